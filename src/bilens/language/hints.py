"""Hints about tokens: a space that was probably meant, signs that are dropped, and capitals."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial
from math import log

import torch
from jaxtyping import Int
from torch import Tensor

from bilens.data.texts import write_out
from bilens.transformer import ResidualModel
from bilens.transformer.tokens import ids_within_text, plain_ids

FAR = log(100)
"""Difference of logits of a token with a space in front and without, from which on it is noted."""


@torch.no_grad()
def space_hints(
    model: ResidualModel, questions: Iterable[tuple[Int[Tensor, " time"], Sequence[str]]]
) -> tuple[str, ...]:
    """Return a hint for each token that is far less probable after a text than behind a space.

    `questions` are texts and the names of the tokens or answers after each. Of an answer of several
    tokens the first is compared. "Far" is a hundred times.
    """
    n, counts, space_of = 0, Counter[str](), cache(partial(_spaced, model))
    for ids, names in questions:
        n += 1
        pairs = {name: pair for name in names if (pair := space_of(name))}
        if not pairs:
            continue
        logits = model.logits(ids[None])[0, -1].float()
        for name, (own, other) in pairs.items():
            counts[name] += float(logits[other] - logits[own]) >= FAR
    return tuple(
        f'"{name}" is far less probable here than " {name}"'
        + (f" (in {count} of {n} questions)" if n > 1 else "")
        + f'; did you mean " {name}"?'
        for name, count in counts.items()
        if count
    )


def otherwise_read(
    model: ResidualModel, texts: Iterable[str], answers: Iterable[str]
) -> tuple[str, ...]:
    """Return hints on signs of texts that the tokenizer drops, and on capitals that it lowers.

    Of texts these are words in capitals, since sentences begin with one; of answers all.
    """
    lost_signs, lowered_words = set[str](), dict[str, None]()
    if model.tokenizer is None:
        return ()
    for text in texts:
        lost_signs |= _dropped_signs(model, text)
        words = filter(str.isupper, re.findall(r"\w{2,}", text))
        spelling = write_out(model.tokenizer, model.ids(text)) if text != text.lower() else ""
        lowered_words |= dict.fromkeys(
            word for word in words if word not in spelling and word.lower() in spelling
        )
    for name in answers:
        # Not by `model.answer`, which is slow where a name is unknown.
        spelling = write_out(model.tokenizer, ids_within_text(name, model.tokenizer)).strip()
        if name.strip() != spelling and name.strip().lower() == spelling:
            lowered_words[name.strip()] = None
    signs = "".join(sorted(filter(str.isprintable, lost_signs)))
    notes = [f"The tokenizer drops {signs}."] if signs else []
    if pairs := [f'"{word}" as "{word.lower()}"' for word in lowered_words]:
        notes.append(f"The tokenizer reads {', '.join(pairs)}.")
    return tuple(notes)


def _dropped_signs(model: ResidualModel, text: str) -> set[str]:
    """Return the signs of a text without which it has the same tokens."""
    signs = set[str]()
    for sign in {sign for sign in text if not sign.isascii()}:
        rest = text.replace(sign, "")
        if rest.strip() and torch.equal(model.ids(rest), model.ids(text)):
            signs.add(sign)
    return signs


def _spaced(model: ResidualModel, name: str) -> tuple[int, int] | None:
    """Return the first token of an answer, and its first token behind a space.

    None if that is no other answer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or name.startswith((" ", "Ġ", "▁")):
        return None
    own = model.answer(name)
    # Not by `model.token`, which takes a second to say what is like an unknown name.
    other = plain_ids(f" {name}", tokenizer)
    if own[1:] != other[1:] or own[:1] == other[:1] or tokenizer.unk_token_id in other:
        return None
    return own[0], other[0]
