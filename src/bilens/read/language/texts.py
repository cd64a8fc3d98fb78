"""Texts in the tokens of a model: its corpus, and texts that it generates."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from bilens.checks import checked, full_precision
from bilens.data import Corpus, load_corpus, load_documents
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.residual.trace import max_tokens, require_tokenizer, trained_on_clean_text
from bilens.settings import Count, NotNegative, Seed

COLD = 1e-6
"""Temperatures below count as 0: logits divided by them would leave the range of numbers."""

LONGEST = 256
"""Largest number of tokens of a text, in which contexts are looked up."""

EXAMPLES = (
    TokenDirection("swim", ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")),
    TokenDirection('"'),
    TokenDirection("girl"),
)
"""Outputs explained by Pearce et al. 2024 in figure 7, Table 7 and Table 1."""


@full_precision
def corpus_for(model: ResidualModel, data: str, data_dir: str | Path | None = None) -> Corpus:
    """Load texts in the form of the model's training: cleaned for bilens's own models.

    `data` and `data_dir` are those of `bilens.data.load_corpus`.

    Raises:
        DataError: the texts do not exist.
        BilensError: the model came without a tokenizer.
    """
    tokenizer: Any = require_tokenizer(model.tokenizer)
    if trained_on_clean_text(model.tokenizer):
        return load_corpus(
            data,
            n_ctx=model.model.config.n_ctx,
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
            data_dir=data_dir,
        )
    return load_documents(
        data, tokenizer, n_ctx=min(LONGEST, max_tokens(model.model.config)), data_dir=data_dir
    )


@checked
def generate_text(
    model: ResidualModel,
    prompt: str,
    *,
    tokens: Count = 120,
    temperature: NotNegative = 0.7,
    seed: Seed = 0,
) -> str:
    """Continue a text until the model ends it, by at most `tokens` tokens.

    Temperature 0 takes the most likely token each time, and 1 samples from the model's
    probabilities. The seed does not affect other random numbers of the process.

    Raises:
        BilensError: as in `ResidualModel.ids`, or a number is out of range.
    """
    given = model.ids(prompt)[None]
    draws = temperature > COLD
    drawing = {"temperature": temperature, "top_k": 0} if draws else {}
    config = GenerationConfig(max_new_tokens=tokens, do_sample=draws, **drawing)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        written = model.model.generate(given, config, attention_mask=torch.ones_like(given))
    return str(
        require_tokenizer(model.tokenizer).decode(written[0], skip_special_tokens=True)
    ).removeprefix(" ")


@full_precision
def example_directions(model: ResidualModel, corpus: Corpus) -> list[TokenDirection]:
    """Return the paper's examples with known tokens, or else the most frequent word."""
    known = corpus.tokenizer.get_vocab()
    examples = [d for d in EXAMPLES if all(name in known for name in (d.token, *d.minus))]
    if examples and trained_on_clean_text(model.tokenizer):
        return examples
    counts = torch.bincount(corpus.validation[:200]["input_ids"].flatten(), minlength=len(known))
    order = counts.argsort(descending=True).tolist()
    names = corpus.tokenizer.convert_ids_to_tokens(order)
    word = (name for name in names if name and name.strip("▁Ġ").isalpha() and len(name) > 3)
    return [TokenDirection(next(word, names[0]))]
