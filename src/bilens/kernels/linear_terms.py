"""What other chunks add to (q . k + c)^2 and to the sums of rows beside the squares' own state.

Squares of q . k need a state of d_head^2 d_value numbers, which the kernels keep. All other terms
are read from one of (d_head + 1)(d_head + 1 + d_value) numbers. With k~ = [k, 1], w = [k, 1, v],
q~ = [q, c], p = [q, c / 2] and, over the tokens of earlier chunks, L = sum_s k~_s w_s',

    outputs += 2 c p_t' L_v,    sums += q~_t' L_k q~_t,

where L_k are the columns of k~ and L_v those of v. With r the gradient of a row's sum, dy that of
its output, u = [r q~, c dy] and, over the tokens of later chunks, M = sum_t p_t u_t',

    dq_t += 2 L_q u_t,   dc += 2 q~_t' L_1 [r_t, dy_t],   dk_s += 2 M_q w_s,   dv_s += 2 M_v' k~_s,

where L_q and M_q are the rows of q, and L_1 the columns of [1, v].
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bilens.kernels.products import both_orders, one_order


class LinearTerms:
    """Terms of a text in chunks, in float32.

    Args:
        q: queries (batch, heads, time, d_head).
        k: keys (batch, kv_heads, time, d_head).
        v: values (batch, kv_heads, time, d_value).
        constant: c of each head, (heads,), or None for 0.
        length: tokens of a chunk.
        seen: 1 for tokens and 0 for padding (batch, time), whose keys and values are 0; or None.
        start: L of the tokens before the text, (batch * kv_heads, ...), or None.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        constant: Tensor | None,
        length: int,
        seen: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        self._kv_heads, self._length, self._time = k.shape[1], length, k.shape[2]
        self._width = q.shape[-1]
        c = q.new_zeros(q.shape[1]) if constant is None else constant
        # The tokens of a text are a row of its last but one axis, as those of queries.
        self._c = c.float()[None, :, None, None].expand(*q.shape[:3], 1)
        one = torch.ones_like(k[..., :1])
        if seen is not None:
            one = one * seen[:, None, :, None]
        self._constant = self._cut(self._c)
        self._q = self._cut(torch.cat([q.float(), self._c], -1))
        self._half = self._cut(torch.cat([q.float(), self._c / 2], -1))
        self._k = self._cut(torch.cat([k, one], -1).float())
        self._w = self._cut(torch.cat([k, one, v], -1).float())
        parts = self._moments(self._k, self._w)
        before = torch.zeros_like(parts[:, :, :1])
        if start is not None:
            before = start.view_as(before)
        sums = torch.cat([before, parts], 2).cumsum(2)
        self._before, self.last = sums[:, :, None, :-1], sums[:, :, -1].flatten(0, 1)

    def outputs(self) -> Tensor:
        """Return what is added to the outputs before their scale, (batch, heads, time, d_value)."""
        of_values = self._before[..., self._width + 1 :]
        return self._join(2 * self._constant * (self._half @ of_values))

    def sums(self) -> Tensor:
        """Return the whole sums of rows over the tokens before each chunk, (batch, heads, time)."""
        read = self._q @ self._before[..., : self._width + 1]
        return self._join((read * self._q).sum(-1, keepdim=True))[..., 0]

    def gradients(self, dy: Tensor, dsums: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is added to the gradients of q, k and v, and to that of c for each row."""
        width, dy = self._width, self._cut(dy.float())
        r = torch.zeros_like(self._constant) if dsums is None else self._cut(dsums[..., None])
        u = torch.cat([r * self._q, self._constant * dy], -1)
        dq = 2 * u @ self._before[..., :width, :].mT
        to_ones = self._q @ self._before[..., width:]
        dc = 2 * (to_ones * torch.cat([r, dy], -1)).sum(-1, keepdim=True)
        parts = self._moments(self._half, u).flip(2)
        after = torch.cat([torch.zeros_like(parts[:, :, :1]), parts[:, :, :-1]], 2).cumsum(2)
        after = after.flip(2)[:, :, None]
        dk = 2 * self._w @ after[..., :width, :].mT
        dv = 2 * self._k @ after[..., width + 1 :]
        return self._join(dq), self._join(dk), self._join(dv), self._join(dc)[..., 0]

    def _cut(self, x: Tensor) -> Tensor:
        """Return rows of (batch, heads, time, ...) as (batch, kv_heads, sharing, chunks, ...)."""
        missing = -self._time % self._length
        chunks = functional.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, self._length))
        return chunks.unflatten(1, (self._kv_heads, -1))

    def _join(self, x: Tensor) -> Tensor:
        return x.flatten(3, 4)[..., : self._time, :].flatten(1, 2)

    def _moments(self, x: Tensor, z: Tensor) -> Tensor:
        """Return sum_t x_t z_t' over each chunk and the heads that share keys."""
        return (x.mT @ z).sum(2)


class SplitState(NamedTuple):
    """A recurrent state of keys [k, 1] and values [v, 1], or of one of both, as its parts.

    Attributes:
        squares: of k and v alone, (batch * kv_heads, features, d_value).
        linear: L of `LinearTerms`; entries that the state lacks are zero.
    """

    squares: Tensor
    linear: Tensor

    @classmethod
    def of(cls, state: Tensor, width: int, d_value: int, *, constant: bool) -> "SplitState":
        """Split a state (batch, kv_heads, features, values); constant: its keys are [k, 1]."""
        side = width + constant
        full = both_orders(state.flatten(0, 1), side).unflatten(1, (side, side))
        more = width + 1 - side
        full = functional.pad(full, (0, d_value + 1 - full.shape[-1], 0, more, 0, more))
        squares = one_order(full[:, :width, :width, :d_value].flatten(1, 2), width)
        return cls(squares, torch.cat([full[..., d_value], full[:, :, width, :d_value]], -1))

    def joined(self, width: int, *, constant: bool, normalised: bool) -> Tensor:
        """Return the state of [k, 1] with a constant, and of [v, 1] with normalised rows."""
        d_value, side = self.squares.shape[-1], width + constant
        products = both_orders(self.squares, width).unflatten(1, (width, width))
        full = functional.pad(products, (0, 1, 0, 1, 0, 1))
        full[..., d_value] = self.linear[..., : width + 1]
        full[:, :, width, :d_value] = self.linear[..., width + 1 :]
        full[:, width, :, :d_value] = self.linear[..., width + 1 :]
        return one_order(full[:, :side, :side, : d_value + normalised].flatten(1, 2), side)
