"""Modules that are imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bilens
from bilens.errors import BilensError
from bilens.lazy_imports import lazy_import
from bilens.nn.language import LanguageConfig, LanguageModel


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


def test_no_inner_module_is_reached_through_its_package():
    """`bilens.read.language` is there only where somebody else has imported it, as in tests."""
    source = Path(bilens.__file__).parent
    inner = {".".join(path.with_suffix("").parts[-3:]) for path in source.glob("*/*.py")}
    inner |= {".".join(path.parts[-4:-1]) for path in source.glob("*/*/__init__.py")}
    assert "bilens.read.language" in inner
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in inner), path


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


WITHOUT_EXTRAS = """
import sys

HIDDEN = ("sklearn", "gradio", "gguf", "accelerate", "datasets", "pyarrow")

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *others):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, *others)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Finder, sys.meta_path)
import transformers
import bilens
print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
import bilens.read.flow, bilens.read.language, bilens.report, bilens.residual, bilens.train
from bilens.convert.gguf import gguf
from bilens.data import load_images
from bilens.lazy_imports import accelerate, datasets
for use in (
    lambda: load_images("digits"), lambda: bilens.explore.explorer, lambda: gguf.GGUFReader,
    lambda: accelerate.PartialState, lambda: datasets.load_dataset,
):
    try:
        use()
    except bilens.BilensError as error:
        print(error)
"""


def test_every_room_is_imported_without_extras_and_their_absence_is_said(tmp_path):
    """In a process that imported transformers first, which opens models of bilens too."""
    config = LanguageConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2)
    LanguageModel(config).save_pretrained(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    opened, *messages = ran.stdout.splitlines()
    assert opened == "LanguageModel"
    extras = [line.split("bilens[")[1].rstrip("]'") for line in messages]
    assert extras == ["train", "explore", "gguf", "train", "train"]
