"""The pass under rules is the model's own: each operation, in each form of call, in a model.

The metric of a flow in each of its texts is that of the untouched module on this text alone, or the
operation is refused by its name and line. The model has the operation in place of the activation of
its MLPs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import CohereConfig, CohereForCausalLM

from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.flows import flow
from bilens.flows.rules import OF_NUMBERS
from bilens.flows.secants import UnknownOperationError
from bilens.transformer import ResidualModel
from tests.flows.own_model import TEXTS, OwnModel, own_model
from tests.models import TOKENS

WIDTH = 32
EYE = torch.eye(WIDTH, dtype=torch.float64)
EVEN = torch.arange(WIDTH) % 2 == 0
ARGUMENTS: dict[str, dict[str, Any]] = {
    "clamp": {"min": -0.3, "max": 0.4},
    "clamp_min": {"min": 0.1},
    "clamp_max": {"max": 0.1},
    "threshold": {"threshold": 0.1, "value": 0.0},
    "prelu": {"weight": torch.tensor([0.3], dtype=torch.float64)},
}
POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"}
Call = Callable[[Any, Tensor, Tensor], Tensor]
"""A function of the MLP, its hidden units, and its input."""


def changed(change: Callable[[Tensor], Any]) -> Call:
    """Return the operation that changes hidden units in place, and goes on with them."""

    def call(_: Any, h: Tensor, __: Tensor) -> Tensor:
        change(h)
        return h

    return call


def fitting(name: str, h: Tensor) -> Tensor:
    return h.abs() + 0.1 if name in POSITIVE else h


def forms(name: str) -> dict[str, Call]:
    """Return the forms of call that torch has of a function of each number."""
    given, found = ARGUMENTS.get(name, {}), dict[str, Call]()
    for home in (torch, functional):
        if function := getattr(home, name, None):
            label = f"{home.__name__}.{name}"
            found[f"{label}(h)"] = lambda s, h, x, f=function: f(fitting(name, h), *given.values())
            found[f"{label}(input=h)"] = lambda s, h, x, f=function: f(
                input=fitting(name, h), **given
            )
        if function := getattr(home, f"{name}_", None):
            found[f"{home.__name__}.{name}_(h)"] = changed(
                lambda h, f=function: f(fitting(name, h), *given.values())
            )
    if hasattr(Tensor, name):
        found[f"h.{name}()"] = lambda s, h, x: getattr(fitting(name, h), name)(*given.values())
    if hasattr(Tensor, f"{name}_") and name not in POSITIVE:
        found[f"h.{name}_()"] = changed(lambda h: getattr(h, f"{name}_")(*given.values()))
    if name not in POSITIVE and hasattr(torch, name):
        function = getattr(torch, name)
        found[f"torch.{name}(h, out=)"] = lambda s, h, x: function(
            h, *given.values(), out=torch.empty_like(h)
        )
    if function := getattr(functional, name, None):
        call = changed(lambda h: function(h, *given.values(), inplace=True))
        found[f"F.{name}(h, inplace=True)"] = call
        found[f"F.{name}(h[..., :9], inplace=True)"] = changed(
            lambda h: function(h[..., :9], *given.values(), inplace=True)
        )
    return found


def gate(s: Any, x: Tensor) -> Tensor:
    out: Tensor = s.gate_proj(x)
    return out


@torch.no_grad()
def without_gradient(_: Any, h: Tensor, __: Tensor) -> Tensor:
    return functional.silu(h)


@torch.inference_mode()
def in_inference_mode(_: Any, h: Tensor, __: Tensor) -> Tensor:
    return functional.silu(h)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def in_autocast(s: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (functional.silu(gate(s, x)) + h).double()


OTHERS: dict[str, Call] = {
    "torch.add(h, other=g)": lambda s, h, x: torch.add(h.relu(), other=gate(s, x)),
    "torch.add(input=h, other=g, alpha=2)": lambda s, h, x: torch.add(
        input=h.relu(), other=gate(s, x), alpha=2
    ),
    "h += g": lambda s, h, x: h.relu().__iadd__(gate(s, x)),
    "h.add_(g)": lambda s, h, x: h.relu().add_(gate(s, x)),
    "torch.sub(g, h)": lambda s, h, x: torch.sub(gate(s, x), h.relu()),
    "torch.rsub(h, other=g)": lambda s, h, x: torch.rsub(h.relu(), other=gate(s, x)),
    "1 - h": lambda s, h, x: 1 - h.relu(),
    "torch.mul(h, other=g)": lambda s, h, x: torch.mul(h, other=gate(s, x)),
    "torch.multiply(h, x2=g)": lambda s, h, x: torch.mul(h, x2=gate(s, x)),
    "h *= g": lambda s, h, x: h.__imul__(gate(s, x)),
    "torch.mul(h, g, out=)": lambda s, h, x: torch.mul(h, gate(s, x), out=torch.empty_like(h)),
    "torch.div(h, other=g)": lambda s, h, x: torch.div(h, other=gate(s, x).exp()),
    "torch.div, rounded": lambda s, h, x: torch.div(h, 0.1, rounding_mode="floor"),
    "h // 0.1": lambda s, h, x: h // 0.1,
    "2 / h": lambda s, h, x: 2 / (h.abs() + 1),
    "h.abs() ** (exponents)": lambda s, h, x: h.abs() ** torch.full((WIDTH,), 1.5).double(),
    "torch.pow(2, h)": lambda s, h, x: torch.pow(2, h),
    "torch.pow(self=2, exponent=h)": lambda s, h, x: torch.pow(self=2, exponent=h),
    "2 ** h": lambda s, h, x: 2**h,
    "torch.pow(input=h, exponent=2)": lambda s, h, x: torch.pow(input=h, exponent=2),
    "h.pow_(2)": lambda s, h, x: h.pow_(2),
    "torch.float_power(h, 2)": lambda s, h, x: torch.float_power(h, 2),
    "torch.matmul(input=h, other=W)": lambda s, h, x: torch.matmul(input=h.relu(), other=EYE),
    "torch.bmm(h, mat2=W)": lambda s, h, x: torch.bmm(
        h.relu(), mat2=EYE.expand(len(h), WIDTH, WIDTH)
    ),
    "torch.mm(h, mat2=W)": lambda s, h, x: torch.mm(h.relu().flatten(0, 1), mat2=EYE).view_as(h),
    "torch.addmm(mat1=h)": lambda s, h, x: torch.addmm(
        input=EYE[0], mat1=h.relu().flatten(0, 1), mat2=EYE
    ).view_as(h),
    "torch.addcmul(h, g, g)": lambda s, h, x: torch.addcmul(
        h, tensor1=gate(s, x), tensor2=h, value=0.5
    ),
    "torch.lerp(h, end=g)": lambda s, h, x: torch.lerp(h, end=gate(s, x).relu(), weight=0.3),
    "torch.einsum": lambda s, h, x: torch.einsum("btd,btd->btd", h, gate(s, x)),
    "functional.linear(input=h, weight=W)": lambda s, h, x: functional.linear(
        input=h.relu(), weight=EYE
    ),
    "torch.cat(axis=-1)": lambda s, h, x: torch.cat([h.relu(), h], axis=-1)[..., :WIDTH],
    "torch.cat(tensors=, dim=1)": lambda s, h, x: torch.cat(tensors=[h.relu(), h], dim=1)[
        :, : h.shape[1]
    ],
    "torch.cat, first axis": lambda s, h, x: torch.cat([h.relu(), h])[: len(h)],
    "torch.stack(dim=-1)": lambda s, h, x: torch.stack([h.relu(), h], dim=-1).sum(-1),
    "torch.softmax(h, axis=-1)": lambda s, h, x: torch.softmax(h, axis=-1),
    "functional.softmax(input=h, dim=-1)": lambda s, h, x: functional.softmax(input=h, dim=-1),
    "functional.log_softmax(h, -1)": lambda s, h, x: functional.log_softmax(h, -1),
    "torch.logsumexp(keepdims=True)": lambda s, h, x: h - torch.logsumexp(h, -1, keepdims=True),
    "F.glu": lambda s, h, x: functional.glu(input=torch.cat([h, h], -1), dim=-1),
    "F.layer_norm": lambda s, h, x: functional.layer_norm(h, normalized_shape=(WIDTH,), eps=1e-3),
    "torch.layer_norm": lambda s, h, x: torch.layer_norm(h, (WIDTH,)),
    "F.rms_norm": lambda s, h, x: functional.rms_norm(input=h, normalized_shape=(WIDTH,)),
    "F.group_norm": lambda s, h, x: functional.group_norm(h.flatten(0, 1), num_groups=2).view_as(h),
    "functional.normalize(p=2, axis -1)": lambda s, h, x: functional.normalize(h, p=2.0, dim=-1),
    "h.var(unbiased)": lambda s, h, x: h * h.var(-1, False, True),
    "torch.var(axis=, correction=)": lambda s, h, x: (
        h * torch.var(h, axis=-1, correction=0, keepdim=True)
    ),
    "h.std(dim=-1)": lambda s, h, x: h * h.std(dim=-1, keepdim=True),
    "torch.norm(p=1)": lambda s, h, x: h * torch.norm(h, p=1, dim=-1, keepdim=True),
    "torch.linalg.norm(x=h)": lambda s, h, x: h * torch.linalg.norm(h, dim=-1, keepdim=True),
    "torch.linalg.norm of matrices": lambda s, h, x: (
        h * torch.linalg.norm(h.unflatten(-1, (4, -1)), 2, (-2, -1)).unsqueeze(-1)
    ),
    "torch.max(h, other=g)": lambda s, h, x: torch.max(h, other=0.5 * gate(s, x)),
    "torch.maximum(h, g)": lambda s, h, x: torch.maximum(input=h, other=gate(s, x)),
    "h.max(axis=-1)": lambda s, h, x: h - h.max(axis=-1, keepdims=True).values,
    "torch.amax(dim=(-1,))": lambda s, h, x: h - torch.amax(input=h, dim=(-1,), keepdim=True),
    "h.clamp(max=g)": lambda s, h, x: h.clamp(max=gate(s, x)),
    "h.clamp_(-1, g)": lambda s, h, x: h.clamp_(torch.full_like(h, -1), gate(s, x)),
    "h.topk(k=9)": lambda s, h, x: h - h.topk(k=9, dim=-1).values.sum(-1, keepdim=True),
    "torch.sort(input=h)": lambda s, h, x: torch.sort(input=h, dim=-1, descending=True).values,
    "h.sort(stable=True)": lambda s, h, x: h.sort(stable=True).values,
    "h.kthvalue(3)": lambda s, h, x: h - h.kthvalue(3, keepdim=True).values,
    "h.where(h > 0, 0.1 h)": lambda s, h, x: h.where(h > 0, 0.1 * h),
    "h.where(condition=, other=)": lambda s, h, x: h.where(condition=h > 0, other=0.1 * h),
    "h.where(h > 0, 0.)": lambda s, h, x: h.where(h > 0, 0.0),
    "h.where(even columns, g)": lambda s, h, x: h.relu().where(EVEN, gate(s, x)),
    "torch.where(condition=, input=, other=)": lambda s, h, x: torch.where(
        condition=h > 0, input=h, other=torch.zeros_like(h)
    ),
    "torch.where(h > 0, 1., h)": lambda s, h, x: torch.where(h > 0, 1.0, h),
    "h.masked_fill(mask=, value=)": lambda s, h, x: h.masked_fill(mask=h < 0, value=0.2),
    "h.masked_fill_(h < 0, 0)": changed(lambda h: h.masked_fill_(h < 0, 0)),
    "z[z < 0] = 0": changed(lambda h: h.__setitem__(h < 0, 0.0)),
    "z[..., :9] = g": lambda s, h, x: (h.__setitem__((..., slice(9)), gate(s, x)[..., :9]), h)[1],
    "z[z < 0] *= 0.1": changed(lambda h: h.__setitem__(h < 0, h[h < 0] * 0.1)),
    "zeros.scatter(top)": lambda s, h, x: torch.zeros_like(h).scatter(
        -1, h.topk(4).indices, h.topk(4).values
    ),
    "torch.gather(input=)": lambda s, h, x: (
        h * torch.gather(input=h, dim=-1, index=gate(s, x).topk(1).indices)
    ),
    "torch.take_along_dim": lambda s, h, x: torch.take_along_dim(h, gate(s, x).argsort(-1), -1),
    "h.mul_(h)": changed(lambda h: h.mul_(h)),
    "a, b = h.chunk(2); a *= b": lambda s, h, x: torch.cat(
        [(parts := h.chunk(2, -1))[0].mul_(parts[1]), parts[1]], -1
    ),
    "h.unflatten; view changed": lambda s, h, x: (h.view(*h.shape[:2], 2, -1)[:, :, 0].relu_(), h)[
        1
    ],
    "silu kept, then changed": lambda s, h, x: functional.silu(h) * h.mul_(2),
    "h.data.relu()": lambda s, h, x: h * h.data.relu(),
    "h.detach()": lambda s, h, x: h * h.detach(),
    "no_grad within": without_gradient,
    "inference mode within": in_inference_mode,
    "autocast within": in_autocast,
    "half within": lambda s, h, x: functional.silu(h.half()).double(),
    "checkpoint": lambda s, h, x: checkpoint(functional.silu, h, use_reentrant=False),
    "reentrant checkpoint": lambda s, h, x: checkpoint(functional.silu, h, use_reentrant=True),
    "torch.jit.script": lambda s, h, x: torch.jit.script(quick_gelu)(h),
    "torch.vmap": lambda s, h, x: torch.vmap(functional.silu)(h),
    "time first": lambda s, h, x: functional.silu(h.transpose(0, 1)).transpose(0, 1),
    "time and columns first": lambda s, h, x: functional.silu(h.permute(2, 1, 0)).permute(2, 1, 0),
    "one scale for the batch": lambda s, h, x: (h / h.detach().abs().max() * 7).round(),
    "a number of the batch": lambda s, h, x: functional.silu(h) * float(h.detach().abs().max()),
    "a row of the batch": lambda s, h, x: h.relu() - h[:1],
    "mean over the batch": lambda s, h, x: h.relu() - h.mean(0, keepdim=True),
    "mean over everything": lambda s, h, x: h.relu() - h.mean(),
    "the batch turned": lambda s, h, x: h.relu() + h.flip(0),
    "another path alone": lambda s, h, x: functional.silu(h) if len(h) == 1 else functional.gelu(h),
    "a path by the numbers": lambda s, h, x: functional.silu(h) if h.sum() > 0 else h.relu(),
    "a tensor that requires a gradient": lambda s, h, x: functional.silu(h) * _FACTOR,
    "sort of rows": lambda s, h, x: h.relu().sort(0).values,
    "cumsum": lambda s, h, x: h.relu().cumsum(1) / 5,
    "cumprod": lambda s, h, x: h.relu().cumprod(1),
    "remainder": lambda s, h, x: h % 0.5,
    "nn.functional.dropout in place": lambda s, h, x: (
        functional.leaky_relu(functional.dropout(h, 0.1, False, inplace=True), 0.2, True) + h
    ),
}
_FACTOR = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)


CALLS = {
    **{form: call for name in sorted(OF_NUMBERS) for form, call in forms(name).items()},
    **OTHERS,
}


def own_metrics(model: OwnModel) -> list[float]:
    """Return the metric of the untouched module on each text alone."""
    with torch.no_grad():
        logits = [model(text[None]).logits[0, -1] for text in TEXTS]
    return [float(x[7] - x[5]) for x in logits]


def outcome(model: OwnModel) -> str:
    """Return how a flow reads a model: as it is, refused, other, raw, or that it does not run."""
    try:
        own = own_metrics(model)
    except Exception:
        return "not a call of torch"
    state = {name: x.clone() for name, x in model.state_dict().items()}
    try:
        view = ResidualModel(model, TOKENS)
        found = flow(view, TEXTS[0], "t7", minus="t5", against=TEXTS[1], labels=0).values
    except UnknownOperationError as error:
        return "refused" if " at " in str(error) else f"refused without a line: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    finally:
        for name, x in model.state_dict().items():
            assert torch.equal(x, state[name])
        assert all(x.grad is None for x in model.parameters())
        assert not any(x.requires_grad for x in model.buffers())
    same = all(abs(a - b) < 1e-6 * max(1, abs(b)) for a, b in zip(found, own, strict=True))
    return "as it is" if same else f"other: {found}, not {own}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS)
def test_each_call_is_the_models_own_or_refused_by_name_and_line(call):
    assert outcome(own_model(op=CALLS[call])) in ("as it is", "refused", "not a call of torch")


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])


def with_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to a key and a value of zeros in front of the text, too."""
    k, v = (functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
    return attend(q, k, v, attn_mask=causal(q, k))


def forget(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
    """Return biases of scores that follow from the queries."""
    kept = functional.logsigmoid(q[..., 0]).cumsum(-1)
    gates = kept[..., :, None] - kept[..., None, :]
    return gates.masked_fill(~causal(q, k), -torch.inf)


attend = functional.scaled_dot_product_attention
ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "more keys than queries": with_front,
    "a mask that is an activation": lambda q, k, v: attend(q, k, v, forget(q, k, v)),
    "that mask by products": lambda q, k, v: (
        (q @ k.mT / q.shape[-1] ** 0.5 + forget(q, k, v)).softmax(-1) @ v
    ),
    "a mask of one head": lambda q, k, v: attend(q, k, v, attn_mask=causal(q, k)[None]),
    "a query that sees nothing": lambda q, k, v: attend(
        q, k, v, attn_mask=causal(q, k).tril(-1)
    ).nan_to_num(),
    "shared keys and values": lambda q, k, v: attend(
        q, k[:, :1], v[:, :1], is_causal=True, scale=0.4, enable_gqa=True
    ),
    "one axis of texts and heads": lambda q, k, v: attend(
        *(x.flatten(0, 1) for x in (q, k, v)), is_causal=True
    ).unflatten(0, (-1, 2)),
    "keys of the first row alone": lambda q, k, v: attend(q, k[:1], v, is_causal=True),
    "dropout": lambda q, k, v: attend(q, k, v, None, 1e-30, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mix", ATTENTIONS)
def test_each_attention_is_the_models_own_or_refused_by_name_and_line(mix):
    assert outcome(own_model(mix=ATTENTIONS[mix])) in ("as it is", "refused")


def in_place(layer: Any, x: Tensor) -> Tensor:
    x += layer.self_attn(layer.norm1(x))
    x += layer.mlp(layer.norm2(x))
    return x


class WithoutGradient(OwnModel):
    """The model under no_grad."""

    @torch.no_grad()
    def forward(self, *args: Any, **others: Any) -> Any:
        """Return the logits."""
        return super().forward(*args, **others)


MODELS: dict[str, Callable[[], OwnModel]] = {
    "no_grad": lambda: own_model(WithoutGradient),
    "residuals in place": lambda: own_model(residual=in_place),
    "a changed stream": lambda: own_model(between=lambda layer, x, x0: layer(0.9 * x + 0.1 * x0)),
    "layers without a result": lambda: own_model(
        residual=in_place, between=lambda layer, x, _: (layer(x), x)[1]
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_run_without_a_gradient_are_read(name):
    assert outcome(MODELS[name]()) in ("as it is", "refused")


def test_patches_of_residuals_in_place_are_those_of_sums():
    same = lambda layer, x: in_place(layer, x.clone())  # noqa: E731
    effects = [
        patch(ResidualModel(own_model(residual=f), TOKENS), TEXTS[0], "t7", against=TEXTS[1])
        for f in (in_place, same)
    ]
    torch.testing.assert_close(effects[0].noising, effects[1].noising)
    assert float(effects[0].noising.abs().max()) > 1e-3


def test_nodes_of_a_model_that_changes_the_stream_are_not_measured():
    view = ResidualModel(MODELS["a changed stream"](), TOKENS)
    found = flow(view, TEXTS[0], "t7", minus="t5", against=TEXTS[1], ablate=20)
    assert found.nodes
    assert all(node.measured is None and not node.raises for node in found.nodes)


def test_a_model_that_writes_into_its_buffers_is_refused_and_stays():
    def cached(s: Any, h: Tensor, _: Tensor) -> Tensor:
        s.cache[: len(h), : h.shape[1]] = h
        out: Tensor = functional.silu(s.cache[: len(h), : h.shape[1]])
        return out

    model = own_model(op=cached)
    for layer in model.layers:
        layer.mlp.register_buffer("cache", torch.ones(2, 9, WIDTH).double())
    with pytest.raises(BilensError, match=r"writes into its buffer layers\.0\.mlp\.cache when it"):
        ResidualModel(model, TOKENS)
    assert all(bool((x == 1).all()) and not x.requires_grad for x in model.buffers())


@pytest.mark.parametrize("size", [2, 3, 7])
def test_tiny_vocabularies_of_unknown_families_open(size):
    config = CohereConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    view = ResidualModel(CohereForCausalLM(config).eval())
    assert view.places.modules is None
    assert not view.places.crosses
