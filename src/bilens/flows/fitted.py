"""A question in the numbers of a model: texts and tokens, which every reading takes from here.

Whatever is spelled otherwise and has the same tokens is the same from here on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import check_finite, detached
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.flows.question import NEUTRAL, Against, Question, is_text
from bilens.language.hints import otherwise_read, space_hints
from bilens.language.names import TokenDirection, exact_names, shown_tokens
from bilens.options import Target
from bilens.tensor.factors import wide_device
from bilens.transformer import ResidualModel
from bilens.transformer.passes import Pass

ROWS = 8192
"""Embeddings of the vocabulary that are in memory at once."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """The numbers of a question in a model.

    Attributes:
        question: the question, with each of its tokens once and by a name that the model knows.
        clean: the first text, up to the position that predicts. The tokens of an answer of several
            follow it, without the last one, in both runs.
        corrupt: the second run; None on one text.
        embeddings: those of the second run, if they are not those of its tokens.
        tokens: the answer, or each of several; none of a vector or of an answer of several tokens.
        minus: the tokens that are subtracted.
        spoken: the tokens of an answer of several.
        target: what the number is.
        vector: the direction of the last normalised stream, in place of tokens.
    """

    question: Question
    clean: Int[Tensor, " time"]
    corrupt: Int[Tensor, " corrupt_time"] | None
    embeddings: Float[Tensor, "time d_model"] | None
    tokens: tuple[int, ...]
    minus: tuple[int, ...]
    spoken: tuple[int, ...]
    target: Target
    vector: Float[Tensor, " d_model"] | None

    @property
    def rows(self) -> list[Int[Tensor, " any_time"]]:
        """The tokens of each run."""
        return [self.clean] if self.corrupt is None else [self.clean, self.corrupt]

    @property
    def starts(self) -> list[int]:
        """Number of places before each run, where only the longer text has tokens."""
        most = max(map(len, self.rows))
        return [most - len(row) for row in self.rows]

    @property
    def shares(self) -> list[float]:
        """The weight of each token's number, and of each of those to subtract."""
        shares = [1 / len(self.tokens) for _ in self.tokens]
        return shares + [-1 / len(self.minus) for _ in self.minus]


def fit(
    model: ResidualModel, question: Question, *, any_length: bool = False, padded: bool = False
) -> Fitted:
    """Return a question in the numbers of a model.

    The number of an answer of several tokens is its log-probability, in place of a logit. With
    `any_length` a second text may have another number of tokens, if its end predicts, in models
    without vectors of positions; and if the shorter one is `padded`, in any model.

    Raises:
        BilensError: a text or a token is not one of the model, both texts do not fit each other, a
            token is subtracted from itself, or an answer of several tokens has tokens to subtract
            or no second text.
    """
    tokens, spoken = {}, _spoken(model, question)
    if not spoken:
        tokens = _numbered(model, question.tokens)
    minus = _numbered(model, question.minus)
    for token in tokens.keys() & minus.keys():
        raise BilensError(f"minus has the token {tokens[token]!r} itself, expected other tokens")
    target = question.target
    if question.vector is None:
        if spoken and target == "logit":
            target = "log-probability"
        names = [*tokens.values()] or question.tokens
        resolved = replace(question, token=tuple(names), minus=tuple(minus.values()), target=target)
    else:
        resolved = question
    clean = model.ids(question.text, question.position)
    parts = model.places.modules
    # Vectors of positions would differ at the end, and no part takes them over.
    moves = parts is None or bool(parts.positions or parts.hidden_positions)
    any_length = padded or (any_length and not moves)
    corrupt, embeddings = _second_run(model, question, clean, any_length=any_length)
    further = clean.new_tensor(spoken[:-1])
    clean = torch.cat([clean, further])
    if corrupt is not None:
        corrupt = torch.cat([corrupt, further])
    if embeddings is not None:
        embeddings = torch.cat([embeddings, model.places.rows(further)])
    return Fitted(
        resolved,
        clean,
        corrupt,
        embeddings,
        tuple(tokens),
        tuple(minus),
        tuple(spoken),
        target,
        _vector(model, question.vector),
    )


def _numbered(model: ResidualModel, names: Sequence[str]) -> dict[int, str]:
    """Return the numbers of tokens, each once, with the first of its names."""
    numbers: dict[int, str] = {}
    for name in names:
        token = model.token(name)
        label = exact_names(model, [token])[0] if name == f"[{token}]" else name
        numbers.setdefault(token, label)
    return numbers


def _spoken(model: ResidualModel, question: Question) -> list[int]:
    """Return the numbers of an answer of several tokens; empty for all other answers."""
    if len(question.tokens) != 1 or len(numbers := model.answer(question.tokens[0])) == 1:
        return []
    if question.minus or not question.has_two_texts:
        pieces = "|".join(shown_tokens(model, numbers))
        without = (
            f"leave out minus={', '.join(question.minus)!r}" if question.minus else "add against"
        )
        raise BilensError(
            f"token={question.tokens[0]!r} is several tokens of the model, |{pieces}|. Their "
            "log-probability is compared between two texts, and no other token is subtracted: "
            f"{without}, or ask for a word that is one token"
        )
    return numbers


def _vector(model: ResidualModel, vector: Tensor | None) -> Tensor | None:
    if vector is None:
        return None
    if model.places.modules is None:
        raise BilensError(
            "a vector is a direction of the stream after the last norm, which is not known of "
            f"{type(model.model).__name__}; give tokens by name or number"
        )
    if vector.shape != (model.d_model,):
        raise BilensError(
            f"vector has {vector.numel()} numbers, expected {model.d_model}, the width of the "
            "model's stream"
        )
    check_finite(vector=vector)
    return vector.to(model.device, model.places.dtype)


def _second_run(
    model: ResidualModel, question: Question, clean: Tensor, *, any_length: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens of the second run up to the position, and embeddings not of theirs."""
    against = question.against
    if not question.has_two_texts:
        return None, None
    # Later tokens are not read, but both texts have as many.
    whole = clean if question.position == -1 else model.ids(question.text)
    if is_text(against):
        corrupt = second_ids(model, against)
        if any_length and question.position == -1:
            return corrupt, None
        _check_length(model, whole, corrupt)
        return corrupt[: len(clean)], None
    if question.is_neutral:
        rows = _neutral(model, whole)
    elif isinstance(against, Tensor):
        rows = _embeddings(model, whole, against)
    elif against:
        texts = [second_ids(model, text) for text in against]
        for text in texts:
            _check_length(model, whole, text)
        rows = torch.stack([model.places.rows(text) for text in texts]).mean(0)
    else:
        raise BilensError("against holds no texts, expected at least one")
    return clean, rows[: len(clean)]


def second_ids(model: ResidualModel, against: str | Tensor) -> Int[Tensor, " time"]:
    """Return the token ids of a second text, which errors name `against`."""
    try:
        return model.ids(against)
    except BilensError as error:
        raise BilensError(f"against: {error}") from None


@torch.no_grad()
def _neutral(model: ResidualModel, ids: Tensor) -> Float[Tensor, "time d_model"]:
    """Return the embeddings of the neutral text in place of a text."""
    if len(ids) == 1:
        raise BilensError(
            "text has one token, and the neutral text differs from the second token on; give "
            "against, another text"
        )
    total = torch.zeros(model.d_model, device=model.device, dtype=model.places.dtype)
    for numbers in torch.arange(model.vocab_size, device=model.device).split(ROWS):
        total += model.places.rows(numbers).sum(0)
    rows = model.places.rows(ids).clone()
    rows[1:] = total / model.vocab_size
    return rows


def _embeddings(model: ResidualModel, ids: Tensor, against: Tensor) -> Tensor:
    time, width = len(ids), model.d_model
    if against.shape not in ((width,), (time, width)):
        raise BilensError(
            f"against has shape {tuple(against.shape)}, expected ({time}, {width}) or "
            f"({width},), embeddings of the text's {time} tokens or one for all"
        )
    check_finite(against=against)
    return against.to(model.device, model.places.dtype).expand(time, width)


def _check_length(model: ResidualModel, ids: Tensor, other: Tensor) -> None:
    if len(ids) == len(other):
        return
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

    def __init__(self, model: ResidualModel, fitted: Fitted) -> None:
        self.places, self.target = model.places, fitted.target
        self.tokens, self.minus, self.spoken = map(
            list, (fitted.tokens, fitted.minus, fitted.spoken)
        )
        # Direction of the last normalised stream, if the number is a product with one.
        self.u: Tensor | None = None
        if fitted.vector is not None:
            self.u, self.bias, self.modules = fitted.vector, 0.0, model.modules
            return
        self.shares = torch.tensor(fitted.shares, device=model.device, dtype=model.places.dtype)
        modules = model.places.modules
        if self.tokens and self.target == "logit" and modules is not None:
            self.modules = modules
            W, b = modules.logit_weights(self.tokens + self.minus)
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
            logits = parts.normalised(x[-1:].to(W))[0] @ W + b
            tokens, minus = logits.split([len(self.tokens), len(self.minus)])
            return bool(tokens.max() > minus.max())
        logits = self.places.logits(x[-1:])[0]
        if not self.minus:
            return int(logits.argmax()) in self.tokens
        return bool(logits[self.tokens].max() > logits[self.minus].max())


def likely_answer(
    model: ResidualModel, text: str | Tensor, second: Against | None = None, position: int = -1
) -> TokenDirection:
    """Return the likeliest token after a text, minus that in a second run if it is another.

    Otherwise minus the second likeliest: a single logit is mostly a constant that all tokens share.
    """

    def likely(ids: Tensor, rows: Tensor | None = None) -> list[int]:
        stream = Pass.of(model, ids[None], None if rows is None else rows[None]).stream[:, -1]
        return model.places.logits(stream).topk(2).indices[0].tolist()

    first, rival = likely(model.ids(text, position))
    if second is not None:
        question = Question(text, f"[{first}]", (), second, position=position)
        fitted = fit(model, question, padded=True)
        in_second = likely(fitted.rows[-1], fitted.embeddings)[0]
        rival = in_second if in_second != first else rival
    return TokenDirection.of(model, first, rival)


@detached
def answered(model: ResidualModel, questions: Sequence[Question]) -> list[Question]:
    """Return the questions that a model answers: after the first text, and not after the second.

    The token is ahead of those to subtract, or of all others if there are none.

    Raises:
        BilensError: a text or a token does not fit the model.
    """
    results = []
    for question in questions:
        fitted = fit(model, question, any_length=True)
        score, answers = Score(model, fitted), []
        for ids, rows in zip(fitted.rows, (None, fitted.embeddings), strict=False):
            stream = Pass.of(model, ids[None], None if rows is None else rows[None]).stream[0]
            answers.append(score.is_answer(stream))
        if answers == [True, False][: len(answers)]:
            results.append(question)
    return results


def token_hints(model: ResidualModel, questions: Sequence[Question]) -> tuple[str, ...]:
    """Return what is read in a chat or otherwise than written, and tokens meant behind a space."""
    with_tokens = [question for question in questions if question.vector is None]
    texts_in = [x for q in questions for x in (q.text, q.against) if isinstance(x, str)]
    answers = dict.fromkeys(name for q in with_tokens for name in (*q.tokens, *q.minus))
    otherwise = otherwise_read(model, dict.fromkeys(x for x in texts_in if x != NEUTRAL), answers)
    texts = ((model.ids(q.text, q.position), (*q.tokens, *q.minus)) for q in with_tokens)
    as_read = [write_out(model.tokenizer, model.ids(q.text)) for q in questions[: int(model.chat)]]
    chats = (f"the first text is read as {text!r}." for text in as_read)
    return (*chats, *otherwise, *space_hints(model, texts))


def rounded_size(questions: Sequence[Fitted], logits: Float[Tensor, "texts vocab"]) -> float:
    """Return the size of the numbers that metrics are rounded with.

    These are logits, of which a metric may be a much smaller difference. The rounding of a logit
    changes a probability by at most as large a share of it.

    Args:
        questions: questions of one target, that of each text.
        logits: those of the texts, after a soft cap.
    """
    size = float(logits.abs().max())
    if questions[0].target != "probability":
        return size
    largest = 0.0
    for row, fitted in zip(logits.softmax(-1), questions, strict=True):
        tokens = [*fitted.tokens, *fitted.minus, *fitted.spoken[-1:]]
        largest = max(largest, float(row[tokens].max()))
    return size * largest
