"""Which tokens the change of the stream raises, at each position and layer of a model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from bilens.analysis import Reading
from bilens.checks import check_sum, checked
from bilens.errors import BilensError
from bilens.flows.fitted import likely_answer
from bilens.flows.labels import both_sides
from bilens.flows.question import NEUTRAL, Against, Question
from bilens.flows.split import OneText, adjoints_of
from bilens.flows.tangents import Start, Tangents
from bilens.flows.token_lens import LogitChanges
from bilens.language.names import quoted, shown_tokens
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact
from bilens.settings import Between, Count
from bilens.transformer import ResidualModel


@dataclass(frozen=True)
class LensCell:
    """The change of the stream before a layer at a position, carried forward to all logits.

    Attributes:
        layer: number of the layer that reads the stream.
        position: number of the token.
        answer: change of the answer's logit difference by it.
        raises: next tokens that it makes more likely, the most first.
        lowers: next tokens that it makes less likely.
    """

    layer: int
    position: int
    answer: float
    raises: tuple[str, ...]
    lowers: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class LensReading(Reading):
    """Which tokens the change between two texts raises, layer by layer.

    In each layer the cells add up to the change of all logits.

    Attributes:
        tokens: those of the text.
        difference: the likeliest token of the first text minus that of the second, in words.
        value: change of the logit difference between both.
        cells: those whose stream differs.
        raises: next tokens that the whole change makes more likely.
        lowers: next tokens that it makes less likely.
        error: largest error of the sum over a layer's cells, over the largest change of a logit.
    """

    tokens: tuple[str, ...]
    difference: str
    value: float
    cells: tuple[LensCell, ...]
    raises: tuple[str, ...]
    lowers: tuple[str, ...]
    error: float

    title: ClassVar[str] = "Which tokens does the change raise, layer by layer?"
    has_plain_fields: ClassVar[bool] = True
    axes: ClassVar[dict[str, str]] = {"x": "token", "y": "answer"}
    formats: ClassVar[dict[str, str]] = {"answer": "+#.3g"}

    @property
    def layers(self) -> list[int]:
        """The layers that are shown, the first one first."""
        return list(dict.fromkeys(cell.layer for cell in self.cells))

    def facts(self) -> list[Fact]:
        return [
            (f"change of {self.difference}", self.value),
            ("raises", ", ".join(self.raises)),
            ("lowers", ", ".join(self.lowers)),
            ("error of the sum over all tokens", f"{self.error:.1e}"),
        ]

    def columns(self) -> Columns:
        """Return a row for each cell, and for each layer their sum."""
        rows = []
        for layer in self.layers:
            here = [cell for cell in self.cells if cell.layer == layer]
            for x in here:
                rows.append((layer, self.tokens[x.position], x.answer, x.raises, x.lowers))
            total = sum(cell.answer for cell in here)
            rows.append((layer, "sum", total, self.raises, self.lowers))
        layers, names, answers, raises, lowers = zip(*rows, strict=True)
        return {
            "layer": layers,
            "token": names,
            "answer": answers,
            "raises": [", ".join(x) for x in raises],
            "lowers": [", ".join(x) for x in lowers],
        }


@checked
def read_lens(
    model: ResidualModel,
    text: OneText,
    against: Against = NEUTRAL,
    *,
    layers: Count = 8,
    k: Annotated[int, Between(1, 20)] = 3,
) -> LensReading:
    """Carry the change of the stream, at each position and layer, forward to all logits.

        bilens.flows.read_lens(model, "The keys to the cabinet", "The key to the cabinet")

    Args:
        model: the model.
        text: a text, or its tokens' numbers.
        against: the second text, of as many tokens, since one that only one text has changes what
            each layer sees beside the stream; or another second run, see `bilens.flow`.
        layers: most layers that are shown, evenly spaced; the first is one of them.
        k: most tokens that a cell is said to raise, and to lower.

    Raises:
        BilensError: the streams of a layer do not add up to the change of all logits: what a
            layer chooses, or reads beside the stream, differs too.
    """
    answer = likely_answer(model, text, against)
    adjoints = adjoints_of(model, [Question(text, answer, against=against)])
    tangents = Tangents(adjoints)
    n_layers, cells, errors = len(adjoints.graphs), list[LensCell](), list[float]()
    layer_ids = torch.linspace(0, n_layers - 1, min(layers, n_layers)).round().int().tolist()
    whole: LogitChanges | None = None
    for layer in progress_bar("layers of the lens", layer_ids):
        change = adjoints.change(adjoints.graphs[layer].stream.leaf)[0]
        starts = [
            Start(layer, "stream", position, at) for position, at in enumerate(change) if at.any()
        ]
        if not starts:
            raise BilensError("against has the same tokens as the text, so that nothing changes")
        carried = tangents.carry(starts)
        changes = LogitChanges(*tangents.logits(carried, 1))
        expected = (changes.logits[0, 0] - changes.logits[0, 1]).cpu().double()
        total = changes.changes[0].cpu().double().sum(0)
        # Logits are rounded by their own size, and their change may be much smaller.
        size = float(changes.changes.abs().sum(1).max() + changes.logits.abs().max())
        check_sum(f"The change of the stream before layer {layer}", total, expected, size=size)
        errors.append(float((total - expected).abs().max() / expected.abs().max()))
        flows = tangents.at_answer(carried).tolist()
        for start, value, scores in zip(starts, flows, changes.scores(model.places), strict=True):
            cells.append(LensCell(layer, start.position, value, *both_sides(model, scores, k)))
        whole = whole or LogitChanges(changes.logits, expected[None, None].to(changes.logits))
    assert whole is not None
    raises, lowers = both_sides(model, whole.scores(model.places)[0], k)
    first, second = adjoints.numbers.tolist()
    minus = ", ".join(map(quoted, answer.minus))
    return LensReading(
        tokens=tuple(shown_tokens(model, adjoints.ids[0])),
        difference=f"{quoted(answer.token)} minus {minus}",
        value=first - second,
        cells=tuple(cells),
        raises=raises,
        lowers=lowers,
        error=max(errors),
    )
