"""Checks that bilens reads an architecture exactly, for those who register their own.

    bilens.register_family("MyModel", Family(...))
    check_family(MyModel())

bilens's own tests run the same checks on every architecture that it knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from bilens.convert import process
from bilens.errors import BilensError
from bilens.flows import flow
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.layers import Moment
from bilens.transformer.sums import mlp_output, sum_of_parts

SOFTMAX_ROUNDING = 1e-6
"""Relative error of patterns: transformers computes softmax in float32 whatever the weights."""


@dataclass(frozen=True, eq=False)
class FamilyCase:
    """A model, a text and the relative error that counts as rounding."""

    view: ResidualModel
    ids: Int[Tensor, " time"]
    rounding: float = 1e-5

    @cached_property
    def of_text(self) -> Pass:
        return Pass.of(self.view, self.ids)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple({0, self.view.n_layers - 1})

    def compare(self, total: Tensor, expected: Tensor, rounding: float = 0.0) -> None:
        """Raise BilensError unless two arrays are equal within rounding."""
        a, b = total.detach().double(), expected.detach().double()
        error, size = float((a - b).abs().max()), max(float(b.abs().max()), 1e-30)
        if not error <= max(self.rounding, rounding) * size:
            raise BilensError(
                f"off by {error:.2g} where the largest number is {size:.3g}, expected a relative "
                f"error of at most {max(self.rounding, rounding):.0e}"
            )


def check_family(
    model: nn.Module, ids: Int[Tensor, " time"] | None = None, *, rounding: float = 1e-5
) -> None:
    """Check that bilens reads a model exactly, whatever its architecture.

    Every part of the view is compared with the modules of the model: embeddings, norms, heads,
    MLPs, the unembedding, and their sum with the logits.

    Args:
        model: of an architecture that is known or registered; a small one with random weights is
            enough, all of them different from 0 and norms' gains from 1.
        ids: a text; random tokens by default.
        rounding: relative error that counts as rounding: 1e-5 for models that compute in float32.

    Raises:
        BilensError: the model cannot be read, or checks fail; names all of them.
    """
    view = model if isinstance(model, ResidualModel) else ResidualModel(model)
    if ids is None:
        length = min(8, view.modules.n_positions or 8)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(view.vocab_size, (length,), generator=generator)
    case, failures = FamilyCase(view, ids.to(view.device), rounding), []
    for name, check in CHECKS.items():
        try:
            check(case)
        except BilensError as error:
            failures.append(f"- {name}: {error}")
    if failures:
        raise BilensError(
            f"{type(view.model).__name__} is not read exactly; correct its Family:\n"
            + "\n".join(failures)
        )


def _check_logits(case: FamilyCase) -> None:
    case.compare(sum_of_parts(case.of_text), case.of_text.logits[0])


def _setting(view: ResidualModel, name: str) -> Any:
    config = view.model.config
    return getattr(getattr(config, "text_config", config), name, None)


def _check_patterns(case: FamilyCase) -> None:
    """Compare patterns of softmax attention with the scores of queries and keys."""
    view, time = case.view, len(case.ids)
    if view.modules.attention != "softmax" or _setting(view, "sliding_window"):
        return
    cap = _setting(view, "attn_logit_softcapping")
    unseen = torch.ones(time, time, dtype=torch.bool, device=view.device).triu(1)
    for index in case.layers:
        n = case.of_text.layer(index).attn_n[0]
        rows = [view.queries_keys(index, n[[t]], t, time)[0] for t in range(time)]
        q, k = map(torch.cat, zip(*rows, strict=True))
        score = torch.einsum("thd,shd->hts", q, k)
        score = cap * torch.tanh(score / cap) if cap else score
        pattern = score.masked_fill(unseen, -torch.inf).softmax(-1)
        case.compare(pattern, case.of_text.pattern(index)[0], SOFTMAX_ROUNDING)


def _check_scores(case: FamilyCase) -> None:
    """Compare QK with the scores of two normalised rows, where queries and keys have no norm."""
    view = case.view
    if any(view.layer(index).heads.inner for index in case.layers):
        return
    window = _setting(view, "sliding_window") or len(case.ids)
    for index, distance in zip(case.layers, (min(window, len(case.ids)) - 1, 0), strict=False):
        n = case.of_text.layer(index).attn_n[0]
        a, b = n[-1:], n[:1]

        def scored(
            x: Tensor, at: int, layer: int = index, length: int = distance + 1
        ) -> list[tuple[Tensor, Tensor]]:
            # The score of biases and positions is no part of QK.
            with_x, without = (view.queries_keys(layer, y, at, length) for y in (x, 0 * x))
            return [(q - q0, k - k0) for (q, k), (q0, k0) in zip(with_x, without, strict=True)]

        pairs = zip(view.qk(index, distance), scored(a, distance), scored(b, 0), strict=True)
        for matrix, (q, _), (_, k) in pairs:
            total = (a @ matrix.left @ matrix.right @ b.mT)[:, 0, 0]
            size = (q[0].norm(dim=-1) * k[0].norm(dim=-1)).max()
            case.compare(total / size, (q * k).sum(-1)[0] / size, SOFTMAX_ROUNDING)


def _check_values(case: FamilyCase) -> None:
    for index in case.layers:
        n, weights = case.of_text.layer(index).attn_n[0], case.view.layer(index).heads.weights()
        expected = torch.einsum("td,hde,hef->htf", n, weights.value, weights.out)
        case.compare(n @ case.view.ov(index).dense(), expected)


def _check_mlps(case: FamilyCase) -> None:
    """Compare MLPs on the streams of the text, by their modules and by their factors."""
    view = case.view
    for index in case.layers:
        layer = case.of_text.layer(index)
        total = mlp_output(view, index, layer.mlp_n[0], layer.gate_ratio[0])
        output = view.layer(index).mlp.stream_output(layer.mlp_input)
        case.compare(layer.mlp_out_scale[..., None] * total, output)
        # The two runs attend by different kernels.
        case.compare(view.mlp_inputs(index, case.ids[None]), layer.mlp_n, 1e-5)


def _check_streams(case: FamilyCase) -> None:
    view, last = case.view, case.view.n_layers - 1
    # A parallel MLP does not read what the attention of its layer writes.
    if view.modules.mlp_moment(last) == Moment.attention(last):
        x = case.of_text.layer(last).mlp_input
        case.compare(x + view.layer(last).mlp.stream_output(x), case.of_text.stream)


def _check_directions(case: FamilyCase) -> None:
    view, logits = case.view, case.of_text.next_logits[0]
    if view.modules.softcap is not None:
        logits = view.modules.softcap * torch.atanh(logits / view.modules.softcap)
    first, second = 1, 2
    n = view.modules.normalised(case.of_text.stream[0, -1])
    _, b = view.modules.logit_weights([first, second])
    total = n @ view.direction(first, [second]) + b[0] - b[1]
    size = logits.abs().max()
    case.compare(total[None] / size + 1, (logits[first] - logits[second])[None] / size + 1)


def _check_flow(case: FamilyCase) -> None:
    """Split a difference of logits, and its change between two texts; both check their sums."""
    direction = case.view.direction(1, [2])
    flow(case.view, case.ids, direction)
    if case.view.modules.queries_keys is None:
        flow(case.view, case.ids, direction, against=case.ids.flip(0))


def _check_processing(case: FamilyCase) -> None:
    if isinstance(case.view.model, PreTrainedModel):
        process(case.view.model)


def _check_untouched(case: FamilyCase) -> None:
    view = case.view
    before = {name: value.clone() for name, value in view.model.state_dict().items()}
    of_text = Pass.of(view, case.ids)
    of_text.layer(0), of_text.pattern(0)
    view.qk(0, 1)
    view.mlp_inputs(0, case.ids[None])
    after = view.model.state_dict()
    if not all(torch.equal(value, after[name]) for name, value in before.items()):
        raise BilensError("a weight has changed, expected reading to change nothing")
    modules = list(view.model.modules())
    hooks = [hook for part in modules for hook in (part._forward_hooks, part._forward_pre_hooks)]
    if any(getattr(h, "__module__", "").startswith("bilens.") for d in hooks for h in d.values()):
        raise BilensError("a hook is left, expected reading to change nothing")


CHECKS: dict[str, Callable[[FamilyCase], None]] = {
    "the parts add up to the logits": _check_logits,
    "queries and keys make the pattern": _check_patterns,
    "QK is the score": _check_scores,
    "OV is the output of a head": _check_values,
    "the MLP's factors are the MLP": _check_mlps,
    "the MLP writes to the stream": _check_streams,
    "directions are differences of logits": _check_directions,
    "flows add up": _check_flow,
    "processing keeps the function": _check_processing,
    "reading changes nothing": _check_untouched,
}
"""All checks of `check_family`, by name."""
