"""Let a model go on with a text."""

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, set_seed

from bilens.data import clean
from bilens.nn.language import LanguageModel

__all__ = ["write_on"]


def write_on(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int = 120,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Go on with a text until it ends or has so many tokens more.

    Args:
        model: what writes.
        tokenizer: its tokens.
        prompt: how the text begins, cleaned as the model's corpus was.
        tokens: at most how many to add.
        temperature: 0 takes the most likely token each time; 1 draws from what the model says.
        seed: of the drawing.
    """
    set_seed(seed)
    ids = tokenizer(clean(prompt), add_special_tokens=False)["input_ids"]
    start = [model.config.bos_token_id] if model.config.bos_token_id is not None else []
    given = torch.tensor([[*start, *ids]], device=model.device)
    drawing = {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
    config = GenerationConfig(max_new_tokens=tokens, do_sample=temperature > 0, **drawing)
    written = model.generate(given, config, attention_mask=torch.ones_like(given))  # type: ignore[misc]
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
