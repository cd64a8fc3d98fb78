"""Transformers made tensors: readings from weights alone, tested on text, and losses by kind.

The models are the tensors of the recipe `tensorise`, both stories260K and the model of two blocks,
beside their originals. Tables:

- Answers: eigenvectors of the last MLP along a difference of two answers, such as he minus she,
  from weights alone. At each held-out position whose next token is one of the two, their activation
  predicts which (area under the ROC curve, 0.5 is chance, with a bootstrap interval of 95 %).
  Beside it are 100 random directions, the difference of the means of both answers' inputs on other
  texts, a ridge probe on these inputs, and the model's own logits.
- Attention: the pattern of each head computed from the embeddings of the tokens alone, against its
  pattern on held-out text: the mean correlation within rows. Beside it is the same with other
  tokens at the same positions.
- Effects: every head and MLP takes its mean output, in the original and in its tensor; correlation
  of the rises of the loss.
- Edits: the strongest eigenvectors are removed from the MLP; the change of the difference of the
  answers' logits, predicted from weights and measured, on held-out text.
- Losses: by position, by frequency of the token, and on random tokens that repeat.
- Generation: bytes that decoding keeps and processor time of the next token after 1,024 and 16,384
  tokens, and of whole texts of 16,384 and 65,536 tokens for the tensor.
- Softmax: the loss if a single head of the original is squared, with its taught pattern, and if
  all are squared but a single one keeps softmax.

Small: a minute for each model, besides the trainings of `tensorise`. Paper: SmolLM2 on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
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
from bilens.reading import Table
from bilens.residual import ResidualModel
from experiments import tensorise as tensors
from experiments.context import Outcome, RecipeContext

ANSWERS = (("he", "she"), ("his", "her"), ("was", "is"), (".", ","), ("and", "to"))
"""Pairs of answers; those that are single tokens of a model are tested."""
TEXTS, RANDOM, SAMPLES, LEAST, BATCH = 400, 100, 200, 40, 32
LENGTHS = (1024, 16_384, 65_536)
STEPS = 30
FEW = 2
"""Eigenvectors of each sign that an edit removes."""
RIDGE = 1e-2


def run(context: RecipeContext) -> Outcome:
    """Read both tensors, and compare them with their originals."""
    tables: dict[str, pd.DataFrame] = {}
    for name in context.choose(("stories260K", "two blocks"), ("SmolLM2",)):
        for variant in ("attention", "both"):
            tensors.variant_of(context, name, variant)
        model, tokenizer, _, _, training = tensors.source(context, name)
        original: Any = ResidualModel(as_language_model(model), tokenizer)
        tensor: Any = load(str(tensors.folder_of(context, name, "both")))
        taught: Any = open_model(
            tensors.folder_of(context, name, "attention") / "stages" / "attention"
        )
        texts = _texts(context, name, tokenizer, training.length)
        parts = {
            "answers": answers(tensor, *texts),
            "attention": attention(tensor, texts[1]),
            "effects": effects(original, tensor, texts[1][:24]),
            "edits": edits(tensor, texts[1]),
            "losses": losses(original, tensor, *texts),
            "generation": generation({"original": original.model, "tensor": tensor.model}),
            "softmax": softmax_kept(original.model, taught, texts[1][:24]),
        }
        tables |= {f"{name}: {kind}": frame for kind, frame in parts.items()}
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
    """Return the pairs whose names are single tokens of a model, with its mark of a word."""
    known = []
    for pair in pairs:
        for mark in ("", " "):
            try:
                [model.token(mark + word) for word in pair]
            except BilensError:
                continue
            known.append((mark + pair[0], mark + pair[1]))
            break
    return known


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
    """Return the correlation of each head's pattern from embeddings with its pattern on text."""
    own: Any = model.model
    ids = texts[:16]
    positions = torch.arange(ids.shape[1])[None]
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    streams = [own.embed_text(tokens, positions) for tokens in (ids, ids, shuffled)]
    x, _, rope = streams[0]
    rows = []
    for number, block in enumerate(own.blocks):
        patterns = [
            block.attn.attention_pattern(block.attn_norm(stream), None, rope)
            for stream in (x, streams[1][0], streams[2][0])
        ]
        measured, from_weights, other = (_rows(pattern) for pattern in patterns)
        for head in range(model.n_heads):
            numbers = [
                _row_correlation(measured[:, head], guess[:, head])
                for guess in (from_weights, other)
            ]
            rows.append((f"{number}.{head}", *numbers))
        x = block(x, None, rope)
    return pd.DataFrame(rows, columns=["head", "from embeddings", "other tokens"])


def _rows(pattern: Tensor) -> Tensor:
    """Return the later half of the rows, which see enough tokens."""
    return pattern[:, :, pattern.shape[2] // 2 :].double()


def _row_correlation(a: Tensor, b: Tensor) -> float:
    """Return the mean over rows of the correlation among the tokens that every row sees."""
    width = a.shape[-1] // 2
    a, b = (part[..., :width] - part[..., :width].mean(-1, keepdim=True) for part in (a, b))
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    return float(((a * b).sum(-1) / scale.clamp_min(1e-30)).mean())


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


def edits(model: ResidualModel, held_out: Tensor) -> pd.DataFrame:
    """Return the change of an answer's logit by an edit, predicted from weights and measured.

    The edit removes the strongest eigenvectors of each sign from the last MLP's input. The last
    MLP writes directly into the logits, so the change is the difference of the form on the input
    and on what the edit leaves of it, divided by the last norm's scale.
    """
    rows = []
    layer = model.n_layers - 1
    pairs = single_tokens(model, ANSWERS)
    for pair, (x, y, before, size) in positions_of(model, held_out, pairs).items():
        u = model.direction(pair[0], minus=pair[1])
        form = model.mlp(layer).interaction(u)
        edited = edit(model, layer, _ends(form.eigh(), FEW).vectors)
        after = positions_of(edited, held_out, [pair])[pair].difference
        change = after - before
        # The size is that of the unedited run.
        fall = edited.mlp(layer).interaction(u)(x) - form(x)
        predicted = fall / size
        rows.append(
            (
                " - ".join(word.strip() for word in pair),
                float(change.mean()),
                float(predicted.mean()),
                float(stats.pearsonr(predicted.numpy(), change.numpy()).statistic),
                float(1 - (change - predicted).square().sum() / change.square().sum()),
                auc(before, y),
                auc(after, y),
            )
        )
    columns = ["answers", "measured", "predicted", "correlation", "R2", "AUC before", "AUC after"]
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
            loss(lambda *at, one=(layer, head): at != one) - all_softmax,
            none - loss(lambda *at, one=(layer, head): at == one),
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
