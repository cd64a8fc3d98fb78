"""Texts in the tokens of a model: a corpus, a prompt, and how the model goes on with it."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from bilens.checks import checked, full_precision
from bilens.data import Corpus, clean, load_corpus, load_documents
from bilens.errors import BilensError
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.settings import Count, NotNegative, Seed

__all__ = ["corpus_for", "example_directions", "generate_text", "prompt_ids"]

COLD = 1e-6
"""Temperatures below count as 0: logits divided by them would leave the range of numbers."""

LONGEST = 256
"""Tokens of a text of models that read longer ones too: contexts are looked up in as many."""

EXAMPLES = (
    TokenDirection("swim", ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")),
    TokenDirection('"'),
    TokenDirection("girl"),
)
"""What Pearce et al. 2024 explain: figure 7, Table 7 and Table 1."""


@full_precision
def corpus_for(model: ResidualModel, data: str, data_dir: str | Path | None = None) -> Corpus:
    """Texts as the model has learned to read them: cleaned for bilens's own, or as they are.

    `data` and `data_dir` are those of `bilens.data.load_corpus`.

    Raises:
        DataError: there are no such texts.
        BilensError: the model came without a tokenizer.
    """
    tokenizer: Any = _tokenizer(model)
    if _cleans(model):
        return load_corpus(
            data,
            n_ctx=model.config.n_ctx,
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
            data_dir=data_dir,
        )
    return load_documents(data, tokenizer, n_ctx=min(LONGEST, longest(model)), data_dir=data_dir)


def longest(model: ResidualModel) -> int:
    """How many tokens the model reads at most, as its configuration says."""
    return int(getattr(model.config, "max_position_embeddings", 2**31 - 1))


def prompt_text(model: ResidualModel, prompt: str) -> str:
    """A prompt as the tokenizer is given it: cleaned for models that learned from clean texts."""
    return clean(prompt) if _cleans(model) else prompt


@full_precision
def prompt_ids(model: ResidualModel, prompt: str) -> Int[Tensor, " time"]:
    """A prompt in the model's tokens, behind the one that its texts begin with.

    Raises:
        BilensError: it is empty, too long, or all its words are unknown, or there is no tokenizer.
    """
    tokenizer: Any = _tokenizer(model)
    if _cleans(model):
        ids = tokenizer(prompt_text(model, prompt), add_special_tokens=False)["input_ids"]
        begin = model.config.bos_token_id
        ids = ids if begin is None else [begin, *ids]
    else:
        ids = tokenizer(prompt)["input_ids"]
    said = [i for i in ids if i not in tokenizer.all_special_ids]
    if not said:
        raise BilensError(
            f"prompt={prompt[:80]!r} holds no token that the model knows; expected some text"
        )
    if len(ids) > longest(model):
        raise BilensError(
            f"prompt has {len(ids)} tokens, expected up to {longest(model)}, the longest text that "
            "the model reads"
        )
    return torch.tensor(ids, device=model.device)


@checked
def generate_text(
    model: ResidualModel,
    prompt: str,
    *,
    tokens: Count = 120,
    temperature: NotNegative = 0.7,
    seed: Seed = 0,
) -> str:
    """Go on with a text until it ends or has so many tokens more.

    Temperature 0 takes the most likely token each time; 1 draws from what the model says. The seed
    leaves other random numbers of the process alone.

    Raises:
        BilensError: as in `prompt_ids`, or a number is out of range.
    """
    given = prompt_ids(model, prompt)[None]
    draws = temperature > COLD
    drawing = {"temperature": temperature, "top_k": 0} if draws else {}
    config = GenerationConfig(max_new_tokens=tokens, do_sample=draws, **drawing)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        written = model.model.generate(given, config, attention_mask=torch.ones_like(given))
    return str(_tokenizer(model).decode(written[0], skip_special_tokens=True)).removeprefix(" ")


@full_precision
def example_directions(model: ResidualModel, corpus: Corpus) -> list[TokenDirection]:
    """The papers' examples as far as the tokenizer knows them, or else the most frequent word."""
    known = corpus.tokenizer.get_vocab()
    found = [d for d in EXAMPLES if all(name in known for name in (d.token, *d.minus))]
    if found and _cleans(model):
        return found
    counts = torch.bincount(corpus.validation[:200]["input_ids"].flatten(), minlength=len(known))
    order = counts.argsort(descending=True).tolist()
    names = corpus.tokenizer.convert_ids_to_tokens(order)
    word = (name for name in names if name and name.strip("▁Ġ").isalpha() and len(name) > 3)
    return [TokenDirection(next(word, names[0]))]


def _cleans(model: ResidualModel) -> bool:
    """Whether the model was trained by bilens on cleaned texts, as its tokenizer tells."""
    return getattr(model.tokenizer, "bos_token", None) == "[BOS]"


def _tokenizer(model: ResidualModel) -> Any:
    if model.tokenizer is None:
        raise BilensError(
            "The model came without a tokenizer, which texts take: ResidualModel(model, tokenizer)"
        )
    return model.tokenizer
