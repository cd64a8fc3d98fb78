"""Additions of the site to Markdown: equations and outputs of tutorials; and checks.

No page loads anything from other hosts, and the reference of a room has every public name.
"""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import jupytext
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from nbformat import NotebookNode
from nbformat.v4 import new_output

__all__ = [
    "index_text",
    "mathml",
    "notebook_of",
    "on_page_markdown",
    "on_post_build",
    "on_post_page",
]

SOURCE = Path(__file__).parents[1] / "src"
REMOTE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
CELL = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
PICTURES = "pictures/tutorials"
DRAWN = re.compile(rf"^!\[.*\]\(\.\./{PICTURES}/.*\)\n*", re.MULTILINE)
DISPLAY = re.compile(r"^\$\$\n(.*?)^\$\$$", re.MULTILINE | re.DOTALL)
ROOM = re.compile(r"^::: (\S+)$", re.MULTILINE)


COLAB = "https://colab.research.google.com/github/{}/blob/gh-pages/main/tutorials/{}.ipynb"
"""Address that opens a notebook of the site, which .github/workflows/docs.yml publishes."""

INSTALL = {
    True: '%pip install --quiet "bilens[all] @ git+https://github.com/{}"',
    False: "# In a clone, once: pip install -e '.[all]'",
}
"""First cell of a notebook, by whether GitHub builds the site: bilens is in no package index."""


def mathml(source: str, *_: Any, **__: Any) -> str:
    """Return an equation of a fence called math as MathML, which browsers draw without a script."""
    return f'<div class="math">{convert(source, display="block")}</div>'


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put equations of tutorials, between $$ in notebooks, into fences, and outputs below cells.

    Below the title are links to the notebook and, if GitHub builds the site, to Colab.

    Raises:
        PluginError: a tutorial has other cells than when it was run for its outputs.
    """
    if not page.file.src_uri.startswith("tutorials/"):
        return markdown
    outputs = json.loads(Path(page.file.abs_src_path).with_suffix(".json").read_text("utf-8"))
    if len(outputs) != len(CELL.findall(markdown)):
        raise PluginError(f"{page.file.src_uri} has changed: run `python -m docs.draw_tutorials`")
    below = iter(outputs)

    def with_output(cell: re.Match[str]) -> str:
        text = next(below)
        return f"{cell[0]}\n\n```{{.text .output}}\n{text}\n```" if text else cell[0]

    name = Path(page.file.src_uri).stem
    links = [f'<a href="{name}.ipynb" download>Notebook</a>']
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        links.append(f'<a href="{COLAB.format(repository, name)}">Open in Colab</a>')
    title, body = markdown.split("\n", 1)
    text = f"{title}\n\n{' · '.join(links)}\n{body}"
    return CELL.sub(with_output, DISPLAY.sub(r"```math\n\1```", text))


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the notebooks of the tutorials, and llms.txt."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.glob("tutorials/*.md"):
        jupytext.write(notebook_of(page), site / "tutorials" / f"{page.stem}.ipynb")
    text = index_text(config.nav, docs, config.site_description)
    (site / "llms.txt").write_text(text, encoding="utf-8")


def notebook_of(page: Path) -> NotebookNode:
    """Return a tutorial as a notebook with its texts and figures as outputs.

    Its first cell installs bilens, or says how.
    """
    notebook = jupytext.read(page)
    outputs = json.loads(page.with_suffix(".json").read_text("utf-8"))
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    for cell, text in zip(cells, outputs, strict=True):
        if text:
            cell.outputs.append(new_output("stream", text=text))  # type: ignore[no-untyped-call]
        figure = page.parents[1] / PICTURES / f"{page.stem}-{cell.source.splitlines()[-1]}.svg"
        if figure.exists():
            data = {"image/svg+xml": figure.read_text("utf-8")}
            cell.outputs.append(new_output("display_data", data))  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = DRAWN.sub("", cell.source)
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    install = INSTALL[bool(repository)].format(repository)
    notebook.cells[1:1] = jupytext.reads(f"```python\n{install}\n```", "md").cells
    return notebook


def index_text(nav: list[Any], docs: Path, about: str) -> str:
    """Return the pages of the site as Markdown for language models, by sections of the menu."""
    lines = ["# bilens", "", f"> {about}"]

    def add(entries: list[Any]) -> None:
        for entry in entries:
            # An entry is a page, or a name with a page or with the entries of a section.
            [(name, target)] = entry.items() if isinstance(entry, dict) else [("", entry)]
            if isinstance(target, list):
                lines.extend(["", f"## {name}", ""])
                add(target)
                continue
            title = re.search(r"^# (.+)$", (docs / target).read_text("utf-8"), re.MULTILINE)
            shown = name or (title[1] if title else target)
            lines.append(f"- [{shown}]({Path(target).with_suffix('.html').as_posix()})")

    pages = [entry for entry in nav if not _is_section(entry)]
    add([{"Pages": pages}, *filter(_is_section, nav)])
    return "\n".join(lines) + "\n"


def _is_section(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(next(iter(entry.values())), list)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Fail the build if a page breaks one of the two rules.

    Raises:
        PluginError: the page would fetch a script, style or picture from another machine, or a
            public name of its room has no entry.
    """
    if match := REMOTE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {match.group()}")
    # A page may also list functions, which come first or which a module of the same name hides.
    named = ROOM.findall(page.markdown)
    if rooms := [name for name in named if (SOURCE / name.replace(".", "/")).is_dir()]:
        entries = set(re.findall(r'id="bilens[\w.]*\.(\w+)"', output))
        if missing := _public_names(rooms[0]) - entries:
            raise PluginError(f"{page.file.src_uri} has no entry for {', '.join(sorted(missing))}")
    return output


def _public_names(room: str) -> set[str]:
    path = SOURCE / room.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            # The version is a fact about the package, and has no entry.
            return set(ast.literal_eval(node.value)) - {"__version__"}
    return set()
