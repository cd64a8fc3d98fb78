"""The docs and the README run, are complete, and short."""

import ast
import re
import shlex
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import bilens.cli
from bilens.convert import save_model
from bilens.data import Grammar
from bilens.files import write_json
from bilens.nn import ATTENTIONS, ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier
from bilens.transformer.families import FAMILIES
from tests.command_line import ROOT, python
from tests.families import LIKE_LLAMA, tiny
from tests.models import digits, random_model, random_text
from tests.source import SOURCE, nodes_of_files

# The tutorials run as notebooks, in test_tutorials.
TUTORIALS = ROOT / "docs" / "tutorials"
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent != TUTORIALS]
PAGES = [ROOT / "README.md", *DOCS]
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = {
    page: [(m[1], m[2], page.read_text()[: m.start()].count("\n")) for m in names]
    for page in PAGES
    if (names := list(FENCE.finditer(page.read_text())))
}
# Commands with one of these words in them need data, a browser or minutes: they are parsed alone.
HEAVY = re.compile(
    r"mnist|tinystories|my-stories|data grammar|--figures|--order|reproduce|bilens demo|pythia|"
    r"MODEL|BASE|annealed|bilinear|runs/linear|HuggingFaceTB|SmolLM2"
)
TRAINING = ClassifierTraining(epochs=3, batch_size=100, weight_decay=0.0, input_noise=0.2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small versions of the runs of the pages."""
    folder = tmp_path_factory.mktemp("docs") / "runs"
    for name, layers in (("digits", 1), ("two", 2)):
        config = ClassifierConfig(64, 10, 12, layers, image_shape=(8, 8))
        train_classifier(config, digits(), TRAINING, folder / name)
    shutil.copytree(folder / "digits", folder / "mnist")
    shutil.copytree(folder / "two", folder / "demo" / "deep")
    grammar = Grammar()
    words = len(grammar.vocabulary)
    for name, size in {"grammar": words, "grammar-bilinear": words, "tinystories": 2100}.items():
        attention = "bilinear" if "bilinear" in name else "softmax"
        model = random_model(vocab_size=size, attention=attention).float()
        save_model(folder / name, model, grammar.tokenizer())
        write_json(folder / name / "training.json", {"data": "grammar"})
    shutil.copytree(folder / "grammar", folder / "demo" / "grammar")
    # hidden_act linear is what an annealed model is exported with.
    changes = {"vocab_size": 60, "num_hidden_layers": 4, "hidden_act": "linear"}
    annealed = tiny("llama", dtype=torch.float32, settings={**LIKE_LLAMA, **changes})
    save_model(folder / "annealed-tiny", annealed, None)
    return folder


@pytest.fixture
def place(runs, tmp_path, monkeypatch):
    """Return a folder with those runs, a small grammar, and a hub with runs/digits."""
    shutil.copytree(runs, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bilens.data.corpus.GRAMMAR_SENTENCES", 400)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    fetched = "bilens.nn.checkpoint.hf_hub_download"
    monkeypatch.setattr(fetched, lambda _, name, **hub: str(tmp_path / "runs" / "digits" / name))
    monkeypatch.setattr("bilens.nn.checkpoint.Checkpointed.push_to_hub", lambda *_: None)
    monkeypatch.setattr("bilens.explore.app.Explorer.launch", lambda *_, **settings: None)
    with patch.dict(FAMILIES), patch.dict(ATTENTIONS):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_runs(page):
    state = {"__name__": page.stem, "x": digits().test_images, "ids": random_text()}
    for language, code, line in BLOCKS[page]:
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", code):
                Path(name[1]).write_text(code)
            exec(compile("\n" * (line + 1) + code, str(page), "exec"), state)
        else:
            for command in code.replace("\\\n", "").splitlines():
                follow(command)


def follow(command: str) -> None:
    """Run a bilens command, or only parse a heavy one; look a make target up."""
    words = shlex.split(command, comments=True)
    if "make" in words:
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif "torchrun" in words:
        bilens.cli.parse(words[words.index("bilens") + 1 :])
    elif "bilens" in words[:1]:
        bilens.cli.parse(words[1:])
        if not HEAVY.search(command):
            if "train" in words and "--output" in words and "--resume" not in words:
                # A reader trains what is there for the other pages already.
                shutil.rmtree(words[words.index("--output") + 1], ignore_errors=True)
            brief = ["--epochs", "2"] if words[1:3] == ["train", "images"] else []
            # The last of several values counts.
            bilens.cli.main([*words[1:], *brief])


def test_every_room_has_its_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    folders = [path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("__init__.py")]
    rooms = {".".join(folder.parts) for folder in folders}
    # Figures are public by the names of bilens.pages, analyses by those of commands.
    private = {"bilens.analyses", "bilens.cli", "bilens.figures"}
    assert rooms - private <= set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))


def names_and_texts(nodes):
    """Return the names in a module's code, and its docstrings."""
    expressions = [node.value for node in nodes if isinstance(node, ast.Expr)]
    docstrings = [value for value in expressions if isinstance(value, ast.Constant)]
    names = set()
    for node in nodes:
        named = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        names |= {part for name in named if isinstance(name, str) for part in name.split(".")}
        if isinstance(getattr(node, "value", None), str) and node not in docstrings:
            names |= {*re.findall(r"\w+", node.value)}
    return names, [str(text.value) for text in docstrings]


def test_every_name_in_a_docstring_exists():
    """Names in backticks, but for those of other packages."""
    others = {"benchmarks", "cfg", "experiments", "gguf", "huggingface_hub", "tqdm"}
    names, quoted = set(), []
    for path, nodes in nodes_of_files().items():
        of_code, texts = names_and_texts(nodes)
        names |= {*path.relative_to(SOURCE.parent).with_suffix("").parts} | of_code
        for text in texts:
            quoted += [(path.name, name) for name in re.findall("`([^`\n]+)`", text)]
    unknown = []
    for place, name in quoted:
        dotted = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", name)
        parts = dotted[1].split(".") if dotted else []
        if parts and parts[0] not in others and not names.issuperset(filter(None, parts)):
            unknown.append(f"{place}: {name}")
    assert len(quoted) > 500
    assert not unknown


@pytest.mark.parametrize(
    ("pages", "most"), [("README.md", 800), ("docs/results/*.md", 5_000), ("docs/**/*.md", 36_000)]
)
def test_the_docs_stay_short(pages, most):
    count = 0
    for page in ROOT.glob(pages):
        # In all docs together only what persons wrote counts, not what programs made.
        by_program = page.parent.name == "results" or page.name in ("results.md", "sources.md")
        if pages == "docs/results/*.md" or not by_program:
            text = re.sub(r"<!-- tables .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            count += len(text.split())
    assert 0 < count <= most


def test_the_search_works_in_pages_opened_as_files(tmp_path, browser):
    pictures = tmp_path / "docs" / "pictures"
    pictures.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "pictures" / "iframe-worker.js", pictures)
    (tmp_path / "docs" / "index.md").write_text("# Home")
    (tmp_path / "docs" / "bonds.md").write_text("# Bonds\n\nA certificate of a cut.")
    config, rest = tmp_path / "mkdocs.yml", "hooks: []\nnav: [index.md, bonds.md]"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nsite_name: two pages\n{rest}")
    python("-m", "mkdocs", "--quiet", "build", "--config-file", config)
    page = browser.new_page()
    page.goto((tmp_path / "site" / "index.html").as_uri())
    query = page.locator("input[name=query]")
    query.focus()
    # Letters that are typed before the index is there are lost.
    ready = page.locator(".md-search-result__meta", has_text="Type to start searching")
    ready.wait_for(state="attached")
    query.press_sequentially("certificate")
    assert page.locator(".md-search-result__item h1").first.inner_text() == "Bonds"
    page.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("figure width", "howto/report.md"),
        ("leading space", "howto/circuit.md"),
        ("questions file", "howto/circuit.md"),
        ("patch a head at a position and generate", "howto/patch.md"),
        ("eap-ig on your own questions", "ideas/attributions.md"),
    ],
)
def test_what_people_search_for_is_a_heading(words, page):
    """The search of the site ranks headings before all other text."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert any(words in heading.lower() for heading in headings)
