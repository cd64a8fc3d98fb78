"""Questions: a text, the token that is predicted after it, and a second text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bilens.errors import BilensError
from bilens.read.language.names import TokenDirection

COLUMNS = "the text, the token, tokens to subtract (separated by commas), the second text"


@dataclass(frozen=True)
class Question:
    """Why a model predicts one token rather than others, after one text and not after another.

    Attributes:
        text: the first text.
        token: the token that is predicted after it.
        minus: tokens whose mean logit is subtracted.
        against: the second text, of as many tokens; empty for the first text alone.
        task: a name for all questions of one kind.
    """

    text: str
    token: str
    minus: tuple[str, ...] = ()
    against: str = ""
    task: str = ""

    @property
    def direction(self) -> TokenDirection:
        """The token, and those that are subtracted."""
        return TokenDirection(self.token, self.minus)


def read_questions(path: str | Path) -> list[Question]:
    """Read questions from a file of lines, whose columns are separated by tabs.

    The columns are the text, the token, tokens to subtract (separated by commas) and, if there are
    more, the second text and a name of the task.

    Raises:
        BilensError: the file does not exist, holds no line, or a line has other columns.
    """
    path = Path(path)
    if not path.is_file():
        raise BilensError(f"{path} is no file; expected lines with {COLUMNS}")
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        columns = line.split("\t")
        if len(columns) not in (3, 4, 5):
            raise BilensError(
                f"{path}, line {number} has {len(columns)} columns; expected, separated by tabs, "
                f"{COLUMNS}"
            )
        text, token, minus, *others = columns
        names = tuple(name for name in minus.split(",") if name)
        questions.append(Question(text, token, names, *others))
    if not questions:
        raise BilensError(f"{path} holds no line; expected lines with {COLUMNS}")
    return questions


def of_equal_kind(questions: Sequence[Question]) -> None:
    """Raise unless all questions have a second text.

    Raises:
        BilensError: one has none, or there are none.
    """
    if not questions or not all(question.against for question in questions):
        raise BilensError(
            "questions need a second text each, and there must be at least one; add the other "
            "text as the fourth column, or as against"
        )
