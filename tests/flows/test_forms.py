"""Models, texts, tokens and questions in each of the forms in which people have them."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from experiments.families import make

import bilens
from bilens.circuits import circuit, patch, task_directions
from bilens.errors import BilensError
from bilens.flows import Question, flow
from bilens.flows.sources import as_questions
from bilens.transformer import ResidualModel
from tests.families import tiny

TABLE = "text,token,minus,against\n" + "".join(
    f"t{i} t4 t5,t6,t7,t{i} t8 t5\n" for i in (3, 4, 5, 9, 11)
)


def forms(folder: Path):
    """Return the same questions in every form."""
    path = folder / "questions.csv"
    path.write_text(TABLE, encoding="utf-8")
    frame = pd.read_csv(path)
    frame["task"] = None
    rows = [{**row, "minus": [row["minus"]]} for row in frame.to_dict("records")]
    listed = as_questions(path)
    return {
        "a path": path,
        "the text of a path": str(path),
        "a table": frame,
        "dictionaries": rows,
        "a list": listed,
        "a generator": (question for question in listed),
        "tuple": tuple(listed),
    }


@pytest.mark.long
def test_questions_are_the_same_in_every_form(view, tmp_path):
    expected = [Question(f"t{i} t4 t5", "t6", "t7", f"t{i} t8 t5") for i in (3, 4, 5, 9, 11)]
    for name, given in forms(tmp_path).items():
        assert as_questions(given) == expected, name
    assert as_questions(expected[0]) == expected[:1]
    first = patch(view, "t3 t4 t5", "t6", minus="t7", against="t3 t8 t5")
    assert patch(view, expected[0]).noising.equal(first.noising)
    alone = [patch(view, question) for question in expected]
    for name, given in forms(tmp_path).items():
        mean = torch.stack([effects.noising for effects in alone]).mean(0)
        torch.testing.assert_close(patch(view, given).noising, mean)
        assert task_directions(view, forms(tmp_path)[name], 2).questions == (3, 2), name
    frame = forms(tmp_path)["a table"][:1]
    assert circuit(view, frame).facts() == circuit(view, expected[0]).facts()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "questions is a int, expected Questions, dictionaries or a table"),
        ({"text": "a"}, "questions is a dict, expected"),
        ([3], "questions holds a int, expected Questions, dictionaries"),
        (
            [{"text": "a", "answer": "b"}],
            "question 0 has 'answer', which is no field; expected text",
        ),
        ([{"token": "a"}], "question 0: text=None, expected"),
        ([{"text": "a"}], "question 0: token is empty"),
        (pd.DataFrame({"text": ["a"], "token": [0.5]}), "question 0: token=0.5, expected a token"),
        ("nowhere.csv", "nowhere.csv is no file and no task"),
    ],
)
def test_what_is_no_question_is_said(given, words):
    with pytest.raises(BilensError, match=words):
        as_questions(given)


def test_a_model_is_opened_in_every_form(view, tmp_path):
    texts = "t3 t4 t5", "t6"
    options = {"minus": "t7", "against": "t3 t8 t5", "labels": 0}
    expected = flow(view, *texts, **options).value
    bilens.convert.save_model(tmp_path / "model", view.model, view.tokenizer)
    for model in (tmp_path / "model", str(tmp_path / "model")):
        assert flow(model, *texts, **options).value == pytest.approx(expected, rel=1e-4)
        assert patch(model, *texts, minus="t7", against="t3 t8 t5").change == pytest.approx(
            expected, rel=1e-4
        )
    ids = [view.ids(x) for x in (texts[0], options["against"])]
    numbers = view.token("t6"), view.token("t7")
    bare = flow(view.model, ids[0], numbers[0], minus=numbers[1], against=ids[1], labels=0)
    assert bare.value == pytest.approx(expected)
    with pytest.raises(BilensError, match="model is a Linear, whose structure is not known"):
        flow(torch.nn.Linear(2, 2), ids[0], 3)
    with pytest.raises(BilensError, match="model=5, expected a model of bilens.load, a causal"):
        flow(5, ids[0], 3)


@pytest.mark.long
@pytest.mark.parametrize(
    "make_model", [lambda: tiny("llama"), lambda: make("opt")], ids=["llama", "opt"]
)
def test_ids_and_numbers_are_enough_without_a_tokenizer(make_model):
    view = ResidualModel(make_model())
    first, second = torch.tensor([3, 4, 5, 6]), torch.tensor([3, 8, 5, 6])
    logits = [view.logits(ids[None])[0, -1] for ids in (first, second)]
    change = float(logits[0][20] - logits[0][21] - logits[1][20] + logits[1][21])
    for text, against in ((first, second), ("3 4 5 6", "3 8 5 6")):
        for token, minus in ((20, 21), ("20", "[21]"), ([20], [21, 21])):
            given = {"minus": minus, "against": against}
            assert flow(view, text, token, **given).value == pytest.approx(change, abs=1e-5)
            assert patch(view, text, token, **given).change == pytest.approx(change, abs=1e-5)
            (found,) = circuit(view, [Question(text, token, minus, against)]).circuits
            assert found.mask.any()
    likely = flow(view, first)
    assert likely.question.token == f"[{int(logits[0].argmax())}]"
    assert likely.values[0] == pytest.approx(float(logits[0].topk(2).values.diff().abs()), abs=1e-5)
    many = flow(view, first, "20 21", against=second)
    assert many.question.target == "log-probability"
