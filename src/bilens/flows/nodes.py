"""Nodes of a flow: names, vectors that they read from the stream and write to it, and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bilens.errors import BilensError
from bilens.sections import Columns
from bilens.transformer.parts import Part

NodeKind = Literal["output", "token", "head", "mlp", "expert", "choice"]
Sublayer = Literal["attention", "mlp"]
LEAVES = ("token", "choice")
"""Kinds of nodes at which a flow starts."""
WRITING = ("token", "head", "mlp")
"""Kinds of nodes whose output can be exchanged, and carried forward, in any model."""


@dataclass(frozen=True)
class Node:
    """A part of a model between two texts.

    Attributes:
        kind: output is the logit itself, token an embedding. A head is at one position, from one or
            from all. An mlp is at one position, and so is an expert, a part of it. A choice is what
            a layer chose, such as experts.
        flow: the part of the logit, or of its change, that goes through it.
        layer: its number.
        part: attention or mlp, inside a layer.
        position: its position, at which it writes.
        source: the position that a head attends to; None for all.
        number: of the head or expert.
        measured: its effect in the running model; None where it is not measured.
        raises: next tokens that its change makes more likely, the most first; see `bilens.lens`.
        lowers: next tokens that it makes less likely.
        sources: in a graph, the tokens of the text at which most of its flow starts.
    """

    kind: NodeKind
    flow: float
    layer: int | None = None
    part: Sublayer | None = None
    position: int | None = None
    source: int | None = None
    number: int | None = None
    measured: float | None = None
    raises: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from the other nodes of its flow."""
        return self.kind, self.layer, self.part, self.number, self.position, self.source

    @property
    def is_removable(self) -> bool:
        """True if it can be exchanged between two runs of the model."""
        return self.kind not in ("output", "choice")

    @property
    def where(self) -> Part:
        """The part of the model that it is.

        Raises:
            BilensError: it is the logit.
        """
        if self.kind == "output":
            raise BilensError(f"{self.address} is no part of the model at a place")
        return Part(self.kind, self.layer, self.number, self.position, self.source)

    @property
    def address(self) -> str:
        """Its address, such as head.26.0@4 or mlp.26@4."""
        return "the logit" if self.kind == "output" else str(self.where)

    @property
    def strength(self) -> float:
        """Size of its measured effect, or of its flow where it is not measured."""
        return abs(self.flow if self.measured is None else self.measured)

    def name(self, tokens: Sequence[str], second: Sequence[str] = ()) -> str:
        """Return its address with the tokens there; a source that is repeated has its position.

        A token that is another in the second text, whose tokens are `second`, has both.
        """
        if self.position is None:
            return self.address
        at = f'"{tokens[self.position]}"'
        if self.kind == "token" and second and second[self.position] != tokens[self.position]:
            at += f' / "{second[self.position]}"'
        if self.kind == "head" and self.source is not None:
            source = tokens[self.source]
            suffix = f" ({self.source})" if tokens.count(source) > 1 else ""
            return f'{self.address} "{source}"{suffix} → {at}'
        return f"{self.address} {at}"

    def effect(self, k: int = 3) -> str:
        """Return in words the tokens that it raises and lowers; empty without labels."""
        sides = (("raises", self.raises[:k]), ("lowers", self.lowers[:k]))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in sides if names)

    @property
    def label(self) -> str:
        """Return a name for a picture, whose columns are the tokens of the text."""
        words = self.effect(2).split("; ")
        # Of a part that lowers the logit, first what it lowers.
        words = words if self.flow > 0 else words[::-1]
        return f"{self.address} {words[0]}".strip()


def strongest_first(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes by their measured effects, then those that are not measured by their flows."""
    return sorted(nodes, key=lambda node: (node.measured is None, -node.strength))


def node_columns(nodes: Sequence[Node], tokens: Sequence[str], second: Sequence[str]) -> Columns:
    """Return a row for each node; columns in which no node has an entry are left out."""
    columns: Columns = {
        "node": [node.name(tokens, second) for node in nodes],
        "kind": [node.kind for node in nodes],
        "layer": [node.layer for node in nodes],
        "flow": [node.flow for node in nodes],
    }
    optional: Columns = {
        "measured effect": [node.measured for node in nodes],
        "raises": [", ".join(node.raises) for node in nodes],
        "lowers": [", ".join(node.lowers) for node in nodes],
        "from": [", ".join(node.sources) for node in nodes],
    }
    cells_of = {name: cells for name, cells in optional.items() if set(cells) - {None, ""}}
    return {**columns, **cells_of}
