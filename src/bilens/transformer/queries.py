"""Queries and keys of a layer for rows at any position, by the layer's own modules."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.transformer.layers import Modules
from bilens.transformer.running import attention_call, device_of, run

ScoredRows = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries and keys (n, heads, d_head), whose inner products are the scores."""


def query_key_maps(
    model: nn.Module, modules: Modules, layer: int, position: int, length: int
) -> ScoredRows:
    """Return the maps from normalised rows n at a position to queries and keys, [n, 1] @ map.

    They include rotation, the scores' scale and the gains of norms of queries and keys. They are
    one or two pairs of (d_model + 1, heads, d_head). The last row is the output of biases and of
    positions that are vectors.
    """
    heads = modules.layers[layer].heads
    basis = torch.eye(heads.out.n_out, dtype=modules.dtype, device=heads.out.device)
    zero = torch.zeros_like(basis[:1])
    if heads.norm is not None:
        basis = heads.norm.folded(basis, None)[0].T
        bias = heads.norm.bias()
        zero = zero if bias is None else bias[None]
        basis = basis + zero
    # The maps are run, not read: only the modules know their rotation. They are affine in the rows
    # as long as norms of queries and keys only multiply by their gain, so the row of zeros has the
    # constant.
    rows = torch.cat([basis, zero])
    pairs = scored_rows(model, modules, layer, rows, position, length, linear=True)

    def without_bias(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1] - rows[-1:], rows[-1:]])

    return [(without_bias(q), without_bias(k)) for q, k in pairs]


def scored_rows(
    model: nn.Module,
    modules: Modules,
    layer: int,
    x: Float[Tensor, "n d_model"],
    position: int,
    length: int | None = None,
    *,
    linear: bool = False,
) -> ScoredRows:
    """Return queries and keys of a layer for rows that its maps read at one position.

    The rows go through the layer's own maps, norms and rotation. The scores' scale is in the
    queries. Keys that heads share are repeated for each of them. With `linear` norms of queries and
    keys multiply by their gain only, so that the result is linear in the rows.

    Raises:
        BilensError: the layer does not see the position from the end of a text of `length`.
    """
    at_once = 8192  # rows that go through a layer
    if len(x) > at_once:
        batches = x.split(at_once)
        several = [
            scored_rows(model, modules, layer, y, position, length, linear=linear) for y in batches
        ]
        pairs = []
        for of_batches in zip(*several, strict=True):
            queries, keys = zip(*of_batches, strict=True)
            pairs.append((torch.cat(queries), torch.cat(keys)))
        return pairs
    heads = modules.layers[layer].heads
    if modules.queries_keys is not None:
        return modules.queries_keys(heads.module, x, position)
    # Each row is a text of one token, at the given position.
    rows = x[:, None].to(heads.out.stored.dtype)
    if hasattr(heads.module, "queries_keys"):
        pairs, scale = _of_own_model(model, heads.module, rows, position, linear=linear)
    else:
        norms = heads.inner if linear else ()
        with hooked(after=[(norm.module, partial(_times, norm.gain())) for norm in norms]):
            length = length or position + 1
            arguments = _arguments(model, heads.module, position, length)
            call = attention_call(model, lambda: heads.module(hidden_states=rows, **arguments))
        if call is None:
            raise BilensError(
                f"{type(heads.module).__name__} is not built on the attention interface of "
                "transformers, which returns queries and keys; set queries_keys in its Family"
            )
        query, key, scale = call["query"], call["key"], call["scaling"]
        window, distance = call.get("sliding_window"), length - 1 - position
        if window is not None and distance >= window:
            raise BilensError(
                f"Heads of layer {layer} see {window} positions, expected a distance between query "
                f"and key of 0 to {window - 1}, got {distance}"
            )
        # Row h of the keys is then that of head h, also where heads share keys.
        pairs = [(query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))]
    return [(scale * q[:, :, 0].to(x), k[:, :, 0].to(x)) for q, k in pairs]


def _of_own_model(
    model: Any, module: Any, rows: Tensor, position: int, *, linear: bool
) -> tuple[ScoredRows, float]:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
    _, pos_embed, rope = model.embed_text(ids, torch.full_like(ids, position))
    place = None if pos_embed is None else pos_embed.expand(len(rows), 1, -1)
    return module.queries_keys(rows, place, rope, normed=not linear), module.scale


def _arguments(model: Any, module: nn.Module, position: int, length: int) -> dict[str, Any]:
    """Return the arguments of an attention module at a position of a text, without its input."""
    # The last position tells a model the length of the text.
    text = [position] if length == position + 1 else [position, length - 1]
    places = torch.tensor([text], device=device_of(next(module.parameters())))
    _, arguments = first_call(
        module, lambda: run(model, torch.zeros_like(places), position_ids=places)
    )
    options: dict[str, Any] = {"attention_mask": None}
    if "position_embeddings" in arguments:
        turns = arguments["position_embeddings"]
        options["position_embeddings"] = (
            turns if len(text) == 1 else tuple(part[:, :1] for part in turns)
        )
    return options


def _times(gain: Tensor, _: nn.Module, args: tuple[Any, ...], *others: Any) -> Tensor:
    return args[0] * gain
