"""Browsers and servers are started once; the warnings of Gradio's own parts are not ours."""

import pytest

from bilens.convert import save_model
from bilens.data import Grammar
from bilens.explore import explorer
from bilens.explore.flows import FlowView
from bilens.files import write_json
from tests.explore.browser import served
from tests.models import digit_model, grammar_view, random_model


@pytest.fixture(scope="session")
def flows():
    return FlowView(grammar_view(n_layers=2), "once lily ate")


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explore") / "digits"
    digit_model().save_files(folder)
    write_json(folder / "training.json", {"data": "digits"})
    return folder


@pytest.fixture(scope="session")
def image_site(image_run):
    with served(explorer(image_run)) as address:
        yield address


@pytest.fixture(scope="session")
def language_run(tmp_path_factory):
    """Return a model with random weights, in the words of the grammar."""
    folder = tmp_path_factory.mktemp("explore") / "grammar"
    grammar = Grammar()
    model = random_model(vocab_size=len(grammar.vocabulary)).float()
    save_model(folder, model, grammar.tokenizer())
    write_json(folder / "training.json", {"data": "grammar"})
    return folder


@pytest.fixture(scope="session")
def language_site(language_run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
        app = explorer(language_run)
    with served(app) as address:
        yield address
