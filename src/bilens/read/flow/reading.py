"""The flow of a logit on a text as a reading: its strongest nodes, and some of them removed."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pandas as pd

from bilens.checks import full_precision
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.lazy_imports import go
from bilens.read.flow import figures
from bilens.read.flow.ablation import Ablation, ablation_frame
from bilens.read.flow.account import account
from bilens.read.flow.contrast import Target, second_run
from bilens.read.flow.graph import Flow
from bilens.read.flow.labels import described, first_texts
from bilens.read.flow.nodes import node_frame
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection
from bilens.reading import Fact, Percent, Reading, Section
from bilens.registry import reading
from bilens.residual import ResidualModel
from bilens.settings import Between, Count


@dataclass(frozen=True, eq=False, repr=False)
class FlowReading(Reading):
    """The flow of a logit on a text, and what became of it without single nodes.

    Attributes:
        flow: The flow.
        prompt: The text.
        direction: The token whose logit is split, and those that are subtracted.
        data: Its strongest nodes and the edges between them; see `flow_data`.
        probability: Of the token after the text.
        ablated: Effect of each node that was removed from the running model.
        notes: Warnings about the tokens.
        other: The second text; empty without one.
    """

    flow: Flow
    prompt: str
    direction: TokenDirection
    data: dict[str, Any]
    probability: float
    ablated: tuple[Ablation, ...] = ()
    notes: tuple[str, ...] = ()
    other: str = ""

    axes: ClassVar[dict[str, str]] = Flow.axes
    formats: ClassVar[dict[str, str]] = dict.fromkeys(
        ("flow", "estimated effect", "measured effect", "weight", "predicted", "actual"), "+#.3g"
    )
    explanation: ClassVar[str] = (
        "Where this logit, or difference of logits, comes from: a graph of parts of the model. "
        "At every node as much flows in as flows out, and nothing is left over."
    )

    @property
    def title(self) -> str:
        """The text, and the token that follows it."""
        against = f" against “{self.other}”" if self.other else ""
        return f"{self.data['direction']} after “{self.prompt}”{against}"

    def facts(self) -> list[Fact]:
        """Return the value, the number of nodes, and the share that is shown."""
        data = self.data
        held, of_logit = data["shares"][-1][1:]
        values = ", ".join(f"{value:+.4g}" for value in data["values"])
        return [
            (data["direction"], data["value"]),
            ("probability of the token", Percent(self.probability)),
            ("nodes", data["n_nodes"]),
            ("shown", len(data["nodes"]) - 1),
            ("absolute flow through these", Percent(held)),
            ("logit on paths among these", Percent(of_logit)),
            *([("in the text, and in the second", values)] if len(data["values"]) > 1 else []),
            ("held fixed", ", ".join(data["frozen"]) or "nothing"),
            *(("note", note) for note in self.notes),
        ]

    def frame(self) -> pd.DataFrame:
        """Return the strongest nodes and their flow, the strongest first."""
        nodes = [self.flow.nodes[node["index"]] for node in self.data["nodes"][1:]]
        return node_frame(nodes, self.flow.tokens)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the strongest nodes and paths with the sums of all others, and removed nodes."""
        tables = {
            "nodes, by |flow|": figures.node_table(self.data),
            "paths, by |weight|": figures.path_table(self.data),
        }
        if self.ablated:
            tables["one node removed"] = ablation_frame(self.ablated)
        return tables

    def plot(self) -> "go.Figure":
        """Draw the graph of the strongest nodes over the tokens of the text."""
        return self.flow.plot()

    def figures(self) -> "dict[str, go.Figure]":
        """Draw the graph, and predicted against actual effects, if nodes were removed."""
        drawn = {"graph": self.plot()}
        if self.ablated:
            drawn["interventions"] = figures.ablation_figure(self.ablated)
        return drawn

    def sections(self) -> list[Section]:
        """Return the graph, the strongest nodes, and the nodes that were removed."""
        return figures.flow_sections(self.data, self.ablated)

    def record(self) -> dict[str, Any]:
        """Return the graph for JSON, with the nodes that were removed."""
        record = {"prompt": self.prompt, "against": self.other, **self.data}
        if self.ablated:
            record["ablated"] = [
                {"node": result.part, "predicted": result.predicted, "actual": result.actual}
                for result in self.ablated
            ]
        return record


@reading("flow")
@full_precision
def read_flow(  # noqa: PLR0913  the options of `flow`, and those of what is shown
    model: ResidualModel,
    prompt: str,
    direction: TokenDirection,
    corpus: Corpus | None = None,
    *,
    against: str | None = None,
    mean: bool = False,
    replace: str = "",
    target: Target = "logit",
    m: Annotated[int, Between(0)] = 4,
    threshold: Annotated[float, Between(0, 1, below=True)] = 1e-4,
    through_patterns: bool = False,
    shown: Count = 200,
    ablate: Annotated[int, Between(0)] = 0,
) -> FlowReading:
    """Split a logit on a text, or its change between two, exactly over the parts of a model.

    With a second text nothing is frozen, and heads are split into values, queries and keys.

        bilens flow runs/grammar --prompt "then ben ate" --token rice --minus soup
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --ablate 5
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --replace keys=key

    Args:
        model: Any, with its tokenizer.
        prompt: The text; the logit that is split is of the token after it.
        direction: The token that is predicted, and those whose mean is subtracted.
        corpus: Texts that describe directions; without them, directions have tokens only.
        against: A second text of as many tokens; the change of the logit between both is split. Of
            several, separated by |, the mean embedding is taken.
        mean: The second run has the mean embedding at each position, of the texts or else of the
            vocabulary.
        replace: Words of the prompt and their replacements in a second text, as keys=key,was=is.
        target: The logit, or between two texts the log-probability or the probability.
        m: Directions of each MLP at each position, at least 2; 0 for all eigenvectors.
        threshold: Nodes that carry less than this share of the absolute flow are not split.
        through_patterns: Split patterns of bilinear and squared attention too.
        shown: Number of the strongest nodes that pages and JSON have.
        ablate: Remove this many of the strongest nodes, one at a time, from the running model,
            and compare. Between two texts their changes are exchanged, in both directions.

    Raises:
        BilensError: the model has no tokenizer, a text is empty, or a token is unknown.
    """
    texts = [] if corpus is None else list(first_texts(corpus))
    second, other = second_run(
        model, prompt, against=against, mean=mean, replace=replace, texts=texts
    )
    split = flow(
        model,
        prompt,
        direction,
        against=second,
        target=target,
        m=m or None,
        threshold=threshold,
        through_patterns=through_patterns,
    )
    split = described(model, account(model, split, measured=ablate), shown, texts)
    strongest = sorted(split.nodes, key=lambda node: -abs(node.flow))
    ablated = [
        Ablation(-node.flow, -node.measured, node.name(split.tokens), node.kind)
        for node in strongest
        if node.measured is not None
    ]
    data = figures.flow_data(split, direction=direction_in_words(direction, target), k=shown)
    probability = float(split.trace.logits[-1].softmax(-1)[model.token(direction.token)])
    notes = tuple(missing_spaces(model, direction))
    return FlowReading(split, prompt, direction, data, probability, tuple(ablated), notes, other)


def direction_in_words(direction: TokenDirection, target: Target) -> str:
    """Return the number that is split in words, with its tokens in quotes."""
    token, *minus = (f'"{name}"' for name in (direction.token, *direction.minus))
    name = f"{token} minus {', '.join(minus)}" if minus else token
    return name if target == "logit" else f"{target} of {name}"


def missing_spaces(model: ResidualModel, direction: TokenDirection) -> Iterator[str]:
    """Yield a note on each token that lacks the space with which the others begin."""
    names = [direction.token, *direction.minus]
    bare = [name for name in names if not name.startswith((" ", "Ġ", "▁"))]
    for name in bare if len(bare) < len(names) else ():
        with suppress(BilensError):
            if model.token(f" {name}") != model.token(name):
                yield f'"{name}" and " {name}" are two tokens, and the first is taken'
