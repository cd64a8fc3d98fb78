"""Modules that are imported when they are first used."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module

import pytest

import bilens
from bilens.convert.gguf import gguf
from bilens.data import load_images
from bilens.errors import BilensError
from bilens.lazy_imports import datasets, lazy_import
from tests.command_line import python
from tests.models import random_model
from tests.source import SOURCE, all_nodes, nodes_of_files


@pytest.fixture
def package(tmp_path, monkeypatch):
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


def test_no_inner_module_is_reached_through_its_package():
    """`bilens.nn.language` is there only where somebody else has imported it, as in tests."""
    inner = {".".join(path.with_suffix("").parts[-3:]) for path in SOURCE.glob("*/*.py")}
    inner |= {".".join(path.parts[-4:-1]) for path in SOURCE.glob("*/*/__init__.py")}
    assert "bilens.nn.language" in inner
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in inner), path


def test_what_a_package_itself_misses_is_not_explained_away(package):
    package("lazy_broken", "import not_there_either")
    for name, install in (("lazy_broken", ""), ("lazy_broken", "x"), ("not_there_either", "")):
        with pytest.raises(ModuleNotFoundError, match="not_there_either"):
            lazy_import(name, install=install).anything  # noqa: B018


TRACKERS = ("tensorboard", "wandb", "trackio")
EXTRAS = ("sklearn", "gguf", "accelerate", "datasets", "pyarrow")
WITHOUT_EXTRAS = f"""
import sys
class Finder:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *others):
        return None if name.split(".")[0] in {EXTRAS} else self.finder.find_spec(name, *others)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Finder, sys.meta_path)
import transformers
import bilens
print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
import bilens.flows, bilens.language, bilens.pages, bilens.transformer, bilens.train
from bilens.convert.gguf import gguf
from bilens.data import load_images
from bilens.lazy_imports import accelerate, datasets
for use in (
    lambda: load_images("digits"), lambda: gguf.GGUFReader,
    lambda: accelerate.PartialState, lambda: datasets.load_dataset,
):
    try:
        use()
    except bilens.BilensError as error:
        print(error)
"""


def imports_at_once(node: ast.AST) -> Iterator[str]:
    """Yield the packages that a module imports when it is imported itself."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield str(node.module).partition(".")[0]
    typing_alone = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if typing_alone else ast.iter_child_nodes(node):
        yield from imports_at_once(child)


def test_no_module_needs_an_extra_and_its_absence_is_said(monkeypatch):
    for path, (tree, *_) in nodes_of_files().items():
        assert not {*EXTRAS} & {*imports_at_once(tree)}, path

    def without_extras(name):
        if name.startswith(EXTRAS):
            raise ModuleNotFoundError(name=name.partition(".")[0])
        return import_module(name)

    monkeypatch.setattr("bilens.lazy_imports.import_module", without_extras)
    with pytest.raises(BilensError, match=r"sklearn is needed .* pip install -e '\.\[train\]'"):
        load_images("digits")
    for module, extra in ((gguf, "gguf"), (datasets, "train")):
        with pytest.raises(BilensError, match=rf"'\.\[{extra}\]'"):
            module.anything  # noqa: B018


def advised() -> set[str]:
    """Return what the texts of the source say to install by pip, or hand to `lazy_import`."""
    advice: set[str] = set()
    for node in all_nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            advice |= {*re.findall(r"pip install +'?(-e [.\w\[\]]+|[\w\[\]-]+)", node.value)}
        if isinstance(node, ast.keyword) and node.arg == "install":
            advice.add(f"-e {ast.literal_eval(node.value)}")
    return advice - {"-e"}  # with the extra of `lazy_import` after it


def test_what_errors_say_to_install_is_there_to_be_installed():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    packages = {re.match(r"[\w-]+", line)[0] for line in listed} - {project["name"]}
    works = {"-e .", "sentencepiece", *(f"-e .[{extra}]" for extra in extras), *packages, *TRACKERS}
    assert advised() <= works
    assert {"-e .[train]", "-e .[gguf]", "gguf"} <= advised()


def test_what_imported_transformers_first_opens_models_of_bilens_too(monkeypatch):
    # A notebook that another test ran in this process would silence a warning of tqdm's, too.
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    names = []
    monkeypatch.setattr(importlib, "import_module", names.append)
    importlib.reload(bilens)
    assert names == ["bilens.nn.language"]


@pytest.mark.slow
def test_every_room_is_imported_without_extras_and_their_absence_is_said(tmp_path):
    """In a process that imported transformers first, which opens models of bilens too."""
    random_model().float().save_pretrained(tmp_path)
    opened, *messages = python("-c", WITHOUT_EXTRAS, tmp_path, cwd=tmp_path).stdout.splitlines()
    assert opened == "LanguageModel"
    extras = [line.split(".[")[1].split("]")[0] for line in messages]
    assert extras == ["train", "gguf", "train", "train"]
