"""LRP as one backward pass of the model itself, written without bilens.

Scales of norms, patterns and gate ratios are detached, and each factor of a product gets half of
the gradient (AttnLRP, arXiv 2402.05602; RelP, arXiv 2508.21258).
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.nn import functional

softmax = functional.softmax


@contextmanager
def frozen(model):
    """Let gradients of a Llama or a Gemma be those of LRP as long as this runs."""

    def norm(module, offset, x):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt().detach()
        return x * scale * (offset + module.weight)

    def mlp(module, x):
        up, gate = module.up_proj(x), module.gate_proj(x)
        acted = gate * (module.act_fn(gate) / gate).detach()
        return module.down_proj((up * acted.detach() + up.detach() * acted) / 2)

    with pytest.MonkeyPatch.context() as patch:
        for module in model.modules():
            name = type(module).__name__
            if name.endswith("RMSNorm"):
                offset = 1.0 if name.startswith("Gemma") else 0.0
                patch.setattr(module, "forward", lambda x, m=module, o=offset: norm(m, o, x))
            elif name.endswith("MLP"):
                patch.setattr(module, "forward", lambda x, m=module: mlp(m, x))
        detached = lambda *args, **kwargs: softmax(*args, **kwargs).detach()  # noqa: E731
        patch.setattr(functional, "softmax", detached)
        patch.setattr(model.config, "_attn_implementation", "eager")
        yield


def lrp(model, ids, token, minus):
    """Return relevance of each token, (time,), and of each head, (layers, heads)."""
    remaining = []

    def keep(x):
        remaining.append(x.requires_grad_() if x.is_leaf else x)
        x.retain_grad()

    with frozen(model), torch.enable_grad(), ExitStack() as hooks:
        # Written without bilens, the hooks are taken off before it reads the model again.
        embed = model.get_input_embeddings()
        hooks.enter_context(embed.register_forward_hook(lambda _, __, out: keep(out)))
        for layer in model.model.layers:
            out = layer.self_attn.o_proj
            hooks.enter_context(out.register_forward_pre_hook(lambda _, args: keep(args[0])))
        logits = model(ids[None], use_cache=False).logits[0, -1]
        (logits[token] - logits[minus]).backward()
    tokens, *heads = [(x * x.grad)[0].detach() for x in remaining]
    count = model.config.num_attention_heads
    return tokens.sum(-1), torch.stack([x.unflatten(-1, (count, -1)).sum((0, -1)) for x in heads])
