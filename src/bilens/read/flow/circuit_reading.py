"""Circuits of one task or several as a reading: the answer, its parts, and where it transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.canvas import BLUE, dress
from bilens.figures.plots import count_axis, heat_figure
from bilens.lazy_imports import go
from bilens.options import Keep, Left, Level
from bilens.read.flow.ablation import named_by_measurement
from bilens.read.flow.case import Case, check_apart, different
from bilens.read.flow.circuit_controls import controls as controls_of
from bilens.read.flow.circuit_measures import (
    Circuit,
    Measured,
    Split,
    exchanges,
    found_circuit,
    left_out,
)
from bilens.read.flow.circuit_search import HIGHEST, SIZES, Cases
from bilens.read.flow.edges import EdgeCircuit, found_edges
from bilens.read.flow.graph import FlowGraph, notebook_picture
from bilens.read.flow.interval import LEAST, Interval
from bilens.read.flow.nodes import NARROW, WIDE
from bilens.read.flow.patching import parts_in
from bilens.read.flow.question import Question, token_hints
from bilens.read.flow.split import flows
from bilens.read.language.names import in_words
from bilens.residual import ResidualModel
from bilens.sections import Fact, Panel, Picture, Section, Table, signed

DRAWN = 15
"""Nodes of the picture."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """f of the circuit of each task (row), and of all else, on the questions of each (column)."""

    restored: tuple[tuple[Interval, ...], ...]
    left: tuple[tuple[Interval, ...], ...]

    def frame(self, tasks: Sequence[str]) -> pd.DataFrame:
        """Return a row for each circuit, and a column with both numbers for each task."""
        rows = []
        for task, restored, left in zip(tasks, self.restored, self.left, strict=True):
            cells = [f"{a.value:.2f}, {b.value:.2f}" for a, b in zip(restored, left, strict=True)]
            rows.append((task, *cells))
        return pd.DataFrame(rows, columns=["circuit", *tasks])


@dataclass(frozen=True, eq=False, repr=False)
class CircuitReading(Reading):
    """The circuits of one task or of several, measured on questions that did not find them.

    Attributes:
        question: the first question that measures.
        texts: both of its texts for a page, in quotes.
        values: its number after each text.
        heading: what it asks, in a sentence.
        graph: the parts of the first circuit in the flow of this question.
        circuits: one for each task.
        transfer: what each circuit does on the questions of the others; None for one task.
        n_parts: number of heads and MLPs, at each position for a single question.
        limits: least f of a circuit, and the largest f of everything else.
        notes: warnings about the tokens.
        finding: the questions that found the circuits.
    """

    question: Question
    texts: tuple[str, str]
    values: tuple[float, float]
    heading: str
    graph: FlowGraph
    circuits: tuple[Circuit, ...]
    transfer: Transfer | None
    n_parts: int
    limits: tuple[float, float]
    notes: tuple[str, ...] = ()
    finding: tuple[Question, ...] = ()

    title: ClassVar[str] = "Circuit"
    formats: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("noising", "denoising"), "+.0%"),
        **dict.fromkeys(("restored", "left", "closeness"), ".0%"),
        "share": "+.1%",
        "mean change": ".3g",
    }

    def facts(self) -> list[Fact]:
        """Return the answer of each circuit in a few sentences, and warnings."""
        answers: list[Fact] = [(circuit.task, self.answer(circuit)) for circuit in self.circuits]
        return answers + ([("note", " ".join(self.notes))] if self.notes else [])

    def answer(self, circuit: Circuit) -> str:
        """Return what a circuit does in a few sentences."""
        keep, most = self.limits
        measured, count = circuit.measured, circuit.measured.questions
        change = "absolute change" if circuit.opposite else "change"
        parts = f"{circuit.size} of {self.n_parts:,} parts"
        if not circuit.found.holds:
            where = (
                "every template" if len(circuit.by_template) > 1 else "the questions that decide"
            )
            parts = (
                f"No circuit of at most {SIZES[-1]} parts restores {keep:.0%} to {HIGHEST:.0%} of "
                f"the {change} on {where}. The best, {parts},"
            )
        restore = "restore" if circuit.found.holds else "restores"
        text = f"{parts} {restore} {measured.restored} of the {change} on {_measuring(circuit)}"
        if measured.right is not None and circuit.questions[2]:
            answer = "answer" if circuit.found.holds else "answers"
            text += f", and {answer} {measured.right} of them"
        if measured.restored.value > 1.2:
            text += "; that is more than all, since parts that oppose the answer are left out"
        needed = ", ".join(map(str, parts_in(circuit.needed)))
        kept = f", with {needed} in place," if needed else ""
        if circuit.needed.equal(circuit.mask):
            text += f". Any circuit needs {needed}"
        else:
            text += f". Without them{kept} {measured.left.value:z.0%} is left"
            if measured.left.value > most:
                text += f", more than the {most:.0%} that were asked for"
        if circuit.left_out:
            text += f". {_of_the_others(circuit)}"
        if circuit.edges is not None:
            text += (
                f". {len(circuit.edges.edges)} of the {circuit.edges.candidates} edges between "
                f"them restore {circuit.edges.restored}"
            )
        if circuit.opposite:
            text += (
                f". In {circuit.opposite} of {count} the answer is the other way round: the number "
                "is smaller after the first text"
            )
        if circuit.wrong:
            count_wrong = _counted(len(circuit.wrong), "question")
            text += f". Left out: {count_wrong} that the model answers otherwise"
        if circuit.repeated:
            text += f". Left out: {_counted(circuit.repeated, 'repeated question')}"
        return f"{text}."

    def record(self) -> dict[str, Any]:
        """Return all numbers for JSON, those of each circuit, and the matrix of several tasks.

        Of the matrix rows are circuits, and columns the questions of a task.
        """
        record: dict[str, Any] = {
            "prompt": self.texts[0].strip("“”"),
            "against": self.texts[1].strip("“”"),
            "number": self.question.number,
            "values": list(self.values),
            "number of parts": self.n_parts,
            "keep": self.limits[0],
            "left at most": self.limits[1],
            "circuits": [self._of_circuit(circuit) for circuit in self.circuits],
            "notes": list(self.notes),
        }
        if self.transfer is not None:
            for name in ("restored", "left"):
                rows: tuple[tuple[Interval, ...], ...] = getattr(self.transfer, name)
                key = "transfer" if name == "restored" else "transfer left"
                record[key] = [[x.value for x in row] for row in rows]
        return record

    def _of_circuit(self, circuit: Circuit) -> dict[str, Any]:
        ordering, deciding, measuring = circuit.questions
        needed, core = parts_in(circuit.needed), parts_in(circuit.core)
        numbers: dict[str, Any] = {
            "task": circuit.task,
            "holds": circuit.found.holds,
            **_numbers(circuit.measured),
            "questions that order": ordering,
            "questions that decide the size": deciding,
            "questions that measure": measuring,
            "of other templates": circuit.of_other_templates,
            "the other way round": circuit.opposite,
            "answered otherwise": list(circuit.wrong),
            "repeated": circuit.repeated,
            "parts": [],
            "sizes": [
                {"size": size, "restored": list(shares)}
                for size, shares in sorted(circuit.found.sizes.items())
            ],
            "templates": [
                {"template": name, **_numbers(measured)}
                for name, measured in circuit.by_template.items()
            ],
            "left out": [
                {
                    "template": left.template,
                    "size": int(left.found.mask.sum()),
                    "holds": left.found.holds,
                    "restored": {name: x.value for name, x in left.restored.items()},
                    **_ends("", left.restored[left.template]),
                }
                for left in circuit.left_out
            ],
            "similar": circuit.similar,
            "circuits of a template": [self._of_circuit(own) for own in circuit.own],
            "controls": [
                {
                    "control": control.name,
                    "size": control.size,
                    "holds": control.holds,
                    **_numbers(control.measured),
                    "model answers": control.answers,
                    "mean change": control.change,
                }
                for control in circuit.controls
            ],
        }
        for effect in circuit.effects:
            part = effect.part
            other = circuit.exchanged.get(part)
            numbers["parts"].append(
                {
                    "part": str(part),
                    "noising": effect.noising,
                    "denoising": effect.denoising,
                    "raises": list(effect.raises),
                    "lowers": list(effect.lowers),
                    "needed": part in needed,
                    "core": part in core,
                    "exchanged for": None if other is None else str(other),
                }
            )
        if circuit.edges is not None:
            names = ("from", "to", "through", "share")
            rows = self._edge_rows(circuit.edges)
            numbers |= {
                "edges": [dict(zip(names, row, strict=True)) for row in rows],
                "edges between the parts": circuit.edges.candidates,
                "restored by edges": circuit.edges.restored.value,
                **_ends("restored by edges ", circuit.edges.restored),
            }
        return numbers

    def frame(self) -> pd.DataFrame:
        """Return a row for each part of each circuit, the largest effect first."""
        rows = []
        for circuit in self.circuits:
            needed, core = parts_in(circuit.needed), parts_in(circuit.core)
            for effect in circuit.effects:
                numbers = (effect.noising, effect.denoising)
                words = (", ".join(effect.raises), ", ".join(effect.lowers))
                notes = []
                if effect.part in needed:
                    notes.append("needed by any circuit")
                if circuit.left_out and effect.part in core:
                    notes.append("in all circuits")
                if effect.part in circuit.exchanged:
                    notes.append(f"or {circuit.exchanged[effect.part]}")
                rows.append((circuit.task, str(effect.part), *numbers, *words, ", ".join(notes)))
        columns = ["task", "part", "noising", "denoising", "raises", "lowers", "note"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.drop(columns=[name for name in ("task", "note") if not frame[name].any()])

    def plot(self, *, width: int = WIDE) -> "go.Figure":
        """Draw the circuit over the tokens of a question, or the matrix of several tasks.

        See `FlowGraph.plot` for the width.
        """
        if self.transfer is not None:
            tasks = [circuit.task for circuit in self.circuits]
            rows = self.transfer.restored
            values = torch.tensor([x.value for row in rows for x in row]).view(len(rows), -1)
            title = "Share of the change restored"
            return heat_figure(
                values, tasks, tasks, title=title, across="questions", down="circuit", numbers=True
            )
        caption = f"The strongest of {self.circuits[0].size} parts, with their tokens"
        return self.graph.plot(caption, width=width)

    _repr_mimebundle_ = notebook_picture

    def sections(self) -> list[Section]:
        """Return the answer with its picture, the controls, templates and parts, and sizes."""
        sections = [self._first_section()]
        for circuit in self.circuits:
            of_task = f" of {circuit.task}" if len(self.circuits) > 1 else ""
            if circuit.controls:
                text = (
                    "The same search where there is nothing to find, beside the answer. A circuit "
                    "of what the model does not know restores the change as well: what tells it "
                    "apart are the questions that the model answers, and the mean change."
                )
                table = Table(_control_frame(circuit), "", self.formats)
                sections.append(Section(f"Controls{of_task}", text, [[table]]))
            if circuit.left_out:
                text = (
                    "Each row is the circuit that the other templates find where one is left out, "
                    "each column the questions of a template: the share of the change restored. "
                    f"These circuits share {circuit.similar:.0%} of their parts (mean Jaccard "
                    "index)."
                )
                table = Table(_template_frame(circuit), "")
                sections.append(Section(f"Templates{of_task}", text, [[table]]))
        if self.transfer is not None:
            tasks = [circuit.task for circuit in self.circuits]
            text = (
                "Each row is a circuit, each column the questions of a task. The first number is "
                "the share of the change that the circuit restores there, the second what is left "
                "without it, with the parts in place that any circuit needs."
            )
            table = Table(self.transfer.frame(tasks), "")
            sections.append(Section("Transfer", text, [[table]]))
        parts = (
            "Each part alone takes its value of the second text in the run of the first (noising: "
            "share of the change that is lost), and that of the first in the run of the second "
            "(denoising: share that is gained). Without it the tokens that it raises become less "
            "probable."
        )
        table = Table(self.frame(), "", self.formats)
        sections.append(Section("Parts", parts, [[table]], folded=len(table.frame) > DRAWN))
        if any(circuit.edges is not None for circuit in self.circuits):
            text = (
                "An edge is what one part writes for another one to read, from the embedding to "
                "the logits. All other edges carry what they do on the second text. Shares are "
                "integrated gradients."
            )
            table = Table(self._edges(), "", self.formats)
            sections.append(Section("Edges", text, [[table]], folded=len(table.frame) > DRAWN))
        size = (
            "The share that is restored on the questions that decide the size, by number of parts, "
            "of each template."
        )
        sections.append(Section("Size", size, [[Picture("sizes", self._curves)]], folded=True))
        return [*sections, self._found_by()]

    def _first_section(self) -> Section:
        """Return the answer of each circuit with the picture."""
        answers = " ".join(map(self.answer, self.circuits))
        heading, row = self.heading, list[Panel]([Picture("circuit", self._page_figure)])
        if self.transfer is not None:
            tasks = [circuit.task for circuit in self.circuits]
            heading = f"Which few parts answer {', '.join(tasks[:-1])} and {tasks[-1]}?"
            answers = "\n".join(f"{c.task}: {self.answer(c)}" for c in self.circuits)
        return Section(heading, " ".join([answers, *self.notes]), [row])

    def _page_figure(self) -> "go.Figure":
        # It has room on a phone, too.
        return self.plot(width=NARROW)

    def _found_by(self) -> Section:
        rows = []
        for question in self.finding:
            texts = (str(question.text), question.token, ", ".join(question.minus))
            rows.append((question.task, *texts, str(question.against)))
        frame = pd.DataFrame(rows, columns=["task", "text", "token", "minus", "against"])
        frame = frame if len(self.circuits) > 1 else frame.drop(columns="task")
        return Section("Questions that found it", "", [[Table(frame, "")]], folded=True)

    def _edges(self) -> pd.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for circuit in self.circuits:
            if circuit.edges is not None:
                rows += [(circuit.task, *row) for row in self._edge_rows(circuit.edges)]
        frame = pd.DataFrame(rows, columns=["task", "from", "to", "through", "share"])
        return frame if len(self.circuits) > 1 else frame.drop(columns="task")

    @staticmethod
    def _edge_rows(edges: EdgeCircuit) -> list[tuple[str, str, str, float]]:
        rows = []
        for edge in edges.edges:
            source = "embedding" if edge.source is None else str(edge.source)
            readers = ", ".join(map(str, edge.readers)) or "logits"
            rows.append((source, readers, edge.role or "input", edge.share))
        return rows

    def _curves(self) -> "go.Figure":
        figure = dress(go.Figure(), height=320, title="Share restored, by number of parts")
        for circuit in self.circuits:
            counts, rows = zip(*sorted(circuit.found.sizes.items()), strict=True)
            columns = zip(circuit.by_template, zip(*rows, strict=True), strict=True)
            for template, values in columns:
                name = ", ".join(filter(None, (circuit.task, template)))
                figure.add_scatter(x=counts, y=values, mode="lines+markers", name=name)
        count_axis(figure, [max(max(circuit.found.sizes) for circuit in self.circuits)], "parts")
        if len(figure.data) == 1:
            figure.update_traces(line_color=BLUE)
        return figure.update_yaxes(title="share of the change")


@checked
def circuit(
    model: ResidualModel,
    questions: Sequence[Question],
    *,
    keep: Keep = 1.0,
    left: Left = 0.1,
    level: Level = "parts",
    controls: bool = False,
) -> CircuitReading:
    """Find the few heads and MLPs that answer the questions of each task, and measure them.

    Of the questions of each template some order the parts, by integrated gradients; the circuit is
    the smallest whose f lies between `keep` and 1.5 on others, of every template; and the rest
    measure. With two or more templates each is left out once, and the circuit of the others is
    measured there. Questions that repeat others, or that the model answers otherwise, are left out.
    Of a single question the parts are at positions, and it measures itself.

    f is the number in a run of the first text in which everything else has its value of the second,
    on a scale where the second text has 0 and the first 1. It is above 1 where parts that oppose
    the answer are left out. Over questions it is a share of the absolute change.

    Args:
        model: any.
        questions: each with a second text of as many tokens; by the names of their tasks and of
            their templates, of which each has three or more.
        keep: least f on the questions that decide the size.
        left: largest f there of everything but the circuit. Parts are added until it is met.
        level: with "edges" the same search goes on over the edges between the parts. Parts of a
            single question are at all positions.
        controls: also search where there is nothing to find: random parts, a nonsense answer, and
            shuffled weights.

    Raises:
        BilensError: there are no questions, one has no second text, texts do not fit, the number is
            the same after both, the model answers fewer than three of a template, or a question
            that finds a circuit would measure that of another task.
        MemoryLimitError: there are more questions than fit into memory.
    """
    everything = Cases.of(model, questions)
    tasks = different(everything.cases)
    plans = [_plan(everything, task, numbers) for task, numbers in tasks.items()]
    _check_plans(everything, plans)
    found, measuring, finders = list[Circuit](), list[Cases](), list[Question]()
    for plan in plans:
        split = partial(_splits, plan=plan, by_position=plan.alone and level == "parts")
        splits = split(everything)
        for of_template in splits:
            finders += [case.question for case in of_template.ordering.cases]
            if not plan.alone:
                finders += [case.question for case in of_template.deciding.cases]
        measuring.append(Cases.joined([of_template.measuring for of_template in splits]))
        of_task = replace(
            found_circuit(splits, keep, left),
            left_out=left_out(splits, keep),
            wrong=plan.wrong,
            repeated=plan.repeated,
            of_other_templates=_of_other_templates(splits[0]) if len(splits) == 1 else 0,
        )
        of_task = replace(of_task, exchanged=exchanges(of_task, splits))
        if of_task.unlike_templates:
            own = tuple(found_circuit([of_template], keep, left) for of_template in splits)
            of_task = replace(of_task, own=own)
        if level == "edges":
            first = [of_template.ordering for of_template in splits]
            deciding = [of_template.deciding for of_template in splits]
            edges = found_edges(first, deciding, measuring[-1], of_task.mask)
            of_task = replace(of_task, edges=edges)
        if controls:
            beside = controls_of(everything, split, of_task, keep, left)
            of_task = replace(of_task, controls=beside)
        found.append(of_task)
    shown = measuring[0].cases[0]
    return CircuitReading(
        question=shown.question,
        texts=shown.texts,
        values=shown.ends,
        heading=_heading(shown),
        graph=_graph(model, shown.question, found[0]),
        circuits=tuple(found),
        transfer=_transfer(found, measuring) if len(found) > 1 else None,
        n_parts=found[0].mask.numel(),
        limits=(keep, left),
        notes=token_hints(model, questions),
        finding=tuple(finders),
    )


@dataclass(frozen=True)
class _Plan:
    """The questions of a task that are asked, by their numbers in each template."""

    task: str
    templates: dict[str, list[int]]
    alone: bool  # whether it is a single question, which finds and measures itself
    wrong: tuple[str, ...]
    repeated: int


def _plan(everything: Cases, task: str, numbers: Sequence[int]) -> _Plan:
    """Return the plan of the different questions of a task.

    Raises:
        BilensError: the model answers fewer than three of a template.
    """
    cases = everything.cases
    count = sum(case.question.task == task for case in cases)
    repeated, alone = count - len(numbers), len(numbers) == 1 and count == len(cases)
    templates: dict[str, list[int]] = {}
    wrong = []
    for number, is_right in zip(numbers, everything.some(numbers).answers, strict=True):
        case = cases[number]
        of_template = templates.setdefault(case.question.template, [])
        if alone or is_right is not False:
            of_template.append(number)
        else:
            wrong.append(case.texts[0])
    for template, right in templates.items():
        if len(right) < 3 and not alone:
            places = {"template": template, "task": task}
            names = [f" of the {kind} {name!r}" for kind, name in places.items() if name]
            hints = token_hints(everything.model, [cases[number].question for number in numbers])
            raise BilensError(
                f"the model answers {_counted(len(right), 'different question')}{''.join(names)}, "
                "expected at least three: some order the parts, some decide the size of the "
                "circuit, and others measure it. A question is answered if its token is ahead of "
                f"{' '.join(['those to subtract, or of all others without any.', *hints])}"
            )
    return _Plan(task, templates, alone, tuple(wrong), repeated)


def _check_plans(everything: Cases, plans: Sequence[_Plan]) -> None:
    """Check that what finds does not measure, in any task."""
    finding = list[int]()
    measuring: dict[str, list[int]] = {}
    for plan in plans:
        for numbers in plan.templates.values():
            ordering, deciding, others = Split.shares(numbers)
            finding += [*ordering, *deciding]
            measuring.setdefault(plan.task, []).extend(others)
    check_apart(everything.cases, finding, measuring)


def _splits(cases: Cases, plan: _Plan, *, by_position: bool) -> list[Split]:
    splits = []
    for template, numbers in plan.templates.items():
        if plan.alone:
            only = cases.some(numbers, by_position=by_position)
            splits.append(Split(template, only, only, only))
        else:
            splits.append(Split.of(cases, numbers, template))
    return splits


def _of_the_others(circuit: Circuit) -> str:
    """Return what the circuits of all templates but one restore in words."""
    shares = []
    for left in circuit.left_out:
        share = left.restored[left.template].value
        shares.append(f"{share:z.0%} ({left.template or 'without a name'})")
    text = f"Found without one template, circuits restore on it: {', '.join(shares)}"
    if not circuit.unlike_templates:
        return text
    alone = []
    for own in circuit.own:
        (template,) = own.by_template
        alone.append(f"{own.size} parts restore {own.measured.restored.value:z.0%} ({template})")
    return f"{text}: these templates are answered by other parts. Alone, {', '.join(alone)}"


def _measuring(circuit: Circuit) -> str:
    """Return the questions that measure a circuit in words."""
    measuring, count = circuit.questions[2], len(circuit.by_template)
    if not measuring:
        return "this question"
    if count > 1:
        template = f" of the same {count} templates"
    elif not circuit.of_other_templates:
        template = " of the same template"
    elif circuit.of_other_templates == measuring:
        template = " of other templates"
    else:
        template = f", of which {circuit.of_other_templates} are of other templates"
    text = f"{_counted(measuring, 'other question')}{template}"
    if measuring < LEAST:
        text += " (too few for an interval)"
    elif circuit.measured.restored.low is None:
        text += " (their changes differ too much for an interval)"
    return text


def _of_other_templates(split: Split) -> int:
    """Return the number of questions that measure whose sentences are not among those that find."""
    finding = [*split.ordering.cases, *split.deciding.cases]
    return sum(
        not any(is_similar(case, other) for other in finding) for case in split.measuring.cases
    )


def is_similar(a: Case, b: Case) -> bool:
    """Return whether two questions are of one template: half of their tokens agree in order."""
    tokens, others = (case.passes[0].ids[case.row].tolist() for case in (a, b))
    return SequenceMatcher(None, tokens, others, autojunk=False).ratio() >= 0.5


def _numbers(measured: Measured) -> dict[str, Any]:
    return {
        "restored": measured.restored.value,
        **_ends("", measured.restored),
        "left": measured.left.value,
        **_ends("left ", measured.left),
        "closeness": measured.closeness,
        "right": measured.right,
        "questions": measured.questions,
    }


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    return {f"{name}low": interval.low, f"{name}high": interval.high}


def _control_frame(circuit: Circuit) -> pd.DataFrame:
    """Return the numbers of a circuit, and of each control below."""
    rows = []
    for control in circuit.controls:
        measured = control.measured

        def of_all(count: int | None, total: int = measured.questions) -> str:
            return "" if count is None else f"{count} of {total}"

        rows.append(
            {
                "search": control.name,
                "the model answers": of_all(control.answers),
                "mean change": control.change,
                "parts": f"{control.size}{', none holds' * (control.holds is False)}",
                "restored": measured.restored.value,
                "left": measured.left.value,
                "closeness": measured.closeness,
                "answered with it alone": of_all(measured.right),
            }
        )
    return pd.DataFrame(rows)


def _template_frame(circuit: Circuit) -> pd.DataFrame:
    """Return what the circuit of all templates but one (row) restores on each (column)."""
    rows = []
    for left in circuit.left_out:
        cells = {name: f"{share.value:z.0%}" for name, share in left.restored.items()}
        rows.append({"without": left.template, "parts": int(left.found.mask.sum()), **cells})
    return pd.DataFrame(rows)


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _heading(case: Case) -> str:
    """Return what a question asks; why the answer follows only where the model gives it."""
    question, (first, second) = case.question, case.texts
    if case.answers == (True, False):
        return f"Why does {in_words(question.token)} follow {first}, and not {second}?"
    before, after = (signed(x, "#.3g") for x in case.ends[::-1])
    return f"Why is {question.number} {before} after {second}, and {after} after {first}?"


def _transfer(found: Sequence[Circuit], measuring: Sequence[Cases]) -> Transfer:
    masks = torch.stack([mask for circuit in found for mask in (circuit.mask, circuit.others)])
    restored: list[list[Interval]] = [[] for _ in found]
    left: list[list[Interval]] = [[] for _ in found]
    for cases in measuring:
        values = cases.values(masks.double())
        for number in range(len(found)):
            restored[number].append(Interval.of(values[2 * number], cases.changes))
            left[number].append(Interval.of(values[2 * number + 1], cases.changes))
    return Transfer(tuple(map(tuple, restored)), tuple(map(tuple, left)))


def _graph(model: ResidualModel, question: Question, circuit: Circuit) -> FlowGraph:
    """Return the parts of a circuit at the positions of a question, with its tokens."""
    (through,) = flows(model, [question])
    in_circuit = {(e.part.layer, e.part.number, e.part.position) for e in circuit.effects}
    at_positions = circuit.mask.dim() == 3
    drawn = []
    for node in through.nodes:
        at = node.position if at_positions else None
        is_part = node.kind in ("head", "mlp") and (node.layer, node.number, at) in in_circuit
        if is_part or node.kind == "token":
            drawn.append(node)
    drawn = drawn[:DRAWN]
    named = named_by_measurement(model, through, drawn)
    places = {node.place for node in drawn}
    return named.graph([node for node in named.nodes if node.place in places])
