"""Results show themselves: in a line, as an escaped table, as a figure."""

import json
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
import pytest
import torch

from bilens.analysis import Reading
from bilens.errors import BilensError
from bilens.figures.sheet import figure_html, svg_of
from bilens.flows import flow
from bilens.images import read_bonds, read_classifier, read_deep
from bilens.language import TokenDirection, read_ngrams
from bilens.language.outputs import read_language
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.sections import Percent, Table, fact_text, plain, signed
from bilens.tensor import BilinearTensor, QuadraticForm, Spectrum, bonds, decompile
from bilens.transformer.parts import Part
from tests.models import digits, grammar_view, random_text, small_corpus


def test_a_record_is_json_where_numbers_are_missing():
    frame = pd.DataFrame({"loss": [0.5, float("nan")], "name": ["a", None]})
    rows = [{"loss": 0.5, "name": "a"}, {"loss": None, "name": None}]
    found = {"rows": frame, "peak": torch.tensor([float("inf"), 1.0]), "best": float("-inf")}
    record = plain(found | {"scale": torch.tensor(2.0)})
    assert record == {"rows": rows, "peak": [None, 1.0], "best": None, "scale": 2.0}


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        *((-0.001, ".2f", "0.00"), (0.001, ".2f", "0.00"), (-0.005001, ".2f", "-0.01")),
        *((-0.0, ".3g", "0"), (0.0, "#.3g", "0.00"), (-0.001, ".0%", "0%")),
        *((1e-9, ".3g", "+1e-09"), (10.0, ".0f", "+10"), (float("-inf"), ".2f", "-inf")),
    ],
)
def test_zero_has_no_sign(value, digits, text):
    assert signed(value, digits) == text


def classifier(n_layers: int) -> ImageClassifier:
    names = tuple("abcdefghij")
    config = ClassifierConfig(64, 10, 12, n_layers, image_shape=(8, 8), class_names=names)
    return ImageClassifier(config).requires_grad_(False)


@pytest.fixture(scope="module")
def results(view):
    tensor, deep = classifier(1).tensor(), classifier(2)
    direction, words = TokenDirection("t3", ("t7",)), [TokenDirection("lily", ("tom",))]
    of_words = read_language(grammar_view(n_ctx=8), small_corpus(), words, layer=0)
    return {
        "spectrum": tensor.interaction(output="a").eigh(),
        "spectra": tensor.interaction(output=range(10)).eigh(k=3),
        "svd": tensor.svd(),
        "tensor": tensor,
        "bonds": bonds(deep.layer_tensors(), torch.eye(10), embedding=deep.embedding()),
        "images": digits(),
        "flow": flow(view, random_text(), direction),
        "ngrams": read_ngrams(view, direction.token, minus=direction.minus, layer=0, k=5),
        "form": tensor.interaction(output="a"),
        "forms": tensor.interaction(output=range(3)),
        "leaves": decompile(deep.tensors(), torch.eye(10), k=12),
        "heads": view.ov(0),
        "read": read_classifier(classifier(1), digits()),
        "deep": read_deep(deep, digits(), k=12),
        "few": read_bonds(deep, digits()),
        "language": of_words,
        "direction": of_words.directions[0],
        "attention": of_words.attention,
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spectrum", "Spectrum(eigenpairs 64, inputs 64, top eigenvalue "),
        ("spectra", "Spectrum(forms 10, eigenpairs 3, inputs 64, mean top eigenvalue "),
        ("svd", "TensorSVD(components 10, outputs 10, inputs 64, top singular value "),
        ("tensor", "BilinearTensor(outputs 10, inputs 64, hidden units 12, float32)"),
        ("bonds", "Bonds(directions 12 + 12, norm "),
        ("images", "ImageData(digits, "),
        ("flow", "Flow("),
        ("ngrams", "NGramReading(token t3 minus t7, layer 0, "),
        ("form", "QuadraticForm(inputs 64, hidden units 12, float32)"),
        ("forms", "QuadraticForm(forms 3, inputs 64, hidden units 12, float32)"),
        ("leaves", "Paths(paths 12, layers 2, inputs 64, top effective eigenvalue "),
        ("heads", "FactoredMatrix(matrices 4, rows 16, columns 16, rank at most 4, float64)"),
        ("read", "ClassifierReading(data digits, test accuracy "),
        ("deep", "DeepReading(data digits, test accuracy "),
        ("few", "BondReading(data digits, test accuracy "),
        ("language", "LanguageReading(layer 0, outputs lily minus tom)"),
        ("direction", "DirectionReading(token lily minus tom, layer 0, eigenpairs 16, inputs 16, "),
        ("attention", "AttentionReading(layer 0, heads 4)"),
    ],
)
def test_a_result_shows_itself(results, name, text):
    result = results[name]
    assert repr(result).startswith(text)
    assert "\n" not in repr(result)
    frame, page = result.frame(), result._repr_mimebundle_()["text/html"]
    assert len(frame)
    assert not frame[result.axes["y"]].isna().any()
    assert ("<img" in page) == result.is_picture
    if not result.is_picture:
        assert page.count("<tr>") == 1 + min(10, len(frame))
        assert ("of " + f"{len(frame):,} rows</p>" in page) == (len(frame) > 10)
    assert b"<text" in svg_of(result.plot())


def test_everything_is_derived_from_facts_and_columns():
    class Scores(Reading):
        axes: ClassVar[dict[str, str]] = {"x": "head", "y": "score"}

        def facts(self):
            return [("heads", 2), ("accuracy", Percent(0.5)), ("model", "<b>")]

        def columns(self):
            return {"head": ['" <s>"', "0.1"], "score": [12.345, -0.5], "n": [1000, 2]}

    scores = Scores()
    assert repr(scores) == "Scores(heads 2, accuracy 50.00%, model <b>)"
    rows = [{"head": '" <s>"', "score": 12.345, "n": 1000}, {"head": "0.1", "score": -0.5, "n": 2}]
    record = {"heads": 2, "accuracy": 0.5, "model": "<b>", "Scores": rows}
    assert json.loads(json.dumps(scores.record())) == record
    ((table, picture),) = (section.parts for section in scores.sections())
    assert table.header == ["head", "score", "n"]
    assert table.rows == [('" <s>"', "12.3", "1,000"), ("0.1", "-0.5", "2")]
    assert table.is_word == [True, False, False]
    assert picture.name == "plot"
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ['" <s>"', "0.1"]
    assert [bar.get_width() for bar in axes.patches] == [12.345, -0.5]
    assert "<b>" not in scores._repr_mimebundle_()["text/html"].replace("&lt;b&gt;", "")
    assert Reading().record() == {}
    assert Reading().sections()[0].parts == []


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        *(([9.654, 0.001], ["9.65", "0.00"]), ([1e-9, 2e-9], ["1.00e-09", "2.00e-09"])),
        *(([0.0, -0.0], ["0", "0"]), ([12345.6, 1.0], ["12346", "1"])),
        ([float("nan"), 0.25], ["", "0.250"]),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(numbers, text):
    assert [cell for (cell,) in Table(pd.DataFrame({"x": numbers})).rows] == text


def test_tables_say_what_the_results_say(results):
    outcome, frame = results["flow"], results["spectra"].frame()
    assert frame["eigenvalue"][3:6].tolist() == results["spectra"].values[1].tolist()
    assert frame["form"].tolist() == [form for form in range(10) for _ in range(3)]
    assert results["svd"].frame()["share"].sum() == pytest.approx(1, abs=1e-4)
    costs = results["bonds"].frame().query("bond == 1 and direction == 4")["error"]
    assert costs.item() == pytest.approx(results["bonds"].certificate((12, 3)), rel=1e-6)
    strongest = max(outcome.nodes, key=lambda node: abs(node.flow))
    assert sum(bool(node.raises) for node in outcome.nodes) == 20
    first = outcome.frame().iloc[0]
    assert (first["node"], first["flow"]) == (
        strongest.name(outcome.tokens, outcome.second),
        strongest.flow,
    )
    forms, heads = results["forms"], results["heads"]
    assert forms.frame()["eigenvalue"].tolist() == pytest.approx(forms.eigh().values.flatten())
    frame = heads.frame().query("matrix == 2")
    assert frame["value"].tolist() == pytest.approx(heads[2].svd().values.tolist())
    assert results["read"].frame()["form"].unique().tolist() == list(digits().class_names)
    assert set(results["language"].frame()["output"]) == {"lily minus tom"}


def test_what_is_not_finite_or_zero_is_shown_too():
    zero, single = torch.zeros(2), torch.eye(2)
    assert "effective rank 0" in repr(Spectrum(zero, single, zero))
    assert Spectrum(zero, single, zero).frame()["share"].tolist() == [0, 0]
    assert repr(Spectrum(zero / 0, single, zero)) == "Spectrum(eigenpairs 2, inputs 2)"


def test_names_are_escaped():
    evil = "<script>alert(1)</script>"
    data = replace(digits(), name=evil, class_names=(evil, *"123456789"))
    page = data._repr_mimebundle_()["text/html"]
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "<script>" not in figure_html(data.plot(), "a")


def test_large_tensors_are_not_decomposed_to_be_shown():
    few, many = torch.ones(1, 3), torch.ones(1, 1025)
    for result, is_shown in (
        (BilinearTensor(few, few, many.mT), False),
        (BilinearTensor(many, many, few.mT), True),
        (QuadraticForm(many, many, torch.ones(1)), False),
    ):
        assert ("<table" in result._repr_mimebundle_()["text/html"]) == is_shown


def test_outputs_have_names(results):
    tensor = results["tensor"]
    for output, minus in (("c", "d"), (2, 3)):
        weights = tensor.interaction(output=output, minus=minus).weights
        torch.testing.assert_close(weights, tensor.out[2] - tensor.out[3])
    several = tensor.interaction(output=["a", 1], minus=["c", "d"]).weights
    torch.testing.assert_close(several, tensor.out[:2] - tensor.out[2:4].mean(0))
    assert tensor.change_basis(inputs=torch.eye(64)).names == tuple("abcdefghij")
    assert tensor.change_basis(outputs=torch.eye(10)).names == ()
    with pytest.raises(BilensError, match=r"minus='z', expected 0 to 9, .* or one of a, b, c"):
        tensor.interaction(output="a", minus="z")
    with pytest.raises(BilensError, match="minus goes with output"):
        tensor.interaction(torch.ones(10), minus="a")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(("heads", 1, "heads 1"), ("pixels", "28x28", "pixels 28x28"), ("", "float32", "float32")),
        *(("loss", 4.0, "loss 4"), ("texts", 1200, "texts 1,200")),
        ("accuracy", Percent(1), "accuracy 100.00%"),
    ],
)
def test_a_fact_is_a_name_and_its_value(name, value, text):
    assert fact_text(name, value) == text


@dataclass(frozen=True)
class Address:
    part: Part
    weights: torch.Tensor
    model: object = field(default=None, repr=False)


def test_a_record_is_the_fields_of_a_dataclass_by_their_names():
    addresses = {0: (Address(Part("mlp", 1, position=3), torch.eye(2)),)}
    expected = {"part": "mlp.1@3", "weights": [[1, 0], [0, 1]]}
    assert plain(addresses) == {"0": [expected]}
