"""A part of a flow as what its weights say: eigenvectors of an MLP, pairs of tokens of a head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_index, checked
from bilens.errors import BilensError
from bilens.nn import ATTENTIONS
from bilens.read.flow.ablation import remove, without_written
from bilens.read.flow.graph import Flow
from bilens.read.flow.labels import token_words
from bilens.read.language.heads import attention_pairs, output_pairs
from bilens.read.language.names import token_text
from bilens.read.language.ngrams import attention_scores
from bilens.read.linear.mlp import Directions, LinearMLP
from bilens.residual import Moment, ResidualModel
from bilens.residual.interventions import Part
from bilens.sections import Fact, Section, Table, signed
from bilens.settings import Count


@dataclass(frozen=True, eq=False, repr=False)
class PartWeights(Reading):
    """A head or MLP of a flow at a position, and what its weights say.

    Attributes:
        part: its address, with the token there.
        flow: through it.
        measured: its effect in the running model: removed on one text, exchanged between two.
        share: of an MLP, the share of its measured effect that its strongest eigenvectors carry
            when all others are removed; None of a head.
        frames: tables by their captions: eigenvectors of an MLP; of a head pairs of tokens of QK,
            which differential attention does not have, and of OV.
        about: further facts.
    """

    part: str
    flow: float
    measured: float
    share: float | None
    frames: Mapping[str, pd.DataFrame]
    about: tuple[Fact, ...] = ()

    formats: ClassVar[dict[str, str]] = dict.fromkeys(
        ("flow", "measured effect", "eigenvalue", "value"), "+#.3g"
    )

    @property
    def title(self) -> str:
        """The part."""
        return f"{self.part} in its weights"

    def facts(self) -> list[Fact]:
        """Return flow and effect, and the share of the strongest eigenvectors."""
        facts: list[Fact] = [("flow", signed(self.flow)), ("measured", signed(self.measured))]
        if self.share is not None:
            facts.append(("share of the strongest eigenvectors", self.share))
        return [*facts, *self.about]

    def frame(self) -> pd.DataFrame:
        """Return the first table."""
        return next(iter(self.frames.values()))

    def sections(self) -> list[Section]:
        """Return one section with all tables."""
        tables = [Table(frame, name, self.formats) for name, frame in self.frames.items()]
        return [Section(self.title, "", [tables], self.facts())]


@torch.no_grad()
@checked
def open_part(model: ResidualModel, flow: Flow, part: str, *, k: Count = 3) -> PartWeights:
    """Open a head or MLP of a flow to what its weights say.

    **An MLP that is a tensor.** Later parts read its output y along w, and w . y = z'Qz with
    Q = sum_r (w'D)_r (L_r R_r' + R_r L_r') / 2. Eigenvectors v_i of Q with eigenvalues l_i carry
    l_i (v_i . z)^2, and between two texts l_i (v_i . (z1 + z0)) (v_i . Dz). Their outputs
    B(z, v_i) (v_i . z) add up to y without its bias, so that all but the strongest are removed from
    the running model. Each has the tokens whose embeddings are farthest along it, those at the
    position and those that the heads of the layer move there.

    **A head** has its strongest pairs of tokens: of a query and a key at the distance at which most
    of its flow goes, and of a key and an output. They are exact in the first layer, and in later
    ones those of the tokens' embeddings. Pairs of a query and a key are left out in differential
    attention, whose pattern is not ordered by one number of two tokens.

    Args:
        model: the model of the flow.
        flow: the flow, of one text or of two.
        part: address of the part, such as mlp.2@3 or head.1.0@3. Without a position the one is
            taken at which most of its flow goes.
        k: number of eigenvectors; heads have ten pairs of each kind.

    Raises:
        BilensError: there is no such part in the flow.
        NotBilinearError: the MLP is no tensor.

    Source: Pearce et al. 2024, section 3.3, for eigenvectors of an interaction matrix.
    """
    address = Part.parse(part, model)
    if address.position is None:
        nodes = [flow.nodes[i] for i in _numbers(flow, address)]
        if not nodes:
            raise BilensError(
                f"part={part!r} has no node in the flow; lower the threshold of flow(), or add a "
                "position, such as mlp.2@3"
            )
        strongest = max(nodes, key=lambda node: abs(node.flow))
        address = address._replace(position=strongest.position)
    check_index("position", address.position, len(flow.ids))
    opened = _mlp if address.kind == "mlp" else _head
    return opened(model, flow, address, k)


def eigenvectors(mlp: LinearMLP, w: Float[Tensor, "time d_model"], position: int) -> Directions:
    """Return the eigenvectors of an MLP along w at a position, the largest |flow| first."""
    pulled = torch.zeros_like(mlp.z)
    pulled[position] = mlp.pulled(w)[position]
    return mlp.directions(w, pulled, mlp.write(mlp.z), None, 0.0, of_form=True)


def _mlp(model: ResidualModel, flow: Flow, part: Part, k: int) -> PartWeights:
    layer, position = part.layer or 0, part.position or 0
    model.mlp(layer)  # an error if it is no tensor
    mlp, w = LinearMLP.of(model, (flow.trace, flow.before), layer), flow.above(Moment.mlp(layer))
    parts = eigenvectors(mlp, w, position)
    output = mlp.write(mlp.z)[position]
    k = min(k, len(parts.flow))
    sets = torch.zeros(k + 2, *mlp.z.shape[:1], len(output)).to(output)
    sets[0, position] = output
    sets[1, position] = output - parts.written[:k].sum(0)
    sets[2:, position] = parts.written[:k]
    whole, without_others, *single = (-x for x in without_written(model, flow, layer, sets))
    assert parts.value is not None
    columns = {
        "eigenvalue": parts.value[:k].tolist(),
        "flow": parts.flow[:k].tolist(),
        "measured effect": single,
    }
    of_layer = model.parts.layers[layer]
    tokens = of_layer.mlp.normalised(model.W_E)
    vectors = parts.vector[:k, : model.d_model]
    paths = {"tokens": vectors @ tokens.T}
    if model.parts.mlp_moment(layer) == Moment.attention(layer):
        ov, moved = model.ov(layer), of_layer.heads.normalised(model.W_E)
        # Of all heads together, each as if it attended to the token only.
        read = (ov.left @ (ov.right @ vectors.T)).sum(0)
        paths["through heads"] = read.T @ moved.T
    for path, scores in paths.items():
        for name, side in ((path, scores), (f"opposite {path}", -scores)):
            # Four tokens that are text.
            largest = side.topk(min(20, side.shape[1])).indices
            columns[name] = [", ".join(token_words(model, row, 4)) for row in largest]
    frame = pd.DataFrame(columns)
    return PartWeights(
        part=_named(flow, part),
        flow=float(w[position] @ output),
        measured=whole,
        share=1 - without_others / whole if whole else None,
        frames={f"eigenvectors of mlp.{layer}": frame},
    )


def _head(model: ResidualModel, flow: Flow, part: Part, k: int) -> PartWeights:
    layer, head, position = part.layer or 0, part.number or 0, part.position or 0
    numbers = [i for i in _numbers(flow, part) if flow.nodes[i].position == position]
    if not numbers:
        raise BilensError(
            f"part={str(part)!r} has no flow of its own there; lower the threshold of flow(), or "
            "take a part of the flow's table"
        )
    strongest = max((flow.nodes[i] for i in numbers), key=lambda node: abs(node.flow))
    source = strongest.source or 0
    # Of learned positions scores need the query's, and outputs the key's.
    learned = model.parts.n_positions is not None
    at, of_key = (position, source) if learned else (None, None)
    distance, (query, key) = position - source, (int(flow.ids[p]) for p in (position, source))
    scores = attention_scores(model, layer=layer, distance=distance, position=at)
    product = [scores[i] for i in ATTENTIONS[model.parts.attention].product]
    (OV,) = output_pairs(model, [head], layer=layer, k=10, position=of_key)
    name = f"head.{layer}.{head}"
    frames, about = {f"OV of {name}": OV.highest}, tuple[Fact, ...]()
    # Without such numbers, as in differential attention, no order of pairs is that of the pattern.
    if product:
        row = torch.stack([pair[head].left[query] @ pair[head].right for pair in product]).prod(0)
        rank = 1 + int((row > row[key]).sum())
        (QK,) = attention_pairs(model, [head], layer=layer, k=10, distance=distance, position=at)
        frames = {f"QK of {name}": QK.highest, **frames}
        words = [f'"{flow.tokens[p]}"' for p in (source, position)]
        about = ((f"rank of {words[0]} as key of {words[1]}", f"{rank} of {len(row):,}"),)
    return PartWeights(
        part=_named(flow, part),
        flow=sum(flow.nodes[i].flow for i in numbers),
        measured=-remove(model, flow, numbers).actual,
        share=None,
        frames=frames,
        about=about,
    )


def _numbers(flow: Flow, part: Part) -> list[int]:
    """Return the numbers of the nodes of a head or MLP at all positions."""
    kinds = {"head": ("head",), "mlp": ("mlp", "direction")}[part.kind]
    of_layer = [
        i for i, node in enumerate(flow.nodes) if node.kind in kinds and node.layer == part.layer
    ]
    return [i for i in of_layer if part.kind == "mlp" or flow.nodes[i].number == part.number]


def _named(flow: Flow, part: Part) -> str:
    return f'{part} "{token_text(flow.tokens[part.position or 0])}"'
