"""Nodes of a flow: their names, and the vectors that they read from the stream and write to it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

NodeKind = Literal["output", "token", "position", "head", "direction", "mlp", "bias", "rest"]
LEAVES = ("token", "position", "bias")
"""Kinds of nodes at which a flow starts."""
WORDS = ("after", "reads", "writes", "lowers")
ROLES = {"values": "", "queries": " by query", "keys": " by key", None: ""}
"""Words for the roles of heads in pictures."""


@dataclass(frozen=True)
class Node:
    """A part of a model on a text, or between two texts.

    Attributes:
        kind: output is the logit itself, token an embedding, position a position's vector. A head
            is from one position to one. A direction is one of an MLP's input at a position, mlp all
            of an MLP without a gate there. Then bias, and rest, which is not split further.
        flow: the part of the logit, or of its change, that goes through it.
        layer: its number.
        part: attention or mlp, inside a layer.
        position: its position, at which it writes.
        source: the position that a head attends to.
        number: of the head; of the direction, 1 for the strongest there.
        eigenvalue: of a direction: its Ritz value, an eigenvalue where all directions are split.
        role: of a head between two texts: values, the tokens that it moves, or queries or keys,
            the positions that it attends to.
        estimated: its effect to first order, by gradients; None until `account` finds it.
        measured: its effect in the running model; None where it is not measured.
        after: ends of texts after which a direction is most active, if texts were searched.
        reads: tokens that the vector of a direction has most of, if they were looked up.
        writes: tokens that its output raises most, likewise; also of heads.
        lowers: tokens that its output lowers most.
    """

    kind: NodeKind
    flow: float
    layer: int | None = None
    part: Literal["attention", "mlp"] | None = None
    position: int | None = None
    source: int | None = None
    number: int | None = None
    eigenvalue: float | None = None
    role: Literal["values", "queries", "keys"] | None = None
    estimated: float | None = None
    measured: float | None = None
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        """True for a part of the model, false for the logit and for remainders."""
        return self.kind not in ("output", "rest")

    @property
    def is_removable(self) -> bool:
        """True if `ablate` can remove it from a flow of one text."""
        return self.is_part and self.kind != "bias" and self.role is None

    def name(self, tokens: Sequence[str]) -> str:
        """Return its name, given the tokens of the text; repeated tokens get their position."""
        at, source = (
            "" if i is None else f'"{tokens[i]}"' + f" ({i})" * (tokens.count(tokens[i]) > 1)
            for i in (self.position, self.source)
        )
        if self.kind == "head":
            of = "" if self.role is None else f" {self.role}"
            return f"head {self.layer}.{self.number}{of}: {source} -> {at}"
        if self.kind == "bias":
            where = {"attention": f"heads of layer {self.layer}", "mlp": f"MLP {self.layer}"}
            return f"biases of {where.get(self.part or '', 'the unembedding')}"
        if self.kind == "rest" and self.part == "attention":
            return f"other heads of layer {self.layer}"
        texts = {
            "output": f"the logit at {at}",
            "token": f"token {at}",
            "position": f"position {self.position}",
            "direction": f"MLP {self.layer} direction {self.number} at {at}",
            "mlp": f"MLP {self.layer} at {at}",
            "rest": f"rest of MLP {self.layer} at {at}",
        }
        return texts[self.kind]


def label(node: Node, tokens: Sequence[str]) -> str:
    """Return a name for a picture: shorter than `Node.name`, with the tokens read and written."""
    at = "" if node.position is None else f'"{tokens[node.position]}"'
    if node.kind == "head":
        source = "" if node.source is None else f'"{tokens[node.source]}"'
        return f"{node.layer}.{node.number}{ROLES[node.role]}: {source} → {at}"
    if node.kind == "direction":
        # Not the contexts, which hover and tables have: those of late layers are so varied that
        # one of them says less than the tokens that the direction has most of.
        read = ", ".join(map('"{}"'.format, node.reads[:2]))
        return f"MLP {node.layer}: {read} {written(node)}" if read else f"MLP {node.layer} {at}"
    return at if node.kind == "token" else node.name(tokens)


def written(node: Node) -> str:
    """Return the tokens that a node raises, or lowers if it lowers the logit; empty if unknown."""
    mark, tokens = ("→", node.writes) if node.flow > 0 else ("⊣", node.lowers)
    return f"{mark} " + ", ".join(map('"{}"'.format, tokens[:2])) if tokens else ""


def quoted(tokens: Iterable[str]) -> str:
    """Return tokens in quotes."""
    return " ".join(f'"{token}"' for token in tokens)


@dataclass(frozen=True, eq=False)
class Rows:
    """Vectors that nodes read from the stream, or write to it.

    Moments are those of `bilens.residual.Moment`.

    Attributes:
        node: the node of each row.
        position: its position.
        moment: its moment.
        vector: the vector.
    """

    node: Int[Tensor, " rows"]
    position: Int[Tensor, " rows"]
    moment: Int[Tensor, " rows"]
    vector: Float[Tensor, "rows d_model"]

    def grouped(self, group: Int[Tensor, " nodes"]) -> "Rows":
        """Return the rows of groups of nodes; those of a group at one place are added up.

        Args:
            group: number of each node's group; -1 for nodes that are left out.
        """
        of_row = group[self.node]
        among = of_row >= 0
        places = torch.stack([of_row[among], self.position[among], self.moment[among]])
        places, place = places.unique(dim=1, return_inverse=True)
        vectors = self.vector.new_zeros(places.shape[1], self.vector.shape[1])
        vectors = vectors.index_add(0, place, self.vector[among])
        return Rows(places[0], places[1], places[2], vectors)


def node_frame(nodes: Sequence[Node], tokens: Sequence[str]) -> pd.DataFrame:
    """Return a row for each node; columns in which no node has an entry are left out."""
    frame = pd.DataFrame(
        {
            "node": [node.name(tokens) for node in nodes],
            "kind": [node.kind for node in nodes],
            "layer": [node.layer for node in nodes],
            "flow": [node.flow for node in nodes],
            "estimated effect": [node.estimated for node in nodes],
            "measured effect": [node.measured for node in nodes],
            "eigenvalue": [node.eigenvalue for node in nodes],
            **{side: [", ".join(getattr(node, side)) for node in nodes] for side in WORDS},
        }
    )
    optional = ["estimated effect", "measured effect", *WORDS]
    empty = [name for name in optional if not frame[name].replace("", None).notna().any()]
    return frame.drop(columns=empty)
