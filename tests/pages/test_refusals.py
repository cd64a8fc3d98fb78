"""What reports and figures refuse."""

import torch

from bilens.pages import heat_figure, network_figure, report, tree_figure, write_report
from bilens.pages.cuts import directions_figure, matrices_figure
from bilens.tensor import decompile
from tests.models import digit_bonds, digit_model
from tests.refusals import refused

FIGURES = {
    "^layer=2, expected 0 to 1$": lambda read: matrices_figure(read.cut_reading, 2),
    "^bond=2, expected 0 to 1$": lambda read: directions_figure(read.cut_reading, 2, (8, 8)),
    "^output=10, expected 0 to 9$": lambda read: network_figure(read.cut_reading, 10, (8, 8)),
    "^reading is .*BondReading, expected CutRe": lambda read: network_figure(read, 1, (8, 8)),
    r"^shape=\(8,\), expected 2 values": lambda read: directions_figure(read.cut_reading, 0, (8,)),
}
test_what_a_figure_cannot_show_is_named = refused(FIGURES, given=digit_bonds)


def draw_many_paths():
    many = decompile(digit_model(n_layers=2).tensors(), torch.eye(10), 30)
    tree_figure(many, (8, 8), title="")


def report_of(source):
    return lambda tmp_path: report(source, tmp_path / "page.html")


REPORTS = {
    r"source holds \[\], expected at least one reading": report_of([]),
    r"source holds \['int'\], expected at least one reading": report_of([1]),
    "expected at least one reading": report_of(()),
    r"source holds \['NoneType'\]": report_of([None]),
    "source is NoneType, expected a model that bilens.load returns": report_of(None),
    "source is int, expected a model": report_of(5),
    "readings has 0 and no section": lambda tmp_path: write_report(tmp_path / "a", [], title="a"),
    "up to 24 paths of one direction; these are 30": draw_many_paths,
    r"values has shape \(2, 2\), with 2 names of rows and 1": lambda: heat_figure(
        torch.zeros(2, 2), ["a", "b"], ["x"], title=""
    ),
}
test_a_report_needs_readings = refused(REPORTS)
