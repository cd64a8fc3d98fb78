"""The page of what carries an answer: its picture, templates, numbers, and questions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch

from bilens.circuits.cuts import Cuts
from bilens.circuits.measures import Circuit
from bilens.circuits.questions import UsedQuestion
from bilens.circuits.reading import SHOWN, Answer, CircuitReading
from bilens.circuits.search import HIGHEST
from bilens.circuits.stages import Stages
from bilens.figures.plots import count_axis, heat_figure
from bilens.figures.sheet import CHART, LINE, Figure, add_legend, new_figure, styled
from bilens.pages.graph import NARROW
from bilens.pages.layout import plot_of, sections_of
from bilens.pages.stages import stages_figure
from bilens.sections import Picture, Section, Table

STAGES = (
    "A stage is all heads, or all MLPs, of a range of layers at the places of one role: at the "
    "word where the texts differ, at the end, or between. What differs after tokens that are the "
    "same again is word 2. Beside each stage stand the share that the other stages restore, and "
    "those of its heads with the largest gradients: what is restored with each as the only head of "
    "the stage, which may be more than with all. Stages are the path of the change and not of one "
    "answer: other tasks share them."
)
PARTS = (
    "Each part alone takes its value of the second text in the run of the first (noising: share of "
    "the change that is lost), and that of the first in the run of the second (denoising: share "
    f"that is gained), on at most {SHOWN} of the questions that measure."
)


@sections_of.register
def circuit_sections(reading: CircuitReading) -> list[Section]:
    """Return the answer with its picture, the stages or parts, the templates, and all questions."""
    several = len(reading.circuits) > 1
    sections = []
    for answer in reading.answers:
        circuit = answer.circuit
        of_task = f" of {circuit.task}" if several else ""
        # It has room on a phone, too.
        draw = partial(_picture, reading, circuit, NARROW)
        title = f"What carries {circuit.task}?" if several else reading.heading
        text = " ".join([reading.text(answer), *reading.notes])
        sections.append(Section(title, text, [[Picture(f"circuit{of_task}", draw)]]))

    def add(title: str, text: str, frame: pd.DataFrame, folds: bool = False, **look: Any) -> None:
        table = Table(frame, **{"formats": reading.formats, **look})
        sections.append(Section(title, text, [[table]], folded=folds))

    add(*(("Stages", STAGES) if reading.is_of_stages else ("Parts", PARTS)), reading.frame())
    for answer in reading.answers:
        circuit = answer.circuit
        of_task = f" of {circuit.task}" if several else ""
        if circuit.left_out:
            text = (
                "Each row is what the other templates find where one is left out, on the questions "
                "of that one: the share restored by it alone, the share left without it, and how "
                "many questions it answers."
            )
            add(f"Templates{of_task}", text, _templates(circuit.left_out))
        if isinstance(circuit, Stages) and circuit.cuts is not None and circuit.cuts.apart:
            title = f"Share restored by the stream at one place, by template{of_task}"
            text = "Only this stream passes before the layer, on the questions that decide."
            formats = dict.fromkeys(circuit.by_template, "z.0%")
            add(title, text, _curves_of(circuit.cuts, circuit), folds=True, formats=formats)
        text = "What each question is for, its numbers, and the share of its change restored."
        questions = pd.DataFrame(map(_question, answer.questions))
        add(f"Questions{of_task}", text, questions, folds=True, by="role")
    if reading.transfer:
        draw = partial(circuit_plot, reading, width=NARROW)
        text = "The share of the change of each task that the stages or parts of each restore."
        sections.append(Section("Of other tasks", text, [[Picture("transfer", draw)]]))
    return sections


@plot_of.register
def circuit_plot(reading: CircuitReading, *, width: int = CHART, model: str = "") -> Figure:
    """Draw the stages, the curve over numbers of parts, or the matrix of several tasks."""
    if reading.transfer:
        tasks = [circuit.task for circuit in reading.circuits]
        values = torch.tensor([[x.restored.value for x in row] for row in reading.transfer])
        title = "Share of the change restored"
        words = [[f"{x:.2f}" for x in row] for row in values.tolist()]
        return heat_figure(
            values, tasks, tasks, title=title, across="questions", down="circuit", words=words
        )
    return _picture(reading, reading.circuits[0], width, model)


def _picture(reading: CircuitReading, answer: Answer, width: int, model: str = "") -> Figure:
    if isinstance(answer, Circuit):
        return _curve(answer, reading.keep, width)
    title = reading.heading if len(reading.circuits) == 1 else answer.task
    return stages_figure(answer, len(answer.mask), title, width, model)


@styled
def _curve(circuit: Circuit, keep: float, width: int) -> Figure:
    """Draw the share that is restored by number of parts, with its bounds and the size taken."""
    title = "Share restored, by number of parts"
    figure, axes = new_figure(width=width, height=320, title=title)
    counts, rows = zip(*sorted(circuit.search.sizes.items()), strict=True)
    axes.axhspan(keep, HIGHEST, color=LINE, alpha=0.5)
    axes.axvline(circuit.size, color=LINE, linestyle="--")
    for template, values in zip(circuit.by_template, zip(*rows, strict=True), strict=True):
        axes.plot(counts, values, marker="o", label=template)
    count_axis(axes, [max(*counts, circuit.size)], "parts")
    axes.set_ylabel("share of the change")
    add_legend(axes)
    return figure


def _templates(circuits: Mapping[str, Answer]) -> pd.DataFrame:
    """Return the numbers of what was found without each template, on this one."""
    rows = []
    for template, one in circuits.items():
        x = one.measured
        if isinstance(one, Stages):
            parts: Any = "; ".join(map(str, one.stages))
        else:
            parts = f"{one.size} parts{', none holds' * (not one.holds)}"
        numbers = {"restored": x.restored.value, "left": x.left.value}
        right = "" if x.right is None else f"{x.right} of {x.questions}"
        rows.append({"left out": template, "found by the others": parts, **numbers, "right": right})
    return pd.DataFrame(rows)


def _curves_of(cuts: Cuts, circuit: Stages) -> pd.DataFrame:
    rows = []
    for place, curve in cuts.curves.items():
        for layer, shares in sorted(curve.items()):
            of_templates = dict(zip(circuit.by_template, shares, strict=True))
            rows.append({"stream at": place, "before layer": layer, **of_templates})
    return pd.DataFrame(rows)


def _question(one: UsedQuestion) -> dict[str, Any]:
    first, second = one.values
    return {
        "template": one.question.template,
        "role": one.use,
        "why": one.why,
        "text": _unquoted(one.texts[0]),
        "against": _unquoted(one.texts[1]),
        "token": ", ".join(one.question.tokens),
        "minus": ", ".join(one.question.minus),
        "after the first text": first,
        "after the second": second,
        "restored": one.restored,
    }


def _unquoted(text: str) -> str:
    """Return a text without the quotes around it; those within are its own."""
    return text[1:-1] if text.startswith("“") else text
