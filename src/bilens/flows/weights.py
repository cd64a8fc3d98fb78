"""A part of a flow as what its weights say: eigenvectors of an MLP, pairs of tokens of a head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from bilens.analysis import Reading
from bilens.checks import check_index, detached
from bilens.errors import BilensError
from bilens.flows.ablation import measure, without_output
from bilens.flows.graph import Flow
from bilens.flows.labels import token_words
from bilens.flows.nodes import Node
from bilens.language.heads import attention_pairs, output_pairs
from bilens.language.names import token_text
from bilens.language.ngrams import attention_scores
from bilens.nn import ATTENTIONS
from bilens.sections import Columns, Fact, signed
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.changes import Part
from bilens.transformer.passes import embedded


@dataclass(frozen=True, eq=False, repr=False)
class PartWeights(Reading):
    """A head or MLP of a flow at a position, and what its weights say.

    Attributes:
        part: its address, with the token there.
        flow: through it.
        measured: its effect in the running model, exchanged between the texts.
        share: of an MLP, the share of its measured effect that its strongest eigenvectors carry
            when all others are removed; None of a head.
        weights: tables by their captions: eigenvectors or experts of an MLP; of a head pairs of
            tokens of QK, which differential attention does not have, and of OV.
        about: further facts.
    """

    part: str
    flow: float
    measured: float
    share: float | None
    weights: Mapping[str, Columns]
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

    def columns(self) -> Columns:
        """Return the first table."""
        return next(iter(self.weights.values()))


@detached
def open_part(model: ResidualModel, flow: Flow, part: str, *, k: Count = 3) -> PartWeights:
    """Open a head or MLP of a flow to what its weights say.

    **An MLP that is a tensor.** Later parts read its output y along w, and w . y = z'Qz with
    Q = sum_r (w'D)_r (L_r R_r' + R_r L_r') / 2. Eigenvectors v_i of Q with eigenvalues l_i carry
    l_i (v_i . (z1 + z0)) (v_i . Dz). Their outputs
    B(z, v_i) (v_i . z) add up to y without its bias, so that all but the strongest are removed from
    the running model. Each has the tokens whose embeddings are farthest along it, those at the
    position and those that the heads of the layer move there.

    **An MLP of experts** has them as parts, each with its flow and its measured effect.

    **A head** has its strongest pairs of tokens: of a query and a key at the distance at which most
    of its flow goes, and of a key and an output. They are exact in the first layer, and in later
    ones those of the tokens' embeddings. Pairs of a query and a key are left out in differential
    attention, whose pattern is not ordered by one number of two tokens.

    Args:
        model: the model of the flow.
        flow: the flow.
        part: address of the part, such as mlp.2@3 or head.1.0@3. Without a position the one is
            taken at which most of its flow goes.
        k: number of eigenvectors; heads have ten pairs of each kind.

    Raises:
        BilensError: there is no such part in the flow.
        NotBilinearError: the MLP is no tensor.

    Source: Pearce et al. 2024, section 3.3, for eigenvectors of an interaction matrix.
    """
    flow.check_model(model)
    address = Part.parse(part, model)
    if address.position is None:
        of_layer = flow.mlps if address.kind == "mlp" else flow.heads[:, address.number]
        strongest = int(of_layer[address.layer].abs().argmax())
        address = address._replace(position=strongest)
    check_index("position", address.position, len(flow.ids))
    if address.kind not in ("head", "mlp"):
        raise BilensError(f"part={part!r}, expected a head or an MLP; an MLP shows its experts")
    if address.kind == "mlp" and model.places.layers[address.layer or 0].experts is not None:
        return _experts(model, flow, address)
    opened = _mlp if address.kind == "mlp" else _head
    return opened(model, flow, address, k)


class Eigenvectors(NamedTuple):
    """Eigenvectors of an MLP along the adjoint of its output at one position."""

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n_in"]
    flows: Float[Tensor, " k"]
    written: Float[Tensor, "k d_model"]  # the part of the output of each, or of its change


def eigenvectors(model: ResidualModel, flow: Flow, layer: int, position: int) -> Eigenvectors:
    """Return the eigenvectors of an MLP along its adjoint at a position, largest |flow| first.

    Raises:
        NotBilinearError: the MLP is no tensor.
    """
    tensor, mlp = model.mlp(layer), model.modules.layers[layer].mlp
    node = Node("mlp", 0.0, layer, "mlp", position)
    w = flow.adjoint(node).to(tensor.left.dtype)
    # The tensor's output has the gain of a norm after the MLP, which its own output has not.
    gain = mlp.residual_scale * (1 if mlp.out_norm is None else mlp.out_norm.gain())
    form = tensor.interaction(w / gain)
    spectrum = form.eigh()
    first, second = tensor_inputs(model, flow, layer, position)
    # The change of z'Qz is (z1 + z0)' Q (z1 - z0).
    along, moved = first + second, first - second
    # The sign of an eigenvector is arbitrary: all point along what is read, or its change.
    vectors = torch.where(spectrum.vectors @ moved < 0, -1, 1)[:, None] * spectrum.vectors
    flows = spectrum.values * (vectors @ along) * (vectors @ moved)
    order = flows.abs().argsort(descending=True)
    vectors, flows = vectors[order], flows[order]
    outputs = tensor(along.expand_as(vectors), vectors) * (vectors @ moved)[:, None]
    return Eigenvectors(spectrum.values[order], vectors, flows, outputs / gain)


def tensor_inputs(
    model: ResidualModel, flow: Flow, layer: int, position: int
) -> list[Float[Tensor, " n_in"]]:
    """Return the input of an MLP's tensor at a position, in each run of a flow."""
    ids, other = flow.fitted.rows
    tokens = flow.fitted.embeddings
    first = model.mlp_inputs(layer, ids[None])
    with embedded(model, model.places.rows(other) if tokens is None else tokens):
        second = model.mlp_inputs(layer, other[None])
    z = [x[0, position] for x in (first, second)]
    # A tensor with biases has a last input of 1.
    return [pad(x, (0, model.mlp(layer).n_in - len(x)), value=1.0) for x in z]


def _mlp(model: ResidualModel, flow: Flow, part: Part, k: int) -> PartWeights:
    layer, position = part.layer or 0, part.position or 0
    parts = eigenvectors(model, flow, layer, position)
    whole = Node("mlp", float(flow.mlps[layer, position]), layer, "mlp", position)
    (output,) = flow.written([whole])
    k = min(k, len(parts.flows))
    strongest = parts.written[:k].to(output)
    rows = torch.stack([output, output - strongest.sum(0), *strongest])
    effects = [-x for x in without_output(model, flow, part, rows)]
    columns = {
        "eigenvalue": parts.values[:k].tolist(),
        "flow": parts.flows[:k].tolist(),
        "measured effect": effects[2:],
    }
    of_layer = model.modules.layers[layer]
    tokens = of_layer.mlp.normalised(model.W_E)
    vectors = parts.vectors[:k, : model.d_model]
    paths = {"tokens": vectors @ tokens.T}
    if not model.modules.parallel:
        ov, moved = model.ov(layer), of_layer.heads.normalised(model.W_E)
        # Of all heads together, each as if it attended to the token only.
        read = (ov.left @ (ov.right @ vectors.T)).sum(0)
        paths["through heads"] = read.T @ moved.T
    for path, scores in paths.items():
        for name, side in ((path, scores), (f"opposite {path}", -scores)):
            # Four tokens that are text.
            largest = side.topk(min(20, side.shape[1])).indices
            columns[name] = [", ".join(token_words(model, row, 4)) for row in largest]
    return PartWeights(
        part=_named(flow, part),
        flow=whole.flow,
        measured=effects[0],
        share=1 - effects[1] / effects[0] if effects[0] else None,
        weights={f"eigenvectors of mlp.{layer}": columns},
    )


def _experts(model: ResidualModel, flow: Flow, part: Part) -> PartWeights:
    layer, position = part.layer or 0, part.position or 0
    whole = Node("mlp", float(flow.mlps[layer, position]), layer, "mlp", position)
    nodes = flow.experts(layer, position)
    together, *effects = measure(model, flow, [whole, *nodes])
    columns: Columns = {
        "expert": [node.number for node in nodes],
        "flow": [node.flow for node in nodes],
        "measured effect": [-effect.actual for effect in effects],
    }
    weights = {f"experts of mlp.{layer}": columns}
    return PartWeights(_named(flow, part), whole.flow, -together.actual, None, weights)


def _head(model: ResidualModel, flow: Flow, part: Part, k: int) -> PartWeights:
    layer, head, position = part.layer or 0, part.number or 0, part.position or 0
    through = float(flow.heads[layer, head, position])
    whole = Node("head", through, layer, "attention", position, None, head)
    source = _source(flow, whole)
    # Of learned positions scores need the query's, and outputs the key's.
    learned = model.modules.n_positions is not None
    at, of_key = (position, source) if learned else (None, None)
    distance, (query, key) = position - source, (int(flow.ids[p]) for p in (position, source))
    scores = attention_scores(model, layer=layer, distance=distance, position=at)
    product = [scores[i] for i in ATTENTIONS[model.modules.attention].product]
    (OV,) = output_pairs(model, [head], layer=layer, k=10, position=of_key)
    name = f"head.{layer}.{head}"
    weights, facts = {f"OV of {name}": OV.highest}, tuple[Fact, ...]()
    # Without such numbers, as in differential attention, no order of pairs is that of the pattern.
    if product:
        row = torch.stack([pair[head].left[query] @ pair[head].right for pair in product]).prod(0)
        rank = 1 + int((row > row[key]).sum())
        (QK,) = attention_pairs(model, [head], layer=layer, k=10, distance=distance, position=at)
        weights = {f"QK of {name}": QK.highest, **weights}
        words = [f'"{flow.tokens[p]}"' for p in (source, position)]
        facts = ((f"rank of {words[0]} as key of {words[1]}", f"{rank} of {len(row):,}"),)
    return PartWeights(
        part=_named(flow, part),
        flow=whole.flow,
        measured=-measure(model, flow, [whole])[0].actual,
        share=None,
        weights=weights,
        about=facts,
    )


def _source(flow: Flow, head: Node) -> int:
    """Return the position from which most of the flow of a head comes."""
    pairs = flow.pairs[head.layer or 0]
    if pairs is None:  # without a pattern no source is known
        return head.position or 0
    here = (pairs.places[:, :2] == pairs.places.new_tensor([head.number, head.position])).all(1)
    if not here.any():
        raise BilensError(f"{head.address} has no flow; take a part of the flow's table")
    sources, flows = pairs.places[here, 2], pairs.flows[here]
    return int(sources[flows.abs().argmax()])


def _named(flow: Flow, part: Part) -> str:
    return f'{part} "{token_text(flow.tokens[part.position or 0])}"'
