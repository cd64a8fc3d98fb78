"""Transformers made tensors: readings from weights alone, tested on text, and losses by kind.

The models are tensors of the recipe `tensorise`, stories260K without softmax and gates and without
gates only, beside their original. The recipe `tensorise_own` has the same tables of heads of 64
coordinates. Tables:

- Answers: eigenvectors of the last MLP along a difference of two answers, such as he minus she,
  from weights. Their activation predicts the answer at held-out positions whose next token is one
  of the two. The number is the area under the ROC curve, with a bootstrap interval of 95 %; 0.5 is
  chance. Beside it are 100 random directions and the unembedding's direction. From other texts come
  the difference of the means of both answers' inputs, and a ridge probe on these inputs. The last
  row is the model's own logits.
- Attention: the pattern of each head computed from the embeddings of the tokens only, against its
  pattern on held-out text: the mean correlation within rows. Beside it is the same with other
  tokens at the same positions, and the mean pattern of the other texts, which knows no token. OV:
  the logits that a head adds for a token, from its embedding against its input on text. It is the
  mean correlation over the vocabulary, beside the embedding of another token.
- BLiMP: share of pairs whose acceptable sentence is more probable, for each paradigm. Columns are
  the original, its tensor and the frequency of tokens; 0.5 is chance. The first rows hold the means
  over paradigms with intervals of 95 % and the correlations over paradigms.
- Effects: every head and MLP takes its mean output, in the original and in its tensor; correlation
  of the rises of the loss.
- Edits: the strongest eigenvectors are removed from the MLP. The change of the difference of the
  answers' logits is predicted from weights and measured on held-out text. Last columns: the change
  of the accuracy on BLiMP, with its spread over paradigms.
- Losses: by position, by frequency of the token, and on random tokens that repeat.
- Generation: bytes that decoding keeps and processor time of the next token after 1,024 and 16,384
  tokens, and of whole texts of 16,384 and 65,536 tokens for the tensor.
- Softmax: the loss if only one head of the original is squared, with its taught pattern, and if
  only one keeps softmax.

Small: five minutes on one core, besides the training of `tensorise`. Paper: SmolLM2 on a GPU.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor
from torch.nn import functional

from bilens.convert import open_model
from bilens.convert.language_model import as_language_model
from bilens.data import load_documents
from bilens.errors import BilensError
from bilens.models import load
from bilens.nn.language import LanguageModel
from bilens.read.flow import edit
from bilens.residual import ResidualModel
from bilens.sections import Table
from experiments import tensorise as tensors
from experiments.blimp import Pair, Preferences, load_pairs, preferred
from experiments.context import Outcome, RecipeContext, interval

ANSWERS = (("he", "she"), ("his", "her"), ("was", "is"), (".", ","), ("and", "to"))
"""Pairs of answers; those that are single tokens of a model are tested."""
TEXTS, RANDOM, SAMPLES, LEAST, BATCH = 400, 100, 200, 40, 32
READ: tuple[tensors.Row, ...] = tuple(
    (tensors.STORY, v, {"learning_rate": tensors.RATES[v], "tokens": tensors.MANY[v]})
    for v in ("both", "gates")
)
"""Tensors: rows of `tensorise`."""
PAIRS = 100
"""Pairs of sentences of each paradigm."""
LENGTHS = (1024, 16_384, 65_536)
STEPS = 30
SUMMARY = ("mean", "low", "high", "std")
FEW = 2
"""Eigenvectors of each sign that an edit removes."""
RIDGE = 1e-2


def run(context: RecipeContext) -> Outcome:
    """Read a tensor, and compare it with its original."""
    return read(context, context.choose(READ, (("SmolLM2", "both", {}),)))


def read(context: RecipeContext, models: Iterable[tensors.Row]) -> Outcome:
    """Read the tensors of models, each made with these changes of its settings.

    Tables of attention are of tensors without softmax.
    """
    tables: dict[str, pd.DataFrame] = {}
    folder = context.data_dir or Path(os.environ.get("BILENS_DATA", "."))
    pairs = load_pairs(folder / "blimp", PAIRS)
    for name, variant, changes in models:
        tensors.variant_of(context, name, variant, **changes)
        made = tensors.folder_of(context, name, variant, changes)
        model, tokenizer, _, _, training = tensors.source(context, name)
        original: Any = ResidualModel(as_language_model(model), tokenizer)
        tensor: Any = load(str(made))
        texts = _texts(context, name, tokenizer, training.length)
        parts = {
            "answers": answers(tensor, *texts),
            "BLiMP": minimal_pairs(original, tensor, pairs, texts[0]),
            "effects": effects(original, tensor, texts[1][:24]),
            "edits": edits(tensor, texts[1], pairs),
            "losses": losses(original, tensor, *texts),
        }
        if variant == "both":
            taught: Any = open_model(made / "stages" / "attention")
            parts |= {
                "attention, original": attention(original, texts[1]),
                "attention, tensor": attention(tensor, texts[1]),
                "generation": generation({"original": original.model, "tensor": tensor.model}),
                "softmax": softmax_kept(original.model, taught, texts[1][:24]),
            }
        tables |= {f"{name}, {variant}: {kind}": frame for kind, frame in parts.items()}
    return Outcome(
        {name: frame.to_dict("records") for name, frame in tables.items()},
        parts=[Table(frame, name) for name, frame in tables.items()],
    )


def _texts(context: RecipeContext, name: str, tokenizer: Any, n_ctx: int) -> tuple[Tensor, Tensor]:
    """Return texts for the probe and the frequencies, and held-out texts."""
    if name == "two blocks":
        corpus = context.corpus("tinystories", n_ctx, tensors.OWN.vocab_size)
    else:
        corpus = load_documents("tinystories", tokenizer, n_ctx=n_ctx, data_dir=context.data_dir)
    return corpus.train[: 2 * TEXTS]["input_ids"], corpus.validation[:TEXTS]["input_ids"]


def single_tokens(model: ResidualModel, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs whose names are single tokens of a model, with its mark of a word.

    A word without the mark is a piece inside of words, unless a model has no mark.
    """

    def known(pairs: Sequence[tuple[str, str]], mark: str) -> list[tuple[str, str]]:
        named = []
        for first, second in pairs:
            names = (mark + first, mark + second)
            try:
                [model.token(name) for name in names]
            except BilensError:
                continue
            named.append(names)
        return named

    words = [pair for pair in pairs if pair[0].isalpha()]
    marked = (known(words, mark) for mark in ("▁", " ", ""))
    return next(filter(None, marked), []) + known([p for p in pairs if p not in words], "")


def answers(model: ResidualModel, learned: Tensor, held_out: Tensor) -> pd.DataFrame:
    """Return how well eigenvectors from weights predict answers, beside baselines, by AUC."""
    rows = []
    layer = model.n_layers - 1
    pairs = single_tokens(model, ANSWERS)
    before, tested = (positions_of(model, ids, pairs) for ids in (learned, held_out))
    for pair in (pair for pair in pairs if pair in before and pair in tested):
        u = model.direction(pair[0], minus=pair[1])
        (x0, y0, *_), (x, y, difference, _) = before[pair], tested[pair]
        spectrum = model.mlp(layer).interaction(u).eigh()
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(RANDOM, x.shape[1], generator=generator, dtype=x.dtype)
        mean = x0[y0].mean(0) - x0[~y0].mean(0)
        # The constant of the form is 1 in every input.
        center = x0.mean(0) if not spectrum.constant else torch.cat([x0.mean(0), x0.new_ones(1)])
        slope = (spectrum.dense() @ center)[: x.shape[1]]
        scores = {
            "strongest eigenvector of each sign, from weights": _ends(spectrum, 1)(x),
            f"{2 * FEW} strongest eigenvectors": _ends(spectrum, FEW)(x),
            "all eigenvectors (the whole form)": spectrum(x),
            "slope of the form at the mean input": x @ slope,
            "the unembedding's direction, from weights": x @ u.to(x),
            "difference of means, from texts": x @ mean,
            "ridge probe, from texts": x @ _probe(x0, y0),
            "the model's logits": difference,
        }
        name = " - ".join(word.strip() for word in pair)
        for reading, score in scores.items():
            low, high = bootstrap(score, y)
            rows.append((name, len(y), reading, auc(score, y), low, high))
        chance = torch.tensor([auc(line, y) for line in random @ x.T]).sort().values
        ends = float(chance[round(0.025 * RANDOM)]), float(chance[round(0.975 * RANDOM) - 1])
        rows.append((name, len(y), f"{RANDOM} random directions", float(chance.mean()), *ends))
    columns = ["answers", "positions", "reading", "AUC", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def _ends(spectrum: Any, count: int) -> Any:
    order = spectrum.values.argsort()
    return spectrum.select(torch.cat([order[:count], order[-count:]]))


class Positions(NamedTuple):
    """Positions of texts before an answer.

    Attributes:
        x: input of the last MLP.
        is_first: True where the first answer follows.
        difference: difference of the answers' logits.
        size: number by which the last norm divides.
    """

    x: Float[Tensor, "positions d_model"]
    is_first: Bool[Tensor, " positions"]
    difference: Float[Tensor, " positions"]
    size: Float[Tensor, " positions"]


@torch.no_grad()
def positions_of(
    model: ResidualModel, ids: Tensor, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Positions]:
    """Return the positions of each pair of answers; pairs with few of either are left out."""
    layer, norm = model.n_layers - 1, model.parts.norm
    module: Any = norm.module  # type: ignore[union-attr]
    batches: dict[tuple[str, str], list[tuple[Tensor, ...]]] = {pair: [] for pair in pairs}
    for batch in ids.split(BATCH):
        streams: list[Tensor] = []
        record = streams.append
        hook = module.register_forward_pre_hook(lambda _, args, record=record: record(args[0]))
        with _hook(hook):
            logits = model.logits(batch)[:, :-1]
        size = 1 / norm.scale(streams[0])[:, :-1]  # type: ignore[union-attr]
        x, after = model.mlp_inputs(layer, batch)[:, :-1], batch[:, 1:]
        for pair, rows in batches.items():
            first, second = map(model.token, pair)
            mask = (after == first) | (after == second)
            difference = logits[mask][:, first] - logits[mask][:, second]
            rows.append((x[mask], after[mask] == first, difference, size[mask]))
    joined = {
        pair: Positions(*map(torch.cat, zip(*rows, strict=True))) for pair, rows in batches.items()
    }
    return {
        pair: at
        for pair, at in joined.items()
        if LEAST <= int(at.is_first.sum()) <= len(at.is_first) - LEAST
    }


def _probe(x: Tensor, y: Tensor) -> Tensor:
    """Return the ridge regression of the answer on the input, without its mean."""
    x, target = x.double() - x.double().mean(0), y.double() - y.double().mean()
    gram = x.T @ x
    keep = RIDGE * gram.diagonal().sum() / len(gram) * torch.eye(len(gram), dtype=torch.float64)
    # As much ridge as the average variance, times the number of directions a text may lack.
    return torch.linalg.solve(gram + 10 * keep, x.T @ target).float()


def auc(score: Tensor, label: Tensor) -> float:
    """Return the share of pairs of a True and a False row that the score orders rightly."""
    ranks = torch.from_numpy(stats.rankdata(score.double().numpy()))
    n_true = int(label.sum())
    above = float(ranks[label].sum()) - n_true * (n_true + 1) / 2
    return above / (n_true * (len(label) - n_true))


def bootstrap(score: Tensor, label: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of the AUC over positions drawn with replacement."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(SAMPLES):
        rows = torch.randint(len(label), (len(label),), generator=generator)
        if 0 < int(label[rows].sum()) < len(rows):
            values.append(auc(score[rows], label[rows]))
    low, high = torch.tensor(values).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


@torch.no_grad()
def attention(model: ResidualModel, texts: Tensor) -> pd.DataFrame:
    """Return correlations of patterns and OV logits from embeddings with those on text, by head."""
    inner: Any = model.model
    ids = texts[:16]
    positions = torch.arange(ids.shape[1])[None]
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))
    (x, _, rope), (embedded, *_), (shuffled, *_) = (
        inner.embed_text(tokens, positions) for tokens in (ids, ids, ids[:, order])
    )
    unembed = inner.unembed.weight * inner.norm.weight
    rows = []
    for number, block in enumerate(inner.blocks):
        streams = [block.attn_norm(stream) for stream in (x, embedded, shuffled)]
        patterns = [block.attn.attention_pattern(stream, None, rope) for stream in streams]
        measured, *guesses = (_rows(pattern) for pattern in patterns)
        others = (measured.sum(0, keepdim=True) - measured) / (len(ids) - 1)
        values = [
            block.attn.values(stream).repeat_interleave(model.n_heads // block.attn.n_kv_heads, 1)
            for stream in streams
        ]
        for head in range(model.n_heads):
            qk = [_correlation(measured[:, head], guess[:, head]) for guess in (*guesses, others)]
            map_ = block.attn.W_O[head] @ unembed.T
            target, *logits = ((value[:, head] @ map_).double() for value in values)
            ov = [_correlation(target, guess) for guess in logits]
            rows.append((f"{number}.{head}", *qk, *ov))
        x = block(x, None, rope)
    columns = [
        "head",
        "QK",
        "QK, other tokens",
        "QK, mean of other texts",
        "OV",
        "OV, other tokens",
    ]
    return pd.DataFrame(rows, columns=columns)


def _rows(pattern: Tensor) -> Tensor:
    """Return the later half of the rows, on the tokens that each of them sees."""
    half = pattern.shape[2] // 2
    return pattern[:, :, half:, :half].double()


def _correlation(a: Tensor, b: Tensor) -> float:
    """Return the mean over rows of the correlation of their numbers."""
    a, b = (part - part.mean(-1, keepdim=True) for part in (a, b))
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    return float(((a * b).sum(-1) / scale.clamp_min(1e-30)).mean())


def minimal_pairs(
    original: ResidualModel, tensor: ResidualModel, pairs: Sequence[Pair], learned: Tensor
) -> pd.DataFrame:
    """Return the accuracy of both models on BLiMP by paradigm, after the means over paradigms."""
    chances = torch.bincount(learned.flatten(), minlength=original.vocab_size).add(1).log().double()

    def frequency(text: str) -> float:
        ids: Any = original.tokenizer(text)["input_ids"]  # type: ignore[misc]
        return float((chances[ids] - chances.logsumexp(0)).sum())

    answers = {
        "original": preferred(original, pairs),
        "tensor": preferred(tensor, pairs),
        "frequency": [frequency(pair.good) > frequency(pair.bad) for pair in pairs],
    }
    frame = pd.DataFrame(answers).assign(paradigm=[pair.paradigm for pair in pairs])
    same = float((frame.original == frame.tensor).mean())
    grouped = frame.groupby("paradigm")
    shares, counts = grouped.mean(), grouped.size()
    names = list(answers)
    ends = {name: [interval(list(shares[name]))[key] for key in SUMMARY] for name in names}
    first = pd.DataFrame(ends, index=[f"all paradigms, {key}" for key in SUMMARY])
    related = shares.corr().loc[["tensor"]].rename({"tensor": "correlation with the tensor"})
    related.loc["pairs answered as by the tensor"] = {"original": same, "tensor": 1.0}
    # Half of the interval of 95 % of a share, at its largest, at one half.
    half = (0.25 * 1.96**2 / counts) ** 0.5
    shares = shares.assign(pairs=counts, half=half)
    return pd.concat([first, related, shares]).rename_axis("paradigm").reset_index()


def effects(original: ResidualModel, tensor: ResidualModel, texts: Tensor) -> pd.DataFrame:
    """Return the rise of the loss if a head or MLP gives its mean output, in both models."""
    columns = {"original": _effects(original, texts), "tensor": _effects(tensor, texts)}
    frame = pd.DataFrame(columns).rename_axis("part").reset_index()
    heads = frame[frame.part.str.startswith("head")]
    pearson = stats.pearsonr(heads.original, heads.tensor).statistic
    spearman = stats.spearmanr(heads.original, heads.tensor).statistic
    summary = [("heads: Pearson, Spearman", pearson, spearman)]
    return pd.concat([pd.DataFrame(summary, columns=frame.columns), frame], ignore_index=True)


def _effects(model: ResidualModel, texts: Tensor) -> dict[str, float]:
    before = _loss(model.model, texts)
    rises = {}
    for number, layer in enumerate(model.parts.layers):
        weight: Any = layer.heads.out.module.weight
        width = weight.shape[1] // model.n_heads
        for head in range(model.n_heads):
            columns = slice(head * width, (head + 1) * width)

            def average(_: Any, args: Any, columns: slice = columns) -> Any:
                x = args[0].clone()
                x[..., columns] = x[..., columns].mean((0, 1))
                return (x, *args[1:])

            with _hook(layer.heads.out.module.register_forward_pre_hook(average)):
                rises[f"head {number}.{head}"] = _loss(model.model, texts) - before
        hook = layer.mlp.module.register_forward_hook(lambda _, __, y: y.mean((0, 1)).expand_as(y))
        with _hook(hook):
            rises[f"MLP {number}"] = _loss(model.model, texts) - before
    return rises


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _token_losses(model: Any, texts: Tensor) -> Tensor:
    """Return the loss of each next token, (texts, time - 1)."""
    logits = model(texts, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(logits.mT, texts[:, 1:], reduction="none")


def _loss(model: Any, texts: Tensor) -> float:
    return float(_token_losses(model, texts).mean())


def edits(model: ResidualModel, held_out: Tensor, sentences: Sequence[Pair]) -> pd.DataFrame:
    """Return the change of an answer's logit by an edit, predicted from weights and measured.

    The edit removes the strongest eigenvectors of each sign from the last MLP's input. The last
    MLP writes directly into the logits. So the change is the difference of the form on the input
    before and after the edit, divided by the last norm's scale.
    """
    rows = []
    layer = model.n_layers - 1
    pairs = single_tokens(model, ANSWERS)
    prefers = Preferences(model, sentences, layer)
    paradigms = [sentence.paradigm for sentence in sentences]
    unedited = prefers(model)
    for pair, (x, y, before, size) in positions_of(model, held_out, pairs).items():
        u = model.direction(pair[0], minus=pair[1])
        form = model.mlp(layer).interaction(u)
        edited = edit(model, layer, _ends(form.eigh(), FEW).vectors)
        after = positions_of(edited, held_out, [pair])[pair].difference
        change = after - before
        # The size is that of the unedited run.
        fall = edited.mlp(layer).interaction(u)(x) - form(x)
        predicted = fall / size
        preferences = pd.DataFrame({"before": unedited, "after": prefers(edited)}).astype(float)
        falls = (preferences.after - preferences.before).groupby(paradigms).mean()
        rows.append(
            (
                " - ".join(word.strip() for word in pair),
                float(change.mean()),
                float(predicted.mean()),
                float(stats.pearsonr(predicted.numpy(), change.numpy()).statistic),
                float(1 - (change - predicted).square().sum() / change.square().sum()),
                auc(before, y),
                auc(after, y),
                float(falls.mean()),
                float(falls.min()),
                float(falls.max()),
            )
        )
    columns = ["answers", "measured", "predicted", "correlation", "R2", "AUC before", "AUC after"]
    columns += ["BLiMP, mean", "BLiMP, least", "BLiMP, most"]
    return pd.DataFrame(rows, columns=columns)


def losses(
    original: ResidualModel, tensor: ResidualModel, learned: Tensor, held_out: Tensor
) -> pd.DataFrame:
    """Return losses of both models by position, by frequency of the token, and on repetition."""
    both = [_token_losses(model.model, held_out) for model in (original, tensor)]
    length = both[0].shape[1]
    positions = torch.arange(length).expand_as(both[0])
    counts = torch.bincount(learned.flatten(), minlength=original.vocab_size)
    order = counts.argsort(descending=True).argsort()[held_out[:, 1:]]
    edges = [0, 8, 32, length // 2, length]
    masks = {
        f"positions {a} to {b}": (positions >= a) & (positions < b)
        for a, b in pairwise(edges)
        if a < b
    }
    ranks = [0, 16, 64, 256, original.vocab_size]
    masks |= {
        f"tokens of rank {a} to {b} by frequency": (order >= a) & (order < b)
        for a, b in pairwise(ranks)
        if a < b
    }
    rows = [
        (name, int(mask.sum()), *(float(part[mask].mean()) for part in both))
        for name, mask in masks.items()
        if mask.any()
    ]
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(original.vocab_size, (32, (length + 1) // 2), generator=generator)
    stories = held_out[:32, : (length + 1) // 2]
    for name, part in (("random tokens", half), ("stories", stories)):
        twice = torch.cat([part, part], 1)
        again = [_token_losses(model.model, twice) for model in (original, tensor)]
        first, second = slice(0, part.shape[1] - 1), slice(part.shape[1], None)
        for when, columns in (("first time", first), ("second time", second)):
            means = [float(row[:, columns].mean()) for row in again]
            rows.append((f"{name}, {when}", again[0][:, columns].numel(), *means))
    frame = pd.DataFrame(rows, columns=["tokens", "number", "original", "tensor"])
    return frame.assign(rise=frame.tensor - frame.original)


@torch.no_grad()
def softmax_kept(original: LanguageModel, taught: LanguageModel, texts: Tensor) -> pd.DataFrame:
    """Return the loss with single heads squared, and with single heads of softmax kept."""
    n_heads = original.config.n_heads
    heads = [(layer, head) for layer in range(len(original.blocks)) for head in range(n_heads)]

    def loss(softmax: Callable[[int, int], bool]) -> float:
        return _mixed_loss(original, taught, texts, softmax)

    all_softmax, none = loss(lambda *_: True), loss(lambda *_: False)
    rows = [
        (
            f"{layer}.{head}",
            loss(lambda *at, place=(layer, head): at != place) - all_softmax,
            none - loss(lambda *at, place=(layer, head): at == place),
        )
        for layer, head in heads
    ]
    rows.append(("all", none - all_softmax, none - all_softmax))
    columns = ["head", "rise if only it is squared", "fall if only it keeps softmax"]
    return pd.DataFrame(rows, columns=columns)


@torch.no_grad()
def _mixed_loss(
    original: Any, taught: Any, texts: Tensor, softmax: Callable[[int, int], bool]
) -> float:
    """Return the loss of the original with some heads' patterns those of the taught model."""
    positions = torch.arange(texts.shape[1])[None]
    x, _, rope = original.embed_text(texts, positions)
    for layer, (block, pupil) in enumerate(zip(original.blocks, taught.blocks, strict=True)):
        normed = block.attn_norm(x)
        patterns = [part.attn.attention_pattern(normed, None, rope) for part in (block, pupil)]
        mask = torch.tensor([softmax(layer, head) for head in range(block.attn.n_heads)])
        pattern = torch.where(mask[:, None, None], *patterns)
        values = block.attn.values(normed)
        values = values.repeat_interleave(block.attn.n_heads // block.attn.n_kv_heads, 1)
        x = x + block.attn.out((pattern @ values).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.mlp_norm(x))
    logits = original.unembed(original.norm(x))[:, :-1].float()
    return float(functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()))


@torch.no_grad()
def generation(models: dict[str, Any]) -> pd.DataFrame:
    """Return the memory and the processor time of decoding after short and long texts."""
    rows = []
    for name, model in models.items():
        for length in LENGTHS if name == "tensor" else LENGTHS[:2]:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
            start = time.process_time()
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            text = time.process_time() - start
            size = sum(
                part.numel() * part.element_size()
                for layer in cache.layers
                for part in (layer.keys, getattr(layer, "values", None))
                if part is not None
            )
            seconds = []
            for _ in range(STEPS):
                start = time.process_time()
                output = model(ids[:, :1], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                seconds.append(time.process_time() - start)
            rows.append((name, length, size, 1e3 * statistics.median(seconds), text))
    columns = ["model", "tokens", "bytes kept", "ms a token", "s of the whole text"]
    return pd.DataFrame(rows, columns=columns)
