"""Options and controls of every reading come from its function's signature."""

import pytest

from bilens.analyses import REQUIRED, direction_of, options_of, run_analysis
from bilens.cli import main
from bilens.errors import BilensError
from bilens.explore import explorer
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.reading import Reading
from bilens.registry import BUILT_IN, Analysis, analysis, module_of
from bilens.report.page import report
from bilens.residual import ResidualModel
from tests.language import random_model, small_corpus, toy_tokenizer
from tests.models import digits


@pytest.mark.parametrize("name", BUILT_IN)
def test_readings_of_bilens_are_registered_where_the_table_says(name):
    entry = analysis(name)
    assert entry.read.__module__ == module_of(name)
    assert issubclass(entry.hints["return"], Reading)
    assert entry.about
    assert all(option.help for option in options_of(entry)), name


def test_options_are_parameters_with_their_types_and_defaults():
    options = {option.name: option for option in options_of(analysis("flow"))}
    assert options["prompt"].default is REQUIRED
    assert options["token"].default is REQUIRED
    assert options["minus"].default == ""
    assert options["through_patterns"].type is bool
    assert options["shown"].default == 200
    assert {"data", "data_dir"} <= {option.name for option in options_of(analysis("bonds"))}


def test_plain_settings_become_arguments():
    model = ResidualModel(random_model(n_layers=2), toy_tokenizer())
    settings = {"token": "t3", "minus": "t4,t5", "layer": 1, "k": 3, "among": 10, "unknown": 1}
    reading = run_analysis(analysis("ngrams"), model, settings)
    assert str(reading.direction) == "t3 minus t4, t5"
    assert (reading.layer, len(reading.preceding)) == (1, 3)
    tokens = {f"t{number}" for number in range(10)}
    assert set(reading.heads[0]["virtual"]) <= tokens
    assert direction_of("a", ("b", "")).minus == ("b",)


def test_texts_and_images_that_are_loaded_are_taken():
    config = ClassifierConfig(64, 10, 12, 1, image_shape=(8, 8))
    classifier = ImageClassifier(config).requires_grad_(False)
    data = digits()
    reading = run_analysis(
        analysis("eigenvectors"), classifier, {"order": "activation"}, inputs=[data]
    )
    assert reading.order == "activation"
    assert reading.data.name == data.name
    corpus = small_corpus()
    model = random_model(vocab_size=len(corpus.tokenizer), n_ctx=8, d_model=16)
    view = ResidualModel(model, corpus.tokenizer)
    settings = {"token": "lily", "k": 2}
    reading = run_analysis(analysis("contexts"), view, settings, inputs=[corpus])
    assert len(reading.contexts[0]) == 2


def test_a_model_of_another_kind_is_named():
    model = ResidualModel(random_model(), toy_tokenizer())
    with pytest.raises(BilensError, match="runs/a holds ResidualModel, and `bilens bonds` reads"):
        run_analysis(analysis("bonds"), model, {}, source="runs/a")
    with pytest.raises(BilensError, match="ngrams needs token: "):
        run_analysis(analysis("ngrams"), model, {})


def test_an_unknown_type_of_model_reads_as_its_name():
    def read(model: list) -> Reading:
        return Reading()

    with pytest.raises(BilensError, match=r"`bilens lists` reads <class 'list'>"):
        run_analysis(Analysis("lists", read), {}, {})


@pytest.mark.parametrize(("data", "message"), [(None, "does not say what"), ("no.txt", "'no.txt'")])
def test_texts_that_do_not_exist_are_refused_before_the_model_is_opened(
    tmp_path, capsys, data, message
):
    file, page = tmp_path / "model.gguf", tmp_path / "page.html"
    with pytest.raises(BilensError, match=message):
        explorer(file, data=data)
    with pytest.raises(BilensError, match=message):
        report(file, page, data=data)
    named = [] if data is None else ["--data", data]
    commands = [["report"], ["contexts", "--token", "a"]]
    for command, *options in commands[: 1 + len(named)]:
        with pytest.raises(SystemExit):
            main([command, str(file), *options, *named])
        assert message in capsys.readouterr().err
