"""The page of circuits: the answer with its picture, controls, templates, parts and sizes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch

from bilens.circuits.interval import Interval
from bilens.circuits.measures import Circuit, Measured
from bilens.circuits.patching import parts_in
from bilens.circuits.reading import DRAWN, CircuitReading
from bilens.figures.plots import count_axis, heat_figure
from bilens.figures.sheet import CHART, Figure, add_legend, new_figure, styled
from bilens.pages.graph import NARROW, WIDE
from bilens.pages.layout import plot_of, record_of, sections_of
from bilens.sections import Picture, Section, Table, plain


@sections_of.register
def circuit_sections(reading: CircuitReading) -> list[Section]:
    """Return the answer with its picture, the controls, templates and parts, and sizes."""
    heading, answers = reading.heading, " ".join(map(reading.answer, reading.circuits))
    if reading.transfer:
        tasks = [circuit.task for circuit in reading.circuits]
        heading = f"Which few parts answer {', '.join(tasks[:-1])} and {tasks[-1]}?"
        answers = "\n".join(f"{c.task}: {reading.answer(c)}" for c in reading.circuits)
    # It has room on a phone, too.
    picture = Picture("circuit", partial(reading.plot, width=NARROW))
    sections = [Section(heading, " ".join([answers, *reading.notes]), [[picture]])]

    def add(title: str, text: str, frame: pd.DataFrame, *, folds: bool = False) -> None:
        table = Table(frame, "", reading.formats)
        sections.append(Section(title, text, [[table]], folded=folds and len(frame) > DRAWN))

    for circuit in reading.circuits:
        of_task = f" of {circuit.task}" if len(reading.circuits) > 1 else ""
        if circuit.controls:
            text = (
                "The same search where there is nothing to find, beside the answer. A circuit "
                "of what the model does not know restores the change as well: what tells it "
                "apart are the questions that the model answers, and the mean change."
            )
            add(f"Controls{of_task}", text, _beside("search", circuit.controls))
        if circuit.left_out:
            text = (
                "Each row is the circuit that the other templates find where one is left out, "
                "on the questions of that one."
            )
            add(f"Templates{of_task}", text, _beside("without", circuit.left_out))
    # A single question measures itself, and its sentence has the two numbers.
    if reading.circuits[0].questions[2]:
        text = (
            "Each row is a circuit on questions of a task that did not find it: the share of "
            "the change that it restores, the ends of the interval of 95 %, and what is left "
            "without it, with the parts in place that any circuit needs."
        )
        add("The answer in numbers", text, _answers(reading))
    text = (
        "Each part alone takes its value of the second text in the run of the first (noising: "
        "share of the change that is lost), and that of the first in the run of the second "
        "(denoising: share that is gained)."
    )
    add("Parts", text, reading.frame(), folds=True)
    text = (
        "The share that is restored on the questions that decide the size, by number of parts, "
        "of each template."
    )
    if reading.graph is not None or reading.transfer:  # else it is the picture above
        sections.append(
            Section("Size", text, [[Picture("sizes", partial(_curves, reading))]], folded=True)
        )
    rows = []
    for question in reading.finding:
        names = (", ".join(tokens) for tokens in (question.tokens, question.minus))
        texts = (str(question.text), *names)
        rows.append((question.task, *texts, str(question.against)))
    frame = pd.DataFrame(rows, columns=["task", "text", "token", "minus", "against"])
    table = Table(_of_tasks(reading, frame), "")
    return [*sections, Section("Questions that found it", "", [[table]], folded=True)]


@plot_of.register
def circuit_plot(reading: CircuitReading, *, width: int = WIDE) -> Figure:
    """Draw the circuit over the tokens of a question, or the matrix of several tasks.

    Without a flow it is the share that is restored, by number of parts.

    See `graph_plot` for the width.
    """
    if reading.transfer:
        tasks = [circuit.task for circuit in reading.circuits]
        values = torch.tensor([[x.restored.value for x in row] for row in reading.transfer])
        title = "Share of the change restored"
        return heat_figure(
            values, tasks, tasks, title=title, across="questions", down="circuit", numbers=True
        )
    if reading.graph is None:
        return _curves(reading, width)
    caption = f"The strongest of {reading.circuits[0].size} parts, with their tokens"
    return reading.graph.plot(caption, width=width)


def _answers(reading: CircuitReading) -> pd.DataFrame:
    """Return what each circuit does on the questions of each task."""
    rows = []
    measured = reading.transfer or ((reading.circuits[0].measured,),)
    for circuit, row in zip(reading.circuits, measured, strict=True):
        for other, x in zip(reading.circuits, row, strict=True):
            of_tasks = {"circuit": circuit.task, "questions of": other.task}
            numbers = {"parts": circuit.size, **_shares(x), "questions": x.questions}
            rows.append(of_tasks | numbers)
    frame = pd.DataFrame(rows)
    return frame if reading.transfer else frame.drop(columns=["circuit", "questions of"])


def _of_tasks(reading: CircuitReading, frame: pd.DataFrame) -> pd.DataFrame:
    return frame if len(reading.circuits) > 1 else frame.drop(columns="task")


@styled
def _curves(reading: CircuitReading, width: int = CHART) -> Figure:
    title = "Share restored, by number of parts"
    figure, axes = new_figure(width=min(width, CHART), height=320, title=title)
    largest = 1
    for circuit in reading.circuits:
        assert circuit.found is not None
        counts, rows = zip(*sorted(circuit.found.sizes.items()), strict=True)
        largest = max(largest, *counts)
        columns = zip(circuit.by_template, zip(*rows, strict=True), strict=True)
        for template, values in columns:
            labels = (circuit.task if len(reading.circuits) > 1 else "", template)
            axes.plot(counts, values, marker="o", label=", ".join(filter(None, labels)))
    count_axis(axes, [largest], "parts")
    axes.set_ylabel("share of the change")
    add_legend(axes)
    return figure


def _beside(name: str, circuits: Mapping[str, Circuit]) -> pd.DataFrame:
    """Return the numbers of some circuits, a row each."""
    rows = []
    for of, circuit in circuits.items():
        x, none = circuit.measured, circuit.found is not None and not circuit.holds
        answers, right = (
            "" if count is None else f"{count} of {x.questions}" for count in (x.answers, x.right)
        )
        rows.append(
            {
                name: of,
                "the model answers": answers,
                "mean change": x.change,
                "parts": f"{circuit.size}{', none holds' * none}",
                "restored": x.restored.value,
                "left": x.left.value,
                "closeness": x.closeness,
                "answered with it alone": right,
            }
        )
    return pd.DataFrame(rows)


def _shares(measured: Measured) -> dict[str, float | None]:
    restored = measured.restored
    shares = {"restored": restored.value, "low": restored.low, "high": restored.high}
    # An interval that there is not leaves no empty columns.
    return {**{k: x for k, x in shares.items() if x is not None}, "left": measured.left.value}


@record_of.register
def circuit_record(reading: CircuitReading) -> dict[str, Any]:
    """Return all numbers for JSON, those of each circuit, and the matrix of several tasks.

    Of the matrix rows are circuits, and columns the questions of a task.
    """
    record: dict[str, Any] = {
        "prompt": _unquoted(reading.texts[0]),
        "against": _unquoted(reading.texts[1]),
        "number": reading.question.number,
        "values": list(reading.values),
        "number of parts": reading.n_parts,
        "keep": reading.limits[0],
        "left at most": reading.limits[1],
        "circuits": [_record(circuit) for circuit in reading.circuits],
        "notes": list(reading.notes),
    }
    if reading.transfer:
        record["transfer"] = [[x.restored.value for x in row] for row in reading.transfer]
        record["transfer left"] = [[x.left.value for x in row] for row in reading.transfer]
    return record


def _record(circuit: Circuit) -> dict[str, Any]:
    """Return the numbers of a circuit for JSON."""
    assert circuit.found is not None
    ordering, deciding, measuring = circuit.questions
    numbers: dict[str, Any] = {
        "task": circuit.task,
        "holds": circuit.holds,
        **_numbers(circuit.measured),
        "questions that order": ordering,
        "questions that decide the size": deciding,
        "questions that measure": measuring,
        "of other templates": circuit.of_other_templates,
        "the other way round": circuit.opposite,
        "answered otherwise": list(circuit.wrong),
        "repeated": circuit.repeated,
        "parts": [],
        "parts for half": circuit.half,
        "sizes": [
            {"size": size, "restored": list(shares)}
            for size, shares in sorted(circuit.found.sizes.items())
        ],
        "templates": [{"template": name, **_numbers(x)} for name, x in circuit.by_template.items()],
    }
    for key, name, circuits in (
        ("left out", "template", circuit.left_out),
        ("controls", "control", circuit.controls),
    ):
        numbers[key] = [
            {name: of, "size": x.size, "holds": x.found and x.holds, **_numbers(x.measured)}
            for of, x in circuits.items()
        ]
    needed, core = parts_in(circuit.needed), parts_in(circuit.core)
    for effect in circuit.effects:
        row = {name: x for name, x in vars(effect).items() if name != "part"}
        numbers["parts"].append(
            {
                "part": str(effect.part),
                **plain(row),
                "needed": effect.part in needed,
                "core": effect.part in core,
            }
        )
    return numbers


def _unquoted(text: str) -> str:
    """Return a text without the quotes around it; those within are its own."""
    return text[1:-1] if text.startswith("“") else text


def _numbers(measured: Measured) -> dict[str, Any]:
    return {
        **_interval("restored", "", measured.restored),
        **_interval("left", "left ", measured.left),
        "closeness": measured.closeness,
        "right": measured.right,
        "questions": measured.questions,
        "model answers": measured.answers,
        "mean change": measured.change,
    }


def _interval(name: str, ends: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.value, f"{ends}low": interval.low, f"{ends}high": interval.high}
