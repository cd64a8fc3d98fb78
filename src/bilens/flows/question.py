"""Questions: a text, the token that is predicted after it, and a second run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import checked
from bilens.errors import BilensError
from bilens.language.names import TokenDirection, names_of, token_text
from bilens.options import Target, replaced, replacements, text_list
from bilens.settings import Said
from bilens.transformer import ResidualModel

Tokens = Annotated[
    str | int | Sequence[str | int], Said("a token by its text or its number, or a list of tokens")
]
"""A token by name or number, or several, whose mean is taken."""
Answer = Annotated[
    str | int | Sequence[str | int] | TokenDirection | Float[Tensor, " d_model"],
    Said(
        "a token by its text or its number, a list of tokens, a TokenDirection, or a vector of the "
        "model's width"
    ),
]
"""Tokens, a record of a token minus others, or a direction of the last normalised stream."""
NEUTRAL = "neutral"
"""The second run in which all tokens but the first have the mean embedding of the vocabulary."""
Against = str | Int[Tensor, " other_time"] | Float[Tensor, "*time d_model"] | Sequence[str]
"""A text, its ids, embeddings at each position or one for all, texts whose mean is taken, or
`NEUTRAL`."""


@dataclass(frozen=True, eq=False, init=False)
class Question:
    """Why a model predicts one token rather than others, after one text and not after another.

    Everything that takes a question obeys all of its fields.

    An answer may have several tokens, such as " New York". The number is then the log-probability
    of all of them after the text, and between two texts they follow both.

    Attributes:
        text: the first text, or its tokens' numbers.
        token: the answer that is predicted after it; or several tokens, whose mean logit is taken.
            The token of number 7 is "[7]".
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text, its numbers, embeddings, or several
            texts; `NEUTRAL`, or an empty text for none, of which a flow takes the neutral one.
        task: a name for all questions of one kind.
        template: a name for the questions of a task whose sentences differ in a few words only.
        target: the logit before a soft cap, the log-probability or the probability of the token.
        position: the position whose next token is predicted, counted from the end if negative.
        vector: a direction of the last normalised stream, in place of the tokens, which are empty.

    Raises:
        BilensError: a field has another type, there is no token and no vector, both are given, or a
            vector has another target than its logit.
    """

    text: str | Int[Tensor, " time"]
    token: str | tuple[str, ...]
    minus: tuple[str, ...]
    against: Against
    task: str
    template: str
    target: Target
    position: int
    vector: Float[Tensor, " d_model"] | None

    @checked
    def __init__(  # noqa: PLR0913, PLR0917  the fields
        self,
        text: str | Int[Tensor, " time"],
        token: Answer = (),
        minus: Tokens = (),
        against: Against | None = None,
        task: str = "",
        template: str = "",
        target: Target = "logit",
        position: int = -1,
        vector: Float[Tensor, " d_model"] | None = None,
    ) -> None:
        """Ask about tokens by name or number; a `TokenDirection` has those to subtract.

        A tensor in place of a token is the vector.
        """
        others = names_of(minus)
        if isinstance(token, Tensor):
            if vector is not None:
                raise BilensError("token and vector are both vectors, expected one of them")
            vector = token
            token = ()
        elif isinstance(token, TokenDirection):
            if others:
                raise BilensError(
                    f"minus={others!r} beside a TokenDirection, which has its own; expected one"
                )
            others, token = token.minus, token.token
        names = names_of(token)
        if vector is None and not all(names or [""]):
            raise BilensError("token is empty, expected the token that is predicted after the text")
        if vector is not None and (any(names) or others):
            raise BilensError(
                f"token={token!r} and minus={others!r} beside a vector, expected one of them: "
                "leave the tokens empty, or the vector out"
            )
        if vector is not None and target != "logit":
            raise BilensError(
                f"target={target!r} with a direction, expected a token; or target='logit'"
            )
        if isinstance(against, list):
            against = tuple(against)
        answer = names[0] if len(names) == 1 else names or ""
        second = "" if against is None else against
        values = (text, answer, others, second, task, template, target, position, vector)
        for field, value in zip(fields(self), values, strict=True):
            # A tensor's own gradients would be in those of flows.
            plain = value.detach() if isinstance(value, Tensor) else value
            object.__setattr__(self, field.name, plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    @property
    def _values(self) -> tuple[object, ...]:
        """The fields, with the numbers of tensors, which torch compares one by one."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(
            (x.shape, *x.flatten().tolist()) if isinstance(x, Tensor) else x for x in values
        )

    @property
    def tokens(self) -> tuple[str, ...]:
        """The answer, or each of several; empty for a vector."""
        names = (self.token,) if isinstance(self.token, str) else self.token
        return names if self.vector is None else ()

    @property
    def has_two_texts(self) -> bool:
        """True if a change between two runs is asked for, false for a number on one text."""
        return not isinstance(self.against, str) or bool(self.against)

    @property
    def is_neutral(self) -> bool:
        """True if the second run is the neutral text."""
        return isinstance(self.against, str) and self.against == NEUTRAL

    @property
    def metric(self) -> str:
        """What is measured in words, with its tokens in quotes."""
        if self.vector is not None:
            return "the direction"
        token = " or ".join(f'"{token_text(name)}"' for name in self.tokens)
        minus = [f'"{token_text(name)}"' for name in self.minus]
        name = f"{token} minus {', '.join(minus)}" if minus else token
        return name if self.target == "logit" else f"{self.target} of {name}"


def is_text(against: Against) -> TypeGuard[str | Tensor]:
    """Return whether a second run is a text or its tokens' numbers, and no embeddings."""
    is_ids = isinstance(against, Tensor) and not against.is_floating_point()
    return is_ids or (isinstance(against, str) and against != NEUTRAL)


def second_run(
    model: ResidualModel,
    text: str,
    *,
    against: str | None = None,
    mean: bool = False,
    replace: str = "",
    texts: Sequence[Int[Tensor, " _"]] = (),
) -> tuple[Against | None, str]:
    """Return the second run that options of `bilens flow` name, and its name.

    It is None, without a name, if there are none. `texts` are those whose mean embedding is taken;
    without them it is that of the vocabulary.
    """
    if mean:
        rows = model.places.rows(torch.cat(list(texts))) if texts else model.W_E
        return rows.mean(0), "mean embeddings"
    if replace:
        second = replaced(text, replacements(replace))
        return second, second
    if against and "|" in against:
        return text_list(against), against
    return against or None, against or ""
