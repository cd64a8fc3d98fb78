"""An exact split of a logit on a text, through every layer of a model."""

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, checked
from bilens.errors import BilensError
from bilens.read.flow.attention import FrozenAttention
from bilens.read.flow.builder import FlowBuilder
from bilens.read.flow.graph import Flow, Kind, Node
from bilens.read.flow.mlp import FrozenMLP
from bilens.read.language.names import TokenDirection
from bilens.residual import Moment, ResidualModel, Trace
from bilens.settings import Between, Count

__all__ = ["flow"]


@checked
@torch.no_grad()
def flow(
    model: ResidualModel,
    ids: Int[Tensor, " time"],
    direction: TokenDirection | Float[Tensor, " d_model"],
    position: int = -1,
    *,
    k: Count = 20,
    threshold: Annotated[float, Between(0, 1, below=True)] = 1e-4,
    through_patterns: bool = False,
) -> Flow:
    """Split a logit, or a difference of logits, exactly over the parts of a model on a text.

    Held fixed is what the text decides by division or softmax: the scale of each norm, the
    patterns A of attention, and the ratio rho = act(g) / g of each gate that is not linear. Then
    attention is linear in what it reads and an MLP bilinear (linear without a gate). From u at the
    last position downwards, with w_p what reads position p from above, z_p the normalised stream
    before an MLP and N, M the norms' scales:

        MLP:        Q_p = 1/2 [L' diag(rho_p * D'w_p) R + R' diag(rho_p * D'w_p) L]
                    adds z'Q_p z = sum_i lambda_i (v_i.z)^2;  reads r_i = M_p lambda_i (v_i.z) v_i
        attention:  head h adds A_ps w_p . (n_s V_h + b) O_h;  reads r = N_s A_ps V_h O_h' w_p
        embedding:  sum_p w_p . x_0(p) and biases = u . n, exactly: there is no error term

    An MLP has eigenvectors of its own at each position; the k with the largest |flow| there are
    nodes, and all others are one node, exactly. So are the heads' pairs of positions below the
    threshold. Costs a forward pass, O(rank n_in^2 + n_in^3) for each layer and position that is
    split, and O(k rank n_in) there for what its eigenvectors write.

    Args:
        model: any.
        ids: the text.
        direction: tokens by name, or u itself; of a vector the unembedding's bias is not known and
            left out.
        position: whose next token is predicted; counted from the end if negative.
        k: how many eigenvectors of each MLP at each position.
        threshold: what carries less than this share of the absolute flow (over heads and hidden
            units) is not split further.
        through_patterns: also let patterns of attention without softmax vary with what is read: a
            head then is a product of five factors, and each one carries a fifth.

    Raises:
        BilensError: the text, the direction or the position does not fit the model, a number is out
            of range, or patterns are to be split that are not polynomials.

    Source:
        Elhage et al. 2021 for paths through frozen attention; Pearce et al. 2024, section 4.1, for
        the eigenvectors.
    """
    if not -len(ids) <= position < len(ids):
        raise BilensError(f"position={position}, expected {-len(ids)} to {len(ids) - 1}")
    if through_patterns and model.parts.attention not in ("bilinear", "squared"):
        raise BilensError(
            f"through_patterns=True, but patterns of {model.parts.attention} attention are not "
            "polynomials of what they read; leave it out to hold them fixed"
        )
    position %= len(ids)
    u, bias = _direction(model, direction)
    # Nothing that comes later is seen.
    split = _Split(model, model.trace(ids[: position + 1]), u, through_patterns)
    return split.run(bias, k, threshold)


def _direction(
    model: ResidualModel, direction: TokenDirection | Tensor
) -> tuple[Float[Tensor, " d_model"], float]:
    if isinstance(direction, TokenDirection):
        token, minus = model.token(direction.token), [model.token(n) for n in direction.minus]
        _, b = model.unembed([token, *minus])
        bias = b[0] - b[1:].mean() if minus else b[0]
        return model.direction(token, minus), float(bias)
    if len(direction) != model.d_model:
        raise BilensError(
            f"direction has {len(direction)} numbers, expected {model.d_model}, the width of the "
            "model's stream; ResidualModel.direction() gives that of a token"
        )
    check_finite(direction=direction)
    return direction.to(model.device, model.dtype), 0.0


class _Split:
    """One text on its way down through the model."""

    def __init__(
        self, model: ResidualModel, trace: Trace, u: Tensor, through_patterns: bool
    ) -> None:
        self.model, self.trace, self.u, self.through_patterns = model, trace, u, through_patterns
        self.time = len(trace.ids)
        self.places = torch.arange(self.time, device=model.device)
        self.root = model.parts.centred(u) * trace.scale[-1]
        self.absolute = 0.0
        self.above = self._down()
        self.graph = FlowBuilder(model, trace)

    def run(self, bias: float, k: int, threshold: float) -> Flow:
        """Everything that carries at least a share `threshold` of the absolute flow, as a node."""
        n_layers, last = self.model.n_layers, self.time - 1
        final = Moment.mlp(n_layers - 1)
        value = float(self.root @ self.trace.stream[last]) + bias
        number = self.graph.add(
            [Node("output", value, position=last)], self.root.new_tensor([bias])
        )
        self.graph.read(number, self.places[-1:], final, self.root[None])
        # What carries nothing at all is never split.
        least = max(threshold * self.absolute, torch.finfo(self.root.dtype).tiny)
        for layer in reversed(range(n_layers)):
            self._split_mlp(layer, k, least)
            self._split_heads(layer, least)
        self._add_leaves()
        return self.graph.flow(self.u, value, self._frozen())

    def _down(self) -> dict[Moment, Tensor]:
        """What reads each position from above, at each moment."""
        w = self.root.new_zeros(self.time, len(self.root))
        w[-1] = self.root
        above = {}
        parts, mixing = self.model.parts, self.model.parts.mixing()
        # What reads further down than the layer that it belongs to: the first layer's values.
        late = torch.zeros_like(w)
        for layer in reversed(range(self.model.n_layers)):
            written, entry = Moment.attention(layer), Moment.input(layer)
            above[Moment.mlp(layer)] = w
            mlp = FrozenMLP.on(self.model, self.trace, layer)
            q = mlp.weights(w)
            self.absolute += float(mlp.units(q).abs().sum())
            from_mlp, _ = mlp.read(mlp.pulled(q), self.places)
            above[written] = w + from_mlp if parts.mlp_moment(layer) == written else w
            heads = self._heads(layer)
            back = heads.back(above[written])
            self.absolute += float(heads.flows(back).abs().sum())
            w = w + from_mlp
            for reads in heads.reads(back):
                rows, _ = reads.total(torch.ones_like(heads.pattern, dtype=torch.bool))
                if reads.moment == entry:
                    w = w + rows
                else:
                    late += rows
            above[entry] = w = w + late if layer == 0 else w
            w = w * float(mixing[entry, entry - 1])
        above[Moment.embedding()] = w
        return above

    def _heads(self, layer: int) -> FrozenAttention:
        return FrozenAttention(
            self.model, self.trace, layer, through_patterns=self.through_patterns
        )

    def _split_mlp(self, layer: int, k: int, least: float) -> None:
        mlp, graph = FrozenMLP.on(self.model, self.trace, layer), self.graph
        seen, written = self.model.parts.mlp_moment(layer), Moment.mlp(layer)
        w = self.above[written]
        graph.write_bias(layer, "mlp", w, mlp.out_bias * mlp.out_scale[:, None])
        q = mlp.weights(w)
        pulled, out = mlp.pulled(q), mlp.written()
        flows = (pulled * mlp.z).sum(-1)
        if mlp.gated:
            found = mlp.eigenvectors(q, k, least)
            at, own = found.position, mlp.written_along(found.vector, found.position)
            taken = found.pull[:, None] * found.vector
            each = zip(
                *(x.tolist() for x in (found.flow, at, found.rank, found.value)), strict=True
            )
            nodes = [Node("eigenvector", f, layer, "mlp", p, p, i + 1, x) for f, p, i, x in each]
            reads, constants = mlp.read(taken, at)
            number = graph.add(nodes, constants, found.vector)
            graph.read(number, at, seen, reads)
            graph.write(number, at, written, own)
            flows = flows.index_add(0, at, -found.flow)
            pulled, out = pulled.index_add(0, at, -taken), out.index_add(0, at, -own)
        reads, constants = mlp.read(pulled, self.places)
        kind: Kind = "rest" if mlp.gated else "mlp"
        nodes = [Node(kind, f, layer, "mlp", p, p) for p, f in enumerate(flows.tolist())]
        number = graph.add(nodes, constants)
        graph.read(number, self.places, seen, reads)
        graph.write(number, self.places, written, out)

    def _split_heads(self, layer: int, least: float) -> None:
        heads, graph, written = self._heads(layer), self.graph, Moment.attention(layer)
        w = self.above[written]
        graph.write_bias(layer, "attention", w, heads.out_bias * heads.out_scale[:, None])
        back = heads.back(w)
        flows = heads.flows(back)
        strong = flows.abs() >= least
        index = head, position, source = strong.nonzero(as_tuple=True)
        each = zip(*(x.tolist() for x in (flows[index], *index)), strict=True)
        nodes = [Node("head", f, layer, "attention", p, s, h) for f, h, p, s in each]
        places = heads.reads(back)
        found = [reads.each(head, position, source) for reads in places]
        number = graph.add(nodes, torch.stack([added for _, _, added in found]).sum(0))
        for reads, (at, rows, _) in zip(places, found, strict=True):
            graph.read(number, at, reads.moment, rows)
        graph.write(number, position, written, heads.writes(head, position, source))
        left = [(reads.moment, *reads.total(~strong)) for reads in places]
        constant = flows.new_tensor([sum(added for _, _, added in left)])
        through = float(flows.masked_fill(strong, 0).sum())
        rest = graph.add([Node("rest", through, layer, "attention")], constant).expand(self.time)
        for moment, rows, _ in left:
            graph.read(rest, self.places, moment, rows)
        graph.write(rest, self.places, written, heads.written(~strong))

    def _add_leaves(self) -> None:
        parts, graph = self.model.parts, self.graph
        for kind, rows in parts.embedding(self.trace.ids).items():
            written = {moment: x * rows for moment, x in parts.embedding_factors().items()}
            flows = torch.stack([(self.above[t] * x).sum(-1) for t, x in written.items()]).sum(0)
            nodes = [Node(kind, f, position=p) for p, f in enumerate(flows.tolist())]
            number = graph.add(nodes, rows.new_zeros(len(rows)))
            for moment, x in written.items():
                graph.write(number, self.places, moment, x)
        graph.add_biases()

    def _frozen(self) -> tuple[str, ...]:
        layers, config = self.model.parts.layers, self.model.config
        normed = any(part.norm is not None for layer in layers for part in (layer.heads, layer.mlp))
        inside = getattr(config, "qk_norm", False) or layers[0].heads.inner
        inside = inside or getattr(config, "attention_norm", "none") != "none"
        ratios = [found.gate_ratio for found in self.trace.layers]
        held = {
            "scales of norms": normed or self.model.has_norms,
            "patterns of attention": not self.through_patterns,
            "norms inside patterns of attention": self.through_patterns and inside,
            "ratios of activations": any((ratio != ratio[0, 0]).any() for ratio in ratios),
        }
        return tuple(name for name, is_so in held.items() if is_so)
