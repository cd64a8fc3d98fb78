"""Heads and directions of MLPs that carry the flows of many prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.analysis import Reading, analysis
from bilens.checks import checked
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.lazy_imports import accelerate
from bilens.processes import this_process
from bilens.read.flow.ablation import StreamDirection
from bilens.read.flow.contrast import Against, other_of
from bilens.read.flow.graph import Flow, first_texts
from bilens.read.flow.patching import runs_of
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection, shown_tokens
from bilens.residual import ResidualModel
from bilens.residual.interventions import Change, adding, logit_of, written_site
from bilens.residual.trace import mlp_inputs
from bilens.sections import Fact
from bilens.settings import Between
from bilens.tensor.similarity import cluster

WORDS = ("after", "reads", "writes", "lowers")
TOP, ENDS, ENDING = 4, 3, 4
"""Tokens of a label; texts of a label, and tokens that each of them shows."""
LIKELY, BLOCK = 100, 2**11
"""Most probable next tokens, from which the tokens that a node raises or lowers are taken; columns
of W_U that are compared at a time."""
COLUMNS = [*("prompt", "kind", "layer", "number", "flow", "position"), *("vector", "output")]
NAMED = 20
"""Directions with words."""


@dataclass(frozen=True)
class RecurringHead:
    """A head in the flows of many prompts.

    Attributes:
        layer: its layer.
        head: its number there.
        mean: mean flow over all prompts.
        absolute: mean over all prompts of the sum of |flow| over its nodes.
        prompts: number of prompts in which it has a node.
    """

    layer: int
    head: int
    mean: float
    absolute: float
    prompts: int


@dataclass(frozen=True, eq=False)
class RecurringDirection:
    """Directions of one layer's MLP that are the same in many prompts, up to sign.

    Attributes:
        layer: their layer.
        vector: of unit length: the direction of their largest weighted sum of squares. Most of the
            texts have a positive part along it.
        mean: mean flow over all prompts.
        absolute: mean over all prompts of the sum of their |flow|.
        prompts: number of prompts that have one.
        agreement: the least |cosine| of one of them with the vector.
        position: the position at which most of their |flow| is, counted from the end of the text.
        words: its tokens and the ends of texts after which it is most active, as nodes of a flow
            have them. They are empty if it is not among the strongest.
        measured: mean effect over all prompts of exchanging them between the two texts.
    """

    layer: int
    vector: Float[Tensor, " d_model_and_1"]
    mean: float
    absolute: float
    prompts: int
    agreement: float
    position: int
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measured: float | None = None

    @property
    def direction(self) -> StreamDirection:
        """The direction at all positions, for `ablate`."""
        return StreamDirection(self.layer, self.vector)


@dataclass(frozen=True, eq=False, repr=False)
class RecurringFlows(Reading):
    """The heads and directions that many flows have in common.

    Attributes:
        values: the logits, or their changes, that were split.
        heads: the heads, the largest |mean| first.
        directions: the directions, the largest |mean| first.
    """

    values: tuple[float, ...]
    heads: tuple[RecurringHead, ...]
    directions: tuple[RecurringDirection, ...]

    title: ClassVar[str] = "Recurring flows"
    formats: ClassVar[dict[str, str]] = {"position": ".0f"}
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "mean"}

    def facts(self) -> list[Fact]:
        """Return the number of prompts, the mean of the logits that were split, and a correlation.

        The correlation is that of measured effects with flows, over the directions that were
        measured.
        """
        facts: list[Fact] = [
            ("prompts", len(self.values)),
            ("mean of the logits", sum(self.values) / len(self.values)),
            ("positive", sum(value > 0 for value in self.values)),
        ]
        measured = [part for part in self.directions if part.measured is not None]
        if len(measured) > 2:
            numbers = torch.tensor([[x.measured, x.mean] for x in measured])
            facts += [
                ("directions measured", len(measured)),
                (
                    "correlation of their measured effects with flows",
                    float(numbers.T.corrcoef()[0, 1]),
                ),
            ]
        return facts

    def frame(self) -> pd.DataFrame:
        """Return a row for each head and direction, the largest |mean| first."""
        parts: list[tuple[str, RecurringHead | RecurringDirection]] = [
            *((f"head {head.layer}.{head.head}", head) for head in self.heads),
            *((f"MLP {x.layer} direction {i}", x) for i, x in enumerate(self.directions, 1)),
        ]
        rows = [
            (
                *(name, part.mean, part.absolute, part.prompts, getattr(part, "position", None)),
                getattr(part, "measured", None),
                *(quoted(getattr(part, "words", {}).get(side, ())) for side in WORDS),
            )
            for name, part in parts
        ]
        columns = ["part", "mean", "mean of |flow|", "prompts", "position"]
        optional = ["measured effect", *WORDS]
        frame = pd.DataFrame(rows, columns=[*columns, *optional])
        empty = [name for name in optional if not frame[name].replace("", None).notna().any()]
        frame = frame.drop(columns=empty)
        return frame.sort_values("mean", key=abs, ascending=False, ignore_index=True)


@checked
def flows(  # noqa: PLR0913  the options of `flow`, and those of clusters
    model: ResidualModel,
    prompts: Sequence[str | Int[Tensor, " _"]],
    directions: TokenDirection | Sequence[TokenDirection],
    *,
    against: Sequence[Against] | None = None,
    m: Annotated[int, Between(2)] | Literal["all"] = 2,
    threshold: float = 1e-4,
    similarity: float = 0.9,
    texts: Sequence[str | Int[Tensor, " time"]] = (),
    ablate: int = 0,
    progress: Callable[[Flow], None] | None = None,
) -> RecurringFlows:
    """Return the heads and directions that recur in the flows of many prompts, by their mean.

    For contrasting prompts use the right answer minus the wrong one: `are` minus `is` after a
    plural, `is` minus `are` after a singular. Parts that raise one of them always have a
    mean near 0. Parts that tell the two apart do not. Directions of one layer are one direction if
    their |cosine| reaches `similarity` (`bilens.tensor.cluster`).

    In several processes, as under `torchrun`, all of them call it. They share the prompts, and each
    returns the result of all.

    Args:
        model: any.
        prompts: texts.
        directions: tokens whose logits are split at the last position, one for all prompts or one
            for each.
        against: a second run for each prompt; None for flows on one text.
        m: directions of each MLP, as for `flow`.
        threshold: as for `flow`.
        similarity: least |cosine| within a direction, above 0 and at most 1.
        texts: texts, or their token ids, in which the strongest directions are looked up.
        ablate: number of the strongest directions whose effect is measured, by an exchange of
            their outputs between the two texts of each prompt, in both directions.
        progress: called with each flow, in the process that computes it.

    Raises:
        BilensError: prompts is empty, directions or against do not have one entry for each, or one
            of them cannot be split.
    """
    count = len(prompts)
    tokens = [directions] * count if isinstance(directions, TokenDirection) else directions
    seconds = [None] * count if against is None else against
    if not count or len(tokens) != count or len(seconds) != count:
        raise BilensError(
            f"prompts holds {count} texts, directions {len(tokens)} and against {len(seconds)}, "
            "expected at least one text, and one direction and second run for each or for all"
        )
    if ablate and against is None:
        raise BilensError(
            f"ablate={ablate} exchanges directions between two texts, and against is None; add a "
            "second text for each prompt, or leave ablate out"
        )
    state = this_process()
    of_process = []
    for i in range(count)[state.process_index :: state.num_processes]:
        # Directions that are orthogonal in their inputs recur, those of outputs hardly do.
        options: dict[str, Any] = {
            "directions": m,
            "threshold": threshold,
            "orthogonal": "inputs",
            "ablate": 0,
        }
        split = flow(model, prompts[i], tokens[i], against=seconds[i], **options)
        of_process.append((i, split.value, _rows(i, split)))
        if progress is not None:
            progress(split)
    # In the order of the prompts, so that sums round as in one process.
    gathered = sorted(accelerate.utils.gather_object(of_process), key=itemgetter(0))
    rows = pd.DataFrame([row for _, _, rows in gathered for row in rows], columns=COLUMNS)

    def shares(group: pd.DataFrame) -> dict[str, Any]:
        through = group["flow"]
        return {
            "mean": float(through.sum()) / count,
            "absolute": float(through.abs().sum()) / count,
            "prompts": group["prompt"].nunique(),
        }

    heads = [
        RecurringHead(int(layer), int(head), **shares(group))
        for (layer, head), group in rows[rows["kind"] == "head"].groupby(["layer", "number"])
    ]
    recurring: list[tuple[RecurringDirection, pd.DataFrame]] = []
    for layer, group in rows[rows["kind"] == "direction"].groupby("layer"):
        weights = torch.tensor(group["flow"].abs().to_numpy())
        alike = cluster(torch.stack(list(group["vector"])), weights, similarity)
        for vector, members, agreement in zip(
            alike.vectors, alike.members, alike.agreement, strict=True
        ):
            of_direction = group.iloc[members.tolist()]
            # Vectors of flows point to where their text is, and similar ones up to sign are merged.
            along = torch.stack(list(of_direction["vector"])) @ vector
            direction = RecurringDirection(
                int(layer),
                (vector if along.sum() >= 0 else -vector).to(model.device),
                agreement=float(agreement),
                position=int(
                    of_direction["flow"].abs().groupby(of_direction["position"]).sum().idxmax()
                ),
                **shares(of_direction),
            )
            recurring.append((direction, of_direction))
    recurring.sort(key=lambda pair: -abs(pair[0].mean))
    words = chain(_words(model, recurring[:NAMED], prompts, texts), repeat({}))
    parts = [replace(x, words=of) for (x, _), of in zip(recurring, words, strict=False)]
    effects = torch.zeros(min(ablate, len(parts)), dtype=torch.float64)
    for i in range(count)[state.process_index :: state.num_processes] if ablate else ():
        groups = [(part.layer, rows[rows["prompt"] == i]) for part, rows in recurring[:ablate]]
        effects += _exchanged(model, prompts[i], tokens[i], seconds[i], groups)
    effects = sum(accelerate.utils.gather_object([effects]))
    for number, effect in enumerate((effects / count).tolist()):
        parts[number] = replace(parts[number], measured=effect)
    return RecurringFlows(
        tuple(value for _, value, _ in gathered),
        tuple(sorted(heads, key=lambda head: -abs(head.mean))),
        tuple(parts),
    )


@torch.no_grad()
def _exchanged(
    model: ResidualModel,
    text: str | Tensor,
    token: TokenDirection,
    against: Against | None,
    groups: Sequence[tuple[int, pd.DataFrame]],
) -> Float[Tensor, " groups"]:
    """Return the measured effects of groups of directions, each of one layer, on a prompt."""
    ids = model.ids(text)
    runs = runs_of(model, ids, other_of(model, ids, against, None))
    number, effects = logit_of(model, token.vector(model)), torch.zeros(len(groups)).double()
    for run, sign in zip(runs, (-1, 1), strict=True):
        sets = []
        for layer, of_group in groups:
            rows = torch.zeros_like(run.stream)
            for position, output in zip(of_group["position"], of_group["output"], strict=True):
                rows[int(position)] += output.to(rows)
            rows = sign / model.parts.layers[layer].mlp.residual_scale * rows
            sets.append([Change(written_site(model, layer, "mlp"), adding(rows))])
        values = number(run.again([[], *sets])).double().cpu()
        effects += sign * (values[1:] - values[0]) / 2
    return effects


@torch.no_grad()
def _words(
    model: ResidualModel,
    recurring: Sequence[tuple[RecurringDirection, pd.DataFrame]],
    prompts: Sequence[str | Tensor],
    texts: Sequence[str | Tensor],
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the words of directions, given the rows of their nodes."""
    if recurring:
        vectors = torch.stack([part.vector[: model.d_model] for part, _ in recurring])
        outputs = torch.stack([sum(rows["output"]) for _, rows in recurring]).to(vectors)
        ends = strongest_ends(model, [part.layer for part, _ in recurring], vectors, texts)
        # Likely next tokens are those of the prompt in which a direction is strongest.
        strongest = [rows.loc[rows["flow"].abs().idxmax()] for _, rows in recurring]
        logits = torch.stack(
            [
                model.logits(model.ids(prompts[row["prompt"]])[None])[0, row["position"]]
                for row in strongest
            ]
        )
        tokens = (nearest_tokens(model, vectors), *lens(model, outputs, logits))
        words = (shown_rows(model, ids) for ids in tokens)
        for of_part in zip(ends, *words, strict=True):
            yield dict(zip(WORDS, of_part, strict=True))


def _rows(number: int, split: Flow) -> list[tuple[Any, ...]]:
    """Return the heads and directions of a prompt's flow, on the CPU, for other processes."""
    numbers = list(split.direction_numbers)
    # A row that is sent to other processes would take the memory of the whole matrix along.
    vectors, outputs = (
        [row.clone() for row in x.cpu()] for x in (split.vectors, node_outputs(split, numbers))
    )
    of_direction = dict(zip(numbers, zip(vectors, outputs, strict=True), strict=True))
    return [
        (
            *(number, node.kind, node.layer, node.number, node.flow),
            (node.position or 0) - len(split.ids),
            *of_direction.get(i, (None, None)),
        )
        for i, node in enumerate(split.nodes)
        if node.kind in ("head", "direction")
    ]


@analysis("recurring")
@checked
def read_recurring(
    model: ResidualModel,
    pairs: str,
    corpus: Corpus | None = None,
    *,
    m: Annotated[int, Between(2)] = 2,
    threshold: Annotated[float, Between(0, 1, below=True)] = 1e-4,
    ablate: Annotated[int, Between(0)] = 0,
) -> RecurringFlows:
    """Find the heads and directions that recur in the flows of many texts, or pairs of texts.

        bilens recurring model.gguf --pairs pairs.tsv --data wikitext.txt --ablate 10

    Args:
        model: Any, with its tokenizer.
        pairs: File with a line for each text, its columns separated by tabs. These are the text,
            the token that is predicted, tokens to subtract, separated by commas, and the second
            text, which may be left out.
        corpus: Texts that describe directions; without them, directions have tokens only.
        m: Directions of each MLP at each position, at least 2.
        threshold: Nodes that carry less than this share of the absolute flow are not split.
        ablate: Exchange this many of the strongest directions between the texts of each pair, and
            compare.

    Raises:
        BilensError: the file does not exist, or a line does not have three or four columns.
    """
    path = Path(pairs)
    if not path.is_file():
        raise BilensError(f"pairs={pairs}: expected a file with a text, token and minus in a line")
    rows = [line.split("\t") for line in path.read_text().splitlines() if line.strip()]
    if any(len(row) != len(rows[0]) or len(row) not in (3, 4) for row in rows):
        raise BilensError(
            f"pairs={pairs}: expected three columns in every line, or four, separated by tabs"
        )
    texts, tokens, minus, *against = zip(*rows, strict=True) if rows else ((), (), ())
    directions = [
        TokenDirection(token, tuple(filter(None, names.split(","))))
        for token, names in zip(tokens, minus, strict=True)
    ]
    return flows(
        model,
        texts,
        directions,
        against=against[0] if against else None,
        m=m,
        threshold=threshold,
        texts=[] if corpus is None else list(first_texts(corpus)),
        ablate=ablate,
    )


def strongest_ends(
    model: ResidualModel,
    layers: Sequence[int],
    vectors: Float[Tensor, "n d_model"],
    texts: Iterable[str | Int[Tensor, " time"]],
) -> list[tuple[str, ...]]:
    """Return the ends of the texts after which directions of MLPs' inputs are most active.

    Args:
        model: the model.
        layers: the layer of each direction.
        vectors: the directions, in the normalised stream.
        texts: texts, or their token ids. A text counts once for each direction, at its strongest
            position.
    """
    best: list[list[tuple[float, str]]] = [[] for _ in layers]
    for ids in map(model.ids, texts) if layers else ():
        batch = ids[None]
        inputs = [n[0] for n in mlp_inputs(model.model, [x.mlp for x in model.parts.layers], batch)]
        for number, (layer, vector) in enumerate(zip(layers, vectors, strict=True)):
            active, position = (inputs[layer] @ vector).max(0)
            first = max(0, int(position) + 1 - ENDING)
            end = "".join(shown_tokens(model, ids[first : int(position) + 1]))
            best[number].append((float(active), end))
    ranked = [dict.fromkeys(end for _, end in sorted(ends, reverse=True)) for ends in best]
    return [tuple(islice(ends, ENDS)) for ends in ranked]


def node_outputs(flow: Flow, numbers: list[int]) -> Float[Tensor, "n d_model"]:
    """Return the outputs of some nodes, added up over positions."""
    place = torch.full((len(flow.nodes),), -1, device=flow.constants.device)
    place[numbers] = torch.arange(len(numbers), device=place.device)
    row = place[flow.writes.node]
    outputs = flow.writes.vector.new_zeros(len(numbers), len(flow.direction))
    return outputs.index_add(0, row[row >= 0], flow.writes.vector[row >= 0])


def lens(
    model: ResidualModel, rows: Float[Tensor, "n d_model"], logits: Float[Tensor, "n vocab"]
) -> tuple[Int[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Return the likely next tokens whose logits each row raises most, and lowers most.

    Args:
        model: the model.
        rows: changes of the stream.
        logits: of the model, at the position of each row.
    """
    likely = logits.topk(min(LIKELY, model.vocab_size)).indices
    columns = _logit_vectors(model, model.parts.unembed.weight()[likely])
    changes = torch.einsum("ntd,nd->nt", columns, rows)
    return likely.gather(1, _top(changes)), likely.gather(1, _top(-changes))


def nearest_tokens(model: ResidualModel, rows: Float[Tensor, "n d_model"]) -> Int[Tensor, "n k"]:
    """Return the tokens whose columns of W_U have the largest cosine with each row.

    The mean of all columns, on which no probability depends, is subtracted first.
    """
    weight = model.parts.unembed.weight()
    if not len(rows):
        return _top(rows @ weight.T)
    mean, cosines = weight.mean(0), []
    # The differences from the mean of all columns at once would be a copy of W_U.
    for block in weight.split(BLOCK):
        columns = functional.normalize(_logit_vectors(model, block - mean), dim=1)
        cosines.append(rows @ columns.T)
    return _top(torch.cat(cosines, 1))


def shown_rows(model: ResidualModel, ids: Int[Tensor, "n k"]) -> list[tuple[str, ...]]:
    """Return rows of tokens as text."""
    return [tuple(shown_tokens(model, row)) for row in ids]


def _logit_vectors(
    model: ResidualModel, columns: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """Return columns of W_U as vectors of the stream before the final norm's gain."""
    norm = model.parts.norm
    return columns if norm is None else norm.centred(columns * norm.gain())


def _top(scores: Float[Tensor, "n tokens"]) -> Int[Tensor, "n k"]:
    return scores.topk(min(TOP, scores.shape[1])).indices


def quoted(tokens: Iterable[str]) -> str:
    """Return tokens in quotes."""
    return " ".join(f'"{token}"' for token in tokens)
