"""A small causal model of a user, into whose MLP or attention an operation is put."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCAB, WIDTH, HEADS = 23, 16, 2
TEXTS = torch.tensor([[3, 1, 4, 1, 5, 9], [3, 2, 4, 1, 7, 9]])
Part = Callable[..., Tensor]


class OwnConfig(PretrainedConfig):
    """The configuration of the model, of which transformers wants one."""

    model_type = "own"

    def __init__(self, **others: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_attention_heads = VOCAB, WIDTH, HEADS
        super().__init__(**others)


class Attention(nn.Module):
    """Causal attention that mixes values by `mix`."""

    def __init__(self, mix: Part | None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.mix = mix or _causal

    def forward(self, x: Tensor) -> Tensor:
        """Return what heads move."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in maps)
        out: Tensor = self.o_proj(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return out


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """An MLP whose hidden units pass an operation."""

    def __init__(self, op: Part | None) -> None:
        super().__init__()
        self.up_proj, self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.op = op or (lambda _, h, __: functional.silu(h))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the stream."""
        out: Tensor = self.down_proj(self.op(self, self.up_proj(x), x))
        return out


class Block(nn.Module):
    """A layer, which adds both to the stream, or does with them what `residual` says."""

    def __init__(self, op: Part | None, mix: Part | None, residual: Part | None) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.residual = Attention(mix), MLP(op), residual
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the layer."""
        if self.residual is not None:
            return self.residual(self, x)
        x = x + self.self_attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class OwnModel(PreTrainedModel):
    """Two layers; `between` calls each with the stream and the first stream."""

    config_class = OwnConfig

    def __init__(
        self,
        config: OwnConfig,
        op: Part | None = None,
        mix: Part | None = None,
        residual: Part | None = None,
        between: Part | None = None,
    ) -> None:
        super().__init__(config)
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([Block(op, mix, residual) for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.between = between or (lambda layer, x, _: layer(x))
        self.post_init()
        torch.manual_seed(1)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(torch.randn_like(weight) * (0.5 if weight.dim() > 1 else 0.3))
                if "norm" in name and name.endswith("weight"):
                    weight.add_(1)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """Return the unembedding."""
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        """Return the logits."""
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x = self.between(layer, x, first)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(x)))


def own_model(kind: type[OwnModel] = OwnModel, **parts: Part) -> OwnModel:
    """Return a model with random weights, in float64."""
    return kind(OwnConfig(), **parts).eval().double()
