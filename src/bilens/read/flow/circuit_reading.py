"""Circuits of one task or several as a reading: the answer, its parts, and where it transfers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pandas as pd
import torch

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.figures.canvas import BLUE, dress
from bilens.figures.plots import count_axis, heat_figure
from bilens.lazy_imports import go
from bilens.options import Bootstraps, Keep, Level
from bilens.read.flow.ablation import named_by_measurement
from bilens.read.flow.case import Case, split_tasks
from bilens.read.flow.circuit_search import Cases, Circuit, everything_but, found_circuit
from bilens.read.flow.edges import EdgeCircuit, found_edges
from bilens.read.flow.graph import FlowGraph, notebook_picture
from bilens.read.flow.interval import LEAST, Interval
from bilens.read.flow.nodes import NARROW, WIDE
from bilens.read.flow.question import Question, token_hints
from bilens.read.flow.split import flows
from bilens.read.language.names import in_words
from bilens.residual import ResidualModel
from bilens.sections import Fact, Panel, Picture, Section, Table, signed
from bilens.settings import Count

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
        edges: of each circuit, the edges between its parts; none if only parts were asked for.
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
    edges: tuple[EdgeCircuit, ...] = ()
    notes: tuple[str, ...] = ()
    finding: tuple[Question, ...] = ()

    title: ClassVar[str] = "Circuit"
    formats: ClassVar[dict[str, str]] = {"noising": "+.0%", "denoising": "+.0%", "share": "+.1%"}

    def facts(self) -> list[Fact]:
        """Return the answer of each circuit in a sentence, and warnings."""
        answers: list[Fact] = [(circuit.task, self.answer(circuit)) for circuit in self.circuits]
        return answers + ([("note", " ".join(self.notes))] if self.notes else [])

    def answer(self, circuit: Circuit) -> str:
        """Return what a circuit does in a few sentences."""
        change = "absolute change" if circuit.opposite else "change"
        text = (
            f"{circuit.size} of {self.n_parts:,} parts restore {circuit.restored} of the {change} "
            f"on {_measuring(circuit)}"
        )
        if circuit.restored.value > 1.05:
            text += ", more than all, since parts that oppose the answer are left out"
        needed = ", ".join(map(str, circuit.needed))
        kept = f", with {needed} in place," if needed else ""
        if len(circuit.needed) == circuit.size:
            text += f"; any circuit needs {needed}"
        else:
            text += f"; without them{kept} {circuit.left.value:z.0%} is left"
        for edges in self.edges[self.circuits.index(circuit) :][:1]:
            text += (
                f". {len(edges.edges)} of the {edges.candidates} edges between them restore "
                f"{edges.restored}"
            )
        count = circuit.questions[1] or 1
        if circuit.right is not None:
            text += f". The model itself is right in {circuit.right} of {count}"
        if circuit.opposite:
            text += (
                f". In {circuit.opposite} of {count} the answer is the other way round: the number "
                "is smaller after the first text"
            )
        if circuit.similar:
            shared = sum(circuit.similar) / len(circuit.similar)
            text += f". Circuits of resampled questions share {shared:.0%} of their parts"
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
            "circuits": [self._of_circuit(number) for number in range(len(self.circuits))],
            "notes": list(self.notes),
        }
        if self.transfer is not None:
            for name in ("restored", "left"):
                rows: tuple[tuple[Interval, ...], ...] = getattr(self.transfer, name)
                key = "transfer" if name == "restored" else "transfer left"
                record[key] = [[x.value for x in row] for row in rows]
        return record

    def _of_circuit(self, number: int) -> dict[str, Any]:
        circuit = self.circuits[number]
        finding, measuring = circuit.questions
        numbers: dict[str, Any] = {
            "task": circuit.task,
            "restored": circuit.restored.value,
            "low": circuit.restored.low,
            "high": circuit.restored.high,
            "left": circuit.left.value,
            "left low": circuit.left.low,
            "left high": circuit.left.high,
            "questions that find": finding,
            "questions that measure": measuring,
            "right": circuit.right,
            "of a template that found it": circuit.familiar,
            "the other way round": circuit.opposite,
            "repeated": circuit.repeated,
            "restored where it was found": circuit.ordering,
            "similar": list(circuit.similar),
            "parts": [],
            "sizes": [{"size": size, "restored": f} for size, f in circuit.curve],
        }
        for effect in circuit.effects:
            part = {name: getattr(effect, name) for name in ("noising", "denoising")}
            words = {"raises": list(effect.raises), "lowers": list(effect.lowers)}
            needed = {"needed": effect.part in circuit.needed}
            numbers["parts"].append({"part": str(effect.part), **part, **words, **needed})
        for of_circuit in self.edges[number : number + 1]:
            rows = self._edge_rows(of_circuit)
            names = ("from", "to", "through", "share")
            numbers |= {
                "edges": [dict(zip(names, row, strict=True)) for row in rows],
                "edges between the parts": of_circuit.candidates,
                "restored by edges": of_circuit.restored.value,
                "restored by edges low": of_circuit.restored.low,
                "restored by edges high": of_circuit.restored.high,
            }
        return numbers

    def frame(self) -> pd.DataFrame:
        """Return a row for each part of each circuit, the largest effect first."""
        rows = []
        for circuit in self.circuits:
            for effect in circuit.effects:
                numbers = (effect.noising, effect.denoising)
                words = (", ".join(effect.raises), ", ".join(effect.lowers))
                note = "needed by any circuit" if effect.part in circuit.needed else ""
                rows.append((circuit.task, str(effect.part), *numbers, *words, note))
        columns = ["task", "part", "noising", "denoising", "raises", "lowers", "note"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.drop(columns=[name for name in ("task", "note") if not frame[name].any()])

    def plot(self, *, width: int = WIDE) -> "go.Figure":
        """Draw the circuit over the tokens of a question, or the matrix of several tasks.

        See `FlowGraph.plot` for the width.
        """
        if self.transfer is not None:
            return self._matrix()
        caption = f"The strongest of {self.circuits[0].size} parts, with their tokens"
        return self.graph.plot(caption, width=width)

    _repr_mimebundle_ = notebook_picture

    def sections(self) -> list[Section]:
        """Return the answer with its picture, the parts, and the curve of f over size."""
        sections = [self._first_section()]
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
        if self.edges:
            text = (
                "An edge is what one part writes for another one to read, from the embedding to "
                "the logits. All other edges carry what they do on the second text. Shares are "
                "integrated gradients, by three midpoints."
            )
            table = Table(self._edges(), "", self.formats)
            sections.append(Section("Edges", text, [[table]], folded=len(table.frame) > DRAWN))
        size = "The share that is restored on the questions that measure, by number of parts."
        curves = [Picture("sizes", self._curves), Table(self._sizes(), "Sizes")]
        sections.append(Section("Size", size, [curves], folded=True))
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
        frame = self._by_task(rows, "text", "token", "minus", "against")
        return Section("Questions that found it", "", [[Table(frame, "")]], folded=True)

    def _edges(self) -> pd.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for circuit, of_circuit in zip(self.circuits, self.edges, strict=True):
            rows += [(circuit.task, *row) for row in self._edge_rows(of_circuit)]
        return self._by_task(rows, "from", "to", "through", "share")

    @staticmethod
    def _edge_rows(edges: EdgeCircuit) -> list[tuple[str, str, str, float]]:
        rows = []
        for edge in edges.edges:
            source = "embedding" if edge.source is None else str(edge.source)
            readers = ", ".join(map(str, edge.readers)) or "logits"
            rows.append((source, readers, edge.role or "input", edge.share))
        return rows

    def _sizes(self) -> pd.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for circuit in self.circuits:
            rows += [(circuit.task, *point) for point in circuit.curve]
        return self._by_task(rows, "parts", "restored")

    def _by_task(self, rows: list[tuple[Any, ...]], *columns: str) -> pd.DataFrame:
        frame = pd.DataFrame(rows, columns=["task", *columns])
        return frame if len(self.circuits) > 1 else frame.drop(columns="task")

    def _curves(self) -> "go.Figure":
        figure = dress(go.Figure(), height=320, title="Share restored, by number of parts")
        for circuit in self.circuits:
            counts, values = zip(*circuit.curve, strict=True)
            figure.add_scatter(x=counts, y=values, mode="lines+markers", name=circuit.task)
        count_axis(figure, [self.n_parts], "parts")
        if len(self.circuits) == 1:
            figure.update_traces(line_color=BLUE)
        return figure.update_yaxes(title="share of the change")

    def _matrix(self) -> "go.Figure":
        assert self.transfer is not None
        tasks = [circuit.task for circuit in self.circuits]
        rows = self.transfer.restored
        values = torch.tensor([x.value for row in rows for x in row]).view(len(rows), -1)
        title = "Share of the change restored"
        return heat_figure(
            values, tasks, tasks, title=title, across="questions", down="circuit", numbers=True
        )


@checked
def circuit(
    model: ResidualModel,
    questions: Sequence[Question],
    *,
    keep: Keep = 0.9,
    finding: Count = 16,
    level: Level = "parts",
    bootstraps: Bootstraps = 0,
) -> CircuitReading:
    """Find the few heads and MLPs that answer the questions of each task, and measure them.

    The search begins with all parts. Those of the smallest integrated gradients on the first
    questions of a task are dropped, as long as f stays above `keep` on them. The other questions
    measure. Questions that repeat others are left out. Of a single question the parts are at
    positions, and it measures itself.

    f is the number in a run of the first text in which everything else has its value of the second,
    on a scale where the second text has 0 and the first 1. It is above 1 where parts that oppose
    the answer are left out. Over questions it is a share of the absolute change.

    Args:
        model: any.
        questions: each with a second text of as many tokens; by the names of their tasks.
        keep: least f on the questions that find the circuit.
        finding: number of questions of a task that find it; half of all, if there are fewer than
            twice as many.
        level: with "edges" the same search goes on over the edges between the parts: it keeps the
            share `keep` of what the parts keep. Parts of a single question are at all positions.
        bootstraps: number of circuits of resampled questions, which say how stable it is: none, or
            at least two to compare.

    Raises:
        BilensError: there are no questions, one has no second text, texts do not fit, the number is
            the same after both, one of several tasks has a single question, or a question that
            finds a circuit would measure that of another task.
        MemoryLimitError: there are more questions than fit into memory.
    """
    everything = Cases.of(model, questions)
    tasks = split_tasks(everything.cases, lambda count: min(finding, count // 2))
    found, measuring, edges = [], [], []
    finders: list[Question] = []
    for task in tasks:
        alone = not task.measuring
        first = everything.some(task.finding, by_position=alone and level == "parts")
        others = first if alone else everything.some(task.measuring)
        finders += [case.question for case in first.cases]
        of_parts = found_circuit(first, others, keep, bootstraps)
        if level == "edges":
            edges.append(found_edges(first, others, of_parts.mask, keep * of_parts.ordering))
        found.append(replace(of_parts, repeated=task.repeated))
        measuring.append(others)
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
        edges=tuple(edges),
        notes=token_hints(model, questions),
        finding=tuple(finders),
    )


def _measuring(circuit: Circuit) -> str:
    """Return the questions that measure a circuit in words."""
    _, measuring = circuit.questions
    if not measuring:
        return "this question"
    strangers = measuring - circuit.familiar
    if not strangers:
        template = " of the same template"
    elif strangers == measuring:
        template = " of other templates"
    else:
        template = f", of which {strangers} are of other templates"
    text = f"{_counted(measuring, 'other question')}{template}"
    if measuring < LEAST:
        text += " (too few for an interval)"
    elif circuit.restored.low is None:
        text += " (their changes differ too much for an interval)"
    return text


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
    masks = torch.stack([x for circuit in found for x in (circuit.mask, everything_but(circuit))])
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
