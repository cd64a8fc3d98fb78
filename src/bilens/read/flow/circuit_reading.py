"""Circuits of one task or several as a reading: the answer, its parts, and where it transfers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
import torch

from bilens.analysis import Reading, analysis
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.figures.canvas import BLUE, dress
from bilens.figures.plots import count_axis, heat_figure
from bilens.lazy_imports import go
from bilens.options import MinusNames
from bilens.read.flow.circuit_search import Cases, Circuit, Interval, everything_but, found_circuit
from bilens.read.flow.edges import EdgeCircuit, found_edges
from bilens.read.flow.graph import FlowGraph
from bilens.read.flow.question import Question, by_task, read_questions
from bilens.read.flow.split import flow
from bilens.read.language.names import in_words
from bilens.residual import ResidualModel
from bilens.sections import Fact, Picture, Section, Table
from bilens.settings import Between, Count

DRAWN = 15
"""Nodes of the picture."""
Level = Literal["parts", "edges"]
"""What a circuit consists of: parts, or parts and the edges between them."""


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
        graph: the parts of the first circuit in the flow of this question.
        circuits: one for each task.
        transfer: what each circuit does on the questions of the others; None for one task.
        n_parts: number of heads and MLPs, at each position for a single question.
        edges: of each circuit, the edges between its parts; none if only parts were asked for.
    """

    question: Question
    graph: FlowGraph
    circuits: tuple[Circuit, ...]
    transfer: Transfer | None
    n_parts: int
    edges: tuple[EdgeCircuit, ...] = ()

    title: ClassVar[str] = "Circuit"
    formats: ClassVar[dict[str, str]] = {"noising": "+.0%", "denoising": "+.0%", "share": "+.1%"}

    def facts(self) -> list[Fact]:
        """Return the answer of each circuit in a sentence."""
        return [(circuit.task, self.answer(circuit)) for circuit in self.circuits]

    def answer(self, circuit: Circuit) -> str:
        """Return what a circuit does in a sentence."""
        _, measuring = circuit.questions
        alone = self.circuits[0].mask.dim() == 3
        on = "this question" if alone else f"{measuring} other questions"
        text = (
            f"{circuit.size} of {self.n_parts:,} parts restore {circuit.restored} of the change "
            f"on {on}; "
        )
        needed = ", ".join(map(str, circuit.needed))
        kept = f", with {needed} in place," if needed else ""
        if len(circuit.needed) == circuit.size:
            text += f"any circuit needs {needed}"
        else:
            text += f"without them{kept} {circuit.left.value:.0%} is left"
        if circuit.restored.value > 1.05:
            text += ", more than all, since parts that oppose the answer are left out"
        for edges in self.edges[self.circuits.index(circuit) :][:1]:
            text += (
                f". {len(edges.edges)} of the {edges.candidates} edges between them restore "
                f"{edges.restored}"
            )
        if circuit.similar:
            shared = sum(circuit.similar) / len(circuit.similar)
            text += f". Circuits of resampled questions share {shared:.0%} of their parts"
        return f"{text}."

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

    def plot(self) -> "go.Figure":
        """Draw the circuit over the tokens of a question, or the matrix of several tasks."""
        if self.transfer is not None:
            return self._matrix()
        return self.graph.plot(f"The strongest of {self.circuits[0].size} parts, with their tokens")

    def sections(self) -> list[Section]:
        """Return the answer with its picture, the parts, and the curve of f over size."""
        why = (
            f"Why does {in_words(self.question.token)} follow “{self.question.text}”, and not "
            f"“{self.question.against}”?"
        )
        answers = " ".join(self.answer(circuit) for circuit in self.circuits[:1])
        sections = [Section(why, answers, [[Picture("circuit", self.plot)]])]
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
        return sections

    def _edges(self) -> pd.DataFrame:
        rows: list[tuple[Any, ...]] = []
        for circuit, of_circuit in zip(self.circuits, self.edges, strict=True):
            for edge in of_circuit.edges:
                source = "embedding" if edge.source is None else str(edge.source)
                readers = ", ".join(map(str, edge.readers)) or "logits"
                rows.append((circuit.task, source, readers, edge.role or "input", edge.share))
        return self._by_task(rows, "from", "to", "through", "share")

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
        return heat_figure(values, tasks, tasks, title=title, across="questions", down="circuit")


def circuit(
    model: ResidualModel,
    questions: Sequence[Question],
    *,
    keep: float = 0.9,
    ordering: int = 16,
    level: Level = "parts",
    bootstraps: int = 0,
) -> CircuitReading:
    """Find the few heads and MLPs that answer the questions of each task, and measure them.

    The search begins with all parts. Those of the smallest integrated gradients on the first
    questions of a task are dropped, as long as f stays above `keep` on them. The other questions
    measure. Of a single question the parts are at positions, and it measures itself.

    f is the number in a run of the first text in which everything else has its value of the second,
    on a scale where the second text has 0 and the first 1. It is above 1 where parts that oppose
    the answer are left out.

    Args:
        model: any.
        questions: each with a second text of as many tokens; by the names of their tasks.
        keep: least f on the questions that find the circuit.
        ordering: number of questions of a task that find it; half of all, if there are fewer than
            twice as many.
        level: with "edges" the same search goes on over the edges between the parts: it keeps the
            share `keep` of what the parts keep. Parts of a single question are at all positions.
        bootstraps: number of circuits of resampled questions, which say how stable it is.

    Raises:
        BilensError: there are no questions, one has no second text, texts do not fit, or the token
            is as probable after both.
    """
    found, measuring, edges = [], [], []
    for of_task in by_task(questions):
        single = len(questions) == 1 and level == "parts"
        count = min(ordering, max(1, len(of_task) // 2))
        first = Cases(model, of_task[:count], by_position=single)
        others = Cases(model, of_task[count:]) if len(of_task) > 1 else first
        of_parts = found_circuit(first, others, keep, bootstraps)
        if level == "edges":
            edges.append(found_edges(first, others, of_parts.mask, keep * of_parts.ordering))
        found.append(of_parts)
        measuring.append(others)
    shown = measuring[0].cases[0].question
    transfer = _transfer(found, measuring) if len(found) > 1 else None
    graph = _graph(model, shown, found[0])
    n_parts = found[0].mask.numel()
    return CircuitReading(shown, graph, tuple(found), transfer, n_parts, tuple(edges))


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
    split = flow(model, question.text, question.direction, against=question.against)
    places = {(e.part.layer, e.part.number, e.part.position) for e in circuit.effects}
    at_positions = circuit.mask.dim() == 3
    numbers = []
    for number, node in enumerate(split.nodes):
        place = node.number if node.kind == "head" else None
        at = node.position if at_positions else None
        if node.kind not in ("output", "rest", "bias") and (
            node.kind == "token" or (node.layer, place, at) in places
        ):
            numbers.append(number)
    numbers.sort(key=lambda number: -abs(split.nodes[number].flow))
    return split.graph(numbers[:DRAWN])


@analysis("circuit")
@checked
def read_circuit(  # noqa: PLR0913  a question, or a file, and how to search
    model: ResidualModel,
    prompt: str = "",
    token: str = "",
    *,
    minus: MinusNames = (),
    against: str = "",
    pairs: str = "",
    keep: Annotated[float, Between(0, 1.5)] = 0.9,
    ordering: Count | None = None,
    level: Level = "parts",
    bootstraps: Annotated[int, Between(0)] = 0,
) -> CircuitReading:
    """Find the few heads and MLPs that answer a question, and measure them on other questions.

        bilens circuit model.gguf --pairs agreement.tsv --level edges
        bilens circuit runs/grammar --prompt "then ben ate" --token rice --against "then lily ate"

    Of one pair of texts the parts are at positions. Of a file with several tasks the circuit of
    each task is measured on the questions of all.

    Args:
        model: Any, with its tokenizer.
        prompt: The first text, of one question.
        token: The token that is predicted after it.
        minus: Tokens whose mean logit is subtracted.
        against: The second text, of as many tokens.
        pairs: File with a line for each question, its columns separated by tabs: the text, the
            token, tokens to subtract (separated by commas), the second text and, with several
            tasks, the name of its task. The first questions of a task find, the others measure.
        keep: Least share of the change that a circuit keeps on the questions that find it.
        ordering: Number of questions of a task that find, by default 16; at most half of them.
        level: Parts, or also the edges between them that carry the answer.
        bootstraps: Number of circuits of resampled questions, to see how stable it is; each takes a
            search.

    Raises:
        BilensError: neither a question nor a file is given, or both, or texts do not fit.
    """
    if bool(pairs) == bool(prompt):
        raise BilensError(
            "prompt and pairs are both questions; expected one of them: --prompt TEXT with --token "
            "and --against, or --pairs FILE"
        )
    # Options of one way to ask beside the other.
    one_question = {"token": token, "minus": minus, "against": against}
    unused = one_question if pairs else {"ordering": ordering}
    for name, value in unused.items():
        if value:
            beside = (
                "pairs, whose lines have their own" if pairs else "prompt, which is one question"
            )
            raise BilensError(f"{name}={value!r} has no effect beside {beside}; leave it out")
    questions = read_questions(pairs) if pairs else [Question(prompt, token, minus, against)]
    return circuit(
        model, questions, keep=keep, ordering=ordering or 16, level=level, bootstraps=bootstraps
    )
