"""Transformers made tensors: readings from weights alone, tested on text.

The models are tensors of the recipe `tensorise`, stories260K without softmax and gates and without
gates only, beside their original. The recipe `tensorise_own` has the same tables of heads of 64
coordinates. Tables:

- Answers: eigenvectors of the last MLP along a difference of two answers, such as he minus she,
  from weights. Their activation predicts the answer at held-out positions whose next token is one
  of the two. The number is the area under the ROC curve, with a bootstrap interval of 95 %; 0.5 is
  chance. Beside it are 100 random directions, the unembedding's direction, a ridge probe on inputs
  of other texts, and the model's own logits.
- Effects: every head and MLP takes its mean output, in the original and in its tensor; correlation
  of the rises of the loss.
- Edits: the strongest eigenvectors are removed from the MLP. The change of the difference of the
  answers' logits is predicted from weights and measured on held-out text.
- Generation: bytes that decoding keeps and processor time of the next token after 1,024 and 16,384
  tokens, and of whole texts of 16,384 and 65,536 tokens for the tensor.

Small: five minutes on one core, besides the training of `tensorise`. Paper: SmolLM2 on a GPU.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor
from torch.nn import functional

from bilens.circuits import edit
from bilens.convert.language_model import as_language_model
from bilens.data import load_documents
from bilens.errors import BilensError
from bilens.transformer import ResidualModel
from experiments import tensorise as tensors
from experiments.context import Outcome, RecipeContext
from experiments.results import Row

ANSWERS = (("he", "she"), ("his", "her"), ("was", "is"), (".", ","), ("and", "to"))
"""Pairs of answers; those that are single tokens of a model are tested."""
TEXTS, RANDOM, SAMPLES, LEAST, BATCH = 400, 100, 200, 40, 32
READ: tuple[tensors.Row, ...] = tuple(
    (tensors.STORY, v, {"learning_rate": tensors.RATES[v], "tokens": tensors.MANY[v]})
    for v in ("both", "gates")
)
"""Tensors: rows of `tensorise`."""
FORM = "all eigenvectors (the whole form)"
KINDS = ("original", "tensor")
LENGTHS = (1024, 16_384, 65_536)
STEPS = 30
FEW = 2
"""Eigenvectors of each sign that an edit removes."""
RIDGE = 1e-2


def run(context: RecipeContext) -> Outcome:
    """Read a tensor, and compare it with its original."""
    return read(context, context.choose(READ, (("SmolLM2", "both", {}),)))


def read(context: RecipeContext, models: Iterable[tensors.Row]) -> Outcome:
    """Read the tensors of models, each made with these changes of its settings."""
    tables: dict[str, pd.DataFrame] = {}
    rows: list[Row] = []
    for name, variant, changes in models:
        model, tokenizer, _, _, training = tensors.source(context, name)
        original: Any = ResidualModel(as_language_model(model), tokenizer)
        tensor: Any = tensors.tensor_of(context, name, variant, changes)
        texts = _texts(context, name, tokenizer, training.length)
        parts = {
            "answers": answers(tensor, *texts),
            "effects": effects(original, tensor, texts[1][:24]),
            "edits": edits(tensor, texts[1]),
        }
        if variant == "both":
            both = (original.model, tensor.model)
            parts["generation"] = generation(dict(zip(KINDS, both, strict=True)))
        tables |= {f"{name}, {variant}: {kind}": frame for kind, frame in parts.items()}
        rows += _rows(f"{name}, {variant}", parts)
    settings = {"directions": RANDOM, "eigenvectors": 2 * FEW, "lengths": LENGTHS[:2]}
    return replace(Outcome.of_tables(tables), rows=rows, settings=settings)


def _rows(name: str, tables: dict[str, pd.DataFrame]) -> list[Row]:
    """Return what the tables of a tensor show."""
    rows = []
    for pair, frame in tables["answers"].groupby("answers", sort=False):
        areas = frame.set_index("reading").AUC.to_dict()
        (form,) = frame[frame.reading == FORM].itertuples()
        del areas[FORM]
        claim = f"{name}, {pair}: AUC of the form of the last MLP"
        rows.append(Row(claim, form.AUC, form.low, form.high, form.positions, baselines=areas))
    heads = tables["effects"]
    n_heads = int(heads.part.str.startswith("head ").sum())
    claim = f"{name}: correlation of the effects of heads with the original's"
    rows.append(Row(claim, float(heads.iloc[0].original), n=n_heads))
    if r2 := tables["edits"].R2.tolist():
        claim = f"{name}: R² of the change that an edit of {2 * FEW} eigenvectors predicts"
        rows.append(Row.of_range(claim, r2))
    if "generation" in tables:
        first, last = LENGTHS[:2]
        times = tables["generation"].set_index(["model", "tokens"])["ms a token"]
        ratios = {kind: float(times[kind, last] / times[kind, first]) for kind in KINDS}
        claim = f"{name}: time of a token after {last} tokens over that after {first}"
        rows.append(
            Row(claim, ratios["tensor"], n=STEPS, baselines={"original": ratios["original"]})
        )
    return rows


def _texts(context: RecipeContext, name: str, tokenizer: Any, n_ctx: int) -> tuple[Tensor, Tensor]:
    """Return texts for the probe, and held-out texts."""
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
        scores = {
            "strongest eigenvector of each sign, from weights": _ends(spectrum, 1)(x),
            f"{2 * FEW} strongest eigenvectors": _ends(spectrum, FEW)(x),
            FORM: spectrum(x),
            "the unembedding's direction, from weights": x @ u.to(x),
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
    """Positions of texts before an answer, whose logits differ by `difference`.

    `x` is the input of the last MLP, and `size` the number by which the last norm divides.
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
    layer, norm = model.n_layers - 1, model.modules.norm
    module: Any = norm.module  # type: ignore[union-attr]
    batches: dict[tuple[str, str], list[tuple[Tensor, ...]]] = {pair: [] for pair in pairs}
    for batch in ids.split(BATCH):
        streams: list[Tensor] = []
        record = streams.append
        hook = module.register_forward_pre_hook(lambda _, args, record=record: record(args[0]))
        with hook:
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
    for number, layer in enumerate(model.modules.layers):
        weight: Any = layer.heads.out.module.weight
        width = weight.shape[1] // model.n_heads
        for head in range(model.n_heads):
            columns = slice(head * width, (head + 1) * width)

            def average(_: Any, args: Any, columns: slice = columns) -> Any:
                x = args[0].clone()
                x[..., columns] = x[..., columns].mean((0, 1))
                return (x, *args[1:])

            with layer.heads.out.module.register_forward_pre_hook(average):
                rises[f"head {number}.{head}"] = _loss(model.model, texts) - before
        hook = layer.mlp.module.register_forward_hook(lambda _, __, y: y.mean((0, 1)).expand_as(y))
        with hook:
            rises[f"MLP {number}"] = _loss(model.model, texts) - before
    return rises


@torch.no_grad()
def _loss(model: Any, texts: Tensor) -> float:
    logits = model(texts, use_cache=False).logits[:, :-1].float()
    return float(functional.cross_entropy(logits.mT, texts[:, 1:], reduction="none").mean())


def edits(model: ResidualModel, held_out: Tensor) -> pd.DataFrame:
    """Return the change of an answer's logit by an edit, predicted from weights and measured.

    The edit removes the strongest eigenvectors of each sign from the last MLP's input. The last
    MLP writes directly into the logits. So the change is the difference of the form on the input
    before and after the edit, divided by the last norm's scale.
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
