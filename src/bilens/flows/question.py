"""Questions: a text, the token that is predicted after it, and a second run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, detached
from bilens.errors import BilensError
from bilens.language.hints import space_hints
from bilens.language.names import TokenDirection, shown_tokens, token_text
from bilens.options import Target, token_list
from bilens.question_files import QuestionLine, read_lines, read_pair_lines
from bilens.settings import CheckedSettings
from bilens.tensor.factors import wide_device
from bilens.transformer import ResidualModel
from bilens.transformer.passes import Pass

Against = str | Int[Tensor, " time"] | Float[Tensor, "*time d_model"] | Sequence[str]
"""A text, its ids, embeddings at each position or one for all, or texts whose mean is taken."""
Answer = Annotated[
    str | Sequence[str] | TokenDirection | Float[Tensor, " d_model"],
    "such as model.direction(7) for the token of number 7",
]
"""A token by name, several, whose mean is taken, or a direction of the last normalised stream."""
BothTexts = tuple[Int[Tensor, " time"], Int[Tensor, " time"], Float[Tensor, "time d_model"] | None]
"""The tokens of a text and of the second run, and embeddings of the latter that are not theirs."""


@dataclass(frozen=True)
class Question(CheckedSettings):
    """Why a model predicts one token rather than others, after one text and not after another.

    Everything that takes a question obeys all of its fields.

    An answer may have several tokens, such as " New York". The number is then the log-probability
    of all of them after the text, and between two texts they follow both.

    Attributes:
        text: the first text, or its tokens' numbers.
        token: the answer that is predicted after it; or several tokens, whose mean logit is taken.
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text of as many tokens, its numbers, embeddings, or several
            texts; an empty text for the first text alone.
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
    minus: tuple[str, ...] = ()
    against: Against = ""
    task: str = ""
    template: str = ""
    target: Target = "logit"
    position: int = -1
    vector: Float[Tensor, " d_model"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("text", "against", "vector"):  # whose own gradients would be in those of flows
            if isinstance(given := getattr(self, name), Tensor):
                object.__setattr__(self, name, given.detach())
        if self.vector is None and not all(self.tokens or [""]):
            raise BilensError("token is empty, expected the token that is predicted after the text")
        if self.vector is not None and (self.token or self.minus):
            raise BilensError(
                f"token={self.token!r} and minus={self.minus!r} beside a vector, expected one of "
                "them: leave the tokens empty, or the vector out"
            )
        if self.vector is not None and self.target != "logit":
            raise BilensError(
                f"target={self.target!r} with a direction, expected a token; or target='logit'"
            )

    @classmethod
    def of(
        cls,
        text: str | Tensor,
        token: Answer,
        minus: str | Sequence[str] = (),
        against: Against | None = None,
        **others: Any,
    ) -> "Question":
        """Return the question with tokens and a second run in any of their forms.

        Raises:
            BilensError: tokens to subtract are given twice, or beside a vector.
        """
        if isinstance(token, TokenDirection | Tensor) and minus:
            raise BilensError(
                "minus needs token as a string; TokenDirection(token, minus) has both"
            )
        names = (minus,) if isinstance(minus, str) else tuple(minus)
        if isinstance(token, TokenDirection):
            names, token = tuple(token.minus), token.token
        second = "" if against is None else against
        if isinstance(token, Tensor):
            return cls(text, "", (), second, vector=token, **others)
        if not isinstance(token, str):
            token = token[0] if len(token) == 1 else tuple(token)
        return cls(text, token, names, second, **others)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The answer, or each of several; empty for a vector."""
        names = (self.token,) if isinstance(self.token, str) else self.token
        return names if self.vector is None else ()

    @property
    def shares(self) -> list[float]:
        """The weight of each token's number, and of each of those to subtract."""
        shares = [1 / len(self.tokens) for _ in self.tokens]
        return shares + [-1 / len(self.minus) for _ in self.minus]

    def spoken(self, model: ResidualModel) -> list[int]:
        """Return the numbers of an answer of several tokens; empty for all other answers.

        Raises:
            BilensError: it has tokens to subtract, or there is no second text.
        """
        if len(self.tokens) != 1 or len(numbers := model.answer(self.tokens[0])) == 1:
            return []
        if self.minus or not self.has_two_texts:
            pieces = "|".join(shown_tokens(model, numbers))
            without = f"leave out minus={', '.join(self.minus)!r}" if self.minus else "add against"
            raise BilensError(
                f"token={self.token!r} has several tokens, |{pieces}|, whose number is the change "
                f"of their log-probability between two texts; {without}, or take one token"
            )
        return numbers

    def fitted(self, model: ResidualModel) -> "Question":
        """Return the question with the number that its answer has in a model.

        That of several tokens has no logit, and the log-probability takes its place.

        Raises:
            BilensError: a token is not in the vocabulary, or is subtracted from itself.
        """
        if self.vector is None and not self.spoken(model):
            self.token_numbers(model)
        elif self.vector is None and self.target == "logit":
            return replace(self, target="log-probability")
        return self

    def token_numbers(self, model: ResidualModel) -> tuple[list[int], list[int]]:
        """Return the numbers of the token, or of several, and of those to subtract.

        Raises:
            BilensError: a token is not in the vocabulary, or is subtracted from itself.
        """
        tokens = [model.token(name) for name in self.tokens]
        minus = [model.token(name) for name in self.minus]
        for name, number in zip(self.tokens, tokens, strict=True):
            if number in minus:
                raise BilensError(f"minus has the token {name!r} itself, expected other tokens")
        return tokens, minus

    def output_direction(self, model: ResidualModel) -> Float[Tensor, " d_model"]:
        """Return the direction of the last normalised stream along which the logit is.

        Raises:
            BilensError: a token is not in the vocabulary, or the vector is of another model.
        """
        if self.vector is None:
            return model.direction(*self.token_numbers(model))
        if self.vector.shape != (model.d_model,):
            raise BilensError(
                f"direction has {self.vector.numel()} numbers, expected {model.d_model}, the width "
                "of the model's stream; ResidualModel.direction() returns that of a token"
            )
        check_finite(direction=self.vector)
        return self.vector.to(model.device, model.places.dtype)

    def both_texts(self, model: ResidualModel, *, any_length: bool = False) -> BothTexts:
        """Return the tokens of both runs up to the position that predicts; see `second_text`.

        Those of an answer of several tokens follow, without the last one, in both. With
        `any_length` a second text may have another number of tokens, if its end predicts, in models
        without vectors of positions.

        Raises:
            BilensError: there is no second text, or it does not fit.
        """
        if not self.has_two_texts:
            raise BilensError(
                f"the question about {self.number} needs a second text; pass it as against, or add "
                "it as the fourth column"
            )
        ids = model.ids(self.text, self.position)
        time = len(ids)
        parts = model.places.modules
        # Vectors of positions would differ at the end, and no part takes them over.
        moves = parts is None or bool(parts.positions or parts.hidden_positions)
        if any_length and not moves and self.position == -1 and is_text(self.against):
            second, embeddings = second_ids(model, self.against), None
        else:
            # Later tokens are not read.
            other, embeddings = second_text(model, model.ids(self.text), self.against)
            second = other[:time]
        spoken = ids.new_tensor(self.spoken(model)[:-1])
        first, second = (torch.cat([row, spoken]) for row in (ids, second))
        if embeddings is not None:
            embeddings = torch.cat([embeddings[:time], model.places.rows(spoken)])
        return first, second, embeddings

    @property
    def has_two_texts(self) -> bool:
        """True if a change between two runs is asked for, false for a number on one text."""
        return not isinstance(self.against, str) or bool(self.against)

    @property
    def number(self) -> str:
        """The number that is asked about in words, with its tokens in quotes."""
        if self.vector is not None:
            return "the direction"
        token = " or ".join(f'"{token_text(name)}"' for name in self.tokens)
        minus = [f'"{token_text(name)}"' for name in self.minus]
        name = f"{token} minus {', '.join(minus)}" if minus else token
        return name if self.target == "logit" else f"{self.target} of {name}"


def read_questions(path: str | Path) -> list[Question]:
    """Read questions from a file; see `bilens.question_files.read_lines`.

    Raises:
        BilensError: the file does not exist, holds no question, or a line has other columns.
    """
    return [_asked(line) for line in read_lines(path)]


def read_pairs(
    model: ResidualModel, path: str | Path, *, any_length: bool = False
) -> list[Question]:
    """Read questions from a file, all with a second text, and check that they fit a model.

    Raises:
        BilensError: as `read_questions`; or a second text is missing or has other numbers of
            tokens, or a token is unknown.
    """
    questions = []
    for line in read_pair_lines(path):
        question = _asked(line)
        try:
            question.fitted(model).both_texts(model, any_length=any_length)
        except BilensError as error:
            raise BilensError(f"{line.place}: {error}") from None
        questions.append(question)
    return questions


def _asked(line: QuestionLine) -> Question:
    return Question.of(
        line.text, line.token, line.minus, line.against, task=line.task, template=line.template
    )


def token_hints(model: ResidualModel, questions: Sequence[Question]) -> tuple[str, ...]:
    """Return a hint for each token of questions that was probably meant with a space in front."""
    named = [question for question in questions if question.vector is None]
    texts = ((model.ids(q.text, q.position), (*q.tokens, *q.minus)) for q in named)
    return space_hints(model, texts)


def replaced(text: str | Tensor, replace: Mapping[str, str]) -> str:
    """Return a text with some of its words replaced."""
    if not isinstance(text, str):
        raise BilensError(
            "replace needs the text as a string, got numbers of tokens; pass the other text's "
            "numbers as against"
        )
    if not replace:
        return text
    # All at once, so that names can be exchanged; of words that begin alike the longer one.
    words = sorted(filter(None, replace), key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)"
    found = set(re.findall(pattern, text)) if words else set()
    for word in replace:
        if word not in found:
            raise BilensError(f"replace names {word!r}, which is not a word of {text!r}")
    return re.sub(pattern, lambda match: replace[match[0]], text)


def second_run(
    model: ResidualModel,
    text: str,
    *,
    against: str | None = None,
    mean: bool = False,
    replace: str = "",
    texts: Sequence[Int[Tensor, " _"]] = (),
) -> tuple[Against | None, str]:
    """Return the second run that options of `read_flow` or of a page name, and its name.

    It is None, without a name, if there are none. `texts` are those whose mean embedding is taken;
    without them it is that of the vocabulary.
    """
    if sum(map(bool, (against, mean, replace))) > 1:
        raise BilensError(
            "against, mean and replace each name the second run, and more than one is given; "
            "expected one of them"
        )
    if mean:
        rows = model.places.rows(torch.cat(list(texts))) if texts else model.W_E
        return rows.mean(0), "mean embeddings"
    if replace:
        pairs = [pair.partition("=") for pair in token_list(replace)]
        words = {word: other for word, _, other in pairs}
        if not all(word and sign for word, sign, _ in pairs) or len(words) < len(pairs):
            raise BilensError(f"replace={replace!r}, expected words as keys=key,was=is, each once")
        second = replaced(text, words)
        return second, second
    if against and "|" in against:
        return against.split("|"), against
    return against or None, against or ""


def likely_answer(model: ResidualModel, text: str, second: Against | None = None) -> TokenDirection:
    """Return the likeliest token after a text, minus that after a second text if it is another.

    Otherwise minus the second likeliest: a single logit is mostly a constant that all tokens share.
    """
    likely = model.logits(model.ids(text)[None])[0, -1].topk(2).indices.tolist()
    if isinstance(second, str):
        after_second = int(model.logits(second_ids(model, second)[None])[0, -1].argmax())
        likely = [likely[0], after_second if after_second != likely[0] else likely[1]]
    return TokenDirection.of(model, *likely)


def is_text(against: Against) -> TypeGuard[str | Tensor]:
    """Return whether a second run is a text or its tokens' numbers, and no embeddings."""
    is_ids = isinstance(against, Tensor) and not against.is_floating_point()
    return is_ids or isinstance(against, str)


def second_ids(model: ResidualModel, against: str | Tensor) -> Int[Tensor, " time"]:
    """Return the token ids of a second text, which errors name `against`."""
    try:
        return model.ids(against)
    except BilensError as error:
        raise BilensError(f"against: {error}") from None


def second_text(
    model: ResidualModel, ids: Int[Tensor, " time"], against: Against
) -> tuple[Int[Tensor, " time"], Float[Tensor, "time d_model"] | None]:
    """Return the tokens of the second run in place of a text, and embeddings that are not theirs.

    Raises:
        BilensError: it does not fit the text or the model.
    """
    if is_text(against):
        return _of_equal_length(model, ids, second_ids(model, against)), None
    if isinstance(against, Tensor):
        return ids, _fitted(model, ids, against)
    if not against:
        raise BilensError("against holds no texts, expected at least one")
    texts = [_of_equal_length(model, ids, second_ids(model, text)) for text in against]
    return ids, torch.stack([model.places.rows(row) for row in texts]).mean(0)


def _fitted(model: ResidualModel, ids: Tensor, against: Tensor) -> Tensor:
    time, width = len(ids), model.d_model
    if against.shape not in ((width,), (time, width)):
        raise BilensError(
            f"against has shape {tuple(against.shape)}, expected ({time}, {width}) or "
            f"({width},), embeddings of the text's {time} tokens or one for all"
        )
    check_finite(against=against)
    return against.to(model.device, model.places.dtype).expand(time, width)


def _of_equal_length(model: ResidualModel, ids: Tensor, other: Tensor) -> Tensor:
    if len(ids) == len(other):
        return other
    names = [shown_tokens(model, row) for row in (ids, other)]
    pairs = enumerate(zip(*names, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(other)))
    raise BilensError(
        f"against has {len(other)} tokens, expected {len(ids)}, as the text has. They differ "
        f"from token {first}: text |{'|'.join(names[0])}|, against |{'|'.join(names[1])}|. "
        "Choose words of equally many tokens"
    )


class Score:
    """The number that a question asks about, as a function of streams after the last layer.

    Attributes:
        tokens: the answer, or each of several; none of a vector.
        minus: the tokens that are subtracted.
        spoken: the tokens of an answer of several.
    """

    def __init__(self, model: ResidualModel, question: Question) -> None:
        self.places, self.target = model.places, question.target
        self.tokens, self.minus, self.spoken = list[int](), list[int](), question.spoken(model)
        # Direction of the last normalised stream, if the number is a product with one.
        self.u: Tensor | None = None
        if question.vector is not None:
            self.u, self.bias, self.modules = question.output_direction(model), 0.0, model.modules
            return
        if self.spoken:
            return
        self.tokens, self.minus = question.token_numbers(model)
        self.shares = torch.tensor(question.shares, device=model.device, dtype=model.places.dtype)
        if self.target == "logit" and model.places.modules is not None:
            self.modules = model.places.modules
            W, b = self.modules.logit_weights(self.tokens + self.minus)
            self.u, self.bias = W @ self.shares, float(self.shares @ b)

    @property
    def length(self) -> int:
        """Number of the last positions that are read."""
        return len(self.spoken) or 1

    def __call__(self, x: Float[Tensor, "batch time d_model"]) -> Float[Tensor, " batch"]:
        """Return logits before a soft cap, or (log-)probabilities after it.

        They are in float64, since the softmax over a vocabulary adds up as many numbers. Of a model
        whose maps are not known it is the logit of the model itself.
        """
        if self.places.modules is not None:
            x = x[:, -self.length :].to(wide_device(x.device), torch.float64)
        if self.spoken:
            return self._of_spoken(x)
        last = x[:, -1]
        if self.u is not None:
            return self.modules.normalised(last) @ self.u.to(last) + self.bias
        numbers = self.places.logits(last)
        if self.target != "logit":
            numbers = numbers.log_softmax(-1)
        if self.target == "probability":
            numbers = numbers.exp()
        return numbers[:, self.tokens + self.minus] @ self.shares.to(numbers)

    def _of_spoken(self, x: Float[Tensor, "batch time d_model"]) -> Float[Tensor, " batch"]:
        total = x.new_zeros(len(x))
        for place, token in enumerate(self.spoken, -self.length):
            total = total + self.places.logits(x[:, place]).log_softmax(-1)[:, token]
        return total.exp() if self.target == "probability" else total

    def is_answer(self, x: Float[Tensor, "time d_model"]) -> bool | None:
        """Return whether the token is ahead of those to subtract, or of all others without any.

        Of several one has to be. Of an answer of several tokens each is ahead of all others where
        it follows. `x` is the stream after the last layer. It is None for a vector.
        """
        if self.spoken:
            likely = self.places.logits(x[-self.length :]).argmax(-1)
            return likely.tolist() == self.spoken
        if not self.tokens:
            return None
        if self.minus and (parts := self.places.modules) is not None:
            # Folding the norm into the rows of all tokens takes longer than a pass.
            W, b = parts.logit_weights(self.tokens + self.minus)
            logits = parts.normalised(x[-1:].to(parts.dtype))[0] @ W + b
            tokens, minus = logits.split([len(self.tokens), len(self.minus)])
            return bool(tokens.max() > minus.max())
        logits = self.places.logits(x[-1:])[0]
        if not self.minus:
            return int(logits.argmax()) in self.tokens
        return bool(logits[self.tokens].max() > logits[self.minus].max())


@detached
def answered(model: ResidualModel, questions: Sequence[Question]) -> list[Question]:
    """Return the questions that a model answers: after the first text, and not after the second.

    The token is ahead of those to subtract, or of all others if there are none.

    Raises:
        BilensError: a text or a token does not fit the model.
    """
    kept = []
    for question in questions:
        fitted = question.fitted(model)
        texts, tokens = [model.ids(fitted.text, fitted.position)], None
        if fitted.has_two_texts:
            first, second, tokens = fitted.both_texts(model, any_length=True)
            texts = [first, second]
        score, answers = Score(model, fitted), []
        for ids, rows in zip(texts, (None, tokens), strict=False):
            stream = Pass.of(model, ids[None], None if rows is None else rows[None]).stream[0]
            answers.append(score.is_answer(stream))
        if answers == [True, False][: len(answers)]:
            kept.append(question)
    return kept
