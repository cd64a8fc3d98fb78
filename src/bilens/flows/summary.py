"""Summary of a language model: why it predicts one token of a text, and its loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, exp, inf, isfinite, log, nan
from typing import ClassVar

import torch
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.data import Corpus
from bilens.data.corpus import first_texts
from bilens.data.texts import write_out
from bilens.errors import BilensError, NotBilinearError
from bilens.flows.question import Question
from bilens.flows.reading import FlowReading, answer_question
from bilens.language.names import TokenDirection, in_words, token_names
from bilens.language.outputs import model_facts
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.passes import last_streams, logit_of
from bilens.transformer.running import counting_operations
from bilens.transformer.tokens import in_template, require_tokenizer

EXAMPLES = (
    ("The keys to the cabinet", "The key to the cabinet", " are", " is"),
    ("The girl was sad because", "The boy was sad because", " she", " he"),
)
"""Two texts, and two next tokens of which models of English prefer one after each."""
PROMPT_TOKENS = 8


ENOUGH = 0.01
"""Standard error of a loss, as a share of it, up to which texts are measured."""


@dataclass(frozen=True)
class TextLoss:
    """The loss of held-out texts."""

    loss: float  # mean negative log-likelihood of a token, in nats
    error: float  # its standard error over texts; infinite for a single text
    n_tokens: int
    n_texts: int
    n_characters: int  # of these tokens, written out by the tokenizer
    n_bytes: int
    unigram: float  # loss of the frequencies of these very tokens, which no other unigram is below
    is_all: bool  # no held-out text is left

    def bits(self, of: int) -> float:
        """Return the loss of all tokens in bits, over a number of characters or bytes."""
        return self.loss * self.n_tokens / log(2) / of if of else nan

    @property
    def shortage(self) -> str:
        """A sentence on texts that were too few; empty otherwise."""
        share = self.error / self.loss if self.loss else 0.0
        if share <= ENOUGH or not self.is_all:
            return ""
        spread = f"± {share:.1%}, as far as they tell" if share < inf else "an unknown error"
        return (
            f"All {self.n_tokens:,} held-out tokens are measured, with {spread}; an error of "
            f"{ENOUGH:.0%} takes more text."
        )


@dataclass(frozen=True, eq=False, repr=False)
class LanguageSummary(Reading):
    """Summary of a language model, with the flow of one logit."""

    about: tuple[Fact, ...]  # names and values of its sizes
    vocab_size: int
    text_loss: TextLoss | None  # None without texts
    next_tokens: Columns  # most likely next tokens of the prompt, with their probabilities
    flow: FlowReading  # flow of the prompt's logit, with its strongest nodes removed
    training_loss: float | None = None  # last validation of its own training, if there is a record

    has_plain_fields: ClassVar[bool] = True
    formats: ClassVar[dict[str, str]] = {"probability": ".1%"}

    @property
    def title(self) -> str:
        """The question that its flow answers."""
        return self.flow.title

    def facts(self) -> list[Fact]:
        loss = self.text_loss
        if loss is None:
            return [*self.about]
        facts: list[Fact] = [
            *self.about,
            (f"loss on {loss.n_tokens:,} tokens, nats", round(loss.loss, 4)),
            *[("standard error", round(loss.error, 4))] * isfinite(loss.error),
            ("perplexity", round(exp(loss.loss), 2)),
            ("bits a character", round(loss.bits(loss.n_characters), 4)),
            ("bits a byte", round(loss.bits(loss.n_bytes), 4)),
            ("loss of the tokens' frequencies, a unigram", round(loss.unigram, 4)),
        ]
        if self.training_loss is not None:
            facts.append(("validation loss in its training", round(self.training_loss, 4)))
        return [*facts, ("", loss.shortage)] if loss.shortage else facts


@detached
def read_summary(
    model: ResidualModel,
    corpus: Corpus | None = None,
    prompt: str = "",
    direction: TokenDirection | None = None,
    *,
    against: str = "",
    n_tokens: Count | None = None,
    training_loss: float | None = None,
) -> LanguageSummary:
    """Split the change of a logit between two texts over a model's parts, and measure its loss.

    Args:
        model: the model.
        corpus: texts in the model's tokens; without them no loss is measured.
        prompt: a text; by default that of `example_of`.
        direction: the token whose logit is split; by default that of the example, or the likeliest
            next token minus the second.
        against: the second text; by default that of the example, or one of the corpus.
        n_tokens: number of tokens of the validation texts that the loss is measured on; by default
            as many as leave it a standard error of 1 %.
        training_loss: the last loss of its own training, to stand beside.

    Raises:
        BilensError: without a prompt, there are no texts, and the model knows no example.
    """
    loss = None
    if corpus is not None:
        loss = measure_loss(model, corpus.validation, n_tokens)
    if not prompt:
        example = example_of(model, corpus)
        prompt, against = example.prompt, against or example.against
        direction = direction or example.direction
    if not prompt:
        raise BilensError(
            "prompt='': there are no texts to take one from; give --prompt (and --against, a "
            "second text), or name texts with --data"
        )
    if not against and corpus is not None:
        against = second_text(model, corpus, prompt)
    ids = model.ids(prompt)
    with counting_operations() as counter:
        logits = model.logits(ids[None])[0, -1]
    operations = round(counter.get_total_flops() / len(ids))
    best = logits.topk(min(6, len(logits))).indices.tolist()
    names = token_names(model, best)
    probabilities = logits.softmax(-1)[best].tolist()
    return LanguageSummary(
        about=(*model_facts(model, corpus), ("operations of a token, forward", operations)),
        vocab_size=model.vocab_size,
        text_loss=loss,
        next_tokens={
            "next token": [in_words(name) for name in names],
            "probability": probabilities,
        },
        flow=answer_question(
            model,
            Question(
                prompt, direction or TokenDirection.of(model, best[0], best[1:2]), against=against
            ),
            shown=80,
            ablate=8,
        ),
        training_loss=training_loss,
    )


def measure_loss(
    model: ResidualModel, rows: Sequence[Mapping[str, torch.Tensor]], n_tokens: int | None = None
) -> TextLoss:
    """Measure the loss of rows of token ids in order.

    Rows are read until they have `n_tokens`, or by default until the standard error of the loss is
    1 % of it, from eight texts on.
    """
    sums: list[float] = []
    counts: list[int] = []
    frequencies = torch.zeros(model.vocab_size, dtype=torch.float64)
    n_characters = n_bytes = 0
    for row in (bar := progress_bar("loss on held-out texts", rows)):
        if _is_enough(sums, counts, n_tokens):
            break
        ids = row["input_ids"].to(model.device)
        logits, right = model.logits(ids[None])[0, :-1].float(), ids[1:]
        sums.append(float(functional.cross_entropy(logits, right, reduction="sum")))
        counts.append(len(right))
        frequencies += right.cpu().bincount(minlength=model.vocab_size)
        if model.tokenizer is not None:
            text = write_out(model.tokenizer, right, skip_special_tokens=True)
            n_characters, n_bytes = n_characters + len(text), n_bytes + len(text.encode())
        bar.total = _needed(sums, counts, n_tokens, len(rows))
    total = sum(counts)
    shares = frequencies / max(total, 1)
    return TextLoss(
        loss=sum(sums) / max(total, 1),
        error=_error(sums, counts),
        n_tokens=total,
        n_texts=len(sums),
        n_characters=n_characters,
        n_bytes=n_bytes,
        unigram=float(torch.special.entr(shares).sum()),
        is_all=len(sums) == len(rows),
    )


def _is_enough(sums: list[float], counts: list[int], n_tokens: int | None) -> bool:
    if n_tokens is not None:
        return sum(counts) >= n_tokens
    return len(sums) >= 8 and _error(sums, counts) * sum(counts) <= ENOUGH * sum(sums)


def _needed(sums: list[float], counts: list[int], n_tokens: int | None, most: int) -> int:
    """Return about how many rows will be read, for the time that is left."""
    if n_tokens is not None:
        return min(most, ceil(n_tokens * len(sums) / sum(counts)))
    spread = _error(sums, counts) * sum(counts) / max(sum(sums), 1e-12)
    count = len(sums) * (spread / ENOUGH) ** 2
    return most if count >= most else max(8, len(sums), ceil(count))


def _error(sums: list[float], counts: list[int]) -> float:
    """Return the standard error of the ratio of two sums over texts, whose tokens are alike."""
    if len(sums) < 2:
        return inf
    loss, n_texts = sum(sums) / sum(counts), len(sums)
    squares = sum((total - loss * n) ** 2 for total, n in zip(sums, counts, strict=True))
    return float((squares * n_texts / (n_texts - 1)) ** 0.5 / sum(counts))


@dataclass(frozen=True)
class Example:
    """A question to begin with: a text, its direction if one is known, and perhaps a second text.

    The text is empty without a corpus that has one.
    """

    prompt: str = ""
    direction: TokenDirection | None = None
    against: str = ""


def example_of(model: ResidualModel, corpus: Corpus | None) -> Example:
    """Return the first of `EXAMPLES` that the model answers, or else the first that it can read.

    If it can read none, the texts are the beginnings of two texts of the corpus.
    """
    if model.chat:
        # Texts that cannot be read are passed over below, and without a template none can be.
        in_template(EXAMPLES[0][0], model.tokenizer)
    examples = [example for row in EXAMPLES if (example := _known(model, *row)) is not None]
    if examples:
        return next((example for example in examples if _is_answered(model, example)), examples[0])
    prompt = next(_beginnings(model, corpus, PROMPT_TOKENS), "") if corpus is not None else ""
    if corpus is None or not prompt:
        return Example()
    return Example(prompt, None, second_text(model, corpus, prompt))


def _known(model: ResidualModel, text: str, against: str, token: str, minus: str) -> Example | None:
    """Return an example whose tokens a model has; None if it cuts the texts into unlike lengths."""
    names = []
    try:
        for name in (token, minus):
            bare, token_id = name.strip(), model.token(name)
            with suppress(BilensError):  # without its space it may be no token, or another one
                name = bare if model.token(bare) == token_id else name  # noqa: PLW2901
            names.append(name)
        if len(model.ids(text)) != len(model.ids(against)):
            return None
    except BilensError:
        return None
    return Example(text, TokenDirection(names[0], tuple(names[1:])), against)


def _is_answered(model: ResidualModel, example: Example) -> bool:
    """Return True if the model prefers the token after the first text, the other after the second.

    Small models know few words, and no number of a noun at a distance.
    """
    assert example.direction is not None
    texts = torch.stack([model.ids(text) for text in (example.prompt, example.against)])
    logit = logit_of(model, example.direction.vector(model))
    first, second = logit(last_streams(model, texts)).tolist()
    return bool(first > 0 > second)


def second_text(model: ResidualModel, corpus: Corpus, prompt: str) -> str:
    """Return the beginning of another text of the corpus with as many tokens; empty without one."""
    length = len(model.ids(prompt))
    # The model may begin a text with a token of its own, so that it has one word more or less.
    texts = chain.from_iterable(_beginnings(model, corpus, n) for n in (length, length + 1))
    return next((t for t in texts if t != prompt and len(model.ids(t)) == length), "")


def _beginnings(model: ResidualModel, corpus: Corpus, length: int) -> Iterator[str]:
    """Yield the first tokens of texts of a corpus, written out, which the model can read."""
    tokenizer = require_tokenizer(model.tokenizer)
    for row in islice(first_texts(corpus), 50):
        text = write_out(tokenizer, row[:length], skip_special_tokens=True).strip()
        with suppress(BilensError):  # no words
            model.ids(text)
            yield text


def is_bilinear(model: ResidualModel) -> bool:
    """Return True if the first layer's MLP is a tensor, whose eigenvectors can be read."""
    try:
        model.mlp(0)
    except NotBilinearError:
        return False
    return True
