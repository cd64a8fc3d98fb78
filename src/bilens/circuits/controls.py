"""Controls of a circuit: what the same search finds where there is nothing to find."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch

from bilens.circuits.measures import Circuit, Split, find_circuit, measured
from bilens.circuits.search import Cases
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.language.names import exact_names, in_words, shown_tokens
from bilens.memory import check_memory
from bilens.transformer import ResidualModel

RANDOM = 5
"""Random circuits of equal size, whose median is one control."""


def controls(
    cases: Cases, split: Callable[[Cases], list[Split]], circuit: Circuit, keep: float, left: float
) -> dict[str, Circuit]:
    """Return a circuit as the first, and its controls by their names.

    They are random parts, as many; the circuit of an answer that is nonsense; and the circuit of
    the same questions in the model whose layers have their weights shuffled. `split` returns the
    same questions of other cases.
    """
    asked = [case.question for case in cases.cases]
    nonsense = cases.asking(nonsense_answer(cases.model, asked))
    shuffled = Cases.of(shuffled_model(cases.model), asked, any_length=True)
    question = nonsense.cases[0].question
    token, minus = map(in_words, (*question.tokens, *question.minus))
    measuring = Cases.joined([of_template.measuring for of_template in split(cases)])
    return {
        "the answer": circuit,
        "random parts": _random(measuring, circuit),
        f"answer {token} minus {minus}": find_circuit(split(nonsense), keep, left),
        "shuffled weights": find_circuit(split(shuffled), keep, left),
    }


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
            used |= {number for name in question.tokens for number in model.answer(name)}
            used |= {model.token(name) for name in question.minus}
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
    for layer in copy.modules.layers:
        for weight in layer.module.parameters():
            if weight.dim() > 1:
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.data = weight.data.flatten()[order].view_as(weight)
    return copy


def _random(measuring: Cases, circuit: Circuit) -> Circuit:
    """Return the random circuit of equal size that restores the median of some."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(RANDOM, circuit.mask.numel(), generator=generator)
    masks = torch.zeros(scores.shape, dtype=torch.bool)
    masks = masks.scatter(1, scores.topk(circuit.size).indices, True).view(-1, *circuit.mask.shape)
    order = measuring.faithfulness(masks.cpu().double()).argsort()
    mask = masks[order[RANDOM // 2]]
    total, by_template = measured(measuring, mask, ~mask)
    return Circuit(circuit.task, None, mask, mask & False, total, by_template)
