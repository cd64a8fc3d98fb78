"""Sixteen bits behave as a float32 copy, and float32 passes where float64 does."""

import ast
import gc
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import bilens
from bilens.circuits import Cases, patch
from bilens.errors import BilensError
from bilens.flows import Question, adjoints, audit, flow
from bilens.flows.fitted import likely_answer
from bilens.transformer import Pass, ResidualModel, running
from bilens.transformer.families import FAMILIES
from bilens.transformer.mixing import AttentionCall
from tests.families import LIKE_LLAMA
from tests.models import TOKENS

pytestmark = pytest.mark.long

FIRST, SECOND = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([5, 11, 7, 8, 9])
NARROW = (torch.bfloat16, torch.float16)
SIZES = {**LIKE_LLAMA, "hidden_size": 32, "intermediate_size": 48}
KINDS = {
    "llama": ("Llama", SIZES),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 8}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, "num_experts": 8, "moe_intermediate_size": 16}),
    "opt": (
        "OPT",
        {
            "vocab_size": 30,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_attention_heads": 4,
        },
    ),
}


def made(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    kind, sizes = KINDS[name]
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    config.num_hidden_layers = 2
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    return model.to(dtype).eval()


def readings(model):
    """Return the numbers of a model's readings, each with the flow's checks."""
    view = ResidualModel(model, TOKENS)
    options = {"minus": "t12", "against": SECOND}
    through = flow(view, FIRST, "t11", **options, ablate=20)
    likely = flow(view, FIRST, "t11", target="log-probability", against=SECOND, labels=0)
    one = flow(view, FIRST, "t11", labels=0)
    return {
        "logits": view.logits(FIRST[None]),
        "flow": through.heads,
        "measured": torch.tensor([x.measured for x in through.nodes if x.measured is not None]),
        "log-probability": torch.tensor(likely.values),
        "one text": one.mlps,
        "patch": patch(view, FIRST, "t11", **options).noising,
        "pass": Pass.of(view, FIRST).stream,
    }


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", KINDS)
def test_sixteen_bits_are_a_copy_in_float32(name, dtype):
    model = made(name, dtype)
    narrow, wide = readings(model), readings(deepcopy(model).float())
    for reading, numbers in narrow.items():
        torch.testing.assert_close(numbers, wide[reading], rtol=1e-4, atol=1e-5, msg=reading)


def scaled_logits(view, monkeypatch):
    modules = replace(view.modules, logit_scale=1.005 * view.modules.logit_scale)
    view.modules, view.places = modules, replace(view.places, modules=modules)


def scaled_scores(view, monkeypatch):
    logs = AttentionCall.logs
    wrong = lambda call, heads: logs(call._replace(scale=1.02 * call.scale), heads)  # noqa: E731
    monkeypatch.setattr(AttentionCall, "logs", wrong)


def scaled_head(view, monkeypatch):
    """Scale the output of one head."""
    own, calls = adjoints._cut, count()
    factors = torch.ones(32)
    factors[:8] = 1.005

    def cut(x, *others):
        return own(x * factors if next(calls) == 0 else x, *others)

    monkeypatch.setattr(adjoints, "_cut", cut)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrong", [scaled_logits, scaled_scores, scaled_head])
def test_what_is_read_wrongly_is_refused_in_every_type(wrong, seed, dtype, monkeypatch):
    model = made("llama", dtype, seed)
    with torch.no_grad():
        # What the first head of the first layer moves.
        model.model.layers[0].self_attn.o_proj.weight[:, :8] *= 0.01
    view = ResidualModel(model, TOKENS)
    read = lambda: flow(view, FIRST, "t11", minus="t12", against=SECOND, labels=0)  # noqa: E731
    read()
    audit._compared.clear()
    wrong(view, monkeypatch)
    with pytest.raises(BilensError, match="own number|no rule for what this call|than alone"):
        read()


@pytest.mark.parametrize("target", ["logit", "log-probability", "probability"])
def test_what_passes_in_float64_passes_in_float32(target):
    vocab = 20_000
    model = made("llama", vocab_size=vocab, hidden_size=64)
    # All logits share a large number, as those of SmolLM2 do.
    shared = torch.randn(64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model.lm_head.weight.add_(30 * shared)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        view = ResidualModel(model.to(dtype))
        for _ in range(8):
            first, token = torch.randint(2, vocab, (2, 6), generator=generator)
            second = first.clone()
            second[2] = (second[2] + 7) % vocab
            flow(view, first, int(token[0]), against=second, target=target, labels=0)


class SwappedForCausalLM(transformers.LlamaForCausalLM):
    """A family that is described wrongly below: its gate is taken for the other factor."""


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_a_family_that_is_described_wrongly_is_refused_in_every_type(dtype, monkeypatch):
    swapped = replace(FAMILIES["LlamaForCausalLM"], gate="mlp.up_proj", up="mlp.gate_proj")
    monkeypatch.setitem(FAMILIES, "SwappedForCausalLM", swapped)
    model = SwappedForCausalLM(made("llama").config).to(dtype).eval()
    with pytest.raises(BilensError, match="has the parts of an MLP but computes something else"):
        ResidualModel(model, TOKENS)


OVERFLOWING = {
    "pass": lambda view: Pass.of(view, FIRST),
    "flow": lambda view: flow(view, FIRST, "t11", against=SECOND),
    "patch": lambda view: patch(view, FIRST, "t11", against=SECOND),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_what_overflows_is_named(name, dtype):
    """NaN differs from itself: a stream that overflows is not one that the model changes."""
    model = made("llama", dtype)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e30)
        model.model.layers[0].mlp.down_proj.weight.mul_(1e30)
    with pytest.raises(BilensError, match=r"NaN or infinite.* forward pass on this text overflows"):
        OVERFLOWING[name](ResidualModel(model, TOKENS))


class Widened(TorchDispatchMode):
    """Counts numbers that are widened, and notes the largest array."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype in NARROW:
            self.count += args[0].numel()
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.dtype not in NARROW:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


def test_no_wide_copy_of_a_weight_waits_for_the_backward_pass(monkeypatch):
    model = made("llama", torch.bfloat16)
    view = ResidualModel(model, TOKENS)
    shapes = {x.shape for x in model.model.layers.parameters() if x.dim() > 1}
    cases = Cases.of(view, [Question(FIRST, "t11", "t12", SECOND)])
    differentiate, given_back = torch.autograd.grad, []
    monkeypatch.setattr(running, "FREED", 0)
    monkeypatch.setattr(running, "return_freed", lambda: given_back.append(None))

    def looking(*args):
        assert [x for x in gc.get_objects() if is_wide(x, shapes)] == []
        before = len(given_back)
        slopes = differentiate(*args)
        # Forward and backward, each matrix of each layer at least.
        assert min(before, len(given_back) - before) >= 7 * len(model.model.layers)
        given_back.clear()
        return slopes

    monkeypatch.setattr(torch.autograd, "grad", looking)
    given_back.clear()
    assert cases.scores(cases.everything).any()


def is_wide(x, shapes):
    """Return whether a Python object is a copy in float32 of a matrix of one of some shapes."""
    return type(x) is torch.Tensor and x.dtype == torch.float32 and x.shape in shapes


def test_only_experts_that_run_are_widened_once_each_way():
    model = made("qwen3_moe", torch.bfloat16, num_experts=32, vocab_size=64)
    view, used = ResidualModel(model), set()
    first = torch.randint(64, (20,), generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[7] = (second[7] + 1) % 64
    for layer in model.model.layers:
        note = lambda _, args, layer=layer: used.update(  # noqa: E731
            (layer, int(x)) for x in args[1].flatten()
        )
        layer.mlp.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        for ids in (first, second):
            model(ids[None])
    for layer in model.model.layers:
        layer.mlp.experts._forward_pre_hooks.clear()
    experts = model.model.layers[0].mlp.experts
    each = sum(weight[0].numel() for weight in experts.parameters())
    rest = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    # A first flow compares its pass with the model's own, once.
    flow(view, first, view.direction(5), against=second, labels=0)
    with Widened() as widened:
        flow(view, first, view.direction(5), against=second, labels=0)
    assert widened.count <= 3 * (len(used) * each + rest)
    with Widened() as widened:
        Pass.of(view, first)
    assert widened.count <= len(used) * each + rest


def test_no_pass_widens_a_table():
    view = ResidualModel(
        made("llama", torch.bfloat16, vocab_size=200_000, tie_word_embeddings=True)
    )
    with Widened() as widened:
        Pass.of(view, torch.tensor([3, 4, 5]))
    assert widened.largest < 1e5
    table = view.modules.embed.module.weight
    with Widened() as widened:
        flow(view, FIRST, 11, against=SECOND, target="probability", labels=0)
    # The logits themselves, and blocks of the table.
    assert widened.largest < 2 * table.nbytes


def test_the_likeliest_token_is_that_of_the_logits_that_are_explained():
    for seed in range(6):
        view = ResidualModel(made("llama", torch.bfloat16, seed, vocab_size=30), TOKENS)
        likely = Pass.of(view, FIRST).next_logits[0].argmax()
        assert view.token(likely_answer(view, FIRST).token) == int(likely)


def test_numbers_are_moved_to_the_cpu_before_they_are_double():
    """Apple's GPUs have no float64."""
    rooms = [Path(bilens.__file__).parent / room for room in ("flows", "circuits", "transformer")]
    for path in (path for room in rooms for path in room.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr == "double":
                of = node.func.value
                moved = isinstance(of, ast.Call) and getattr(of.func, "attr", "") == "cpu"
                assert moved, f"{path.name}:{node.lineno}: write .cpu().double()"
