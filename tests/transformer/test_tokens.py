"""Texts and tokens by name, with tokenizers of each kind, are those of the tokenizer itself."""

import ast
import copy
import re
from functools import partial

import pytest
import torch
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

import bilens
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.language.contexts import corpus_for, generate_text
from bilens.language.names import exact_names
from bilens.transformer import Pass, ResidualModel
from tests.models import TOKENS, random_model
from tests.source import nodes_of_files
from tests.tokenizers_of_all_kinds import KINDS, PREFIXING, small_llama, tokenizer_of, view_with

TEXTS = ("The keys to the cabinet are", "The key", "keys are", "then Tom gave it to Paris")
UNUSUAL = ("The keys.", "é", "The keys, and", "New York!")
TEMPLATES = {
    "a beginning": ("<s> $A", [1]),
    "an end": ("<s> $A </s>", [1]),
    "an end alone": ("$A </s>", []),
    "neither": ("$A", []),
    "two": ("</s> <s> $A", [2, 1]),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_its_tokens_after_one_beginning_and_without_an_end(kind, template):
    form, begin = TEMPLATES[template]
    tokenizer = tokenizer_of(kind, form)
    view = view_with(tokenizer)
    for text in (*TEXTS, *UNUSUAL):
        ids = view.ids(text).tolist()
        assert ids[: len(begin)] == begin
        assert not {1, 2} & set(ids[len(begin) :])
        written = tokenizer.decode(ids[len(begin) :], clean_up_tokenization_spaces=False)
        if kind == "WordPiece":  # which forgets the spaces before signs
            written = written.replace(" .", ".").replace(" ,", ",").replace(" !", "!")
        assert written.removeprefix(" ") == text
        marked = "".join(tokenizer.convert_ids_to_tokens(begin)) + text
        assert view.ids(marked).tolist() == tokenizer(marked, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_named_by_its_text_is_the_one_in_a_running_text(kind):
    view = view_with(tokenizer_of(kind))
    for word in ("are", "is", "cabinet", "New"):
        within = view.ids(f"The keys {word}").tolist()[-1]
        assert view.token(f" {word}") == within
        assert view.token(word) == view.ids(word).tolist()[-1]
        if kind in PREFIXING:
            assert view.token(word) == within
    for sign in (".", ","):
        assert view.token(sign) == view.ids(f"keys{sign}").tolist()[-1]
    if kind != "WordPiece":  # which has no token for it
        assert view.token("\n") == view.ids("keys\n").tolist()[-1]
        assert view.token("!") == view.ids("keys!").tolist()[-1]
    assert view.answer(" New York") == view.ids("The New York").tolist()[-2:]


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_a_name_by_which_it_is_found(kind):
    view = view_with(tokenizer_of(kind))
    numbers = [*range(view.vocab_size)]
    assert [view.token(name) for name in exact_names(view, numbers)] == numbers


def test_a_letter_is_not_the_byte_that_is_spelled_like_it():
    view = view_with(tokenizer_of("byte-level"))
    assert view.tokenizer.decode([view.token("é")]) == "é"
    byte = view.tokenizer.convert_tokens_to_ids("é")
    assert exact_names(view, [byte]) == [f"<0xE9>[{byte}]"]


def test_padding_of_a_vocabulary_has_names_too():
    tokenizer = tokenizer_of("SentencePiece")
    size = len(tokenizer)
    view = bilens.transformer.ResidualModel(small_llama(size + 5), tokenizer)
    assert exact_names(view, [size + 2]) == [f"[{size + 2}]"]
    assert view.token(f"[{size + 2}]") == size + 2
    with pytest.raises(BilensError, match=f"token={size + 5}, expected 0 to {size + 4}, "):
        view.token(f"[{size + 5}]")


@pytest.mark.parametrize("special", [True, False])
def test_a_token_that_only_the_tokenizer_has_is_refused_where_it_is_used(tmp_path, special):
    """Gemma 3 has one for images."""
    tokenizer = tokenizer_of("SentencePiece")
    size = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<image>", special=special, normalized=False)])
    small_llama(size).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    view = bilens.load(tmp_path)
    assert view.ids("The keys").tolist()[0] == 1
    for use in (view.token, view.ids, view.direction, lambda name: view.ids(f"The {name} keys")):
        with pytest.raises(BilensError, match=f"'<image>' is token {size} .* embeddings of {size}"):
            use("<image>")
    torch.testing.assert_close(view.direction("are"), view.direction(" are"))


SLOW = Regex("^(a+)+$")
STOPPING = {
    "pre_tokenizer": pre_tokenizers.Split(SLOW, "isolated"),
    "normalizer": normalizers.Replace(SLOW, "b"),
}


@pytest.mark.parametrize("part", STOPPING)
def test_a_tokenizer_that_stops_is_an_error_of_the_text_wherever_texts_are_read(part, tmp_path):
    """The library's panic is no Exception, so that it would end a command with a raw message."""
    view = view_with(tokenizer_of("byte-level"))
    setattr(view.tokenizer.backend_tokenizer, part, STOPPING[part])
    evil = "a" * 40 + "!"
    texts = (f"{'a' * length}!" for length in range(40, 140))
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    for use in (
        *(view.ids, view.token, view.answer, partial(generate_text, view)),
        lambda text: bilens.flow(view, text, "are"),
        lambda text: bilens.flow(view, "keys", "are", against=text),
        lambda _: [*corpus_for(view, str(tmp_path / "texts.txt")).train],
    ):
        with pytest.raises(BilensError, match="aaaa.* stops the tokenizer: .*retry-limit"):
            pytest.fail(f"{use}: {use(evil)}")


def test_tokens_that_cannot_be_written_out_are_an_error():
    tokenizer = view_with(tokenizer_of("byte-level")).tokenizer
    slow = decoders.Replace(SLOW, "b")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), slow])
    letter, sign = tokenizer.convert_tokens_to_ids(["a", "!"])
    with pytest.raises(BilensError, match="ids=.* stops the tokenizer: .*retry-limit"):
        write_out(tokenizer, [letter] * 40 + [sign])


def test_all_texts_are_tokenized_and_written_out_in_one_place():
    """There its errors are caught."""
    found = []
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.search(r"(^|\.)tokenizer$|tokenizer\.(batch_)?(de|en)code|\.tokenize$", name):
                found.append(f"{path.name}: {name}")
    allowed = ["texts.py: tokenizer", "texts.py: tokenizer.decode"]
    made = "corpus.py: language.tokenizer"  # of a language
    assert sorted(call for call in found if call != made) == allowed


def padded(ids, count, pad):
    return torch.cat([ids.new_full((count,), pad), ids])


PADDED = {
    "flow": lambda view, ids: bilens.flow(view, ids, 7, minus=8, labels=0).values,
    "pass": lambda view, ids: Pass.of(view, ids).stream,
    "mlp_inputs": lambda view, ids: view.mlp_inputs(0, ids[None]),
    "ids": lambda view, ids: view.ids(ids),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_before_a_text_is_refused(name):
    tokenizer = copy.deepcopy(TOKENS)
    tokenizer.pad_token = "t9"
    view = ResidualModel(random_model(), tokenizer)
    ids = torch.tensor([3, 4, 5, 6])
    PADDED[name](view, ids)
    for count in (1, 3):
        with pytest.raises(BilensError, match=f"begin with {count} tokens of padding"):
            PADDED[name](view, padded(ids, count, 9))
    # One token in front may begin the text, where it is the same.
    tokenizer.bos_token = "t9"
    PADDED[name](view, padded(ids, 1, 9))
    with pytest.raises(BilensError, match="begin with 2 tokens of padding"):
        PADDED[name](view, padded(ids, 2, 9))


def test_logits_after_padding_are_those_of_the_text_alone():
    tokenizer = copy.deepcopy(TOKENS)
    tokenizer.pad_token = "t9"
    view = ResidualModel(random_model(), tokenizer)
    first, second = torch.tensor([3, 4, 5, 6]), torch.tensor([5, 6])
    logits = view.logits(torch.stack([first, padded(second, 2, 9)]))
    torch.testing.assert_close(logits[0], view.logits(first[None])[0])
    torch.testing.assert_close(logits[1, 2:], view.logits(second[None])[0])
    assert not logits[1, :2].any()
