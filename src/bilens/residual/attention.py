"""Queries, keys and patterns of attention as the model itself computes them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from threading import RLock
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bilens.checks import detached
from bilens.errors import BilensError
from bilens.residual.parts import Norm
from bilens.settings import Place

ScoredRows = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries and keys (n, heads, d_head), whose inner products are the scores."""

RECORDING = "bilens-recording"
ROWS = 8192
"""Rows that go through a layer at once."""
_LOCK = RLock()
_active: ContextVar[object] = ContextVar("active", default=None)
_recorded: ContextVar[dict[str, Any] | None] = ContextVar("recorded")


class StopForwardError(Exception):
    """Signal that ends a forward pass once enough of it is recorded."""


@contextmanager
def recording() -> Iterator[Callable[[], bool]]:
    """Yield a test that is true in the forward passes of this block only.

    Hooks see every run of their module, also runs in other threads and in traces within this one.
    """
    block = object()
    token = _active.set(block)
    try:
        yield lambda: _active.get() is block
    finally:
        _active.reset(token)


@contextmanager
def attends_by(model: Any, kind: str) -> Iterator[None]:
    """Let a model of transformers attend by another of its functions as long as this runs.

    The choice is in the configuration, so one thread at a time makes it. Attention of bilens's own
    models, and of models that were registered, has no such choice.
    """
    before = getattr(model.config, "_attn_implementation", None)
    if before is None or hasattr(model, "embed_text"):
        yield
        return
    with _LOCK:
        model.config._attn_implementation = kind
        try:
            yield
        finally:
            model.config._attn_implementation = before


@detached
def query_key_maps(view: Any, layer: int, position: Place) -> ScoredRows:
    """Return the maps from normalised rows n at a position to queries and keys, [n, 1] @ map.

    They include rotation, the scores' scale and the gains of norms of queries and keys.

    Args:
        view: a `ResidualModel`.
        layer: number of the layer.
        position: of the rows.

    Returns:
        One or two pairs of (d_model + 1, heads, d_head). The last row is the output of biases
        and of positions that are vectors.
    """
    norm = view.layer(layer).heads.norm
    basis = torch.eye(view.d_model, dtype=view.dtype, device=view.device)
    zero = torch.zeros_like(basis[:1])
    if norm is not None:
        basis = norm.folded(basis, None)[0].T
        bias = norm.bias()
        zero = zero if bias is None else bias[None]
        basis = basis + zero
    # The maps are run, not read: only the modules know their rotation. They are affine in the rows
    # as long as norms of queries and keys only multiply by their gain, so the row of zeros has the
    # constant.
    pairs = _from_stream(view, layer, torch.cat([basis, zero]), position, linear=True)

    def without_bias(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1] - rows[-1:], rows[-1:]])

    return [(without_bias(q), without_bias(k)) for q, k in pairs]


@detached
def queries_keys(
    view: Any, layer: int, n: Float[Tensor, "rows d_model"], position: Place
) -> ScoredRows:
    """Return queries and keys of normalised rows at one position.

    They include biases, norms of queries and keys, rotation and the scores' scale.

    Args:
        view: a `ResidualModel`.
        layer: number of the layer.
        n: the rows.
        position: of the rows.

    Returns:
        One or two pairs of (rows, heads, d_head), whose inner products are the scores.

    Raises:
        BilensError: the rows do not have the width of the stream.
    """
    if n.shape[-1] != view.d_model:
        raise BilensError(
            f"n has shape {tuple(n.shape)}, expected a last axis of {view.d_model}, the width of "
            "the stream"
        )
    norm = view.layer(layer).heads.norm
    x = n if norm is None else norm.applied(n)
    return _from_stream(view, layer, x, position, linear=False)


def _from_stream(view: Any, layer: int, x: Tensor, position: int, *, linear: bool) -> ScoredRows:
    """Return queries and keys of a layer for rows (n, d_model) at one position.

    The rows go through the layer's own maps, norms and rotation. The scores' scale is in the
    queries. Keys that heads share are repeated for each of them. With `linear` norms of queries and
    keys multiply by their gain only, so that the result is linear in the rows.
    """
    if len(x) > ROWS:
        parts = [_from_stream(view, layer, y, position, linear=linear) for y in x.split(ROWS)]
        return [
            (torch.cat([q for q, _ in pair]), torch.cat([k for _, k in pair]))
            for pair in zip(*parts, strict=True)
        ]
    heads, model = view.parts.layers[layer].heads, view.model
    if view.parts.queries_keys is not None:
        return view.parts.queries_keys(heads.module, x, position)
    # Each row is a text of one token, at the given position.
    rows = x[:, None].to(heads.out.stored.dtype)
    if hasattr(heads.module, "queries_keys"):
        pairs, scale = _of_own_model(model, heads.module, rows, position, linear=linear)
    else:
        with _gains_only(heads.inner if linear else ()):
            arguments = _arguments(model, heads.module, position)
            call = attention_call(model, lambda: heads.module(hidden_states=rows, **arguments))
        if call is None:
            raise BilensError(
                f"{type(heads.module).__name__} is not built on the attention interface of "
                "transformers, which returns queries and keys; set queries_keys in its Family"
            )
        query, key, scale = call["query"], call["key"], call["scaling"]
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


def _arguments(model: Any, module: nn.Module, position: int) -> dict[str, Any]:
    """Return the arguments of an attention module at a position, without its input."""
    arguments: dict[str, Any] = {}

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_recorded():
            arguments.update(kwargs)
            raise StopForwardError

    ids = torch.zeros(1, 1, dtype=torch.int64, device=next(module.parameters()).device)
    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    with recording() as is_recorded, hook, suppress(StopForwardError):
        model(ids, position_ids=torch.full_like(ids, position), use_cache=False)
    positions = {name: arguments[name] for name in ("position_embeddings",) if name in arguments}
    return {**positions, "attention_mask": None}


def attention_call(model: Any, run: Callable[[], Any]) -> dict[str, Any] | None:
    """Return query, key, mask and options of the first call of attention in a run.

    None if the model's attention is not built on the interface of transformers.
    """
    # Modules with other arguments are not built on the interface either, and fail before the call.
    # The run ends at the call, so that whatever a module does to queries and keys before it, such
    # as rotation or a scale, is in the result.
    _recorded.set(None)
    with attends_by(model, RECORDING), suppress(StopForwardError, TypeError):
        run()
    return _recorded.get()


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    if options.get("scaling") is None:
        options["scaling"] = query.shape[-1] ** -0.5
    _recorded.set({**options, "query": query, "key": key, "mask": mask})
    raise StopForwardError


ALL_ATTENTION_FUNCTIONS.register(RECORDING, _record)


@contextmanager
def _gains_only(norms: Sequence[Norm]) -> Iterator[None]:
    with ExitStack() as hooks:
        for norm in norms:
            gain = norm.gain()
            hooks.enter_context(
                norm.module.register_forward_hook(lambda _, args, __, g=gain: args[0] * g)
            )
        yield
