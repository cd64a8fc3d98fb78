"""The questions of a circuit: what each is for, what it changes, and whether it is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from bilens.circuits.case import Case
from bilens.circuits.cases import Cases
from bilens.circuits.measures import Split
from bilens.errors import BilensError
from bilens.flows.fitted import token_hints
from bilens.flows.question import Question
from bilens.language.names import quoted
from bilens.sections import signed

LITTLE: dict[str, float] = {"logit": 0.5, "log-probability": 0.5, "probability": 0.05}
"""Mean change below which there is little to explain, by the target."""

Use = Literal["ranks parts", "decides how many", "measures", "all", "left out"]
"""What a question is for; a single one is for all."""
USES: tuple[Use, ...] = ("ranks parts", "decides how many", "measures")
"""What the questions of a split are for."""


@dataclass(frozen=True, eq=False)
class UsedQuestion:
    """A question, what it is for, and its number after both texts.

    Attributes:
        question: the question.
        texts: both texts, in quotes.
        use: what it is for.
        why: why it is left out.
        values: its number after the first text and after the second.
        restored: f of what was found, on this question alone; None if it is left out.
    """

    question: Question
    texts: tuple[str, str]
    use: Use
    why: str
    values: tuple[float, float]
    restored: float | None = None


def answered_questions(
    everything: Cases, task: str, numbers: Sequence[int], *, alone: bool
) -> dict[str, list[int]]:
    """Return the different questions of a task that the model answers, by their templates.

    A single question, which finds and measures itself, need not be answered.

    Raises:
        BilensError: the model answers fewer than three of a template.
    """
    of_task = everything.some(numbers)
    templates: dict[str, list[int]] = {}
    for i, case, is_right in zip(numbers, of_task.cases, of_task.answers, strict=True):
        of_template = templates.setdefault(case.question.template, [])
        if alone or is_right is not False:
            of_template.append(i)
    for template, right in templates.items():
        if len(right) < 3 and not alone:
            places = {"template": template, "task": task}
            names = [f" of the {kind} {name!r}" for kind, name in places.items() if name]
            hints = token_hints(everything.model, [case.question for case in of_task.cases])
            raise BilensError(
                f"the model answers {counted(len(right), 'different question')}{''.join(names)}, "
                "expected at least three: some order the parts, some decide how many are needed, "
                "and others measure. A question is answered if its token is ahead of "
                f"{' '.join(['those to subtract, or of all others without any.', *hints])}"
            )
    return templates


def uses(
    everything: Cases,
    task: str,
    different: Sequence[int],
    templates: Mapping[str, Sequence[int]],
    rises: Float[Tensor, " used"],
) -> list[UsedQuestion]:
    """Return all questions of a task in their order, with what each is for.

    `different` are the numbers of those that repeat no other one. `rises` are those of what was
    found, on the questions of all templates one after the other.
    """
    roles: dict[int, Use] = {}
    fractions: dict[int, float] = {}
    ids = [i for numbers in templates.values() for i in numbers]
    for i, rise in zip(ids, rises.tolist(), strict=True):
        fractions[i] = rise / abs(everything.cases[i].change)
    for numbers in templates.values():
        shares = Split.shares(numbers)
        for use, some in zip(USES, shares, strict=True):
            for i in some:
                roles[i] = "all" if len(numbers) == 1 else use
    questions = []
    for i, case in enumerate(everything.cases):
        if case.question.task != task:
            continue
        why = ""
        if i not in roles:
            why = "the model answers otherwise" if i in different else "repeats another"
        use = roles.get(i, "left out")
        f = fractions.get(i)
        questions.append(UsedQuestion(case.question, case.texts, use, why, case.ends, f))
    return questions


def premise(questions: Sequence[UsedQuestion], cases: Sequence[Case]) -> str:
    """Return what the model says to the questions, before anything is explained.

    `cases` are those that are used.
    """
    target = cases[0].question.target
    change = sum(abs(case.change) for case in cases) / len(cases)
    little = "; there is little to explain" if change < LITTLE[target] else ""
    if len(cases) == 1:
        (case,) = cases
        first, second = (signed(x, "#.3g") for x in case.ends)
        the = "" if target == "logit" else "the "
        kinds: dict[tuple[bool | None, bool | None], str] = {
            (False, False): "The model does not give this answer after either text",
            (True, True): "The model gives this answer after both texts",
            (False, True): "The model gives this answer after the second text, not the first",
            (True, False): "The model gives this answer after the first text, not the second",
        }
        problem = kinds.get(case.answers, "The texts change the number")
        after = f"{case.texts[0]}, and {second} after {case.texts[1]}"
        text = f"{problem}: {the}{case.question.metric} is {first} after {after}{little}."
        return _with_left_out(text, questions)
    highs = sum(max(case.ends) for case in cases) / len(cases)
    lows = sum(min(case.ends) for case in cases) / len(cases)
    text = (
        f"Over {len(cases)} questions the {target} of the answer{_beside(cases)} is "
        f"{signed(highs, '#.3g')} after one text and {signed(lows, '#.3g')} after the other, "
        f"on average{little}."
    )
    return _with_left_out(text, questions)


def _beside(cases: Sequence[Case]) -> str:
    """Return what is subtracted from the number of the answer, in words."""
    subtract = [bool(case.question.minus) for case in cases]
    single = all(len(case.question.minus) == 1 for case in cases)
    other = "the other one" if single else "the others"
    return f" minus that of {other}" if all(subtract) else ""


def _with_left_out(text: str, questions: Sequence[UsedQuestion]) -> str:
    wrong = sum(x.why == "the model answers otherwise" for x in questions)
    n_repeats = sum(x.why == "repeats another" for x in questions)
    parts = []
    if wrong:
        parts.append(f"{counted(wrong, 'question')} that the model answers otherwise")
    if n_repeats:
        parts.append(counted(n_repeats, "repeated question"))
    return f"{text} Left out: {' and '.join(parts)}." if parts else text


def heading_of(case: Case) -> str:
    """Return what a question asks; why the answer follows only where the model gives it."""
    question, (first, second) = case.question, case.texts
    task = f"{question.task}: " if question.task else ""
    if case.answers == (True, False):
        answer = " or ".join(map(quoted, question.tokens))
        why = "why" if task else "Why"
        return f"{task}{why} does {answer} follow {first}, and not {second}?"
    before, after = (signed(x, "#.3g") for x in case.ends[::-1])
    the = "" if question.target == "logit" else "the "
    why = "why" if task else "Why"
    metric = f"{the}{question.metric}"
    return f"{task}{why} is {metric} {before} after {second}, and {after} after {first}?"


def typical(cases: Sequence[Case]) -> Case:
    """Return the question of the median change, of those that are answered as they ask."""
    candidates = [case for case in cases if case.answers == (True, False)] or list(cases)
    order = sorted(candidates, key=lambda case: abs(case.change))
    return order[len(order) // 2]


def counted(count: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
