"""Readings are shown by their types, and what computes them draws nothing."""

import ast
import dataclasses
import subprocess
import sys
from importlib import import_module

import pytest

from bilens.analysis import Reading
from bilens.figures.sheet import Figure
from bilens.pages import layout, new_figure, plot_of, sections_of
from bilens.sections import Section, fact_text
from tests.source import SOURCE, nodes_of_files

COMPUTES = ("tensor", "kernels", "nn", "data", "transformer", "convert", "train", "flows")
COMPUTES += ("circuits", "language", "images")
DRAWS = ("matplotlib", "html", "jinja2", "bilens.figures", "bilens.pages")


@pytest.mark.long
def test_the_page_of_a_reading_is_found_by_its_room():
    """In a process for each room, as importing one page may import others."""
    code = """
import sys
from importlib import import_module
from bilens.pages import layout
for address in sys.argv[1:]:
    module, _, name = address.rpartition(".")
    kind = getattr(import_module(module), name)
    layout.import_page(kind.__new__(kind))
    functions = layout.sections_of, layout.plot_of
    assert any(shown.dispatch(kind) is not shown.dispatch(object) for shown in functions), address
"""
    for path in (SOURCE / "pages").glob("[a-z]*.py"):
        import_module(f"bilens.pages.{path.stem}")
    registered = {*layout.sections_of.registry, *layout.plot_of.registry} - {object}
    rooms: dict[str, list[str]] = {}
    for kind in (kind for kind in registered if kind.__module__.startswith("bilens.")):
        room = kind.__module__.split(".")[1]
        rooms.setdefault(room, []).append(f"{kind.__module__}.{kind.__name__}")
    assert rooms.keys() == {"circuits", "data", "flows", "images", "language"}
    for kinds in rooms.values():
        subprocess.run([sys.executable, "-c", code, *kinds], check=True)


def test_no_room_that_computes_draws():
    for path, nodes in nodes_of_files().items():
        if path.relative_to(SOURCE).parts[0] not in COMPUTES:
            continue
        for node in (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (start + alias.name for alias in node.names):
                # Templates of chats, not of pages.
                if name != "jinja2.TemplateError":
                    assert not name.startswith(DRAWS), (path, name)
                assert name.rpartition(".")[2] not in ("go", "px"), (path, name)


MADE_BY_THE_BASE = ("frame", "plot", "sections", "tables", "figures", "record", "__repr__")


def readings():
    for path in nodes_of_files():
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        # Triton is on machines with its GPUs, and `__main__` is a command.
        if parts[1] in COMPUTES and not parts[-1].startswith(("triton", "__main__")):
            module = import_module(".".join(parts).removesuffix(".__init__"))
            for kind in vars(module).values():
                if isinstance(kind, type) and issubclass(kind, Reading) and kind is not Reading:
                    yield kind


def test_results_are_frozen_and_hold_neither_frames_nor_figures():
    kinds = set(readings())
    assert len(kinds) > 30
    for kind in kinds:
        assert kind.__dataclass_params__.frozen, kind
        assert not set(MADE_BY_THE_BASE) & set(vars(kind)), kind
        for field in dataclasses.fields(kind):
            kind_of_field = str(field.type).lower()
            assert not any(name in kind_of_field for name in ("pandas", "pd.", "matplotlib")), field


def test_the_mathematics_is_read_without_pandas():
    code = """
import sys
import torch
from bilens.tensor import BilinearTensor
maps = torch.randn(3, 4, 5)
spectrum = BilinearTensor(maps[0], maps[1], maps[2].mT).interaction(output=1).eigh()
assert len(spectrum.columns()["eigenvalue"]) == 5 and repr(spectrum)
assert not {"pandas", "matplotlib", "transformers"} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
    def _(reading: Scores) -> Figure:
        figure, _ = new_figure(title=reading.title)
        return figure

    for reading in (Scores(), Others()):
        assert [section.text for section in reading.sections()] == ["heads 2"]
        assert reading.plot().get_suptitle() == type(reading).__name__
        assert reading.record() == {"heads": 2}
