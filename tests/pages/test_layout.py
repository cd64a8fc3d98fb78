"""Readings are shown by their types, and what computes them draws nothing."""

import ast
from importlib import import_module

import plotly.graph_objects as go
import pytest

from bilens.analysis import Reading
from bilens.pages import layout, plot_of, sections_of
from bilens.sections import Section, fact_text
from tests.source import SOURCE, nodes_of_files

COMPUTES = ("tensor", "kernels", "nn", "data", "residual", "convert", "train", "read")
DRAWS = ("plotly", "matplotlib", "html", "jinja2", "bilens.figures", "bilens.pages", "bilens.paper")


@pytest.mark.parametrize("shown_by", [layout.sections_of, layout.plot_of, layout.record_of])
def test_what_is_registered_is_found_by_the_module_of_the_reading(shown_by):
    for path in (SOURCE / "pages").glob("[a-z]*.py"):
        import_module(f"bilens.pages.{path.stem}")
    registered = {kind: shown for kind, shown in shown_by.registry.items() if kind is not object}
    assert len(registered) > 5
    for kind, shown in registered.items():
        assert issubclass(kind, Reading)
        if kind.__module__.startswith("bilens."):
            assert shown.__module__ == f"bilens.pages.{layout.PAGES[kind.__module__]}"


def test_no_room_that_computes_draws():
    for path, nodes in nodes_of_files().items():
        if path.relative_to(SOURCE).parts[0] not in COMPUTES:
            continue
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert not name.startswith(DRAWS), (path, name)
                assert name.rpartition(".")[2] not in ("go", "px"), (path, name)


def test_a_reading_of_ones_own_registers_its_page_and_picture():
    class Scores(Reading):
        def facts(self):
            return [("heads", 2)]

    class Others(Scores):
        pass

    @sections_of.register
    def _(reading: Scores) -> list[Section]:
        return [Section("Scores", fact_text(*reading.facts()[0]))]

    @plot_of.register
    def _(reading: Scores) -> go.Figure:
        return go.Figure(layout_title_text=reading.title)

    for reading in (Scores(), Others()):
        assert [section.text for section in reading.sections()] == ["2 heads"]
        assert reading.plot().layout.title.text == type(reading).__name__
        assert reading.record() == {"heads": 2}
