"""Whether a pass under rules is the model's own, and by which operation it is not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bilens.flows.adjoints import Adjoints
from bilens.flows.modules import module_hooks
from bilens.flows.rules import Rules, called_by, is_live, make_leaf, tensors_in
from bilens.flows.secants import UnknownOperationError
from bilens.hooks import hooked
from bilens.transformer import ResidualModel
from bilens.transformer.passes import embedded
from bilens.transformer.places import Places
from bilens.transformer.running import first_input, first_output

ALLOWED = 1e-4
"""Relative difference of logits that float32 rounding in another order explains."""
ALLOWED_OF_PARTS = 1e-3
"""That of what a head or an MLP gives, in whose inputs rounding has grown through layers."""
_compared: WeakSet[Places] = WeakSet()
"""Models of known families whose pass under rules was once compared with their own."""


class TextPair(NamedTuple):
    """What a pass of questions reads: both texts of each, and the metric of their last streams.

    Attributes:
        ids: the first texts, then as many second ones.
        rows: embeddings in place of those of the tokens, if there are such.
        score: the metric of each text, of streams after the last layer.
        positions: number of the last positions that it reads.
        starts: number of places before the first text, and before the second one, which it lacks.
        at: the position of each token where it lacks any.
    """

    ids: Int[Tensor, "texts time"]
    rows: Float[Tensor, "texts time d_model"] | None
    score: Callable[[Float[Tensor, "texts time d_model"]], Float[Tensor, " texts"]]
    positions: int
    starts: Sequence[int] = (0, 0)
    at: Int[Tensor, "texts time"] | None = None

    def forward(self, model: ResidualModel) -> Float[Tensor, "texts vocab"]:
        """Run the model on all texts."""
        return model.places.forward(self.ids, self.positions, self.at)

    def start(self, row: int) -> int:
        """Return the number of places that a text lacks."""
        return self.starts[row * 2 // len(self.ids)]

    def alone(self, model: ResidualModel, row: int) -> Float[Tensor, "1 vocab"]:
        """Run the model on one text alone."""
        return model.places.forward(self.ids[row : row + 1, self.start(row) :], self.positions)

    def reading(
        self, model: ResidualModel, texts: slice = slice(None)
    ) -> AbstractContextManager[None]:
        """Return the context in which the model reads the embeddings of some texts."""
        return nullcontext() if self.rows is None else embedded(model, self.rows[texts])


def check_pass(model: ResidualModel, adjoints: Adjoints, runs: TextPair) -> None:
    """Raise unless the model itself, on each text alone, has the numbers of the pass under rules.

    Compared are the logits, and what each head and MLP gives if the graphs of layers are kept: an
    error of one head may be far smaller in the logits. A model of a known family is compared once,
    others each time.

    Raises:
        UnknownOperationError: it has others; the error names the first operation that differs.
    """
    places = model.places
    if places in _compared and runs.at is None:
        return
    of_parts = [cut.value.detach() for graph in adjoints.graphs for cut in graph.cuts]
    for row, under_rules in enumerate(adjoints.logits):
        own, text = list[Tensor](), slice(row, row + 1)
        with (
            torch.no_grad(),
            runs.reading(model, text),
            _parts_noted(places, own),
            places.context(),
        ):
            (alone,) = runs.alone(model, row)
        if not alone.isfinite().all():
            continue  # a check of logits names the overflow
        is_same = bool((alone - under_rules).abs().max() <= ALLOWED * alone.abs().max())
        parts = zip(own, (x[row, runs.start(row) :] for x in of_parts), strict=False)
        if not is_same or not all(_is_same_part(*pair) for pair in parts):
            raise _differing(model, runs, row)
    if places.modules is not None and runs.at is None:
        _compared.add(places)


def _parts_noted(places: Places, parts: list[Tensor]) -> AbstractContextManager[None]:
    """Let what each head and MLP gives be noted in the order of a pass."""

    def note_heads(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
        parts.append(args[0].unflatten(-1, (places.n_heads, -1)))

    def note_mlp(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        parts.append(first_output(output)[..., None, :])

    before = [(layer.heads, note_heads) for layer in places.layers if layer.heads is not None]
    after = [(layer.mlp, note_mlp) for layer in places.layers if layer.mlp is not None]
    return hooked(before, after)


def _is_same_part(own: Float[Tensor, "*time heads d_head"], under_rules: Tensor) -> bool:
    """Return whether each head gives the same numbers, but for rounding."""
    own = own.reshape(-1, *own.shape[-2:])
    size = own.abs().amax((0, 2))
    difference = (under_rules.reshape(own.shape) - own).abs().amax((0, 2))
    # Heads that write nearly nothing have the rounding of all.
    return bool((difference <= ALLOWED_OF_PARTS * (size + 1e-3 * size.max())).all())


class _Result(NamedTuple):
    """The result of an operation."""

    name: str
    line: str
    value: Tensor


def _result(func: Any, result: Any) -> Iterator[_Result]:
    for x in tensors_in((result,)):
        if x.is_floating_point():
            name = getattr(func, "__name__", str(func))
            yield _Result(name, called_by(), x.detach().clone())


class _Plain(TorchFunctionMode):
    """Mode that notes the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[_Result] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.results += _result(func, result)
        return result


class _Outermost(Rules):
    """Rules that hand operations of the model's own code, and not those of a rule, to a function.

    Args:
        texts: number of texts.
        perform: from these rules and the arguments of `__torch_function__` to the result.
    """

    def __init__(self, texts: int, perform: Callable[..., Any]) -> None:
        super().__init__(texts)
        self.perform, self.is_inside = perform, False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if self.is_inside:
            return super().__torch_function__(func, types, args, kwargs)
        self.is_inside = True
        try:
            return self.perform(self, func, types, args, kwargs or {})
        finally:
            self.is_inside = False


def _noting(results: list[_Result]) -> Callable[..., Any]:
    """Return a function that runs an operation under rules, and notes its result."""

    def run(rules: Rules, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        result = Rules.__torch_function__(rules, func, types, args, kwargs)
        results.extend(_result(func, result))
        return result

    return run


def _differing(model: ResidualModel, runs: TextPair, row: int) -> UnknownOperationError:
    """Return the error that names the first operation whose result is not that of a text alone."""
    texts, text = len(runs.ids), slice(row, row + 1)
    if runs.start(row):
        raise _error(
            type(model.model).__name__,
            "has other numbers for a shorter text behind padding than alone (expected texts of "
            "equally many tokens)",
            "",
        )
    with torch.no_grad(), runs.reading(model, text), model.places.context(), _Plain() as plain:
        runs.alone(model, row)
    results: list[_Result] = []
    with _ruled(model, runs, _Outermost(texts, _noting(results))):
        runs.forward(model)
    for alone, beside in zip(plain.results, results, strict=False):
        own, value = alone.value, beside.value
        if value.shape != own.shape and value.dim() and len(value) == texts * len(own):
            value = value.unflatten(0, (texts, -1))[row]
        size = own.abs().max() if own.numel() else 0.0
        is_same = value.shape != own.shape or bool(((value - own).abs() <= ALLOWED * size).all())
        if alone.name != beside.name or not is_same:
            return _error(
                beside.name, "has other numbers for a text beside another than alone", beside.line
            )
    return _error(
        type(model.model).__name__, "has other logits for a text beside another than alone", ""
    )


def _error(name: str, message: str, line: str) -> UnknownOperationError:
    error = UnknownOperationError(f"{name} {message}{line}, so that no flow is read")
    error.is_named = True
    return error


@contextmanager
def _ruled(model: ResidualModel, runs: TextPair, rules: Rules) -> Iterator[None]:
    """Let a model run on texts under rules, without the cuts of a flow."""

    def start(_: nn.Module, __: Any, ___: Any, output: Tensor) -> Tensor:
        return make_leaf(output)

    places = model.places
    before, after = module_hooks(places.model, lambda: rules)
    after += [(table, start) for table in (places.embed, *places.tables)]
    # Hooks that were registered first run first: the embeddings that are given come before.
    with runs.reading(model), hooked(before, after), places.context(), torch.enable_grad(), rules:
        yield


class _Operation(NamedTuple):
    """An operation of the model's own code, and its activations."""

    name: str
    line: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    values: list[Tensor]  # of both


def _auditing(calls: list[_Operation]) -> Callable[..., Any]:
    """Return a function that runs an operation, each input read by it alone, and notes it."""

    def run(rules: Rules, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        name, inputs = getattr(func, "__name__", str(func)), list[Tensor]()
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        in_place = in_place and isinstance(args[0], Tensor)
        n_leaves = len(rules.leaves)
        copies = [_read_once(x, inputs) for x in args]
        if in_place:
            copies[0] = _marked(copies[0].clone())
        result = Rules.__torch_function__(rules, func, types, copies, kwargs)
        outputs = [x for x in tensors_in((copies[0] if in_place else result,)) if is_live(x)]
        if in_place:
            args[0].copy_(copies[0])
            _marked(args[0])
            result = None if name == "__setitem__" else args[0]
        inputs += [leaf.value for leaf in rules.leaves[n_leaves:]]
        if inputs or outputs:
            values = [x.detach().clone() for x in (*inputs, *outputs)]
            calls.append(_Operation(name, called_by(), inputs, outputs, values))
        return result

    return run


def _read_once(value: Any, inputs: list[Tensor]) -> Any:
    """Return an argument whose activations one operation alone reads, and note these."""
    if is_live(value) and hasattr(value, "in_pass"):
        inputs.append(alias := _marked(value.view_as(value)))
        return alias
    if type(value) in (list, tuple):
        return type(value)(_read_once(x, inputs) for x in value)
    return value


def _marked(x: Any) -> Any:
    """Return a tensor that is marked as one of the pass if it is an activation."""
    if is_live(x):
        x.in_pass = True
    return x


def check_rules(model: ResidualModel, runs: TextPair) -> None:
    """Raise if an operation of a pass has another change than its adjoints give it.

    Raises:
        UnknownOperationError: an operation has; it is named, the one that misses most.
    """
    last: list[Tensor] = []
    calls: list[_Operation] = []
    audit = _Outermost(len(runs.ids), _auditing(calls))

    def finish(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last.append(first_input(args, kwargs))

    with _ruled(model, runs, audit), hooked(before=[(model.places.last, finish)]):
        runs.forward(model)
        numbers = runs.score(last[-1])
    signs = torch.ones_like(numbers)
    signs[len(signs) // 2 :] = -1
    activations = [x for call in calls for x in (*call.inputs, *call.outputs)]
    gradients = iter(torch.autograd.grad(numbers, activations, signs, allow_unused=True))
    adjoints = [[next(gradients) for _ in call.values] for call in calls]
    least = 1e-3 * float((signs * numbers.detach()).sum().abs())
    for call, of_call in zip(reversed(calls), reversed(adjoints), strict=True):
        # The adjoint of the second text is minus that of the first: w . (x1 - x0) is w . x.
        flows = [
            0.0 if w is None else float((w * value).sum())
            for w, value in zip(of_call, call.values, strict=True)
        ]
        into, out = sum(flows[: len(call.inputs)]), sum(flows[len(call.inputs) :])
        is_mirrored = all(_is_mirrored(w) for w in of_call[: len(call.inputs)] if w is not None)
        if not (is_mirrored and abs(into - out) <= least):
            raise _error(call.name, "has no rule for what this call does", call.line)


def _is_mirrored(w: Tensor) -> bool:
    """Return whether the adjoint of the second text is minus that of the first, on some axis."""
    tolerance = 1e-3 * w.abs().max()
    for axis, size in enumerate(w.shape):
        if size % 2 == 0:
            first, second = w.unflatten(axis, (2, -1)).unbind(axis)
            if bool(((first + second).abs() <= tolerance).all()):
                return True
    return not w.any()
