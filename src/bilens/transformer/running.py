"""Forward passes of a model: what is recorded in them, and how they attend, thread by thread."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NoReturn, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bilens.errors import BilensError
from bilens.hooks import StopForwardError, changed, evaluating, hooked
from bilens.memory import return_freed

PREFIX = "bilens-"
_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)
_recorded: ContextVar[dict[str, Any] | None] = ContextVar("recorded")


def attention_choice(model: Any) -> str | None:
    """Return the name of a model's attention function; None if it has no choice of one.

    Attention of bilens's own models, and of models that were registered, has none.
    """
    if hasattr(model, "embed_text"):
        return None
    choice: str | None = getattr(model.config, "_attn_implementation", None)
    # Another thread may be within `recording_attention`.
    return None if choice is None else choice.removeprefix(PREFIX)


@contextmanager
def counting_operations() -> Iterator[FlopCounterMode]:
    """Count the floating-point operations of matrix products, by torch's own counter.

    Fused attention of a CPU is not counted by it, so that attention takes its plain kernel within.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@contextmanager
def recording_attention(model: Any) -> Iterator[None]:
    """End a run of a model at its first call of attention, in this thread and block only."""
    if attention_choice(model) is None:
        with evaluating(model):
            yield
        return
    outer = _is_recording.get()
    try:
        _is_recording.set(True)
        with evaluating(model), changed(model, _ask_threads, _ask_no_threads):
            yield
    finally:
        _is_recording.set(outer)


def _ask_threads(model: Any, _: Any) -> None:
    """Enter the name of a function that asks each thread whether it records into a configuration.

    All threads share the configuration. Passes of the model in other threads attend as before.
    """
    model.config._attn_implementation = _registered(str(attention_choice(model)))


def _ask_no_threads(model: Any, _: Any) -> None:
    model.config._attn_implementation = attention_choice(model)


def _registered(choice: str) -> str:
    """Return the name of the function that records if a thread does, and else attends."""
    name = PREFIX + choice
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, choice))
    # Functions without an entry here get no mask at all.
    if choice in ALL_MASK_ATTENTION_FUNCTIONS:
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[choice])
    return name


def _attend(choice: str, module: nn.Module, *tensors: Tensor, **options: Any) -> Any:
    if _is_recording.get():
        _record(module, *tensors, **options)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(choice, _eager_attention(module))
    return function(module, *tensors, **options)


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of an architecture, a function of the file of its class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if function is not None:
            return cast(Callable[..., Any], function)
    raise BilensError(
        f"{type(module).__name__} has no eager attention, expected eager_attention_forward beside "
        "it, as in transformers"
    )


NARROW = (torch.float16, torch.bfloat16)
LARGE = 2**22
"""Numbers of a weight that are widened at a time, such as those of an unembedding."""
FREED = 2**30
"""Bytes of freed copies that the C library may keep."""
DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
DEVICE = Tensor.device.__get__
VIEWS: tuple[Any, ...] = (
    Tensor.detach,
    Tensor.__getitem__,
    Tensor.select,
    Tensor.unsqueeze,
    Tensor.squeeze,
    Tensor.split,
    Tensor.chunk,
    Tensor.transpose,
    Tensor.t,
    Tensor.view,
    Tensor.flatten,
    Tensor.permute,
)
VIEWS += (Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
"""Operations whose result is a part of a weight, or the weight in another shape."""
METADATA: tuple[Any, ...] = (
    Tensor.size,
    Tensor.dim,
    Tensor.__len__,
    Tensor.numel,
    Tensor.stride,
    Tensor.data_ptr,
)
METADATA += (Tensor._is_view,)
"""Operations that read no number; attributes are further ones."""


def on_device(weight: Tensor, device: torch.device) -> nn.Parameter:
    """Return a weight that is used on a device; a matrix stays where it is, such as in a file."""
    is_matrix = weight.dim() > 1
    parameter = nn.Parameter(weight if is_matrix else weight.to(device), requires_grad=False)
    if parameter.device != device:
        parameter.used_on = device  # type: ignore[attr-defined]
    return parameter


def device_of(weight: Tensor) -> torch.device:
    """Return the device on which a weight is used, to which passes move it if it is elsewhere."""
    return getattr(weight, "used_on", weight.device)


def _wide_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


@contextmanager
def wide_passes(model: nn.Module, noise: torch.Generator | None = None) -> Iterator[None]:
    """Let passes of this thread compute in float32 with weights that are stored in 16 bits.

    Streams in 16 bits are rounded, and sums over their parts miss by per cents. Weights that stay
    on another device than that of their use are moved there, too. The model is in evaluation mode.
    With `noise` each weight is changed at random by as much as its last bit.
    """
    any_stored = any(map(_is_stored, model.parameters()))
    with evaluating(model), _WideWeights(noise) if any_stored else nullcontext():
        yield


class _WideWeights(TorchFunctionMode):
    """Mode in which each weight is widened where it is used, so that no copy of a model stays.

    Nor does one stay for the backward pass: what it needs of a weight is widened again there.
    """

    freed: ClassVar[int] = 0  # bytes of copies since memory was given back

    def __init__(self, noise: torch.Generator | None = None) -> None:
        super().__init__()
        self.noise = noise

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(function, "__name__", "")
        if not any(map(_is_stored, (*args, *options.values()))):
            return function(*args, **options)
        if function in METADATA or (name == "__get__" and function not in VIEWS):
            # Type and device are those with which weights are used.
            return {DTYPE: _wide_dtype, DEVICE: device_of}.get(function, function)(*args, **options)
        is_large = function is functional.linear and len(args[1]) > _rows_at_once(args[1])
        if is_large or name in ("grouped_mm", "_grouped_mm"):
            with self:
                return (_by_block if is_large else _by_group)(*args, **options)
        if function is functional.embedding:
            # Rows first: a whole table in float32 may be gigabytes.
            ids, table, *others = args
            rows = function(ids.to(table.device), table, *others, **options)
            return self._wide(rows).to(device_of(table))
        if function in VIEWS:
            # Still a weight, which is widened where it is used: of a stack of experts only one.
            with torch.no_grad():
                parts = function(*args, **options)
                several = isinstance(parts, (tuple, list))
                device = device_of(args[0])
                results = [on_device(x, device) for x in (parts if several else [parts])]
                return tuple(results) if several else results[0]
        return self._widened(function, args, options)

    def _wide(self, weight: Tensor) -> Tensor:
        """Return a weight as it is used, with noise in the last bit if there is any."""
        wide = weight.to(device_of(weight), _wide_dtype(weight))
        _give_back(wide.nbytes)
        if self.noise is None:
            return wide
        noise = torch.rand(wide.shape, generator=self.noise).to(wide.device)
        return wide * (1 + torch.finfo(weight.dtype).eps * (noise - 0.5))

    def _widened(self, function: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the result of an operation whose weights are widened, here and backward."""
        weights = [value for value in (*args, *options.values()) if _is_stored(value)]
        copies = {id(weight): self._wide(weight) for weight in weights}
        # Only weights are widened, as everything else follows from them: a model may round to 16
        # bits on purpose.
        wide = [copies.get(id(value), value) for value in args]
        wide_options = {name: copies.get(id(value), value) for name, value in options.items()}
        with made_again([(copies[id(weight)], weight) for weight in weights]):
            return function(*wide, **wide_options)


def _give_back(size: int) -> None:
    """Give back the memory of copies that were freed, once they are `FREED` bytes."""
    _WideWeights.freed += size
    if _WideWeights.freed > FREED:
        _WideWeights.freed = 0
        return_freed()


@contextmanager
def made_again(copies: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let no graph of this block keep wide copies of weights: backward they are made once more.

    Args:
        copies: each with the weight that it is made from.
    """
    weights_of = {copy.untyped_storage().data_ptr(): (weight, copy) for copy, weight in copies}

    def pack(x: Tensor) -> Any:
        # Such as the transpose, a view of the copy.
        weight, copy = weights_of.get(x.untyped_storage().data_ptr(), (None, x))
        if weight is None:
            return x
        return weight, copy.device, copy.dtype, (x.shape, x.stride(), x.storage_offset())

    def unpack(entry: Any) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        weight, device, dtype, view = entry
        _give_back(weight.numel() * dtype.itemsize)
        return weight.detach().to(device, dtype).as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield
    # The graph keeps both functions, and with the first one all that it knows.
    weights_of.clear()


def _rows_at_once(weight: Float[Tensor, "n_out n_in"]) -> int:
    return max(1, LARGE // weight.shape[1])


def _by_block(
    x: Float[Tensor, "*batch n_in"],
    weight: Float[Tensor, "n_out n_in"],
    bias: Float[Tensor, " n_out"] | None = None,
) -> Float[Tensor, "*batch n_out"]:
    """Return the outputs of a map, a block of its rows after the other."""
    size, outputs = _rows_at_once(weight), []
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        outputs.append(functional.linear(x, weight[rows], None if bias is None else bias[rows]))
    return torch.cat(outputs, -1)


def _by_group(
    x: Float[Tensor, "rows n_in"],
    weights: Float[Tensor, "groups n_in n_out"],
    *,
    offs: Int[Tensor, " groups"],
    **_: None,
) -> Float[Tensor, "rows n_out"]:
    """Return the product of each group of rows with its weight; only weights with rows are used."""
    outputs, start = list[Tensor](), 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            outputs.append(x[start:end] @ weights[group])
        start = end
    return torch.cat(outputs)


def _is_stored(value: Any) -> bool:
    """Return True for a weight that is used in another type, or on another device."""
    is_weight = isinstance(value, nn.Parameter)
    return is_weight and (value.dtype in NARROW or hasattr(value, "used_on"))


def run(model: Any, ids: Int[Tensor, "batch time"], **options: Any) -> Any:
    """Run a model on texts without a cache, as if it had not read any text before."""
    with fresh(model):
        return model(ids, use_cache=False, **options)


@contextmanager
def fresh(model: nn.Module) -> Iterator[None]:
    """Let passes of this thread be those of a model in evaluation mode that has read no text.

    Rotary positions may keep the frequencies of the longest text so far, or of the last one.
    """
    memo: dict[nn.Module, Any] = {}

    def turn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memo[module] = _fresh_copy(module)(*args, **kwargs)
        # The module itself, whose state is the user's, runs on a length that does not change it.
        call = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        last = _neutral_length(module, call.get("layer_type")) - 1
        return (), {**call, "position_ids": torch.full_like(call["position_ids"][:1, :1], last)}

    modules = [module for module in model.modules() if BY_LENGTH & _rotations(module)]
    before = [(module, turn) for module in modules]
    after = [(module, lambda module, *_: memo[module]) for module in modules]
    with evaluating(model), hooked(before, after):
        yield


def _fresh_copy(module: nn.Module) -> nn.Module:
    copy = deepcopy(module, {id(module.config): module.config})
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(copy, name, 0)
    return copy


def _neutral_length(module: Any, layer_type: str | None) -> int:
    """Return a length of text for which rotary positions keep the frequencies that they have."""
    # Dynamic ones change them for texts longer than all so far, and shorter than those of training.
    prefix = "" if layer_type is None else f"{layer_type}_"
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind != "longrope":
        return int(module.original_max_seq_len)
    # Those with two sets of frequencies take the second for texts longer than those of training.
    now, short = (getattr(module, prefix + name) for name in ("inv_freq", "original_inv_freq"))
    settings = module.config.rope_parameters
    settings = settings if layer_type is None else settings[layer_type]
    return 1 if torch.equal(now, short) else settings["original_max_position_embeddings"] + 1


BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary positions that depend on the length of a text."""


def rotates_by_length(model: nn.Module) -> bool:
    """Return True if the rotary positions of a text depend on its length."""
    return any(BY_LENGTH & _rotations(module) for module in model.modules())


def _rotations(module: nn.Module) -> set[str]:
    """Return the kinds of rotary positions that a module computes, for its kinds of layers."""
    kinds = getattr(module, "rope_type", ())
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds} if kinds else set()


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the stream that a module is called with."""
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def first_output(output: Any) -> Tensor:
    """Return the first of what a module returns."""
    value: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return value


def with_input(
    x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another stream."""
    if args:
        return (x.to(args[0].dtype), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": x.to(kwargs["hidden_states"].dtype)}


def attention_call(model: Any, run: Callable[[], Any]) -> dict[str, Any] | None:
    """Return query, key, mask and options of the first call of attention in a run.

    None if the model's attention is not built on the interface of transformers.
    """
    # Modules with other arguments are not built on the interface either, and fail before the call.
    # The run ends at the call, so that whatever a module does to queries and keys before it, such
    # as rotation or a scale, is in the result.
    _recorded.set(None)
    with recording_attention(model), suppress(StopForwardError, TypeError):
        run()
    return _recorded.get()


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> NoReturn:
    if options.get("scaling") is None:
        options["scaling"] = query.shape[-1] ** -0.5
    _recorded.set({**options, "query": query, "key": key, "mask": mask})
    raise StopForwardError


def allowed_change(model: nn.Module) -> float:
    """Return the change of a log-probability, in nats, that rounding explains.

    Passes compute in float32 also where weights are stored in 16 bits.
    """
    return 1e-4 if next(model.parameters()).dtype == torch.float64 else 2e-3
