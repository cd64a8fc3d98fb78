"""Fit one gated MLP as a bilinear one: lines for its gates, its down map, then all its weights.

The target is the MLP's output y at its inputs x, weighted by w = 1 / |s|^2 with s the layer's input
stream. Later norms divide by the size of the stream, so this weight measures an error by its effect
on later layers. A few tokens have a much larger stream than the others. In the layer that makes
their stream large they count like any token; in later layers they do not outweigh the others.
"""

from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from bilens.convert.gates import GateSums, set_line
from bilens.errors import BilensError
from bilens.residual.attention import StopForwardError
from bilens.residual.layers import MLP
from bilens.residual.parts import working_dtype
from bilens.train.settings import Distillation

CHUNK = 4096
"""Rows whose hidden units are in memory at once."""
TINY = 1e-30


@dataclass(frozen=True)
class Fit:
    """Errors of a layer with linear gates relative to the gated layer, on the calibration text.

    Attributes:
        lines: share of sum w (u act(g))^2 that the lines leave unexplained.
        distance: sqrt(sum w |y - y'|^2 / sum w |y|^2), of the MLP's output.
    """

    lines: float
    distance: float


@dataclass(frozen=True, eq=False)
class FitRows:
    """Inputs, targets and row weights of a fit.

    Attributes:
        x: inputs of the MLP.
        y: outputs of the MLP with its original activation, in float32 or float64.
        weight: w, in the same dtype.
    """

    x: Float[Tensor, "rows d_in"]
    y: Float[Tensor, "rows d_out"]
    weight: Float[Tensor, " rows"]

    def distance(self, module: Any) -> float:
        """Return the weighted relative distance of a module's outputs from y."""
        error = torch.zeros((), dtype=torch.float64, device=self.x.device)
        with torch.no_grad():
            for x, y, w in self.chunks():
                error += (w[:, None] * (module(x) - y).square()).sum(dtype=torch.float64)
        energy = (self.weight[:, None] * self.y.square()).sum(dtype=torch.float64)
        return float((error / energy.clamp_min(TINY)).sqrt())

    def chunks(self) -> Any:
        """Yield x, y and w for `CHUNK` rows at a time."""
        return zip(*(part.split(CHUNK) for part in (self.x, self.y, self.weight)), strict=True)


def fit_mlp(mlp: MLP, rows: FitRows, ridge: float, distillation: Distillation) -> Fit:
    """Make an MLP bilinear, in place; an infinite `ridge` leaves its down map unchanged."""
    share = _fit_gate(mlp, rows)
    if ridge < torch.inf:
        _fit_down(mlp, rows, ridge)
    if distillation.steps:
        _distil(mlp, rows, distillation)
    return Fit(share, rows.distance(mlp.module))


@torch.no_grad()
def _fit_gate(mlp: MLP, rows: FitRows) -> float:
    assert mlp.gate is not None
    sums = GateSums(mlp.gate.n_out, rows.x.device)
    for x, _, w in rows.chunks():
        up, gate = (part.select(part.module(x).mT).mT for part in (mlp.up, mlp.gate))
        sums.add(up * w[:, None].sqrt(), gate, mlp.act(gate))
    line = sums.line()
    set_line(mlp, line)
    return line.error


@torch.no_grad()
def _fit_down(mlp: MLP, rows: FitRows, ridge: float) -> None:
    """Set the down map D to the minimiser of a sum over the rows.

        sum w |D h + c - y|^2 + ridge sum_i E_i |D_i - D0_i|^2,   E_i = sum w h_i^2

    for the hidden units h = u (a g + b), with D0 the original map and c its bias.
    """
    down = mlp.down
    before, bias = down.weight().double(), down.bias()
    gram = before.new_zeros(before.shape[1], before.shape[1])
    cross = torch.zeros_like(before)
    for x, y, w in rows.chunks():
        up, gate = (part.select(part.module(x).mT).mT for part in mlp.reads[::-1])
        root = w[:, None].sqrt()
        h = (up * gate).to(root.dtype) * root
        gram += (h.mT @ h).double()
        cross += (((y if bias is None else y - bias) * root).mT @ h).double()
    energy = gram.diagonal()
    keep = ridge * energy + energy.mean() * 1e-9 + TINY
    # Energies of units differ by many orders of magnitude. With unit diagonal the condition number
    # of the Gram matrix is near the least that scaling of rows and columns allows.
    size = (energy + keep).rsqrt()
    scaled = (gram + torch.diag(keep)) * size * size[:, None]
    wanted = (cross + before * keep) * size
    down.set_weight(torch.linalg.solve(scaled, wanted, left=False) * size)


def _distil(mlp: MLP, rows: FitRows, how: Distillation) -> None:
    """Train all weights and biases of an MLP towards y."""
    student: Any = deepcopy(mlp.module).to(working_dtype(mlp.up.module.weight.dtype))  # type: ignore[arg-type]
    student.requires_grad_()
    parameters = list(student.parameters())
    optimizer = torch.optim.Adam(parameters, how.learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / how.steps)
    generator = torch.Generator().manual_seed(how.seed)
    size = min(how.batch_size, len(rows.x))
    order = torch.empty(0, dtype=torch.int64)
    scale = (rows.weight[:, None] * rows.y.square()).mean().clamp_min(TINY)
    for _ in range(how.steps):
        if len(order) < size:
            order = torch.cat([order, torch.randperm(len(rows.x), generator=generator)])
        batch, order = order[:size].to(rows.x.device), order[size:]
        with torch.enable_grad():
            error = (student(rows.x[batch].to(scale.dtype)) - rows.y[batch]).square()
            loss = (rows.weight[batch, None] * error).mean() / scale
            loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if not all(torch.isfinite(part).all() for part in parameters):
        raise BilensError(
            f"The distillation of {mlp.name} became infinite or NaN; lower learning_rate"
        )
    with torch.no_grad():
        for stored, trained in zip(mlp.module.parameters(), parameters, strict=True):
            stored.copy_(trained)


BATCH = 8
"""Texts that run at once."""


class LayerRuns:
    """Texts that run through a model one layer at a time, so that layers may change in between.

    Positions and masks depend on the size of the batch and not on its texts, so they are recorded
    once for each size. The parents of `mlps` are the layers.
    """

    def __init__(
        self, model: PreTrainedModel, mlps: list[MLP], texts: Int[Tensor, "texts time"]
    ) -> None:
        names = [mlp.name.rpartition(".")[0] for mlp in mlps]
        self._layers: list[Any] = [model.get_submodule(name) for name in names]
        self._mlps = mlps
        self._beside: dict[int, list[tuple[Any, Any]]] = {}
        self._streams = [self._enter(model, batch) for batch in texts.split(BATCH)]

    @torch.no_grad()
    def run(
        self, layer: int
    ) -> tuple[
        Float[Tensor, "rows d_in"], Float[Tensor, "rows d_out"], Float[Tensor, "rows d_model"]
    ]:
        """Return inputs and outputs of a layer's MLP, and the layer's input stream.

        The texts stay before the layer until `advance`.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        with self._mlps[layer].module.register_forward_hook(
            lambda module, given, made: seen.append((given[0], made))
        ):
            self._next = [self._apply(layer, stream) for stream in self._streams]
        reads, writes = (
            torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*seen, strict=True)
        )
        return reads, writes, torch.cat([stream.flatten(0, 1) for stream in self._streams])

    @torch.no_grad()
    def advance(self, layer: int, *, changed: bool) -> None:
        """Move the texts past a layer, and run it once more if it has changed."""
        if changed:
            self._next = [self._apply(layer, stream) for stream in self._streams]
        self._streams = self._next

    def _apply(self, layer: int, stream: Tensor) -> Tensor:
        given, named = self._beside[len(stream)][layer]
        made = self._layers[layer](stream, *given, **named)
        return made[0] if isinstance(made, tuple) else made

    @torch.no_grad()
    def _enter(self, model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> Tensor:
        """Return the first layer's input stream; record the arguments of layers at a new size."""
        entered: list[Tensor] = []
        beside: list[tuple[Any, Any]] = []
        new = len(texts) not in self._beside

        def catch(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not entered:
                entered.append(given[0])
            if not new:
                raise StopForwardError
            beside.append((given[1:], named))

        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(layer.register_forward_pre_hook(catch, with_kwargs=True))
            stack.enter_context(suppress(StopForwardError))
            model.base_model(texts, use_cache=False)
        if new:
            self._beside[len(texts)] = beside
        return entered[0]
