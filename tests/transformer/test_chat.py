"""In a chat each text is in the tokenizer's own template, for everything that takes a text."""

import json

import pytest
import torch

import bilens
from bilens.circuits import circuit, patch
from bilens.cli import main
from bilens.convert import save_model
from bilens.flows import Question, flow, read_lens
from bilens.language.contexts import generate_text
from bilens.transformer import ResidualModel, in_chat
from tests.families import tiny
from tests.models import TOKENS, toy_tokenizer
from tests.refusals import refused
from tests.tokenizers_of_all_kinds import KINDS, tokenizer_of, view_with

TURNS = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}\n{% endfor %}"
TURNS += "{% if add_generation_prompt %}then{% endif %}"
TEMPLATES = {"a beginning": "{{ bos_token }}" + TURNS, "none": TURNS}
# Of the toy tokenizer, whose texts are words: "t9" begins what a user says, "t8" the answer.
OF_WORDS = "{% for turn in messages %}t9 {{ turn['content'] }} {% endfor %}"
OF_WORDS += "{% if add_generation_prompt %}t8{% endif %}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", ["<s> $A", "$A </s>"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_in_the_template_after_one_beginning(kind, form, template):
    tokenizer = tokenizer_of(kind, form)
    tokenizer.chat_template = TEMPLATES[template]
    message = [{"role": "user", "content": "The keys to the cabinet"}]
    own = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    begins = template == "a beginning" or form == "<s> $A"
    expected = [1] * begins + [number for number in own if number != 1]
    view = view_with(tokenizer)
    assert in_chat(view).ids(message[0]["content"]).tolist() == expected
    assert view.ids("The keys").equal(in_chat(view).ids(view.ids("The keys")))


def words() -> ResidualModel:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = OF_WORDS
    return ResidualModel(tiny("llama"), tokenizer)


def pages(view, first, second):
    """Return what is read from a text, and from two, as text."""
    question = Question(first, "t5", "t6", second)
    tuned = ResidualModel(tiny("llama", 5), view.tokenizer)
    tuned.chat = view.chat
    readings = {
        "flow": flow(view, first, "t5", minus="t6", against=second),
        "lens": read_lens(view, first, second),
        "patch": patch(view, first, "t5", minus="t6", against=second),
        "circuit": circuit(view, [question], level="parts"),
        "diff": bilens.diff(view, tuned, first, "t5", "t6", against=second),
    }
    shown = {name: str(reading.frame()) for name, reading in readings.items()}
    return shown | {"generate": generate_text(view, first, tokens=4, temperature=0)}


def test_whatever_takes_texts_reads_the_same_as_of_the_whole_text():
    view = words()
    in_full = pages(view, "t9 t3 t4 t5 t8", "t9 t3 t7 t5 t8")
    assert pages(in_chat(view), "t3 t4 t5", "t3 t7 t5") == in_full
    assert pages(view, "t3 t4 t5", "t3 t7 t5") != in_full


def test_replaced_words_are_those_of_the_text_itself():
    view = words()
    one = flow(in_chat(view), "t3 t4 t5", "t5", replace={"t4": "t7"}, labels=0)
    other = flow(view, "t9 t3 t4 t5 t8", "t5", against="t9 t3 t7 t5 t8", labels=0)
    assert one.value == other.value


def test_a_command_shows_the_tokens_that_it_read(tmp_path, capsys):
    save_model(tmp_path / "model", words().model, words().tokenizer)
    asked = ["--prompt", "t3 t4 t5", "--token", "t5", "--against", "t3 t7 t5", "--chat"]
    main(["flow", str(tmp_path / "model"), *asked, "--output", str(tmp_path / "page.html")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the first text is read as 't9 t3 t4 t5 t8'." in shown
    page = (tmp_path / "page.html").read_text()
    assert "is read as" in page
    assert "--chat" in page
    assert json.loads((tmp_path / "page.json").read_text())["page"]["tokens"][0] == "t9"
    # Of two models often only the tuned one has a template.
    save_model(tmp_path / "base", tiny("llama", 5), TOKENS)
    main(["diff", *(str(tmp_path / name) for name in ("base", "model")), *asked, "--json"])
    assert "t8" in capsys.readouterr().out


def refusing() -> ResidualModel:
    view = words()
    view.tokenizer.chat_template = "{{ raise_exception('only the system speaks') }}"
    return in_chat(view)


REFUSED = {
    "tokenizer has no chat template.*set tokenizer.chat_template": lambda: in_chat(
        ResidualModel(tiny("llama"), TOKENS)
    ).ids("t3"),
    "template refuses text='t3': only the system speaks": lambda: refusing().ids("t3"),
    "came without a tokenizer": lambda: in_chat(ResidualModel(tiny("llama"))),
    "against: chat: the tokenizer's chat template": lambda: flow(
        refusing(), torch.tensor([3, 4]), 5, against="t4 t5"
    ),
}
test_what_no_chat_is = refused(REFUSED)
