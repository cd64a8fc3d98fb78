"""Modules that are imported when they are first used."""

import sys

import pytest

from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a module that can be imported during the test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_a_module_is_imported_on_first_use(package):
    package("lazy_one", "value = 3")
    module = lazy_import("lazy_one")
    assert "lazy_one" not in sys.modules
    assert module.value == 3
    assert "lazy_one" in sys.modules
    with pytest.raises(AttributeError, match="lazy_one.*nothing"):
        module.nothing  # noqa: B018


def test_submodules_too():
    assert lazy_import("xml.dom.minidom").parseString("<a/>").documentElement.tagName == "a"


def test_a_missing_optional_module_says_how_to_install_it():
    module = lazy_import("not_there.inside", install="not-there>=2")
    with pytest.raises(BilensError, match=r"not_there is needed .* pip install 'not-there>=2'"):
        module.anything  # noqa: B018


def test_what_a_package_itself_misses_is_not_explained_away(package):
    package("lazy_broken", "import not_there_either")
    for install in ("", "lazy-broken"):
        with pytest.raises(ModuleNotFoundError, match="not_there_either"):
            lazy_import("lazy_broken", install=install).anything  # noqa: B018


def test_a_missing_dependency_is_an_ordinary_import_error():
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        lazy_import("not_there").anything  # noqa: B018
