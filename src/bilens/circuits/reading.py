"""Circuits of one task or several as a reading: the answer, its parts, and where it transfers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import ClassVar

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.circuits.case import Case, check_apart, different
from bilens.circuits.controls import controls as controls_of
from bilens.circuits.interval import LEAST
from bilens.circuits.measures import (
    SHOWN,
    Circuit,
    Measured,
    Split,
    find_circuit,
    left_out,
    part_effects,
)
from bilens.circuits.patching import parts_in
from bilens.circuits.search import HIGHEST, KEEP, SIZES, Cases
from bilens.errors import BilensError
from bilens.flows.ablation import name_by_measurement
from bilens.flows.fitted import token_hints
from bilens.flows.graph import FlowGraph
from bilens.flows.question import Question
from bilens.flows.sources import AnyModel, Questions, as_questions, opened
from bilens.flows.split import flows
from bilens.language.names import quoted
from bilens.options import Keep, Left
from bilens.sections import Columns, Fact, by_column, signed
from bilens.transformer import ResidualModel

DRAWN = 15
"""Nodes of the picture."""


@dataclass(frozen=True, eq=False, repr=False)
class CircuitReading(Reading):
    """The circuits of one task or of several, measured on questions that did not find them.

    Attributes:
        question: the first question that measures.
        texts: both of its texts for a page, in quotes.
        values: its number after each text.
        heading: what it asks, in a sentence.
        graph: the parts of the first circuit in the flow of this question; None where its texts
            have unlike numbers of tokens, of which there is no flow.
        circuits: one for each task.
        transfer: of several tasks, what each circuit (row) does on the questions of each (column).
        n_parts: number of heads and MLPs, at each position for a single question.
        limits: least f of a circuit, and the largest f of everything else.
        notes: warnings about the tokens.
        finding: the questions that found the circuits.
    """

    question: Question
    texts: tuple[str, str]
    values: tuple[float, float]
    heading: str
    graph: FlowGraph | None
    circuits: tuple[Circuit, ...]
    transfer: tuple[tuple[Measured, ...], ...]
    n_parts: int
    limits: tuple[float, float]
    notes: tuple[str, ...] = ()
    finding: tuple[Question, ...] = ()

    title: ClassVar[str] = "Circuit"
    is_picture: ClassVar[bool] = True
    formats: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("noising", "denoising"), "+.0%"),
        **dict.fromkeys(("restored", "low", "high", "left", "closeness"), "z.0%"),
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
        if not circuit.holds:
            where = (
                "every template" if len(circuit.by_template) > 1 else "the questions that decide"
            )
            parts = (
                f"No circuit of at most {SIZES[-1]} parts restores {keep:.0%} to {HIGHEST:.0%} of "
                f"the {change} on {where}. The best, {parts},"
            )
        restore = "restore" if circuit.holds else "restores"
        text = f"{parts} {restore} {measured.restored} of the {change} on {_measuring(circuit)}"
        if measured.right is not None and circuit.questions[2]:
            answer = "answer" if circuit.holds else "answers"
            text += f", and {answer} {measured.right} of them"
        if (half := circuit.half) is not None and circuit.questions[2]:
            text += f"; {half} are enough for half of it, on the questions that decide the size"
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

    def columns(self) -> Columns:
        """Return a row for each part of each circuit, the largest effect first."""
        rows = []
        for circuit in self.circuits:
            needed, core = parts_in(circuit.needed), parts_in(circuit.core)
            for effect in circuit.effects:
                numbers = (effect.noising, effect.denoising)
                notes = []
                if effect.part in needed:
                    notes.append("needed by any circuit")
                if circuit.left_out and effect.part in core:
                    notes.append("in all circuits")
                rows.append((circuit.task, str(effect.part), *numbers, ", ".join(notes)))
        names = ["task", "part", "noising", "denoising", "note"]
        columns = dict(by_column(names, rows))
        for name in ("task", "note"):
            if not any(columns[name]):
                del columns[name]
        return columns


@checked
def circuit(
    model: AnyModel,
    questions: Questions,
    *,
    keep: Keep = KEEP,
    left: Left = 0.1,
    controls: bool = False,
) -> CircuitReading:
    """Find the few heads and MLPs that answer the questions of each task, and measure them.

    Of the questions of each template some order the parts, by integrated gradients; the circuit is
    the smallest whose f lies between `keep` and 1.15 on others, of every template, and at the next
    size too; and the rest measure. With two or more templates each is left out once, and the
    circuit of the others is measured on it. Questions that repeat others, or that the model answers
    otherwise, are left out. Of a single question, which measures itself, parts are at positions.

    f is the number in a run of the first text in which everything else has its value of the second,
    on a scale where the second text has 0 and the first 1. It is above 1 where parts that oppose
    the answer are left out. Over questions it is a share of the absolute change.

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        questions: a list of them, of dictionaries, a table, or the path of a file, see
            `bilens.flows.as_questions`. Each has a second text; by the names of their tasks and of
            their templates, of which each has three or more. Of a single question both texts have
            as many tokens; else tokens that are as far from the end stand against each other.
        keep: least f on the questions that decide the size.
        left: largest f there of everything but the circuit. Parts are added until it is met.
        controls: also search where there is nothing to find: random parts, a nonsense answer, and
            shuffled weights.

    Raises:
        BilensError: there are no questions, one has no second text, texts do not fit, the number is
            the same after both, the model answers fewer than three of a template, or a question
            that finds a circuit would measure that of another task.
        MemoryLimitError: there are more questions than fit into memory.
    """
    model, questions = opened(model), as_questions(questions)
    # Parts at positions stand against those of as many tokens.
    everything = Cases.of(model, questions, any_length=len(questions) > 1)
    tasks = different(everything.cases)
    alone = [*map(len, tasks.values())] == [1]
    plans = {
        task: _templates(everything, task, numbers, alone=alone) for task, numbers in tasks.items()
    }
    if not alone:
        finding, others = list[int](), dict[str, list[int]]()
        for task, templates in plans.items():
            for numbers in templates.values():
                ordering, deciding, measures = Split.shares(numbers)
                finding += [*ordering, *deciding]
                others.setdefault(task, []).extend(measures)
        check_apart(everything.cases, finding, others)
    found, measuring, finders = list[Circuit](), list[Cases](), list[Question]()
    for task, templates in plans.items():
        split = partial(_splits, templates=templates, by_position=alone)
        splits = split(everything)
        used = {number for numbers in templates.values() for number in numbers}
        first = Cases.joined([of_template.ordering for of_template in splits])
        second = Cases.joined([of_template.deciding for of_template in splits])
        finders += [case.question for case in dict.fromkeys([*first.cases, *second.cases])]
        measuring.append(Cases.joined([of_template.measuring for of_template in splits]))
        cases = measuring[-1].cases
        of_task = replace(
            _shown(find_circuit(splits, keep, left), splits),
            questions=(len(first), len(second), 0 if alone else len(cases)),
            opposite=sum(case.change < 0 for case in cases),
            left_out=left_out(splits, keep, left),
            wrong=tuple(everything.cases[i].texts[0] for i in tasks[task] if i not in used),
            repeated=sum(x.question.task == task for x in everything.cases) - len(tasks[task]),
            of_other_templates=_of_other_templates(splits[0]) if len(splits) == 1 else 0,
        )
        if controls:
            measured_controls = controls_of(everything, split, of_task, keep, left)
            of_task = replace(of_task, controls=measured_controls)
        found.append(of_task)
    shown = min(measuring[0].cases, key=lambda case: not case.are_alike)
    matrix = []
    for one in found if len(found) > 1 else ():
        matrix.append(tuple(one.on(cases) for cases in measuring))
    return CircuitReading(
        question=shown.question,
        texts=shown.texts,
        values=shown.ends,
        heading=_heading(shown),
        graph=_graph(model, shown.question, found[0]) if shown.are_alike else None,
        circuits=tuple(found),
        transfer=tuple(matrix),
        n_parts=found[0].mask.numel(),
        limits=(keep, left),
        notes=token_hints(model, questions),
        finding=tuple(finders),
    )


def _templates(
    everything: Cases, task: str, numbers: Sequence[int], *, alone: bool
) -> dict[str, list[int]]:
    """Return the different questions of a task that the model answers, by their templates.

    A single question, which finds and measures itself, need not be answered.

    Raises:
        BilensError: the model answers fewer than three of a template.
    """
    asked = everything.some(numbers)
    templates: dict[str, list[int]] = {}
    for number, case, is_right in zip(numbers, asked.cases, asked.answers, strict=True):
        of_template = templates.setdefault(case.question.template, [])
        if alone or is_right is not False:
            of_template.append(number)
    for template, right in templates.items():
        if len(right) < 3 and not alone:
            places = {"template": template, "task": task}
            names = [f" of the {kind} {name!r}" for kind, name in places.items() if name]
            hints = token_hints(everything.model, [case.question for case in asked.cases])
            raise BilensError(
                f"the model answers {_counted(len(right), 'different question')}{''.join(names)}, "
                "expected at least three: some order the parts, some decide the size of the "
                "circuit, and others measure it. A question is answered if its token is ahead of "
                f"{' '.join(['those to subtract, or of all others without any.', *hints])}"
            )
    return templates


def _splits(
    cases: Cases, templates: Mapping[str, Sequence[int]], *, by_position: bool
) -> list[Split]:
    cases = cases.some(range(len(cases)), by_position=by_position)
    return [Split.of(cases, numbers, name) for name, numbers in templates.items()]


def _shown(circuit: Circuit, splits: Sequence[Split]) -> Circuit:
    """Return a circuit with the effects of its parts, on a few questions of each template."""
    count, few = max(1, SHOWN // len(splits)), list[Cases]()
    for split in splits:
        few.append(split.measuring.some(range(min(len(split.measuring), count))))
    return replace(circuit, effects=part_effects(Cases.joined(few), circuit.mask))


def _of_the_others(circuit: Circuit) -> str:
    """Return what the circuits of all templates but one restore in words."""
    shares = [
        f"{one.measured.restored.value:z.0%} ({name or 'without a name'})"
        for name, one in circuit.left_out.items()
    ]
    text = f"Found without one template, circuits restore on it: {', '.join(shares)}"
    if circuit.unlike_templates:
        text += f": {' and '.join(circuit.unlike_templates)} are answered by other parts"
    return text


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


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _heading(case: Case) -> str:
    """Return what a question asks; why the answer follows only where the model gives it."""
    question, (first, second) = case.question, case.texts
    if case.answers == (True, False):
        answer = " or ".join(map(quoted, question.tokens))
        return f"Why does {answer} follow {first}, and not {second}?"
    before, after = (signed(x, "#.3g") for x in case.ends[::-1])
    the = "" if question.target == "logit" else "the "
    return f"Why is {the}{question.number} {before} after {second}, and {after} after {first}?"


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
    named = name_by_measurement(model, through, drawn)
    places = {node.place for node in drawn}
    graph = named.graph([node for node in named.nodes if node.place in places])
    through.origin.release()
    return graph
