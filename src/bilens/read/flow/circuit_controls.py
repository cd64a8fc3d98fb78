"""Controls of a circuit: what the same search finds where there is nothing to find."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch

from bilens.errors import BilensError
from bilens.memory import check_memory
from bilens.read.flow.circuit_measures import (
    Circuit,
    ControlCircuit,
    Measured,
    Split,
    found_parts,
    measured,
)
from bilens.read.flow.circuit_search import Cases
from bilens.read.flow.question import Question
from bilens.read.language.names import exact_names, shown_tokens
from bilens.residual import ResidualModel

RANDOM = 5
"""Random circuits of equal size, whose mean is one control."""


def controls(
    cases: Cases, split: Callable[[Cases], list[Split]], circuit: Circuit, keep: float, left: float
) -> tuple[ControlCircuit, ...]:
    """Return a circuit as a row, and its controls.

    They are random parts, as many; the circuit of an answer that is nonsense; and the circuit of
    the same questions in the model whose layers have their weights shuffled. `split` returns the
    same questions of other cases.
    """
    asked = [case.question for case in cases.cases]
    nonsense = cases.asking(nonsense_answer(cases.model, asked))
    shuffled = Cases.of(shuffled_model(cases.model), asked)
    token, minus = nonsense.cases[0].question.direction.words.split(" minus ")
    return (
        _control("the answer", split(cases), circuit.size, circuit.found.holds, circuit.measured),
        _random(split(cases), circuit.size),
        _searched(f"answer {token} minus {minus}", split(nonsense), keep, left),
        _searched("shuffled weights", split(shuffled), keep, left),
    )


def nonsense_answer(model: ResidualModel, questions: Sequence[Question]) -> tuple[str, str]:
    """Return two tokens of about equal frequency that no question has.

    Tokenizers number their tokens by frequency. They are neighbours there, in the middle of the
    vocabulary, and words with a space in front if there are any.

    Raises:
        BilensError: the vocabulary has no such tokens.
    """
    used = set[int]()
    for question in questions:
        used |= set(model.ids(question.text).tolist())
        if isinstance(question.against, str):
            used |= set(model.ids(question.against).tolist())
        if question.vector is None:
            used |= set(question.token_numbers(model))
    middle = model.vocab_size // 4
    numbers = [i for i in range(middle, min(middle + 2000, model.vocab_size)) if i not in used]
    numbers += [i for i in range(middle) if i not in used][-2000:]
    texts = shown_tokens(model, numbers)
    words = [
        i for i, text in zip(numbers, texts, strict=True) if text[:1] == " " and text[1:].isalpha()
    ]
    chosen = (words if len(words) > 1 else numbers)[:2]
    if len(chosen) < 2:
        raise BilensError(
            "controls need two tokens that no question has, and the vocabulary has none; leave "
            "controls out"
        )
    first, second = exact_names(model, chosen)
    return first, second


def shuffled_model(model: ResidualModel) -> ResidualModel:
    """Return a copy of a model in which the numbers of each matrix of its layers change places.

    Raises:
        MemoryLimitError: there is not enough for the copy.
    """
    size = sum(weight.nbytes for weight in model.model.parameters())
    check_memory(size, "A copy of the model, as control,", model.device)
    copy = ResidualModel(deepcopy(model.model), model.tokenizer)
    generator = torch.Generator().manual_seed(0)
    for layer in copy.parts.layers:
        for weight in layer.module.parameters():
            if weight.dim() > 1:
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.data = weight.data.flatten()[order].view_as(weight)
    return copy


def _searched(name: str, splits: Sequence[Split], keep: float, left: float) -> ControlCircuit:
    found, mask, needed = found_parts(splits, keep, left)
    total, _ = measured(splits, mask, ~mask | needed)
    return _control(name, splits, int(mask.sum()), found.holds, total)


def _random(splits: Sequence[Split], size: int) -> ControlCircuit:
    shape, generator = splits[0].measuring.shape, torch.Generator().manual_seed(0)
    totals = []
    for _ in range(RANDOM):
        scores = torch.rand(shape, generator=generator).flatten()
        mask = torch.zeros(len(scores), dtype=torch.bool)
        mask[scores.topk(size).indices] = True
        mask = mask.view(shape)
        totals.append(measured(splits, mask, ~mask)[0])
    # The one in the middle of them.
    middle = sorted(totals, key=lambda total: total.restored.value)[RANDOM // 2]
    return _control("random parts", splits, size, None, middle)


def _control(
    name: str, splits: Sequence[Split], size: int, holds: bool | None, total: Measured
) -> ControlCircuit:
    cases = [case for split in splits for case in split.measuring.cases]
    every = Cases.joined([split.measuring for split in splits]).answers
    answers = [is_right for is_right in every if is_right is not None]
    change = sum(abs(case.change) for case in cases) / len(cases)
    return ControlCircuit(name, size, holds, total, sum(answers) if answers else None, change)
