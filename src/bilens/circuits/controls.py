"""A control of circuits: the same search for an answer that is nonsense."""

import torch

from bilens.circuits.cases import Cases
from bilens.circuits.measures import Measured
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.language.names import exact_names, in_words, shown_tokens


def nonsense(cases: Cases) -> Cases:
    """Return the same texts with an answer of two words that no question has.

    Raises:
        BilensError: the vocabulary has no such words.
    """
    return cases.asking(nonsense_answer(cases))


def verdict(answer: Measured, control: Measured, question: Question) -> str:
    """Return whether a search for nonsense is told apart from the answer, and by what.

    It is if the model answers less than three quarters of its questions, their number changes less
    than half as much, or what was found is less right by a fifth, or less close by a tenth.
    """
    token, minus = map(in_words, (*question.tokens, *question.minus))
    right = [0.0 if x.right is None else x.right / x.questions for x in (answer, control)]
    change = (
        f"the logit of {token} minus {minus} changes by {control.change:.2g}, that of the answers "
        f"by {answer.change:.2g}"
    )
    rightness = (
        f"what is found prefers the model's token in {control.right} of {control.questions} "
        f"questions, for the answers in {answer.right} of {answer.questions}"
    )
    closeness = (
        f"on a single question what is found is off by {1 - control.closeness:z.0%} of the change "
        f"on average, for the answers {1 - answer.closeness:z.0%}"
    )
    reasons = []
    if control.answers is not None and control.answers < 0.75 * control.questions:
        share = f"{control.answers} of {control.questions}"
        reasons.append(f"the model answers so in {share} questions")
    if control.change < answer.change / 2:
        reasons.append(change)
    if right[1] < right[0] - 0.2:
        reasons.append(rightness)
    if control.closeness < answer.closeness - 0.1:
        reasons.append(closeness)
    relation = "can be told from" if reasons else "cannot be told from"
    because = "; ".join(reasons or [change, rightness, closeness])
    return (
        f"Control: the same search with {token} and {minus} in place of all answers, which makes "
        f"no sense. The answers {relation} it: {because}."
    )


def nonsense_answer(cases: Cases) -> tuple[str, str]:
    """Return two tokens of about equal frequency that no question has.

    Tokenizers number their tokens by frequency. They are neighbours there, in the middle of the
    vocabulary, and words with a space in front if there are any.

    Raises:
        BilensError: the vocabulary has no such tokens.
    """
    model, token_ids = cases.model, set[int]()
    for case in cases.cases:
        fitted = case.fitted
        texts = torch.cat(fitted.rows).tolist()
        token_ids |= {*texts, *fitted.tokens, *fitted.minus, *fitted.spoken}
    middle = model.vocab_size // 4
    numbers = [i for i in range(middle, min(middle + 2000, model.vocab_size)) if i not in token_ids]
    numbers += [i for i in range(middle) if i not in token_ids][-2000:]
    names = zip(numbers, shown_tokens(model, numbers), strict=True)
    words = [i for i, name in names if name[:1] == " " and name[1:].isalpha()]
    pair = (words if len(words) > 1 else numbers)[:2]
    if len(pair) < 2:
        raise BilensError(
            "controls need two tokens that no question has, and the vocabulary has none; leave "
            "controls out"
        )
    first, second = exact_names(model, pair)
    return first, second
