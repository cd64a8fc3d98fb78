"""Every feature works on what is shipped, and on models whose weights or texts are not known.

Each public function that takes a model and each command for language models, on the story model, a
random Llama with a tokenizer of bytes, and a model of an unknown family, with and without one. What
a model does not have is refused by name, and a call that an error recommends works on that model.
"""

import importlib
import inspect
import re
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

import bilens
from bilens import circuits, flows, language
from bilens.cli import COMMANDS, main
from bilens.convert import save_model
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.transformer import ResidualModel
from tests.families import of_order_one
from tests.nightly import nightly

pytestmark = pytest.mark.long

STORY, LLAMA, OPT, BARE_LLAMA, BARE_OPT = MODELS = (
    *("the story model", "a random Llama", "an unknown family"),
    *("a Llama without a tokenizer", "an unknown family without a tokenizer"),
)
DAILY = (STORY, OPT, BARE_OPT)
BARE, UNKNOWN = (BARE_LLAMA, BARE_OPT), (OPT, BARE_OPT)
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 300}
OF_OPT = {"hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 16}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes."""
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def opened(name: str) -> ResidualModel:
    if name == STORY:
        return bilens.load("story")
    tokenizer = None if name in BARE else byte_tokenizer()
    if name in UNKNOWN:
        opt = OPTForCausalLM(OPTConfig(**OF_OPT, vocab_size=300, pad_token_id=1))
        return ResidualModel(of_order_one(opt).float(), tokenizer)
    return ResidualModel(of_order_one(LlamaForCausalLM(LlamaConfig(**SIZES))).float(), tokenizer)


@cache
def texts_of(name: str) -> tuple[str, str, str, str]:
    """Return two texts of one length, a token and another, as a user of the model writes them."""
    if name == STORY:
        return "The girl was sad because", "The boy was sad because", "she", "he"
    return ("3 4 5 6", "3 8 5 6", "20", "21") if name in BARE else ("abcd", "axcd", "h", "s")


def questions(model: ResidualModel, name: str) -> list[Question]:
    """Return questions that the model answers."""
    text, against, *_ = texts_of(name)
    found = []
    for end in (
        ["20", "7", "9", "11", "12"] if name in BARE else ["", " and", " so", " then", " but"]
    ):
        first, second = ((f"{x} {end}" if name in BARE else x + end) for x in (text, against))
        logits = [model.logits(model.ids(x)[None])[0, -1] for x in (first, second)]
        # The tokens that are ahead of each other by most after one text and after the other.
        by = (logits[0] - logits[1]).topk(1).indices, (logits[1] - logits[0]).topk(1).indices
        found.append(Question(first, int(by[0]), int(by[1]), second, template="t"))
    return found


# What each function is called with: the model, its name, and a folder.
ASKED = {
    "flow": lambda m, name: flows.flow(m, *both(m, name)[0], **both(m, name)[1]),
    "read_lens": lambda m, name: flows.read_lens(m, texts_of(name)[0], layers=2),
    "answer_flows": lambda m, name: flows.answer_flows(m, texts_of(name)[0], generate=3),
    "diff": lambda m, name: flows.diff(m, *diff_of(name)),
    "adjoints_of": lambda m, name: flows.adjoints_of(m, questions(m, name)[:1]),
    "answered": lambda m, name: flows.answered(m, questions(m, name)),
    "measure": lambda m, name: flows.measure(m, through(m, name), through(m, name).nodes[:2]),
    "remove": lambda m, name: flows.remove(m, through(m, name), through(m, name).nodes[:2]),
    "flow_table": lambda m, name, folder: flows.flow_table(
        m, file_of(name, folder), folder / "rows"
    ),
    "read_pairs": lambda m, name, folder: flows.read_pairs(m, file_of(name, folder)),
    "circuit": lambda m, name: circuits.circuit(m, questions(m, name)[0]),
    "mask_of": lambda m, _: circuits.mask_of(m, {("heads", "end"): (0, 1)}),
    "eap_ig": lambda m, name: circuits.eap_ig(m, questions(m, name), steps=2),
    "patch": lambda m, name: circuits.patch(m, *both(m, name)[0], **both(m, name)[1]),
    "task_directions": lambda m, name: circuits.task_directions(m, questions(m, name), 2),
    "edit": lambda m, _: circuits.edit(m, 0, torch.eye(m.d_model)[:1].to(m.places.dtype)),
    "edit_heads": lambda m, _: circuits.edit_heads(m, 0, [1]),
    "edit_mlp_along": lambda m, _: circuits.edit_mlp_along(
        m, *torch.eye(m.d_model)[:2, None], layer=0
    ),
    "attention_pairs": lambda m, _: language.attention_pairs(m, [0], layer=0, k=2, **some(m)),
    "attention_scores": lambda m, _: language.attention_scores(m, layer=0, **some(m)),
    "bigram_matrix": lambda m, _: language.bigram_matrix(m, layer=0, part="direct", **some(m)),
    "bigrams": lambda m, _: language.bigrams(m, layer=0, part="direct", k=2, **some(m)),
    "composition_scores": lambda m, _: language.composition_scores(m),
    "following": lambda m, _: language.following(m, 20, layer=0, part="direct", **at(m)),
    "preceding": lambda m, _: language.preceding(m, 20, layer=0, part="direct", **at(m)),
    "generate_text": lambda m, name: language.generate_text(m, texts_of(name)[0], tokens=3),
    "head_outputs": lambda m, _: language.head_outputs(m, layer=0, **some(m)),
    "output_pairs": lambda m, _: language.output_pairs(m, [0], layer=0, k=2, **some(m)),
    "pair_trigrams": lambda m, _: language.pair_trigrams(m, k=2, among=[*range(3, 30)]),
    "read_attention": lambda m, _: language.read_attention(m, layer=0, k=2, **some(m)),
    "read_ngrams": lambda m, _: language.read_ngrams(m, 20, layer=0, k=2, **some(m)),
    "read_stream": lambda m, name: language.read_stream(m, m.ids(texts_of(name)[0]), 2, layer=1),
    "skip_trigrams": lambda m, _: language.skip_trigrams(m, 20, 0, layer=0, part="ov", **some(m)),
    "token_components": lambda m, _: language.token_components(
        m, language.head_outputs(m, layer=0, **some(m))[0], sides=("a", "b"), **some(m, False)
    ),
    "token_names": lambda m, _: language.token_names(m, [3, 5, 299]),
}
"""How each public function that takes a model is called; texts of a corpus are the commands'."""
OF_TEXTS = {"contribution", "corpus_for", "read_direction", "top_contexts", "diffs", "in_chat"}
"""Functions of a corpus, of a second model or of a tokenizer, which have tests of their own."""
COMMANDS_OF_TEXTS = {
    "flow": "--prompt TEXT --against OTHER --token TOKEN --minus MINUS --output {}/flow.html",
    "flow of one text": "--prompt TEXT --save-graph {}/graph.json",
    "flow of an answer": "--prompt TEXT --generate 3 --output {}/answer.html",
    "circuit": "--prompt TEXT --against OTHER --token TOKEN --minus MINUS --output {}/circuit.html",
    "lens": "--prompt TEXT --against OTHER --layers 2 --output {}/lens.html",
    "task-directions": "--questions FILE --k 2 --output {}/directions.html",
    "flow-table": "--questions FILE --output {}/table",
    "contexts": "--token TOKEN --layer 0 --data TEXTS",
    "ngrams": "--token TOKEN --layer 0 --among 20 --output {}/ngrams.html",
    "heads": "--layer 0 --among 20 --output {}/heads.html",
    "composition": "--output {}/composition.html",
    "summary": "--data TEXTS --n-tokens 40",
    "generate": "--prompt TEXT --tokens 3",
    "report": "--prompt TEXT --against OTHER --token TOKEN --output {}/report.html",
    "process": "--output {}/processed",
    "linearise": "--data TEXTS --output {}/linear --tokens 640 --length 64",
    "export": "--output {}/exported",
}
NOT_HERE = {
    "the structure of an unknown family": (UNKNOWN, "structure is not known|reads .* expected one"),
    "a tokenizer": (BARE, "came without a tokenizer|holds no tokenizer"),
    "a product": (MODELS, "is not a tensor|no product|has no gate|0 gated MLPs|not linear"),
    "a vector of positions": (MODELS, "has learned positions|position="),
    "shipped texts": ((STORY,), "name texts or images with --data"),
    "something to export or to fit": (MODELS, "anneal|already|names no activation"),
}
"""What a model may not have, the models without it, and the words of the refusal."""


def at(model: ResidualModel) -> dict[str, Any]:
    """Return a position where the model needs one."""
    asks = model.places.modules is not None and (
        model.modules.positions is not None or model.modules.hidden_positions is not None
    )
    return {"position": 3} if asks else {}


def some(model: ResidualModel, position: bool = True) -> dict[str, Any]:
    """Return a few tokens, among which pairs are looked up."""
    return {"among": [*range(3, 30)], **(at(model) if position else {})}


def both(model: ResidualModel, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a question as ids and numbers."""
    text, against, token, minus = texts_of(name)
    numbers = {"minus": model.token(minus), "against": model.ids(against)}
    return (model.ids(text), model.token(token)), numbers


def diff_of(name: str) -> tuple[ResidualModel, str, str, str]:
    """Return a tuned model, which is here the model itself, and a question in words."""
    text, _, token, minus = texts_of(name)
    return opened(name), text, token, minus


@cache
def through(model: ResidualModel, name: str) -> Any:
    (ids, token), options = both(model, name)
    return flows.flow(model, ids, token, labels=0, **options)


def patched(model: ResidualModel, name: str) -> None:
    text, against, *_ = texts_of(name)
    with circuits.patched(model, ["mlp.0@1"], against):
        model.logits(model.ids(text)[None])


ASKED["patched"] = patched


def file_of(name: str, folder: Path) -> Path:
    path = folder / "questions.tsv"
    rows = [[x.text, x.token, *x.minus, x.against] for x in questions(opened(name), name)]
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def reason(name: str, message: str) -> str | None:
    """Return what a model does not have, by the words of a refusal; None if it is not said."""
    for what, (without, words) in NOT_HERE.items():
        if name in without and re.search(words, message):
            return what
    return None


def test_the_table_has_every_function_of_a_model():
    names = set()
    for room in ("flows", "circuits", "language", "transformer"):
        module = importlib.import_module(f"bilens.{room}")
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isfunction(member):
                first = [*inspect.signature(member).parameters.values()][:1]
                if first and "ResidualModel" in str(first[0].annotation):
                    names.add(name)
    assert names == {*ASKED} | OF_TEXTS


@pytest.mark.parametrize(
    ("function", "name"), nightly(product(ASKED, MODELS), [*product(ASKED, DAILY)])
)
def test_every_function_reads_every_model_or_says_what_is_missing(function, name, tmp_path):
    call = ASKED[function]
    arguments = [opened(name), name, tmp_path][: len(inspect.signature(call).parameters)]
    message = ""
    try:
        call(*arguments)
    except BilensError as error:
        message = str(error)
    check_refusal(name, message)


def texted(name: str) -> None:
    view = ResidualModel(opened(name).model, byte_tokenizer())
    flows.flow(view, "abcd", "h", minus="s", against="axcd", labels=0)


WORKS = {
    "bilens.register_family()": lambda name: inspect.signature(bilens.register_family),
    "ResidualModel(model, tokenizer)": texted,
}
"""Calls that refusals recommend, as a person makes them on that model."""


def check_refusal(name: str, message: str) -> None:
    """Check that a refusal, if there is one, has a reason, and recommends what works here."""
    assert not message or reason(name, message), message
    # Calls, and no formulas or activations, which look like them.
    for call in re.findall(r"\b(?:ResidualModel|[a-z_]\w*\.[\w.]*)\([^()]*\)", message):
        WORKS[call](name)
    if "Flows, patches, circuits and task directions" in message:
        for function in ("flow", "patch", "circuit", "task_directions"):
            ASKED[function](opened(name), name)
    for command in re.findall(r"`bilens ([\w-]+)", message):
        assert command in COMMANDS


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        if name != STORY:
            save_model(folder / name, opened(name).model, opened(name).tokenizer)
    words = ["the", "girl", "boy", "dog", "was", "sad", "happy", "because", "so", "and", "ran"]
    stories = [" ".join(Random(i).choices(words, k=1200)) for i in range(60)]
    text = "".join(f"{story}\n<|endoftext|>\n" for story in stories)
    (folder / "texts.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("command", "name"),
    nightly(product(COMMANDS_OF_TEXTS, MODELS), [*product(COMMANDS_OF_TEXTS, DAILY)]),
)
def test_every_command_reads_every_model_or_says_what_is_missing(
    command, name, sources, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text, against, token, minus = texts_of(name)
    words = {"TEXT": text, "OTHER": against, "TOKEN": token, "MINUS": minus}
    words |= {"TEXTS": str(sources / "texts.txt")}
    options = COMMANDS_OF_TEXTS[command].format(tmp_path).split()
    if "FILE" in options:
        words["FILE"] = str(file_of(name, tmp_path))
    model = "story" if name == STORY else str(sources / name)
    arguments = [command.split()[0], model, *(words.get(word, word) for word in options)]
    try:
        main(arguments)
    except SystemExit:
        message = capsys.readouterr().err
        assert "Traceback" not in message
        check_refusal(name, " ".join(message.split()))
