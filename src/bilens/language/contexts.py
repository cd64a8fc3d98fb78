"""Texts in the tokens of a model, and those in which eigenvectors are most active."""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from bilens.analysis import Reading
from bilens.checks import check_finite, check_index, check_sum, checked, detached
from bilens.data import Corpus, load_corpus, load_documents
from bilens.data.corpus import LANGUAGES, batched
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.language.names import TokenDirection
from bilens.language.stream import Sources, read_stream
from bilens.options import Cleaning
from bilens.progress import progress_bar
from bilens.sections import Fact
from bilens.settings import Count, NotNegative, Seed
from bilens.tensor import Spectrum
from bilens.transformer import ResidualModel
from bilens.transformer.running import fresh, rotates_by_length
from bilens.transformer.tokens import is_own, max_tokens, require_tokenizer, trained_on_clean_text


@dataclass(frozen=True, eq=False)
class Context:
    """A position in a text, its token ids, and an eigenvector's activation lambda (v . n)^2 there.

    Tokens after the position have no influence.
    """

    ids: Int[Tensor, " time"]
    position: int
    activation: float


@detached
def top_contexts(
    model: ResidualModel,
    spectrum: Spectrum,
    texts: Iterable[str | Int[Tensor, " time"]],
    *,
    layer: int,
    k: Count = 8,
    batch_size: Count = 32,
) -> list[list[Context]]:
    """Find the k contexts of largest |activation| for every eigenvector.

    Each text has at most one, and no two have the same tokens up to their position. Texts pass in
    batches, so any number of them fits in memory.

    The spectrum is that of a single form of the layer. The strongest context comes first.

    Source: Pearce et al. 2024, figure 7 and appendix G.
    """
    _check(spectrum)
    best = [_Best(k) for _ in range(spectrum.k)]
    total = len(texts) if isinstance(texts, Sized) else None
    for batch in _run_texts(model, texts, layer, batch_size, total):
        _add_best(best, spectrum, *batch)
    if not best[0].contexts:
        raise BilensError("texts is empty; expected strings or token ids")
    return [contexts.contexts for contexts in best]


class _Best:
    """The k strongest contexts of one eigenvector, no two with the same tokens before them."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.contexts: list[Context] = []
        self.texts: set[tuple[int, ...]] = set()

    def add(self, context: Context) -> None:
        text = tuple(context.ids[: context.position + 1].tolist())
        if text not in self.texts:
            self.texts.add(text)
            insort(self.contexts, context, key=lambda context: -abs(context.activation))
            del self.contexts[self.k :]

    def threshold(self) -> float:
        """Return the |activation| that a further context has to exceed."""
        is_full = len(self.contexts) == self.k
        return abs(self.contexts[-1].activation) if is_full else -1.0


def _add_best(
    best: list[_Best], spectrum: Spectrum, ids: Tensor, lengths: Tensor, inputs: Tensor
) -> None:
    """Add the position of each text at which an eigenvector is most active."""
    activations = spectrum.activations(inputs)
    # Padding comes after all tokens of a text, so no activation there may count.
    is_token = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    positions = activations.abs().where(is_token[..., None], -1).argmax(1)
    strongest = activations.gather(1, positions[:, None])[:, 0]
    for column, contexts in enumerate(best):
        # The first of several equal texts is kept, so the strongest come first.
        for row in strongest[:, column].abs().argsort(descending=True, stable=True).tolist():
            activation = float(strongest[row, column])
            if abs(activation) <= contexts.threshold():
                break
            text = ids[row, : int(lengths[row])].cpu()
            contexts.add(Context(text, int(positions[row, column]), activation))


@detached
def contribution(
    model: ResidualModel, spectrum: Spectrum, number: int, context: Context, *, layer: int
) -> Sources:
    """Split the activation of an eigenvector by the tokens of a context, exactly.

    An activation lambda (v . n)^2 is the sum of lambda (v . n) (v . part) over the parts of n. The
    spectrum is that of a single form of the layer, and `number` that of the eigenvector.

    Source: Pearce et al. 2024, figure 7.
    """
    (result,) = contributions(model, spectrum, [(number, context)], layer=layer)
    return result


@detached
def contributions(
    model: ResidualModel, spectrum: Spectrum, contexts: Sequence[tuple[int, Context]], *, layer: int
) -> list[Sources]:
    """Split activations as `contribution` does, each of an eigenvector's number and a context."""
    for i, context in contexts:
        _check(spectrum, i)
        check_index("position", context.position, len(context.ids), "a position in the text")
    return [
        _contribution(
            model, spectrum, i, read_stream(model, context.ids, context.position, layer=layer)
        )
        for i, context in contexts
    ]


def _contribution(model: ResidualModel, spectrum: Spectrum, i: int, stream: Sources) -> Sources:
    vector = spectrum.vectors[i].to(stream.direct)
    total, width = stream.total(), len(stream.direct)
    # The constant coordinate of the form, if it has one, belongs to the biases.
    v, offset = vector[:width], vector[width:].sum()
    # One of the two factors v . n is split and the other is not, so the parts add up.
    scale = spectrum.values[i] * (v @ total + offset)
    split = Sources(
        direct=scale * (v @ stream.direct),
        heads=scale * (stream.heads @ v),
        constant=scale * (v @ stream.constant + offset),
    )
    check_sum(
        "The activation, split by source,",
        split.total(),
        spectrum.activations(total)[i],
        size=float(scale.abs() * (v.abs() @ (stream.direct.abs() + stream.constant.abs()))),
    )
    return split


def _check(spectrum: Spectrum, i: int = 0) -> None:
    if spectrum.batch_shape:
        raise BilensError(
            f"spectrum is a batch of shape {tuple(spectrum.batch_shape)}, expected that of one "
            "form: index it"
        )
    check_finite(spectrum=spectrum.values)
    check_index("number", i, spectrum.k, "an eigenvector")


def _run_texts(
    model: ResidualModel,
    texts: Iterable[str | Tensor],
    layer: int,
    batch_size: int,
    total: int | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches of texts: padded ids, lengths, and the MLP inputs of a layer."""
    with progress_bar("texts", total=total) as bar:
        # Padding would change rotary positions that depend on the length of a text.
        batch_size = 1 if rotates_by_length(model.model) else batch_size
        for batch in batched(texts, batch_size):
            rows = [model.ids(text) for text in batch]
            lengths = torch.tensor([len(row) for row in rows], device=model.device)
            # Attention is causal: padding at the end changes no position before it.
            ids = pad_sequence(rows, batch_first=True)
            yield ids, lengths, model.mlp_inputs(layer, ids)
            bar.update(len(batch))


@checked
def corpus_for(model: ResidualModel, data: str, data_dir: str | Path | None = None) -> Corpus:
    """Load texts in the form of the model's training, and of bilens's own models in its split.

    `data` and `data_dir` are those of `bilens.data.load_corpus`.

    Raises:
        DataError: the texts do not exist.
    """
    tokenizer: Any = require_tokenizer(model.tokenizer)
    if is_own(tokenizer):
        sizes = {"n_ctx": model.model.config.n_ctx, "vocab_size": model.vocab_size}
        # Texts in another form would be rare tokens to the model.
        form: Cleaning = "tinystories" if trained_on_clean_text(tokenizer) else "none"
        clean = None if data in LANGUAGES else form
        return load_corpus(data, **sizes, tokenizer=tokenizer, data_dir=data_dir, clean=clean)
    # Contexts are looked up in texts of at most 256 tokens.
    n_ctx = min(256, max_tokens(model.model.config))
    return load_documents(data, tokenizer, n_ctx=n_ctx, data_dir=data_dir)


@checked
def generate_text(
    model: ResidualModel,
    prompt: str,
    *,
    tokens: Count = 120,
    temperature: NotNegative = 0.7,
    seed: Seed = 0,
) -> str:
    """Continue a text until the model ends it or has read its longest text, by at most `tokens`.

    Temperature 0 takes the most likely token each time, and 1 samples from the model's
    probabilities. The seed does not affect other random numbers of the process.
    """
    ids = continued(model, model.ids(prompt), tokens, temperature=temperature, seed=seed)
    tokenizer = require_tokenizer(model.tokenizer)
    # In a chat they say who speaks.
    text = write_out(tokenizer, ids, skip_special_tokens=not model.chat)
    return text.removeprefix(" ")


def continued(
    model: ResidualModel,
    ids: Int[Tensor, " time"],
    tokens: int,
    *,
    temperature: float,
    seed: int = 0,
) -> Int[Tensor, " longer_time"]:
    """Return the tokens of a text and of its continuation; see `generate_text`."""
    batch = ids[None]
    # Temperatures below count as 0: logits divided by them would leave the range of numbers.
    draws = temperature > 1e-6
    drawing = {"temperature": float(temperature), "top_k": 0} if draws else {}
    # The last token is written and not read.
    room = max_tokens(model.model.config) - batch.shape[1] + 1
    config = GenerationConfig(max_new_tokens=min(tokens, room), do_sample=draws, **drawing)
    devices = [model.device] if model.device.type == "cuda" else []
    # Sampling draws from torch's own generator, which the caller may have seeded.
    with torch.random.fork_rng(devices), fresh(model.model):
        torch.manual_seed(seed)
        return model.model.generate(batch, config, attention_mask=torch.ones_like(batch))[0]


@dataclass(frozen=True, eq=False, repr=False)
class Continuation(Reading):
    """A text that a model has continued: the prompt and its continuation."""

    text: str

    has_plain_fields: ClassVar[bool] = True
    title: ClassVar[str] = "Continuation"

    def facts(self) -> list[Fact]:
        return [("", self.text)]


@checked
def example_directions(model: ResidualModel, corpus: Corpus) -> list[TokenDirection]:
    """Return the paper's examples with known tokens, or else the most frequent word."""
    vocab = corpus.tokenizer.get_vocab()
    # Outputs explained by Pearce et al. 2024 in figure 7, Table 7 and Table 1.
    others = ("run", "climb", "eat", "see", "smell", "walk", "fly", "sit", "sleep")
    candidates = (TokenDirection("swim", others), TokenDirection('"'), TokenDirection("girl"))
    examples = [d for d in candidates if vocab.keys() >= {d.token, *d.minus}]
    if examples and trained_on_clean_text(model.tokenizer):
        return examples
    counts = torch.bincount(corpus.validation[:200]["input_ids"].flatten(), minlength=len(vocab))
    order = counts.argsort(descending=True).tolist()
    names = corpus.tokenizer.convert_ids_to_tokens(order)
    # Punctuation and pieces of words are more frequent than words.
    word = (name for name in names if name and name.strip("▁Ġ").isalpha() and len(name) > 3)
    return [TokenDirection(next(word, names[0]))]
