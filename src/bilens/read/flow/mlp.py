"""An MLP on a text: with its gate ratios held fixed it is bilinear, or linear without a gate."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.read.flow.screen import largest_flow
from bilens.residual import ResidualModel, Trace
from bilens.residual.parts import Norm
from bilens.tensor import QuadraticForm
from bilens.tensor.factors import with_constant

__all__ = ["Eigenvectors", "FrozenMLP"]

SMALL = 128
"""Forms of at most this many inputs are decomposed at once: a bound would save nothing."""
FORMS_BYTES = 128 * 1024**2
"""Working memory of the forms that are decomposed at once."""


class Eigenvectors(NamedTuple):
    """Chosen eigenvectors of the forms at some positions, one row each.

    Attributes:
        position: where each one is.
        rank: its place among those of the position, 0 for the largest |flow|.
        value: its eigenvalue.
        vector: v, of what the MLP reads, the constant coordinate included.
        overlap: v.z.
        pull: v'Qz, which is lambda v.z.
    """

    position: Int[Tensor, " m"]
    rank: Int[Tensor, " m"]
    value: Float[Tensor, " m"]
    vector: Float[Tensor, "m n_in"]
    overlap: Float[Tensor, " m"]
    pull: Float[Tensor, " m"]

    @property
    def flow(self) -> Float[Tensor, " m"]:
        """lambda (v.z)^2."""  # noqa: D403
        return self.overlap * self.pull


@dataclass(frozen=True, eq=False)
class FrozenMLP:
    """The MLP of a layer on a text, its norms' scales and gate ratios held fixed.

    It writes B_p(z, z) = D diag(rho_p) ((L z) * (R z)) at position p, and a bias; those of L and R
    are in the constant coordinate of z. Without a gate R z = 1, and it is linear.

    Attributes:
        left: L, with the norm's gain.
        right: R.
        out: D.
        out_bias: what is added behind D.
        z: what it reads: the normalised stream.
        ratio: rho, act(g) / g.
        gated: whether it has a gate.
        constant: whether the last coordinate of z is the constant 1.
        norm: before it, if there is one.
        in_scale: what that multiplies the stream by; 1 without one.
        out_scale: of a norm behind it; 1 without one.
    """

    left: Float[Tensor, "rank n_in"]
    right: Float[Tensor, "rank n_in"]
    out: Float[Tensor, "d_model rank"]
    out_bias: Float[Tensor, " d_model"]
    z: Float[Tensor, "time n_in"]
    ratio: Float[Tensor, "time rank"]
    gated: bool
    constant: bool
    norm: Norm | None
    in_scale: Float[Tensor, " time"]
    out_scale: Float[Tensor, " time"]

    @classmethod
    def on(cls, model: ResidualModel, trace: Trace, layer: int) -> "FrozenMLP":
        """The MLP of a layer on a text."""
        parts, found, tensor = model.layer(layer).mlp, trace.layers[layer], model.mlp_factors(layer)
        z = found.mlp_n
        # A bias behind the MLP is one hidden unit more; it is not a product of what is read.
        units = found.gate_ratio.shape[1]
        return cls(
            left=tensor.left[:units],
            right=tensor.right[:units],
            out=tensor.out[:, :units],
            out_bias=tensor.out[:, units:].sum(1),
            z=with_constant(z) if tensor.constant else z,
            ratio=found.gate_ratio,
            gated=parts.gate is not None,
            constant=tensor.constant,
            norm=parts.norm,
            in_scale=found.mlp_scale,
            out_scale=found.mlp_out_scale,
        )

    def weights(self, w: Float[Tensor, "time d_model"]) -> Float[Tensor, "time rank"]:
        """What each hidden unit counts along directions w of what is written: rho * D'w."""
        return ((w * self.out_scale[:, None]) @ self.out) * self.ratio

    def units(self, q: Float[Tensor, "time rank"]) -> Float[Tensor, "time rank"]:
        """What each hidden unit adds along the directions, given their weights."""
        return q * (self.z @ self.left.T) * (self.z @ self.right.T)

    def pulled(self, q: Float[Tensor, "time rank"]) -> Float[Tensor, "time n_in"]:
        """Q_p z_p, whose product with z_p is what is written along the directions.

        Each factor of the product L z * R z gets half; without a gate there is one.
        """
        if not self.gated:
            return q @ self.left
        L, R = self.z @ self.left.T, self.z @ self.right.T
        return ((q * R) @ self.left + (q * L) @ self.right) / 2

    def read(
        self, pulled: Float[Tensor, "m n_in"], position: Int[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m d_model"], Float[Tensor, " m"]]:
        """Directions of z as directions of the stream before the norm, and what constants add."""
        n, added = pulled, pulled.new_zeros(len(pulled))
        if self.constant:
            n, added = pulled[:, :-1], pulled[:, -1]
        n = n if self.norm is None else self.norm.centred(n)
        return n * self.in_scale[position, None], added

    def written(self) -> Float[Tensor, "time d_model"]:
        """All that it writes, but for the bias."""
        hidden = self.ratio * (self.z @ self.left.T) * (self.z @ self.right.T)
        return (hidden @ self.out.T) * self.out_scale[:, None]

    def written_along(
        self, vector: Float[Tensor, "m n_in"], position: Int[Tensor, " m"]
    ) -> Float[Tensor, "m d_model"]:
        """(v.z) B_p(v, z), which adds up to B_p(z, z) over an orthonormal basis of vectors v."""
        z = self.z[position]
        L, R = z @ self.left.T, z @ self.right.T
        hidden = ((vector @ self.left.T) * R + L * (vector @ self.right.T)) / 2
        out = (self.ratio[position] * hidden) @ self.out.T
        return (vector * z).sum(-1, keepdim=True) * out * self.out_scale[position, None]

    def eigenvectors(self, q: Float[Tensor, "time rank"], k: int, least: float) -> Eigenvectors:
        """At each position the k eigenvectors of largest |lambda (v.z)^2|, if that reaches `least`.

        Each form is decomposed whole, O(rank n_in^2 + n_in^3): what is large in lambda (v.z)^2 need
        not be large in lambda, so that iterating for the largest |lambda| would miss it. Forms of
        which no eigenvector can reach it are left out: for unit v, |(v.z) (v'Qz)| is at most
        (|z| |Qz| + |z'Qz|) / 2, and at most what `largest_flow` gives.
        """
        pulled = self.pulled(q)
        bound = (self.z.norm(dim=-1) * pulled.norm(dim=-1) + (self.z * pulled).sum(-1).abs()) / 2
        positions = (bound >= least).nonzero()[:, 0]
        if self.left.shape[1] > SMALL:
            most = largest_flow(self.left, self.right, q[positions], self.z[positions])
            positions = positions[most >= least]
        at_once = max(1, FORMS_BYTES // (4 * self.left.element_size() * self.left.shape[1] ** 2))
        found = [self._eigenvectors(q, pulled, some, k, least) for some in positions.split(at_once)]
        return Eigenvectors(*(torch.cat(part) for part in zip(*found, strict=True)))

    def _eigenvectors(
        self, q: Tensor, pulled: Tensor, positions: Tensor, k: int, least: float
    ) -> Eigenvectors:
        spectrum = QuadraticForm(self.left, self.right, q[positions], self.constant).eigh()
        overlap = torch.einsum("pkn,pn->pk", spectrum.vectors, self.z[positions])
        # v'Qz instead of lambda v.z: what is left over is then exact, whatever v rounds to.
        pull = torch.einsum("pkn,pn->pk", spectrum.vectors, pulled[positions])
        flow = overlap * pull
        order = flow.abs().argsort(dim=-1, descending=True, stable=True)[:, :k]
        row, rank = (flow.gather(-1, order).abs() >= least).nonzero(as_tuple=True)
        which = order[row, rank]
        return Eigenvectors(
            position=positions[row],
            rank=rank,
            value=spectrum.values[row, which],
            vector=spectrum.vectors[row, which],
            overlap=overlap[row, which],
            pull=pull[row, which],
        )
