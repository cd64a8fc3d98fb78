"""MLPs as linear maps, on one text or between two, split into a few directions each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.read.linear.secants import NormMap, OutputMap, frozen_norm, norm_secant, secant_slope
from bilens.residual import ResidualModel, Trace
from bilens.tensor.factors import with_constant
from bilens.tensor.quadratic import apply_factored

EVERY = slice(None)
"""All positions."""


class Directions(NamedTuple):
    """Directions of an MLP at some positions, one row each."""

    position: Int[Tensor, " m"]
    # Its place among those of the position, 0 for the largest |flow|; of given directions their
    # place among these.
    rank: Int[Tensor, " m"]
    # Its Ritz value, an eigenvalue if all directions are asked for; None for given ones.
    value: Float[Tensor, " m"] | None
    flow: Float[Tensor, " m"]
    read: Float[Tensor, "m n_in"]  # the vector whose product with z is the flow
    written: Float[Tensor, "m d_model"]  # the part of the output J z that is its own
    # Of unit length along `read`; the input, or its change, has a positive part along it.
    vector: Float[Tensor, "m n_in"]


@dataclass(frozen=True, eq=False)
class LinearMLP:
    """The MLP of a layer as a linear map J of its normalised input z, at each position.

    It maps v to D (a * L v + b * R v). On one text z is the input, a = rho * R z / 2 and
    b = rho * L z / 2 with rho = act(g) / g. So J z is the output, and each factor of the product
    carries half. Between two texts z is the change of the input, a is the mean of act(R z)
    and b the mean of L z times the secant of act. Without a gate a is rho or the secant, and b is
    missing.
    """

    left: Float[Tensor, "rank n_in"]  # L, with the norm's gain unless `gain` has it
    right: Float[Tensor, "rank n_in"] | None  # R; None without a gate
    out: OutputMap  # D and a norm after it
    z: Float[Tensor, "time n_in"]  # the normalised input, or its change
    through_left: Float[Tensor, "time rank"]  # a
    through_right: Float[Tensor, "time rank"] | None  # b; None without a gate
    # rho or the secant of act: with it as weights of the hidden units, L and R are the quadratic
    # form of the output. None without a gate.
    curvature: Float[Tensor, "time rank"] | None
    quadratic: bool  # whether J z is quadratic in z, as that of a gated MLP on one text
    constant: bool  # whether the last coordinate of z is the constant 1
    norm: NormMap  # between the stream and z
    gain: Float[Tensor, " #n_in"] | None = None  # of the norm; None if L and R have it in them

    @classmethod
    def of(
        cls, model: ResidualModel, traces: tuple[Trace, Trace | None], layer: int
    ) -> "LinearMLP":
        """Return the MLP of a layer on one text, or between two if there is a second trace."""
        trace, before = traces
        if before is None:
            return cls.frozen(model, trace, layer)
        return cls.between(model, (trace, before), layer)

    @classmethod
    def frozen(cls, model: ResidualModel, trace: Trace, layer: int) -> "LinearMLP":
        """Return the MLP of a layer on one text, its norms and gate ratios held fixed."""
        mlp, of_layer = model.parts.layers[layer].mlp, trace.layers[layer]
        tensor = mlp.factors()
        n = of_layer.mlp_n
        ratio = of_layer.gate_ratio
        # A bias after the MLP is one hidden unit more in the tensor; it is no product of inputs.
        left, right = tensor.left[: ratio.shape[1]], tensor.right[: ratio.shape[1]]
        z = with_constant(n) if tensor.constant else n
        gated = mlp.gate is not None
        out = OutputMap.frozen(mlp.down, mlp.out_norm, of_layer.mlp_out_scale, mlp.residual_scale)
        # Where act(0) is not 0, a second set of units holds it, with the same output weights.
        n_sets = ratio.shape[1] // out.weight.shape[1]
        return cls(
            left=left,
            right=right if gated else None,
            out=replace(out, weight=out.weight.repeat(1, n_sets)),
            z=z,
            # Half for each factor: the form is quadratic, so its gradient would count it twice.
            through_left=ratio * (z @ right.T) / 2 if gated else ratio,
            through_right=ratio * (z @ left.T) / 2 if gated else None,
            curvature=ratio if gated else None,
            quadratic=gated,
            constant=tensor.constant,
            norm=frozen_norm(mlp.norm, of_layer.mlp_scale),
        )

    @classmethod
    def between(cls, model: ResidualModel, traces: tuple[Trace, Trace], layer: int) -> "LinearMLP":
        """Return the MLP of a layer between two texts, with nothing held fixed."""
        mlp = model.parts.layers[layer].mlp
        x1, x0 = (trace.layers[layer].mlp_input for trace in traces)
        n1, n0 = (trace.layers[layer].mlp_n for trace in traces)
        # Gains stay apart from the weights, of which a copy would take longer than their products.
        normed = torch.stack([mlp.applied(n) for n in (n1, n0)])
        left = mlp.up.weight()
        ups = functional.linear(normed, left, mlp.up.bias())
        right = None
        if mlp.gate is None:
            hidden = [mlp.act(up) for up in ups]
            a, b, slope = secant_slope(mlp.act, ups[0], ups[1]), None, None
        else:
            right = mlp.gate.weight()
            gates = functional.linear(normed, right, mlp.gate.bias())
            acts = [mlp.act(gate) for gate in gates]
            hidden = [up * act for up, act in zip(ups, acts, strict=True)]
            slope = secant_slope(mlp.act, gates[0], gates[1])
            a, b = (acts[0] + acts[1]) / 2, (ups[0] + ups[1]) / 2 * slope
        routed, (r1, r0) = None, (trace.layers[layer].routing for trace in traces)
        if slope is not None and b is not None and r1 is not None and r0 is not None:
            # D(h r) = r_ Dh + h_ Dr for hidden units h and their factors r by the router. Experts
            # may change at once, so Dr is no linear function of Dn: it is written as a bias.
            routed = (hidden[0] + hidden[1]) / 2 * (r1 - r0)
            mean, hidden = (r1 + r0) / 2, [hidden[0] * r1, hidden[1] * r0]
            a, b, slope = mean * a, mean * b, mean * slope
        return cls(
            left=left,
            right=right,
            out=OutputMap.between(
                mlp.down, mlp.out_norm, (hidden[0], hidden[1]), mlp.residual_scale, routed
            ),
            z=n1 - n0,
            through_left=a,
            through_right=b,
            curvature=slope,
            quadratic=False,
            constant=False,
            norm=norm_secant(mlp.norm, x1, x0),
            gain=None if mlp.norm is None else mlp.norm.gain(),
        )

    def weights(self, w: Float[Tensor, "time d_model"]) -> Float[Tensor, "time rank"]:
        """Return D'w: the weight of each hidden unit along directions of the stream."""
        return self.out.pull(w) @ self.out.weight

    def pulled(
        self, w: Float[Tensor, "m d_model"], at: Int[Tensor, " m"] | slice = EVERY
    ) -> Float[Tensor, "m n_in"]:
        """Return p = J'w at some positions, whose product with z is the flow through the MLP."""
        weights = self.out.pull(w, at) @ self.out.weight
        p = (weights * self.through_left[at]) @ self.left
        if self.right is not None and self.through_right is not None:
            p = p + (weights * self.through_right[at]) @ self.right
        return p if self.gain is None else self.norm.centred(p * self.gain)

    def read(
        self, rows: Float[Tensor, "m n_in"], position: Int[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m d_model"], Float[Tensor, " m"]]:
        """Return directions of z as directions of the stream, and the constants' share."""
        n, added = rows, rows.new_zeros(len(rows))
        if self.constant:
            n, added = rows[:, :-1], rows[:, -1]
        return self.norm[position].pull(n), added

    def write(
        self, rows: Float[Tensor, "m n_in"], position: Int[Tensor, " m"] | slice = EVERY
    ) -> Float[Tensor, "m d_model"]:
        """Return J applied to rows at some positions, without the bias."""
        return self.out.push(self.hidden(rows, position) @ self.out.weight.T, position)

    def hidden(self, rows: Tensor, at: Tensor | slice = EVERY) -> Float[Tensor, "m rank"]:
        """Return the hidden units that J has for rows at some positions."""
        rows = rows if self.gain is None else self.norm.centred(rows) * self.gain
        hidden = self.through_left[at] * (rows @ self.left.T)
        if self.right is None or self.through_right is None:
            return hidden
        return hidden + self.through_right[at] * (rows @ self.right.T)

    def _form(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Return products of the forms Q of some positions, given q, with vectors."""
        assert self.right is not None
        rows = rows if self.gain is None else self.norm.centred(rows) * self.gain
        images = apply_factored(self.left, self.right, weights, rows)
        return images if self.gain is None else self.norm.centred(images * self.gain)

    def pairs(
        self, parts: Float[Tensor, "parts d_model"], position: int
    ) -> Float[Tensor, "parts parts d_model"]:
        """Return the output at a position for each pair of parts of its normalised input.

        The constant coordinate belongs to the last part, and so does a bias of the output.
        """
        if self.constant:
            parts = with_constant(parts)
            parts[:-1, -1] = 0
        left = parts @ self.left.T
        if self.right is None or self.curvature is None:
            # Without a gate the second factor is the constant 1.
            right, ratio = torch.zeros_like(left), self.through_left
            right[-1] = 1
        else:
            right, ratio = parts @ self.right.T, self.curvature
        # Symmetric in both parts, since their order has no meaning.
        hidden = (left[:, None] * right + right[:, None] * left) / 2 * ratio[position]
        rows = self.out.push(hidden @ self.out.weight.T, torch.tensor(position))
        rows[-1, -1] += self.out.bias[position]
        return rows

    def directions(
        self,
        w: Float[Tensor, "time d_model"],
        p: Float[Tensor, "time n_in"],
        output: Float[Tensor, "time d_model"],
        m: int | None,
        least: float,
        *,
        of_form: bool = False,
    ) -> Directions:
        """Return m directions of each position whose flows, reads and writes add up exactly.

        They are the Ritz vectors of a form in a Krylov space, and with m=None its eigenvectors.
        Those with less flow than `least` are left out. Given are w, p = J'w and the output J z.

        If the output is quadratic in z, or with `of_form`, the form is
        Q = sum_r q_r (L_r R_r' + R_r L_r') / 2. Here q are the weights of the hidden units along w,
        times their curvature. The space holds z and p. Otherwise, and without a gate, the form is
        JJ', and the space holds the output J z and w. The outputs of directions are orthogonal
        then, and so is what they read, J'u for a Ritz vector u.
        """
        # Positions without flow or without change have no directions, and would cost a space each.
        active = ((p != 0).any(-1) & (self.z != 0).any(-1)).nonzero()[:, 0]
        # Maps whose singular vectors are all taken at once have 128 MB of working memory.
        at_once = max(1, 128 * 1024**2 // (2 * p.element_size() * self.left.numel()))
        parts, of_input = [], self.quadratic or of_form
        for at in active.split(at_once if m is None else max(1, len(active))):
            if of_input:
                assert self.curvature is not None
                forms = self.weights(w)[at] * self.curvature[at]
                apply = partial(self._form, forms)
                ends = torch.stack([self.z[at], p[at]], 1)
                # On one text p is Qz, so that a space of two dimensions from z holds it.
                starts = ends[:, :1] if self.quadratic else ends
                values, vectors, along = ritz_pairs(apply, starts, m)
            else:
                ends = torch.stack([output[at], w[at]], 1)
                back, forth = (partial(_by_position, f, at) for f in (self.pulled, self.write))
                values, vectors, along = ritz_pairs(back, ends, m, forth)
            # v . p instead of the value times v . z: the sum is then exact, however v is rounded.
            overlap, pull = (vectors @ ends.mT).unbind(-1)
            flow = overlap * pull
            order = flow.abs().argsort(dim=-1, descending=True, stable=True)
            sizes = flow.gather(-1, order).abs()
            row, rank = ((sizes >= least) & (sizes > 0)).nonzero(as_tuple=True)
            which = order[row, rank]
            v, places = vectors[row, which], at[row]
            overlap, pull = overlap[row, which, None], pull[row, which, None]
            if of_input:
                along, written = v, self.write(overlap * v, places)
            else:
                along, written = along[row, which], overlap * v
            vector = _unit(overlap, along)
            read, columns = pull * along, (values[row, which], flow[row, which])
            parts.append(Directions(places, rank, *columns, read, written, vector))
        return Directions(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def given(
        self,
        written: Float[Tensor, "k d_model"],
        read: Float[Tensor, "k d_model"],
        w: Float[Tensor, "time d_model"],
        output: Float[Tensor, "time d_model"],
        least: float,
    ) -> Directions:
        """Return given directions of the output at each position, whose flows are at least `least`.

        Direction i writes t_i (r_i . J z) and reads (w . t_i) J'r_i. The vectors t are `written`,
        the r `read`, and J z is the output.
        """
        t, r = written.to(w), read.to(w)
        amounts, pulls = output @ r.T, w @ t.T
        sizes = (amounts * pulls).abs()
        at, which = ((sizes >= least) & (sizes > 0)).nonzero(as_tuple=True)
        amount, pull = amounts[at, which, None], pulls[at, which, None]
        along, flow = self.pulled(r[which], at), (amount * pull)[:, 0]
        read, written = pull * along, amount * t[which]
        return Directions(at, which, None, flow, read, written, _unit(amount, along))


def _by_position(apply: Callable[[Tensor, Tensor], Tensor], at: Tensor, rows: Tensor) -> Tensor:
    """Return J or J' applied to k vectors at each position."""
    places = at.repeat_interleave(rows.shape[1])
    return apply(rows.flatten(0, 1), places).unflatten(0, rows.shape[:2])


def _unit(amount: Float[Tensor, "m 1"], along: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Return vectors of unit length, reversed where an amount along them is negative."""
    return torch.where(amount < 0, -1, 1) * functional.normalize(along, dim=-1, eps=1e-30)


def ritz_pairs(
    apply: Callable[[Float[Tensor, "forms k n"]], Float[Tensor, "forms k n_in"]],
    starts: Float[Tensor, "forms s n"],
    m: int | None,
    push: Callable[[Float[Tensor, "forms k n_in"]], Float[Tensor, "forms k n"]] | None = None,
) -> tuple[Float[Tensor, "forms m"], Float[Tensor, "forms m n"], Float[Tensor, "forms m n_in"]]:
    """Return Ritz values and vectors of symmetric forms in Krylov spaces of m dimensions.

    The space of each form Q is spanned by the starts x, y, then Qx, Qy, Q^2 x and so on, m vectors
    in all. The Ritz vectors are an orthonormal basis of it. A vector in the span of the starts is
    the sum of its parts along them. For starts z and Qz this is m-point Gauss
    quadrature of z'Qz. If a space has fewer dimensions, the remaining vectors are zero. Costs
    m products with each form. Returned are values, vectors, and what `apply` makes of the vectors.

    Args:
        apply: the product of each form Q with k vectors; of J' if Q is JJ'.
        starts: vectors that the space holds.
        m: number of dimensions, at least the number of starts. With None the space has all of
            them, and the Ritz vectors are eigenvectors.
        push: the product of J with k vectors, if Q is JJ'. It is called only if the space needs
            more vectors than the starts.

    Source: Golub and Meurant 2010, "Matrices, Moments and Quadrature with Applications".
    """
    if m is None:
        space = torch.eye(starts.shape[-1]).to(starts).expand(len(starts), -1, -1)
        applied = apply(space)
    else:
        basis: list[Tensor] = []
        images: list[Tensor] = []
        for number in range(m):
            # The first vectors are the starts; each later one is the image of an earlier one.
            behind = number - starts.shape[1]
            candidate = starts[:, number] if behind < 0 else images[behind]
            if behind >= 0 and push is not None:
                candidate = push(candidate[:, None])[:, 0]
            basis.append(_orthogonalised(candidate, basis))
            images.append(apply(basis[-1][:, None])[:, 0])
        space, applied = torch.stack(basis, 1), torch.stack(images, 1)
    # Q restricted to the space. Its rounding is asymmetric, and eigh reads one triangle only.
    small = ((space if push is None else applied) @ applied.mT).double()
    small = (small + small.mT) / 2
    # A zero vector gets a value beyond all others, so that it does not mix with the rest.
    absent = (space == 0).all(-1)
    beyond = 2 * small.abs().sum((-1, -2)) + 1
    values, rotation = torch.linalg.eigh(small + torch.diag_embed(absent * beyond[:, None]))
    rotation = rotation.mT.to(space)
    return values.to(space), rotation @ space, rotation @ applied


def _orthogonalised(x: Float[Tensor, "forms n"], basis: list[Tensor]) -> Float[Tensor, "forms n"]:
    """Return unit vectors orthogonal to a basis; zero where it spans x already."""
    length = x.norm(dim=-1, keepdim=True)
    y = x / length.clamp_min(torch.finfo(x.dtype).tiny)
    if not basis:
        return y
    space = torch.stack(basis, 1)
    left = torch.ones_like(length)
    # Twice is enough to be orthogonal at rounding accuracy, once the first remainder has length 1
    # again (Kahan and Parlett).
    for _ in range(2):
        y = y - ((space @ y[..., None]).mT @ space)[:, 0]
        size = y.norm(dim=-1, keepdim=True)
        left, y = left * size, y / size.clamp_min(torch.finfo(x.dtype).tiny)
    # A vector of which less is left lies in the space already.
    least = {torch.float64: 1e-9, torch.float32: 1e-4}[x.dtype]
    return torch.where((left > least) & (length > 0), y, 0)
