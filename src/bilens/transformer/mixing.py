"""Values that heads mix by their patterns: each sum over positions, and its terms."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bilens.errors import BilensError

PATTERN_BYTES = 32 * 1024**2
"""Heads of attention are taken in blocks whose patterns take no more than this."""


@dataclass(frozen=True, eq=False)
class Mix:
    """Values that heads mix by their patterns, sum_s p_ts v_s.

    Attributes:
        output: the mixed values.
        values: the value of each position.
        pattern: a function from a block of heads to its pattern, (texts, heads, time, sources).
        entry: a function from head, position and source to an entry of the pattern, (texts,), in
            the graph of the pass that runs.
    """

    output: Float[Tensor, "texts heads time d_head"]
    values: Float[Tensor, "texts heads sources d_head"]
    pattern: Callable[[slice], Float[Tensor, "texts heads time sources"]]
    entry: Callable[[int, int, int], Float[Tensor, " texts"]]

    def term(self, head: int, position: int, source: int) -> Float[Tensor, "texts d_head"]:
        """Return p_ts v_s, what a head moves from a source to a position."""
        return self.entry(head, position, source)[:, None] * self.values[:, head, source]

    def is_all_of(self, x: Float[Tensor, "texts time all_heads"]) -> bool:
        """Return whether the mixed values of all heads, side by side, are an activation."""
        output = self.output.detach().transpose(1, 2).flatten(2)
        return torch.equal(output, x.detach())

    def blocks(self) -> Iterator[slice]:
        """Yield blocks of heads whose patterns fit into `PATTERN_BYTES`."""
        texts, heads, time, _ = self.output.shape
        size = texts * time * self.values.shape[2] * self.output.element_size()
        yield from head_blocks(heads, size)


def head_blocks(heads: int, size: int) -> Iterator[slice]:
    """Yield blocks of heads, each of whose patterns takes `size` bytes."""
    step = max(1, PATTERN_BYTES // max(size, 1))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def product_mix(pattern: Tensor, values: Tensor, output: Tensor, texts: int) -> Mix | None:
    """Return the mix of a matrix product, with texts and heads in one axis or two; else None."""
    axes = pattern.dim()
    if axes != values.dim() or axes not in (3, 4) or pattern.shape[-2] != pattern.shape[-1]:
        return None
    if axes == 3:
        if len(pattern) % texts:
            return None
        pattern, values, output = (x.unflatten(0, (texts, -1)) for x in (pattern, values, output))
    return Mix(
        output,
        values,
        lambda heads: pattern[:, heads].detach(),
        lambda h, t, s: pattern[:, h, t, s],
    )


class AttentionCall(NamedTuple):
    """The arguments of a call of torch's attention, with keys and values for each head."""

    query: Float[Tensor, "texts heads time d_head"]
    key: Float[Tensor, "texts heads sources d_head"]
    value: Float[Tensor, "texts heads sources d_value"]
    mask: Tensor  # False, or minus infinity, where nothing is seen
    scale: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "AttentionCall":
        """Return the call of `scaled_dot_product_attention` with these arguments."""
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)
            )
        texts_heads = torch.broadcast_shapes(*(x.shape[:2] for x in (query, key, value)))
        query, key, value = (x.expand(*texts_heads, -1, -1) for x in (query, key, value))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        if is_causal:
            mask = mask.tril()
        elif attn_mask is not None:
            mask = attn_mask
        mask = mask[(None,) * (4 - mask.dim())]
        return cls(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else scale)

    @torch.no_grad()
    def logs(self, heads: slice) -> Float[Tensor, "texts heads time sources"]:
        """Return the logarithms of the patterns of some heads."""
        scores = self.scale * (self.query[:, heads] @ self.key[:, heads].transpose(-1, -2))
        mask = self.mask
        mask = mask[:, heads] if mask.shape[1] > 1 else mask
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hides else scores + mask
        # Queries that see nothing mix nothing.
        return scores.log_softmax(-1).nan_to_num(-torch.inf, torch.inf, -torch.inf)

    def entry(self, head: int, position: int, source: int) -> Float[Tensor, " texts"]:
        """Return the weight of a source at a position."""
        query, key = self.query, self.key
        scores = self.scale * (key[:, head] @ query[:, head, position, :, None])[..., 0]
        shape = (len(scores), query.shape[1], query.shape[2], key.shape[2])
        of_head = self.mask.expand(shape)[:, head, position]
        hides = of_head.dtype == torch.bool
        scores = scores.masked_fill(~of_head, -torch.inf) if hides else scores + of_head
        return scores.softmax(-1)[:, source]

    def mix(self, output: Tensor) -> Mix:
        """Return what the heads mixed, given the output of the call."""
        return Mix(output, self.value, lambda heads: self.logs(heads).exp(), self.entry)


class Mixing(TorchFunctionMode):
    """Mode in which what heads mix is noted, for the map that reads it next."""

    def __init__(self) -> None:
        super().__init__()
        # Of a layer the last products are those before the map of its heads.
        self.noted: deque[Callable[[int], Mix | None]] = deque(maxlen=4)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "bilinear_attention":
            with self:  # by products of matrices
                return func(*args, **options, kernel="reference")
        output = func(*args, **options)
        if name == "scaled_dot_product_attention":
            self.noted.append(lambda _: AttentionCall.of(*args, **options).mix(output))
        elif name in ("matmul", "bmm", "__matmul__"):
            pattern, values = args
            self.noted.append(lambda texts: product_mix(pattern, values, output, texts))
        return output

    def read_by(self, x: Float[Tensor, "texts time all_heads"], layer: int) -> Mix:
        """Return the mix that is the input of the map of a layer's heads, and forget all.

        Raises:
            BilensError: there is no such mix.
        """
        mixes = [make(len(x)) for make in self.noted]
        self.noted.clear()
        for mix in mixes:
            if mix is not None and mix.is_all_of(x):
                return mix
        raise BilensError(
            f"the heads of layer {layer} mix values by no pattern that is found, so that they have "
            "no sources; expected parts of all sources together"
        )
