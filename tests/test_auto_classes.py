"""transformers opens bilens's language models and writes with them."""

import pytest
import torch
from experiments.llama2c import llama2c_tokenizer
from transformers import pipeline

from bilens.data import Grammar
from bilens.data.texts import train_tokenizer
from tests.experiments.test_llama2c import ALL_PIECES, write_tokenizer
from tests.models import random_model


def words(tmp_path):
    return train_tokenizer(["the dog barks, the cat sits."] * 9, 60)


def grammar(tmp_path):
    return Grammar().tokenizer()


def llama2c(tmp_path):
    write_tokenizer(tmp_path / "tok.bin")
    return llama2c_tokenizer(tmp_path / "tok.bin", len(ALL_PIECES))


@pytest.mark.parametrize(
    ("make", "prompt", "new"),
    [
        (words, "the dog", " barks"),
        (words, "the dog", "s bark."),
        (grammar, "tom sang", " oh oh"),
        (llama2c, "the ear", " there"),
        (llama2c, "the ear", "t he"),
    ],
)
def test_a_pipeline_parts_the_prompt_from_what_follows_as_the_tokenizer_does(
    make, prompt, new, tmp_path
):
    tokenizer = make(tmp_path)
    n_given, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + new)["input_ids"]
    model = random_model(vocab_size=len(tokenizer), n_ctx=64)
    model.generate = lambda input_ids, **_: torch.tensor([ids])
    assert tokenizer(prompt)["input_ids"] == ids[:n_given]
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert write(prompt)[0]["generated_text"] == prompt + new
