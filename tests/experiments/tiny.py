"""A Llama of two layers whose tokens are words, and what all outcomes of recipes have."""

import gzip
import json
from dataclasses import asdict
from importlib import import_module

import pytest
import torch
from experiments.results import check
from experiments.running import run_recipe
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens.convert import save_model
from bilens.errors import BilensError
from bilens.figures.sheet import figure_html


def save_llama(path, words, **settings):
    """Save the model of these words."""
    words = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, **settings))
    save_model(path, model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))


def write_gzip(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def check_rows(outcome):
    """See that there are rows for a file of results, whose texts have no numbers but settings."""
    rows = [asdict(row) for row in outcome.rows]
    check({"title": "", "settings": outcome.settings, "rows": rows})
    return outcome


def check_outcome(outcome, figures):
    """See that numbers are JSON, and that there are these figures and they can be written."""
    assert json.loads(json.dumps(outcome.numbers, allow_nan=False)) == outcome.numbers
    assert outcome.figures.keys() == figures
    for figure in check_rows(outcome).figures.values():
        assert "<svg" in figure_html(figure, "figure")
    return outcome


def check_one_seed(name, context, output):
    """See that a recipe runs from one seed, or refuses it if it compares models."""
    least = getattr(import_module(f"experiments.{name}"), "LEAST_SEEDS", 1)
    if least == 1:
        assert run_recipe(name, context, output)["recipe"] == name
        return
    with pytest.raises(BilensError, match=f"seeds=1, expected at least {least}: {name} compares"):
        run_recipe(name, context, output)
