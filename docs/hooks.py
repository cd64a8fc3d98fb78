"""Additions of the site to Markdown: equations and outputs of tutorials; and checks.

No page loads anything from other hosts, and the reference of a room has every public name.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

import jupytext
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from nbformat import NotebookNode

__all__ = [
    "code_cells",
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
DISPLAY = re.compile(r"^\$\$\n(.*?)^\$\$$", re.MULTILINE | re.DOTALL)
ROOM = re.compile(r"^::: (\S+)$", re.MULTILINE)


COLAB = "https://colab.research.google.com/github/{}/blob/gh-pages/main/tutorials/{}.ipynb"
"""Address that opens a notebook of the site, which .github/workflows/docs.yml publishes."""

INSTALL = '%pip install --quiet "bilens[all] @ git+https://github.com/{}"'
"""First cell of a notebook where GitHub builds the site: bilens is in no package index."""


def mathml(source: str, *_: Any, **__: Any) -> str:
    """Return an equation of a fence called math as MathML, which browsers draw without a script."""
    return f'<div class="math">{convert(source, display="block")}</div>'


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put equations of tutorials, between $$ in notebooks, into fences, and outputs below cells.

    Below the title are links to the notebook and, if GitHub builds the site, to Colab.

    Raises:
        PluginError: a tutorial has other cells than its notebook, which was run.
    """
    if not page.file.src_uri.startswith("tutorials/"):
        return markdown
    path = Path(page.file.abs_src_path)
    notebook = notebook_of(path.with_suffix(".ipynb"))
    ran, written = (
        code_cells(x)[-len(CELL.findall(markdown)) :] for x in (notebook, jupytext.read(path))
    )
    if [cell.source for cell in ran] != [cell.source for cell in written]:
        raise PluginError(f"{page.file.src_uri} has changed: run `python -m docs.draw_tutorials`")
    below = iter(ran)

    def with_output(cell: re.Match[str]) -> str:
        outputs = next(below).outputs
        text = "".join(x.text for x in outputs if x.output_type == "stream").strip("\n")
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
    for path in docs.glob("tutorials/*.ipynb"):
        text = jupytext.writes(notebook_of(path), fmt="ipynb")
        (site / "tutorials" / path.name).write_text(text, encoding="utf-8")
    text = index_text(config.nav, docs, config.site_description)
    (site / "llms.txt").write_text(text, encoding="utf-8")


def notebook_of(path: Path) -> NotebookNode:
    """Return the notebook of a tutorial, whose first cell says how to install bilens.

    Where GitHub builds the site, it installs it from there.
    """
    notebook: NotebookNode = jupytext.read(path)
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        code_cells(notebook)[0].source = INSTALL.format(repository)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells of a notebook that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


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
