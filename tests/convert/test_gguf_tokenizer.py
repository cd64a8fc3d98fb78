"""Texts of GGUF files are cut by the rules that the files name."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

import bilens
from bilens.convert.gguf_tokenizer import RULES
from bilens.errors import CheckpointError
from tests.convert.gguf_files import gguf_file
from tests.tokenizers_of_all_kinds import small_llama

pytest.importorskip("gguf")
MERGES = ["1 2", "12 3", "123 4", "Ġ 1", "a r", "ar e", "Ġ are"]
DIGITS = dict.fromkeys(("qwen2", "smollm", "starcoder", "deepseek-coder"), "1 2 3 4")
DIGITS |= dict.fromkeys(("llama-bpe", "default", None), "123 4") | {"gpt-2": "1234"}
BOS = "add_bos_token"
SAID = [{}, {BOS: False}, {BOS: True}, {BOS: True, "add_eos_token": True}]


def opened(tmp_path, pre, merges=MERGES, **settings):
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), *merged]
    file = gguf_file(small_llama(len(tokens)), "llama")
    file.set("tokenizer.ggml.tokens", tokens)
    file.set("tokenizer.ggml.token_type", [3, 3, 3] + [1] * (len(tokens) - 3))
    file.set("tokenizer.ggml.merges", merges)
    if pre is not None:
        file.set("tokenizer.ggml.pre", pre, "text")
    for name, value in settings.items():
        file.set(f"tokenizer.ggml.{name}", value, "bool")
    return bilens.load(file.write(tmp_path))


def names(view, text):
    return view.tokenizer.convert_ids_to_tokens(view.ids(text).tolist())


@pytest.mark.parametrize("pre", DIGITS)
def test_digits_are_cut_by_the_rules_of_the_file(tmp_path, pre):
    view = opened(tmp_path, pre, add_bos_token=False)
    assert names(view, "1234") == DIGITS[pre].split()
    assert names(view, "are") == ["are"]


@pytest.mark.parametrize("pre", RULES)
def test_every_rule_keeps_every_text(tmp_path, pre):
    view = opened(tmp_path, pre, add_bos_token=False)
    for text in ("are 12 345", "AB'S don't", "a\n\n b ", "é, 你好!", "x=1;\ty"):
        assert view.tokenizer.decode(view.ids(text), clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("pre", ["nonsense", "deepseek-llm", ""])
def test_rules_that_are_not_known_are_refused(tmp_path, pre):
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.pre='{pre}', .* expected one of"):
        opened(tmp_path, pre)


@pytest.mark.parametrize(("pre", "usually"), [("llama-bpe", True), ("gpt-2", False)])
@pytest.mark.parametrize("said", SAID)
def test_a_text_begins_as_the_file_says_or_its_rules(tmp_path, pre, usually, said):
    assert names(opened(tmp_path, pre, **said), "are") == ["<s>"] * said.get(BOS, usually) + ["are"]


def test_words_of_llama_3_are_tokens_without_merges(tmp_path):
    merges = [merge for merge in MERGES if merge != "ar e"]
    for pre, expected in (("llama-bpe", ["are"]), ("gpt-2", ["ar", "e"])):
        assert names(opened(tmp_path, pre, merges, add_bos_token=False), "are") == expected
