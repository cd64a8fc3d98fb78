"""Browsers and servers are started once."""

import pytest

from bilens.convert import save_model
from bilens.explore import explorer
from bilens.explore.model_pages import ModelPages
from bilens.files import write_json
from tests.explore.browser import served, visiting
from tests.models import digit_model, grammar_view, small_corpus


@pytest.fixture
def visit(browser):
    with visiting(browser) as page:
        yield page


@pytest.fixture(scope="session")
def site():
    return ModelPages(grammar_view(n_layers=2), small_corpus(), (), {})


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
    folder, view = tmp_path_factory.mktemp("explore") / "grammar", grammar_view()
    save_model(folder, view.model.float(), view.tokenizer)
    write_json(folder / "training.json", {"data": "grammar"})
    return folder


@pytest.fixture(scope="session")
def language_site(language_run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        app = explorer(language_run)
    with served(app) as address:
        yield address
