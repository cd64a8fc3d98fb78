"""Questions: a text, the token that is predicted after it, and a second text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from bilens.errors import BilensError
from bilens.read.flow.contrast import Against, Target
from bilens.read.language.names import TokenDirection, token_text
from bilens.residual import ResidualModel


@dataclass(frozen=True)
class Question:
    """Why a model predicts one token rather than others, after one text and not after another.

    Attributes:
        text: the first text, or its tokens' numbers.
        token: the token that is predicted after it.
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text of as many tokens, its numbers, embeddings, or several
            texts; an empty text for the first text alone.
        task: a name for all questions of one kind.
        target: the logit before a soft cap, the log-probability or the probability of the token.
        position: the position whose next token is predicted, counted from the end if negative.
        vector: a direction of the last normalised stream, in place of the tokens.
    """

    text: str | Int[Tensor, " time"]
    token: str
    minus: tuple[str, ...] = ()
    against: Against = ""
    task: str = ""
    target: Target = "logit"
    position: int = -1
    vector: Float[Tensor, " d_model"] | None = None

    @classmethod
    def of(
        cls,
        text: str | Tensor,
        token: str | TokenDirection | Tensor,
        minus: str | Sequence[str] = (),
        against: Against | None = None,
        **others: Any,
    ) -> "Question":
        """Return the question with tokens and a second run in any of their forms.

        Raises:
            BilensError: tokens to subtract are given twice, or beside a vector.
        """
        if not isinstance(token, str) and minus:
            raise BilensError(
                "minus needs token as a string; TokenDirection(token, minus) has both"
            )
        names = (minus,) if isinstance(minus, str) else tuple(minus)
        if isinstance(token, TokenDirection):
            names, token = tuple(token.minus), token.token
        second = "" if against is None else against
        if isinstance(token, Tensor):
            return cls(text, "", (), second, vector=token, **others)
        return cls(text, token, names, second, **others)

    @property
    def direction(self) -> TokenDirection:
        """The token, and those that are subtracted."""
        return TokenDirection(self.token, self.minus)

    def output_direction(self, model: ResidualModel) -> Float[Tensor, " d_model"]:
        """Return the direction of the last normalised stream along which the number is."""
        return self.direction.vector(model) if self.vector is None else self.vector

    @property
    def has_two_texts(self) -> bool:
        """True if a change between two runs is asked for, false for a number on one text."""
        return not isinstance(self.against, str) or bool(self.against)

    @property
    def number(self) -> str:
        """The number that is asked about in words, with its tokens in quotes."""
        if self.vector is not None:
            return "the direction"
        token, *minus = (f'"{token_text(name)}"' for name in (self.token, *self.minus))
        name = f"{token} minus {', '.join(minus)}" if minus else token
        return name if self.target == "logit" else f"{self.target} of {name}"


def read_questions(path: str | Path) -> list[Question]:
    """Read questions from a file of lines, whose columns are separated by tabs.

    The columns are the text, the token, tokens to subtract (separated by commas) and, if there are
    more, the second text and a name of the task.

    Raises:
        BilensError: the file does not exist, holds no line, or a line has other columns.
    """
    path = Path(path)
    fields = "the text, the token, tokens to subtract (separated by commas), the second text"
    if not path.is_file():
        raise BilensError(f"{path} is no file; expected lines with {fields}")
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        columns = line.split("\t")
        if len(columns) not in (3, 4, 5):
            raise BilensError(
                f"{path}, line {number} has {len(columns)} columns; expected, separated by tabs, "
                f"{fields}"
            )
        text, token, minus, against, task = [*columns, "", ""][:5]
        names = tuple(name for name in minus.split(",") if name)
        questions.append(Question(text, token, names, against, task))
    if not questions:
        raise BilensError(f"{path} holds no line; expected lines with {fields}")
    return questions


def of_equal_kind(questions: Sequence[Question]) -> None:
    """Raise unless all questions have a second text.

    Raises:
        BilensError: one has none, or there are none.
    """
    if not questions or not all(question.has_two_texts for question in questions):
        raise BilensError(
            "questions need a second text each, and there must be at least one; add the other "
            "text as the fourth column, or as against"
        )
