"""The docs leave no room of the package out."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import SOURCE

ROOT = Path(__file__).parents[1]


def test_every_room_has_its_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    rooms = {
        ".".join(p.parent.relative_to(SOURCE.parent).parts) for p in SOURCE.rglob("__init__.py")
    }
    # Figures are public by the names of bilens.pages, analyses by those of commands.
    private = {"bilens.analyses", "bilens.cli", "bilens.figures", "bilens.paper"}
    assert rooms - private <= set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))


def names_and_texts(tree):
    """Return the names in a module's code, and its docstrings."""
    docstrings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.alias(name=name):
                names.update(name.split("."))
            case ast.Constant(value=str(text)) if node not in docstrings:
                names.update(re.findall(r"\w+", text))
    return names, [str(text.value) for text in docstrings]


def test_every_name_in_a_docstring_exists():
    """Names in backticks, but for those of other packages."""
    others = {"benchmarks", "cfg", "experiments", "gguf", "huggingface_hub"}
    names, quoted = set(), []
    for path in sorted(SOURCE.rglob("*.py")):
        names.update(path.relative_to(SOURCE.parent).with_suffix("").parts)
        of_code, texts = names_and_texts(ast.parse(path.read_text(encoding="utf-8")))
        names |= of_code
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
    ("pages", "most"), [("README.md", 900), ("docs/results.md", 5_000), ("docs/**/*.md", 36_000)]
)
def test_the_docs_stay_short(pages, most):
    count = 0
    for page in ROOT.glob(pages):
        # In all docs together only what persons wrote counts, not what programs made.
        if pages == "docs/results.md" or page.name not in ("results.md", "sources.md"):
            text = re.sub(r"<!-- tables .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            count += len(text.split())
    assert 0 < count <= most


def test_the_search_works_in_pages_opened_as_files(tmp_path, browser):
    pictures = tmp_path / "docs" / "pictures"
    pictures.mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "pictures" / "iframe-worker.js", pictures)
    (tmp_path / "docs" / "index.md").write_text("# Home")
    (tmp_path / "docs" / "bonds.md").write_text("# Bonds\n\nA certificate of a cut.")
    config = tmp_path / "mkdocs.yml"
    nav = "nav: [index.md, bonds.md]"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\nsite_name: two pages\nhooks: []\n{nav}")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--config-file", str(config)]
    subprocess.run(command, check=True)
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
