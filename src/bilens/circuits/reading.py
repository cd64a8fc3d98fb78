"""The answer to the questions of a task: the stages or the parts that carry it, measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.circuits.case import check_apart, different
from bilens.circuits.cases import Cases
from bilens.circuits.controls import nonsense, verdict
from bilens.circuits.cuts import Cuts, direction_tokens, find_cuts
from bilens.circuits.measures import Circuit, Measured, Split, find_circuit, part_effects
from bilens.circuits.patching import parts_in
from bilens.circuits.questions import (
    UsedQuestion,
    answered_questions,
    counted,
    heading_of,
    premise,
    typical,
    uses,
)
from bilens.circuits.search import HIGHEST, LARGEST
from bilens.circuits.stages import Stages, find_stages
from bilens.flows.fitted import token_hints
from bilens.flows.interval import LEAST
from bilens.flows.question import Question
from bilens.flows.sources import AnyModel, Questions, as_questions, opened
from bilens.language.names import in_words, shown_tokens
from bilens.options import KEEP, Keep, Level, check_circuit_options
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact, by_column
from bilens.settings import Count
from bilens.transformer import ResidualModel

SHOWN = 20
"""Questions on which the effects of single parts are measured, at most."""
GOOD = 0.9
"""Least f on a template that was left out, below which it is said."""

Answer = Stages | Circuit


@dataclass(frozen=True, eq=False)
class TaskAnswer:
    """What carries the answers of a task.

    Attributes:
        circuit: the stages, or the parts.
        questions: all questions of the task, and what each is for.
        premise: what the model says to them.
        control: the search for nonsense beside this one, in a sentence; empty if it was not asked.
        named: the tokens that a single direction at both cuts raises, and those that it lowers.
    """

    circuit: Answer
    questions: tuple[UsedQuestion, ...]
    premise: str
    control: str
    named: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, eq=False, repr=False)
class CircuitReading(Reading):
    """What carries the answers of one task or of several, measured on questions beside.

    Attributes:
        heading: what a typical question asks, in a sentence.
        question: this question.
        values: its number after each text.
        answers: that of each task.
        transfer: of several tasks, what the answer of each (row) does on the questions of each
            (column).
        n_parts: number of heads and MLPs, or of heads, at each position for a single question.
        keep: least f of a circuit of parts.
        notes: warnings about the tokens.
    """

    heading: str
    question: Question
    values: tuple[float, float]
    answers: tuple[TaskAnswer, ...]
    transfer: tuple[tuple[Measured, ...], ...]
    n_parts: int
    keep: float
    notes: tuple[str, ...] = ()

    title: ClassVar[str] = "Circuit"
    is_picture: ClassVar[bool] = True
    has_plain_fields: ClassVar[bool] = True
    formats: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("noising", "denoising"), "+.0%"),
        **dict.fromkeys(("restored", "low", "high", "left", "others restore"), "z.0%"),
        **dict.fromkeys(("mean change", "after the first text", "after the second"), "#.3g"),
    }

    @property
    def circuits(self) -> tuple[Answer, ...]:
        """The stages, or the parts, of each task."""
        return tuple(answer.circuit for answer in self.answers)

    def facts(self) -> list[Fact]:
        """Return the answer of each task in a few sentences, and warnings."""
        facts: list[Fact] = [("note", " ".join(self.notes))] if self.notes else []
        labels = (
            (f"{x.circuit.task}:" if x.circuit.task else "", self.text(x)) for x in self.answers
        )
        return [*facts, *labels]

    def text(self, answer: TaskAnswer) -> str:
        """Return what the model says to the questions of a task, and what carries it."""
        circuit = answer.circuit
        alone = sum(one.use != "left out" for one in answer.questions) == 1
        measurement = _restored(circuit.measured, alone=alone)
        if isinstance(circuit, Stages):
            sentences = _stages_said(circuit, measurement)
            sentences += [] if circuit.cuts is None else cuts_said(circuit.cuts, answer.named)
        else:
            sentences = self._parts_said(circuit, measurement)
        if circuit.left_out:
            sentences.append(_of_the_others(circuit))
        return " ".join(filter(None, [answer.premise, *sentences, answer.control]))

    def _parts_said(self, circuit: Circuit, measurement: str) -> list[str]:
        keep, measures, result = self.keep, circuit.measured, circuit.search
        thing = "heads, with all MLPs in place," if circuit.live.any() else "parts"
        parts = f"{circuit.size} of {self.n_parts:,} {thing}"
        text = f"{parts} restore {measurement}"
        if not circuit.holds:
            text = (
                f"No circuit of at most {LARGEST} restores {keep:.0%} to {HIGHEST:.0%} of the "
                f"change. The best, {parts}, restores {measurement}"
            )
        sentences = [f"{text}."]
        shares = result.sizes[circuit.size]
        mean = sum(shares) / len(shares)
        if len(result.sizes) > 1 and circuit.holds and not keep - 1e-4 <= mean <= HIGHEST:
            bounds = f"{keep:.0%} to {HIGHEST:.0%}"
            sentences.append(f"On the questions that decide it is {mean:.1%}, not within the "
                             f"{bounds} that were asked for.")  # fmt: skip
        worst = min(circuit.by_template.items(), key=lambda item: item[1].restored.value)
        if len(circuit.by_template) > 1 and len(result.sizes) > 1:
            share = f"{worst[1].restored.value:z.0%}"
            sentences.append(f"The size is for the mean over templates; the worst, {worst[0]}, "
                             f"has {share}.")  # fmt: skip
        if curve := curve_said(result.sizes, circuit.size):
            sentences.append(curve)
        if measures.restored.value > 1.2:
            sentences.append("That is more than all, since parts that oppose the answer are out.")
        sentences.append(f"Without them {measures.left.value:z.0%} is left.")
        return sentences

    def columns(self) -> Columns:
        """Return a row for each stage, or for each part with the largest effect first."""
        rows: list[tuple[Any, ...]] = []
        stages = [one for one in self.circuits if isinstance(one, Stages)]
        if stages:
            for one in stages:
                for stage in one.stages:
                    heads = ", ".join(f"{name} ({f:z.0%})" for name, f in stage.strongest)
                    place = (stage.kind, stage.role, stage.first, stage.last)
                    rows.append((one.task, *place, stage.without, heads))
            names = ["task", "stage", "at", "first", "last", "others restore", "as its only head"]
        else:
            for circuit in self.circuits:
                assert isinstance(circuit, Circuit)
                core = parts_in(circuit.core)
                for effect in circuit.effects:
                    note = "in all circuits" * (bool(circuit.left_out) and effect.part in core)
                    numbers = (effect.noising, effect.denoising)
                    rows.append((circuit.task, str(effect.part), *numbers, note))
            names = ["task", "part", "noising", "denoising", "note"]
        columns = dict(by_column(names, rows))
        for name in ("task", "note"):
            if name in columns and not any(columns[name]):
                del columns[name]
        return columns

    @property
    def is_of_stages(self) -> bool:
        """Whether the answer is stages, and not parts."""
        return isinstance(self.circuits[0], Stages)


@checked
def circuit(
    model: AnyModel,
    questions: Questions,
    *,
    level: Level = "stages",
    keep: Keep = KEEP,
    size: Count | None = None,
    heads: bool = False,
    controls: bool = False,
) -> CircuitReading:
    """Find what carries the answers of each task: a few stages, or heads and MLPs one by one.

    A stage is all heads, or all MLPs, of a range of layers, at the word where the texts of a
    question differ, at its end, or between. See `find_stages` for the search of stages, and
    `find_circuit` for that of parts.

    Of the questions of each template some order, some decide how much is needed, and the rest
    measure. With two or more templates each is left out once, and what the others find is measured
    on it. Questions that repeat others, or that the model answers otherwise, are left out. A single
    question measures itself, and its parts are at positions.

    f is the number in a run of the first text in which everything else has its value of the second,
    on a scale where the second text has 0 and the first 1. It is above 1 where parts that oppose
    the answer are left out. Over questions it is a share of the absolute change.

    Processes of `torchrun` divide the questions, and each returns the whole answer.

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        questions: a list of them, of dictionaries, a table, or the path of a file, see
            `bilens.flows.as_questions`. Each has a second text; by the names of their tasks and of
            their templates, of which each has three or more. Of a single question both texts have
            as many tokens; else tokens that are as far from the end stand against each other.
        level: stages, or parts.
        keep: least f of parts, on the questions that decide the size.
        size: number of parts, which is then not searched.
        heads: of parts only heads, with all MLPs in place.
        controls: also search for an answer that is nonsense, and say whether it is told apart.

    Raises:
        BilensError: there are no questions, one has no second text, texts do not fit, the number is
            the same after both, the model answers fewer than three of a template, a question that
            finds would measure in another task, or an option of parts is given for stages.
    """
    check_circuit_options(level, keep, size, heads=heads)
    model, questions = opened(model), as_questions(questions)
    everything = Cases.of(model, questions, any_length=len(questions) > 1, divided=True)
    tasks = different(everything.cases)
    alone = [*map(len, tasks.values())] == [1]
    plans = {
        task: answered_questions(everything, task, numbers, alone=alone)
        for task, numbers in tasks.items()
    }
    if not alone:
        _check_apart(everything, plans)
    everything = everything.by("role" if level == "stages" else "position" if alone else "")
    search: Find = find_stages
    if level == "parts":
        search = partial(find_circuit, keep=keep, size=size, heads=heads)
    answers = _answers(everything, tasks, plans, search, controls=controls)
    measuring = [_measuring(everything, templates) for templates in plans.values()]
    example = typical(measuring[0].cases)
    several = answers if len(answers) > 1 else []
    matrix = tuple(tuple(x.circuit.on(cases) for cases in measuring) for x in several)
    first = answers[0].circuit
    return CircuitReading(
        heading=heading_of(example),
        question=example.question,
        values=example.ends,
        answers=tuple(answers),
        transfer=matrix,
        n_parts=int((everything.everything & ~getattr(first, "live", first.mask & False)).sum()),
        keep=keep,
        notes=token_hints(model, questions),
    )


Find = Callable[..., Answer]


def _answers(
    everything: Cases,
    tasks: Mapping[str, Sequence[int]],
    plans: Mapping[str, Mapping[str, Sequence[int]]],
    search: Find,
    *,
    controls: bool,
) -> list[TaskAnswer]:
    """Return the answers of all tasks, by the numbers of their questions and of their templates."""
    # The last of each task is what is found, on all of its questions.
    steps = sum(2 + len(x) * (len(x) > 1) + controls for x in plans.values())
    answers = list[TaskAnswer]()
    with progress_bar("circuit", total=steps) as bar:

        def find(splits: Sequence[Split], measuring: Cases | None = None) -> Answer:
            """Search, as all answers, those of other templates and controls are found."""
            answer = search(splits, measuring=measuring)
            bar.update()
            return answer

        for task, templates in plans.items():
            of_task = tasks[task], templates
            answers.append(_of_task(everything, task, *of_task, find, controls=controls))
            bar.update()
    return answers


def _of_task(
    everything: Cases,
    task: str,
    numbers: Sequence[int],
    templates: Mapping[str, Sequence[int]],
    find: Find,
    *,
    controls: bool,
) -> TaskAnswer:
    """Return what carries the answers of a task, by the numbers of its different questions."""
    splits = [Split.of(everything, x, name) for name, x in templates.items()]
    answer, control = find(splits), ""
    if isinstance(answer, Stages):
        answer = replace(answer, cuts=find_cuts(splits))
    else:
        # The first questions of each template.
        count, few = max(1, SHOWN // len(splits)), list[Cases]()
        for split in splits:
            few.append(split.measuring.some(range(min(len(split.measuring), count))))
        answer = replace(answer, effects=part_effects(Cases.joined(few), answer.parts))
    of_others = {}
    for split in splits if len(splits) > 1 else ():
        others = [other for other in splits if other is not split]
        of_others[split.template] = find(others, split.measuring)
    answer = replace(answer, left_out=of_others)  # type: ignore[arg-type]
    if controls:
        cases = nonsense(everything)
        of_nonsense = find([Split.of(cases, x, name) for name, x in templates.items()])
        answer = replace(answer, control=of_nonsense)  # type: ignore[arg-type]
        control = verdict(answer.measured, of_nonsense.measured, cases.cases[0].question)
    subset = everything.some([i for x in templates.values() for i in x])
    rises = subset.values(answer.mask.cpu().double()[None])[0]
    questions = uses(everything, task, numbers, templates, rises)
    words = _named(everything.model, answer)
    return TaskAnswer(answer, tuple(questions), premise(questions, subset.cases), control, words)


def _measuring(everything: Cases, templates: Mapping[str, Sequence[int]]) -> Cases:
    return everything.some([i for numbers in templates.values() for i in Split.shares(numbers)[2]])


def _check_apart(everything: Cases, plans: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    finding, others = list[int](), dict[str, list[int]]()
    for task, templates in plans.items():
        for numbers in templates.values():
            ordering, deciding, measures = Split.shares(numbers)
            finding += [*ordering, *deciding]
            others.setdefault(task, []).extend(measures)
    check_apart(everything.cases, finding, others)


def _named(model: ResidualModel, answer: Answer) -> Mapping[str, tuple[str, str]]:
    """Return the tokens that a single direction at each cut raises and lowers."""
    if not isinstance(answer, Stages) or answer.cuts is None or answer.cuts.width != 1:
        return {}
    if model.places.modules is None:  # its unembedding is not known
        return {}
    words: dict[str, tuple[str, str]] = {}
    for place, directions in answer.cuts.directions.items():
        if not len(directions.written):  # nothing is read from there any more
            continue
        sides = direction_tokens(model, directions.written[0])
        raises, lowers = (", ".join(map(in_words, shown_tokens(model, x))) for x in sides)
        words[place] = raises, lowers
    return words


def _restored(measures: Measured, *, alone: bool) -> str:
    """Return what is restored, and on which questions, in words."""
    count = measures.questions
    if alone:
        return f"{measures.restored} of the change on this question"
    text = f"{measures.restored} of the change on {counted(count, 'held-out question')}"
    if count < LEAST:
        text += " (too few for an interval)"
    elif measures.restored.low is None:
        text += " (whose changes differ too much for an interval)"
    if measures.right is not None:
        text += f", and answer {measures.right}"
    return text


def _stages_said(stages: Stages, measurement: str) -> list[str]:
    inside, every = stages.inside
    much = ", most of the model, so that they say little" if 2 * inside > every else ""
    return [
        f"{counted(stages.size, 'stage')} alone restore{'s' * (stages.size == 1)} {measurement}; "
        f"without them {stages.measured.left.value:z.0%} is left.",
        f"They hold {inside:,} of {every:,} heads and MLPs, counted at each kind of place{much}.",
    ]


def cuts_said(cuts: Cuts, named: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return where the change stands, and how many directions it needs, in sentences."""
    sentences = []
    at_word, at_end = cuts.at
    if not cuts.apart:
        sentences.append("The word is the end, so that nothing has to move.")
    else:
        until = f"until layer {cuts.until} ({at_word:z.2f})"
        text = f"The stream at the word alone carries the change {until}"
        if at_end is None:
            # Directions at the end have nothing to carry.
            return [f"{text}, that at the end alone never: it is spread over positions."]
        sentences.append(f"{text}, that at the end alone from layer {cuts.since} ({at_end:z.2f}).")
    count, f = max(cuts.through), cuts.through[max(cuts.through)]
    word = "one" if count == 1 else str(count)
    at = (f"at the {place} before layer {layer}" for place, layer in cuts.layers.items())
    through = f"{word} direction{'s' * (count > 1)} of the stream {f' and {word} '.join(at)}"
    if cuts.width is None:
        text = f"Not even {through} carry it on every template"
        sentences.append(f"{text}; over all they restore {f:z.2f} of the change.")
    elif cuts.width == 1:
        text = f"A property: {f:z.2f} of the change passes through {through}"
        for place, (raises, lowers) in named.items():
            at_place = f"at the {place} " * (len(cuts.layers) > 1)
            text += f"; {at_place}it raises {raises} and lowers {lowers}"
        sentences.append(f"{text}.")
    else:
        text = f"Content: {f:z.2f} of the change passes through {through}"
        sentences.append(f"{text}, and fewer are not enough.")
    return sentences


def curve_said(sizes: Mapping[int, tuple[float, ...]], size: int) -> str:
    """Return how much fewer parts restore, on the mean over templates, in a sentence."""
    means = {count: sum(f) / len(f) for count, f in sorted(sizes.items()) if count < size}
    points = [f"{count} restore {f:z.2f}" for count, f in means.items() if f >= 0.1]
    return f"Fewer, on the questions that decide the size: {', '.join(points)}." if points else ""


def _of_the_others(answer: Answer) -> str:
    """Return what is found on all templates but one, and restores on it, in words."""
    shares = {name: one.measured.restored.value for name, one in answer.left_out.items()}
    points = ", ".join(f"{f:z.2f} ({name or 'without a name'})" for name, f in shares.items())
    text = f"Found without a template, they restore on it: {points}"
    low = [name for name, f in shares.items() if f < GOOD]
    return f"{text}; below {GOOD} on {' and '.join(low)}." if low else f"{text}."
