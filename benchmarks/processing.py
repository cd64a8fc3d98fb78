"""Changes by weight processing, by family, step and dtype; and its memory."""

from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.clock import machine
from benchmarks.subprocess_memory import peak_above
from bilens.convert import process
from bilens.convert.processing import STEPS
from bilens.errors import BilensError

FAMILIES = (
    *("GPT2", "GPTNeoX", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3"),
    *("Granite", "Olmo2", "Helium", "Glm", "Cohere2"),
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 160}
LLAMA_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


def main() -> None:
    """Print a table of changes, and the peak of memory."""
    transformers.logging.set_verbosity_error()
    print(machine())
    print("largest change of a log-probability on random tokens, random weights, gains and biases")
    print("| family | step | " + " | ".join(str(dtype)[6:] for dtype in DTYPES) + " |")
    print("|---|---|" + "---|" * len(DTYPES))
    for family in FAMILIES:
        for step in (*STEPS, None):
            steps: Any = step and [step]
            changes = " | ".join(_change(_random(family, dtype), steps) for dtype in DTYPES)
            print(f"| {family} | {step or 'process'} | {changes} |")
    _memory()


def _change(model: PreTrainedModel, steps: Any) -> str:
    try:
        _, report = process(model, steps)
    except BilensError:
        return "refused"
    return f"{report.change:.1e}"


def _random(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Weights of order one over the root of the width, gains and biases of order a half."""
    grouped = GROUPED | ({"head_dim": 8} if family.startswith("Gemma") else {})
    sizes = SIZES | (grouped if family not in ("GPT2", "GPTNeoX") else {})
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + suffix)(getattr(transformers, name)(**sizes))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
        values = scale * torch.randn(parameter.shape, generator=generator).double()
        parameter.data = values.to(dtype)
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def _memory() -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**LLAMA_1B))  # type: ignore[arg-type]
    model = empty.to_empty(device="cpu").eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    plain = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    above, (_, report) = peak_above(lambda: process(model, in_place=True))
    peak = plain + 2**20 * above
    print(
        f"\nLlama of {plain / 4 / 1e9:.2f}e9 parameters in float32, in place: {plain / 1e9:.2f} GB"
    )
    print(
        f"peak {peak / 1e9:.2f} GB, {peak / plain:.2f} times the model; change {report.change:.1e}"
    )


if __name__ == "__main__":
    main()
