"""The readings of one model: what is asked in a form becomes the page that a command writes."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from bilens.analyses import check_once, find_analysis
from bilens.analysis import Analysis, Reading
from bilens.data import Corpus, ImageData
from bilens.errors import BilensError
from bilens.explore.forms import Form
from bilens.explore.sketchpad import unpack_input
from bilens.flows import remove
from bilens.flows.fitted import likely_answer
from bilens.flows.reading import FlowReading
from bilens.flows.summary import example_of, is_bilinear
from bilens.language import TokenDirection
from bilens.language.contexts import example_directions
from bilens.language.names import exact_names
from bilens.pages.page import render_report
from bilens.question_files import written_names
from bilens.sections import signed
from bilens.transformer import ResidualModel

Query = Iterable[tuple[str, str]]
LARGEST, AT_ONCE = 2.5e11, 1e11
"""Layers times tokens times d_model^3: of a flow at most, and of one made unasked."""
FLOWS_OF_A_CIRCUIT = 20
"""Flows that take as long as a circuit."""
LARGE_VOCABULARY = 5000
"""Tokens of which all pairs take minutes a head."""
WORKERS = 4
"""Readings that are made at a time."""


class ModelPages:
    """The forms of a model, and the pages of what is asked in them.

    One model serves all visitors: what a reading sets on its modules is bound to a thread.

    Args:
        model: the model.
        data: its images or texts; None for a language model without texts.
        added: further analyses.
        recorded: values that options begin with in place of their defaults.
    """

    def __init__(
        self,
        model: Any,
        data: ImageData | Corpus | None,
        others: Sequence[Analysis],
        settings: Mapping[str, Any],
    ) -> None:
        self.model, self.data, self.cost = model, data, 0.0
        readers = {}
        starts = {name: str(value) for name, value in settings.items()}
        if isinstance(data, ImageData):
            is_deep = len(model.layer_tensors()) > 1
            names = ["bonds", "paths"] if is_deep else ["explain", "eigenvectors"]
            starts["image"] = "test-0"
            readers["image"] = lambda text: unpack_input(text, data)
        else:
            self.cost = float(model.n_layers * model.d_model**3)
            starts |= _language_starts(model, data)
            of_weights = data is not None and is_bilinear(model)
            names = ["flow", "circuit", *(["ngrams", "contexts"] if of_weights else [])]
        entries = [*map(find_analysis, names), *others]
        check_once(entries)
        self.forms = {entry.name: Form(entry, starts, readers) for entry in entries}
        self._free = threading.BoundedSemaphore(WORKERS)
        # Matplotlib draws in one thread at a time.
        self._drawing = threading.Lock()

    def waits(self, name: str) -> bool:
        """Return True if a reading of the texts that a form begins with takes long."""
        flows = FLOWS_OF_A_CIRCUIT if name == "circuit" else 1
        return flows * self._cost(self.forms[name].texts().get("prompt", "")) > AT_ONCE

    def page(self, name: str, query: Query) -> str:
        """Return the page of a reading, the one that its command writes.

        Raises:
            BilensError: a box does not fit the model, or another.
        """
        reading = self._read(name, query)
        with self._drawing:
            return render_report([reading])

    def removed(self, name: str, query: Query, nodes: Sequence[str]) -> str:
        """Return a sentence on the number of a flow after nodes left the running model.

        Raises:
            BilensError: the reading is no flow, or has no such nodes that can be removed.
        """
        reading = self._read(name, query)
        if not isinstance(reading, FlowReading):
            raise BilensError(f"{name} has no nodes to remove; flow has")
        flow = reading.flow
        removable = [node for node in flow.nodes if node.is_removable]
        selection = [node for node in removable if flow.name(node) in nodes]
        if not selection:
            raise BilensError(f"node={nodes[:3]}, expected heads, MLPs or tokens of this flow")
        result = remove(self.model, flow, selection)
        values = flow.value, flow.value + result.actual, result.actual, result.predicted
        before, after, change, prediction = (signed(x, "#.3g") for x in values)
        return (
            f"The change between the runs is {before}, and {after} without {result.part}: a change "
            f"of {change}. The flow through them predicts {prediction}."
        )

    def _read(self, name: str, query: Query) -> Reading:
        return self._reading(name, tuple(self.forms[name].texts(query).items()))

    # The key is all that a reading is made of, beside the model and its data.
    @lru_cache(maxsize=16)  # noqa: B019  they live as long as their app
    def _reading(self, name: str, texts: tuple[tuple[str, str], ...]) -> Reading:
        form = self.forms[name]
        values = form.values(dict(texts))
        # Each token of an answer is a flow of its own.
        answers = max(1, values.get("generate", 0), len(values.get("answer", "").split()))
        if (cost := answers * self._cost(values.get("prompt", ""))) > LARGEST:
            raise BilensError(
                f"prompt has {cost / self.cost:.0f} tokens, which would take minutes: of this "
                f"model up to {int(LARGEST / self.cost)} are read here, `bilens {name}` takes more"
            )
        with self._free:
            return form.entry.run(self.model, values, self._load)

    def _cost(self, prompt: str) -> float:
        return self.cost * len(self.model.ids(prompt)) if prompt else 0.0

    def _load(self, settings: Mapping[str, Any], images: bool, optional: bool) -> Any:
        # Of the readings that may do without texts, a flow takes the mean of texts if asked to.
        if optional and not settings.get("mean"):
            return None
        if self.data is None and not optional:
            raise BilensError("this reading needs data, which the explorer was started without")
        return self.data


def _language_starts(model: ResidualModel, corpus: Corpus | None) -> dict[str, str]:
    """Return the texts that the boxes of a language model begin with."""
    example = example_of(model, corpus)
    starts = {"prompt": example.prompt, "against": example.against, "layer": "0"}
    direction = example.direction
    if direction is None and example.prompt:
        direction = likely_answer(model, example.prompt, example.against or None)
    elif direction is None:
        directions = [] if corpus is None else example_directions(model, corpus)
        direction = directions[0] if directions else TokenDirection(exact_names(model, [0])[0])
    starts |= {"token": direction.token, "minus": written_names(direction.minus)}
    if model.modules.positions or model.modules.hidden_positions:
        starts["position"] = "1"
    if model.vocab_size > LARGE_VOCABULARY:
        starts["among"] = "500"
    return starts
