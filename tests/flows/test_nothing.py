"""Runs that are alike, and models some of whose parts write nothing, have finite answers."""

import json
from dataclasses import replace
from math import isfinite

import pytest

from bilens.circuits import circuit, eap_ig, patch, task_directions
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.flows.reading import answer_question
from bilens.transformer import ResidualModel
from tests.families import TOKENS, tiny
from tests.flows.flows import QUESTIONS
from tests.nightly import nightly

SILENT = {
    "embeddings": ("embed_tokens", "wte."),
    "positions": ("wpe",),
    "heads": ("attn",),
    "MLPs": ("mlp",),
    "the first MLP": (".0.mlp",),
    "heads and MLPs": ("attn", "mlp"),
    "norms": ("norm", "ln_"),
    "unembedding": ("lm_head", "wte"),
    "everything": ("",),
}


def numbers(record):
    """Return all numbers of a record, which is written as JSON."""
    found = []
    json.loads(json.dumps(record, default=str), parse_constant=found.append)
    assert not found, found  # NaN and infinities have names of their own
    json.loads(json.dumps(record, default=str), parse_float=lambda x: found.append(float(x)))
    return found


def answers(view, question):
    """Yield the records of all readings of a question; those that refuse it say why."""
    others = [replace(question, text=f"{question.text} t{i}") for i in range(3, 6)]
    second = [replace(q, against=q.text) for q in others]
    if isinstance(question.against, str):
        second = [replace(q, against=f"{question.against} t{i}") for i, q in enumerate(others, 3)]
    asked = [question, *second]
    for read in (
        lambda: answer_question(view, question),
        lambda: answer_question(view, replace(question, against="")),
        lambda: patch(view, question.text, question.token, against=question.against),
        lambda: eap_ig(view, asked),
        lambda: circuit(view, asked[:1]),
        lambda: circuit(view, asked),
        lambda: task_directions(view, asked, k=2),
    ):
        try:
            reading = read()
        except BilensError:
            continue
        assert [section.title for section in reading.sections()]
        yield {"record": reading.record(), "facts": dict(reading.facts())}


@pytest.mark.parametrize(
    ("family", "silent"),
    nightly(
        [(family, kind) for family in ("llama", "gpt2", "gemma2") for kind in SILENT],
        [("gpt2", kind) for kind in ("embeddings", "heads", "MLPs", "everything")],
    ),
)
def test_parts_that_write_nothing_leave_finite_answers(family, silent):
    model = tiny(family)
    for name, weight in model.named_parameters():
        if any(part in name for part in SILENT[silent]):
            weight.data.zero_()
    records = list(answers(ResidualModel(model, TOKENS), QUESTIONS[0]))
    assert records
    assert all(isfinite(x) for record in records for x in numbers(record))


@pytest.mark.long
@pytest.mark.parametrize("against", ["text", "later", "ids", "embeddings", "texts"])
def test_runs_that_are_alike_have_finite_answers(view, against):
    text, position = "t1 t2 t3 t4", 2 if against == "later" else -1
    seconds = {"text": text, "later": "t1 t2 t3 t9", "ids": view.ids(text), "texts": (text, text)}
    second = seconds | {"embeddings": view.W_E[view.ids(text)]}
    question = Question(text, "t5", ("t6",), second[against], position=position)
    reading = answer_question(view, question)
    assert reading.flow.value == pytest.approx(0, abs=1e-12)
    assert "The change starts at no token." in reading.answer()
    assert any("Both texts are the same" in note for note in reading.notes)
    assert all(isfinite(x) for record in answers(view, question) for x in numbers(record))


def test_directions_without_any_flow_through_mlps_are_refused():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    with pytest.raises(BilensError, match="no flow .* passes through an MLP, expected"):
        task_directions(ResidualModel(model, TOKENS), QUESTIONS)
