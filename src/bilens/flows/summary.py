"""Summary of a language model: why it predicts one token of a held-out text, and its loss."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch.nn import functional

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.data import Corpus
from bilens.data.corpus import first_texts
from bilens.data.texts import write_out
from bilens.errors import BilensError, NotBilinearError
from bilens.flows.question import likely_answer
from bilens.flows.reading import FlowReading, read_flow
from bilens.language.names import TokenDirection, exact_names, in_words, token_names
from bilens.language.outputs import model_facts
from bilens.sections import Columns, Fact
from bilens.settings import Count
from bilens.transformer import ResidualModel
from bilens.transformer.passes import last_streams, logit_of
from bilens.transformer.tokens import require_tokenizer

EXAMPLES = (
    ("The keys to the cabinet", "The key to the cabinet", " are", " is"),
    ("The girl was sad because", "The boy was sad because", " she", " he"),
)
"""Two texts, and two next tokens of which models of English prefer one after each."""
PROMPT_TOKENS, LARGE_VOCABULARY = 8, 5000


@dataclass(frozen=True)
class NextToken:
    """A place of a held-out text, after the tokens `ids`.

    The token `right` comes next. The margin is its logit minus that of the most likely other token.
    """

    ids: tuple[int, ...]
    right: int
    other: int
    margin: float


@dataclass(frozen=True)
class TextLoss:
    """The loss of the beginnings of held-out texts."""

    loss: float  # mean negative log-likelihood of a token, in nats
    error: float  # its standard error over texts; 0 for a single text
    n_tokens: int
    n_texts: int
    # Places among the first tokens of the texts, the largest margin first.
    places: tuple[NextToken, ...]


@dataclass(frozen=True, eq=False, repr=False)
class LanguageSummary(Reading):
    """Summary of a language model, with the flow of one logit on a held-out text."""

    about: tuple[Fact, ...]  # names and values of its sizes
    vocab_size: int
    text_loss: TextLoss | None  # None without texts
    next_tokens: Columns  # most likely next tokens of the prompt, with their probabilities
    flow: FlowReading  # flow of the prompt's logit, with its strongest nodes removed

    formats: ClassVar[dict[str, str]] = {"probability": ".1%"}

    @property
    def title(self) -> str:
        """The question that its flow answers."""
        return self.flow.title

    def facts(self) -> list[Fact]:
        loss = self.text_loss
        if loss is None:
            return [*self.about]
        return [
            *self.about,
            (f"loss on {loss.n_tokens:,} tokens, nats", round(loss.loss, 3)),
            ("standard error", round(loss.error, 3)),
            ("perplexity", round(float(torch.tensor(loss.loss).exp()), 2)),
        ]


@detached
def read_summary(
    model: ResidualModel,
    corpus: Corpus | None = None,
    prompt: str = "",
    direction: TokenDirection | None = None,
    *,
    against: str = "",
    n_tokens: Count = 256,
) -> LanguageSummary:
    """Split the change of a logit between two texts over a model's parts, and measure its loss.

    The first text is the one whose next token the model predicts with the largest margin, the
    second one of as many tokens after which it is less likely; see `example_of`.

    Args:
        model: the model.
        corpus: texts in the model's tokens; without them no loss is measured.
        prompt: a text; by default that of the example.
        direction: the token whose logit is split; by default the next token, minus the most likely
            other one.
        against: the second text; by default one of the corpus.
        n_tokens: number of tokens of the validation texts that the loss is measured on.

    Raises:
        BilensError: without a prompt, there are no texts, and the model knows no example.
    """
    loss = None
    if corpus is not None:
        loss = measure_loss(model, (row["input_ids"] for row in corpus.validation), n_tokens)
    if not prompt and (direction is None or corpus is None):
        example = example_of(model, corpus)
        prompt, direction = example.prompt, direction or example.direction
        against = against or example.against
    if not prompt:
        if loss is None:
            raise BilensError(
                "prompt='': there are no texts to take one from; give --prompt (and --against, a "
                "second text), or name texts with --data"
            )
        wanted = None if direction is None else model.token(direction.token)
        prompt, found = largest_margin(model, loss.places, wanted)
        direction = direction or found
    if not against and corpus is not None:
        against = contrasting_text(model, corpus, prompt, direction)
    logits = model.logits(model.ids(prompt)[None])[0, -1]
    best = logits.topk(min(6, len(logits))).indices.tolist()
    names = token_names(model, best)
    probabilities = logits.softmax(-1)[best].tolist()
    return LanguageSummary(
        about=model_facts(model, corpus),
        vocab_size=model.vocab_size,
        text_loss=loss,
        next_tokens={
            "next token": [in_words(name) for name in names],
            "probability": probabilities,
        },
        flow=read_flow(
            model,
            prompt,
            direction or TokenDirection.of(model, best[0], best[1:2]),
            against=against or None,
            shown=80,
            ablate=8,
        ),
    )


def measure_loss(
    model: ResidualModel, texts: Iterable[torch.Tensor], n_tokens: int, length: int = 32
) -> TextLoss:
    """Measure the loss of the first `length` tokens of texts, and the margins of the right tokens.

    Texts are read until they have `n_tokens`.
    """
    sums: list[float] = []
    counts: list[int] = []
    places: list[NextToken] = []
    for text in texts:
        if sum(counts) >= n_tokens:
            break
        ids = text[:length].to(model.device)
        logits, right = model.logits(ids[None])[0, :-1].float(), ids[1:]
        sums.append(float(functional.cross_entropy(logits, right, reduction="sum")))
        counts.append(len(right))
        # The first tokens only: their texts are short enough to be read.
        first, right = logits[:PROMPT_TOKENS], right[:PROMPT_TOKENS, None]
        others = first.scatter(1, right, -torch.inf).max(1)
        margins = first.gather(1, right)[:, 0] - others.values
        columns = (right[:, 0].tolist(), others.indices.tolist(), margins.tolist())
        for at, (token, other, margin) in enumerate(zip(*columns, strict=True)):
            places.append(NextToken(tuple(ids[: at + 1].tolist()), token, other, margin))
    loss, n_texts = sum(sums) / max(sum(counts), 1), len(sums)
    # Tokens of a text are alike, so texts are what varies: the error of a ratio of two sums.
    squares = sum((total - loss * n) ** 2 for total, n in zip(sums, counts, strict=True))
    error = (squares * n_texts / max(n_texts - 1, 1)) ** 0.5 / max(sum(counts), 1)
    places.sort(key=lambda place: -place.margin)
    return TextLoss(loss, error, sum(counts), n_texts, tuple(places))


def largest_margin(
    model: ResidualModel, places: Sequence[NextToken], wanted: int | None = None
) -> tuple[str, TokenDirection | None]:
    """Return the text of the largest margin, and its next token minus the most likely other one.

    If no text has the same tokens when it is written out and read again, it comes without these.
    The places have the largest margin first. If the token `wanted` is the next one somewhere, only
    those places count.
    """
    tokenizer = require_tokenizer(model.tokenizer)
    for place in [p for p in places if p.right == wanted] or places:
        text = write_out(tokenizer, place.ids, skip_special_tokens=True).strip()
        try:
            again = model.ids(text).tolist()
        except BilensError:  # tokens that the text begins with, and no words
            continue
        if again == list(place.ids):
            names = exact_names(model, [place.right, place.other])
            return text, TokenDirection(names[0], (names[1],))
    # Tokens that the model puts before a text, or drops, make it another one: its own best token.
    for place in places:
        text = write_out(tokenizer, place.ids, skip_special_tokens=True).strip()
        if text:
            return text, None
    raise BilensError("prompt='': no beginning of a held-out text can be written out; give one")


@dataclass(frozen=True)
class Example:
    """A question to begin with: a text, its direction if one is known, and perhaps a second text.

    The text is empty without a corpus that has one.
    """

    prompt: str = ""
    direction: TokenDirection | None = None
    against: str = ""


def example_of(model: ResidualModel, corpus: Corpus | None) -> Example:
    """Return an example of a corpus: the text whose next token has the largest margin.

    For a large vocabulary, and without a corpus, it is a sentence of English and another, the first
    of `EXAMPLES` that the model answers. Otherwise the second text is the one of as many tokens
    after which the logit is lowest.
    """
    if corpus is None or model.vocab_size > LARGE_VOCABULARY:
        known = [example for row in EXAMPLES if (example := _known(model, *row)) is not None]
        answered = [example for example in known if _is_answered(model, example)]
        if answered or known:
            return (answered or known)[0]
    if corpus is None:
        return Example()
    places = measure_loss(model, first_texts(corpus), 500, PROMPT_TOKENS).places
    try:
        prompt, direction = largest_margin(model, places)
    except BilensError:
        return Example()
    try:
        return Example(prompt, direction, contrasting_text(model, corpus, prompt, direction))
    except BilensError:  # the model reads no token of it
        return Example(prompt, direction)


def _known(model: ResidualModel, text: str, against: str, token: str, minus: str) -> Example | None:
    """Return an example whose tokens a model has; None if it cuts the texts into unlike lengths."""
    names = []
    try:
        for name in (token, minus):
            bare, wanted = name.strip(), model.token(name)
            with suppress(BilensError):  # without its space it may be no token, or another one
                name = bare if model.token(bare) == wanted else name  # noqa: PLW2901
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


def contrasting_text(
    model: ResidualModel, corpus: Corpus, prompt: str, direction: TokenDirection | None
) -> str:
    """Return the beginning of as many tokens of a text of the corpus after which a logit is least.

    It is empty if there is none.
    """
    ids = model.ids(prompt)
    if direction is None:
        direction = likely_answer(model, prompt)
    tokenizer = require_tokenizer(model.tokenizer)
    fitting: dict[str, torch.Tensor] = {}
    for row in islice(first_texts(corpus), 50):
        # The model may begin a text with a token of its own, so that it has one word more or less.
        for length in (len(ids), len(ids) + 1):
            other = write_out(tokenizer, row[:length], skip_special_tokens=True).strip()
            with suppress(BilensError):  # no words
                of_other = model.ids(other)
                if other != prompt and len(of_other) == len(ids):
                    fitting[other] = of_other
    if not fitting:
        return ""
    after = last_streams(model, torch.stack([*fitting.values()]))
    logits = logit_of(model, direction.vector(model))(after)
    return list(fitting)[int(logits.argmin())]


def is_bilinear(model: ResidualModel) -> bool:
    """Return True if the first layer's MLP is a tensor, whose eigenvectors can be read."""
    try:
        model.mlp(0)
    except NotBilinearError:
        return False
    return True
