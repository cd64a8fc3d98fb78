"""Texts in tokens, and a model on a text: streams, scales, queries, patterns and gate ratios."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bilens.analysis import Reading
from bilens.checks import check_text, detached
from bilens.data.texts import clean, tokenize, write_out
from bilens.errors import BilensError
from bilens.hooks import first_call, hooked
from bilens.lazy_imports import pd
from bilens.residual.layer_trace import (
    AttentionArguments,
    LayerTrace,
    Recorded,
    first_input,
    layer_trace,
    pattern_of_call,
    widened,
    with_input,
)
from bilens.residual.layers import MLP, Parts
from bilens.residual.parts import Norm
from bilens.residual.running import attends_by, attention_call, rotates_by_length, run, wide_passes
from bilens.sections import Fact
from bilens.settings import Count, Place

ScoredRows = list[tuple[Tensor, Tensor]]
"""One or two pairs of queries and keys (n, heads, d_head), whose inner products are the scores."""

KEPT_BYTES = 256 * 1024**2
"""What follows from the streams of a text is kept if it takes no more than this."""


@detached
def query_key_maps(view: Any, layer: int, position: Place) -> ScoredRows:
    """Return the maps from normalised rows n at a position to queries and keys, [n, 1] @ map.

    They include rotation, the scores' scale and the gains of norms of queries and keys. They are
    one or two pairs of (d_model + 1, heads, d_head). The last row is the output of biases and of
    positions that are vectors. `view` is a `ResidualModel`.
    """
    norm = view.layer(layer).heads.norm
    basis = torch.eye(view.d_model, dtype=view.parts.dtype, device=view.device)
    zero = torch.zeros_like(basis[:1])
    if norm is not None:
        basis = norm.folded(basis, None)[0].T
        bias = norm.bias()
        zero = zero if bias is None else bias[None]
        basis = basis + zero
    # The maps are run, not read: only the modules know their rotation. They are affine in the rows
    # as long as norms of queries and keys only multiply by their gain, so the row of zeros has the
    # constant.
    pairs = _from_stream(view, layer, torch.cat([basis, zero]), position, linear=True)

    def without_bias(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1] - rows[-1:], rows[-1:]])

    return [(without_bias(q), without_bias(k)) for q, k in pairs]


@detached
def queries_keys(
    view: Any,
    layer: int,
    n: Float[Tensor, "rows d_model"],
    position: Place,
    length: Count | None = None,
) -> ScoredRows:
    """Return queries and keys of normalised rows at one position.

    They include biases, norms of queries and keys, rotation and the scores' scale.

    Args:
        view: a `ResidualModel`.
        layer: number of the layer.
        n: the rows.
        position: of the rows.
        length: number of tokens of the text, by which some models choose the frequencies of rotary
            positions; by default the position is the last one.

    Returns:
        One or two pairs of (rows, heads, d_head), whose inner products are the scores.

    Raises:
        BilensError: the rows do not have the width of the stream.
    """
    if n.shape[-1] != view.d_model:
        raise BilensError(
            f"n has shape {tuple(n.shape)}, expected a last axis of {view.d_model}, the width of "
            "the stream"
        )
    x = view.layer(layer).heads.applied(n)
    return _from_stream(view, layer, x, position, length, linear=False)


def _from_stream(
    view: Any, layer: int, x: Tensor, position: int, length: int | None = None, *, linear: bool
) -> ScoredRows:
    """Return queries and keys of a layer for rows (n, d_model) at one position.

    The rows go through the layer's own maps, norms and rotation. The scores' scale is in the
    queries. Keys that heads share are repeated for each of them. With `linear` norms of queries and
    keys multiply by their gain only, so that the result is linear in the rows.
    """
    at_once = 8192  # rows that go through a layer
    if len(x) > at_once:
        batches = x.split(at_once)
        parts = [_from_stream(view, layer, y, position, length, linear=linear) for y in batches]
        pairs = []
        for of_batches in zip(*parts, strict=True):
            queries, keys = zip(*of_batches, strict=True)
            pairs.append((torch.cat(queries), torch.cat(keys)))
        return pairs
    heads, model = view.parts.layers[layer].heads, view.model
    if view.parts.queries_keys is not None:
        return view.parts.queries_keys(heads.module, x, position)
    # Each row is a text of one token, at the given position.
    rows = x[:, None].to(heads.out.stored.dtype)
    if hasattr(heads.module, "queries_keys"):
        pairs, scale = _of_own_model(model, heads.module, rows, position, linear=linear)
    else:
        norms = heads.inner if linear else ()
        with hooked(after=[(norm.module, partial(_times, norm.gain())) for norm in norms]):
            arguments = _arguments(model, heads.module, position, length or position + 1)
            call = attention_call(model, lambda: heads.module(hidden_states=rows, **arguments))
        if call is None:
            raise BilensError(
                f"{type(heads.module).__name__} is not built on the attention interface of "
                "transformers, which returns queries and keys; set queries_keys in its Family"
            )
        query, key, scale = call["query"], call["key"], call["scaling"]
        # Row h of the keys is then that of head h, also where heads share keys.
        pairs = [(query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))]
    return [(scale * q[:, :, 0].to(x), k[:, :, 0].to(x)) for q, k in pairs]


def _of_own_model(
    model: Any, module: Any, rows: Tensor, position: int, *, linear: bool
) -> tuple[ScoredRows, float]:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
    _, pos_embed, rope = model.embed_text(ids, torch.full_like(ids, position))
    place = None if pos_embed is None else pos_embed.expand(len(rows), 1, -1)
    return module.queries_keys(rows, place, rope, normed=not linear), module.scale


def _arguments(model: Any, module: nn.Module, position: int, length: int) -> dict[str, Any]:
    """Return the arguments of an attention module at a position of a text, without its input."""
    # The last position tells a model the length of the text.
    text = [position] if length == position + 1 else [position, length - 1]
    places = torch.tensor([text], device=next(module.parameters()).device)
    _, arguments = first_call(
        module, lambda: run(model, torch.zeros_like(places), position_ids=places)
    )
    known: dict[str, Any] = {"attention_mask": None}
    if "position_embeddings" in arguments:
        turns = arguments["position_embeddings"]
        known["position_embeddings"] = (
            turns if len(text) == 1 else tuple(part[:, :1] for part in turns)
        )
    return known


def _times(gain: Tensor, _: nn.Module, args: tuple[Any, ...], *others: Any) -> Tensor:
    return args[0] * gain


def require_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer; raise BilensError if it is None."""
    if tokenizer is None:
        raise BilensError(
            "The model came without a tokenizer, which texts need: pass the numbers of tokens, or "
            "ResidualModel(model, tokenizer)"
        )
    return tokenizer


def trained_on_clean_text(tokenizer: Any) -> bool:
    """Return True for tokenizers of bilens's own models, which learn from cleaned texts."""
    return getattr(tokenizer, "bos_token", None) == "[BOS]"


def max_tokens(config: Any) -> int:
    """Return the length of the longest text that a model accepts, by its configuration."""
    return int(getattr(config, "max_position_embeddings", 2**31 - 1))


def text_ids(text: str, tokenizer: Any, config: Any) -> list[int]:
    """Return the token ids of a text, after the tokens that the model's texts begin with, once.

    A tokenizer that ends texts with a token gives none here: the answer follows the text itself.
    """
    tokenizer = require_tokenizer(tokenizer)
    check_text("text", text)
    if trained_on_clean_text(tokenizer):
        text = clean(text)
        begin = [] if config.bos_token_id is None else [config.bos_token_id]
    else:
        begin = _beginning(tokenizer)
    ids = plain_ids(text, tokenizer)
    # A text may name its beginning itself, as those of chat templates do.
    if ids[: len(begin)] != begin:
        ids = [*begin, *ids]
    if all(number in tokenizer.all_special_ids for number in ids):
        raise BilensError(
            f"text={text[:80]!r} holds no token that the model knows; expected some text"
        )
    if len(ids) > max_tokens(config):
        raise BilensError(
            f"text has {len(ids)} tokens, expected up to {max_tokens(config)}, the longest text "
            "that the model reads"
        )
    return ids


def plain_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text without those that the tokenizer adds to it."""
    return tokenize(tokenizer, text, add_special_tokens=False)


def _beginning(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text."""
    bare, whole = plain_ids("a", tokenizer), tokenize(tokenizer, "a")
    for start in range(len(whole)):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    raise BilensError(
        f"The tokenizer changes a text where it adds special tokens to it: {bare} becomes {whole}. "
        "Pass the numbers of tokens"
    )


def ids_within_text(name: str, tokenizer: Any) -> list[int]:
    """Return the token ids of some words or signs as they follow a word in a text."""
    # Tokenizers of SentencePiece put a space before every text, so that "are" alone is the word
    # " are", and " are" would have two spaces.
    word = "a"
    first = tokenizer.convert_ids_to_tokens(plain_ids(word, tokenizer)[:1])
    if not first or not str(first[0]).startswith(("▁", "Ġ")):
        return plain_ids(name, tokenizer)
    # A word is apart from the one before it, a comma or a new line is not.
    after = f" {name}" if name[:1].isalnum() else name
    before, both = plain_ids(word, tokenizer), plain_ids(word + after, tokenizer)
    if both[: len(before)] != before:
        return plain_ids(name, tokenizer)
    return both[len(before) :]


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Reading):
    """A model on a text.

    Attributes:
        ids: the text.
        layers: the layers on the text.
        stream: after the last layer.
        scale: scale of the last norm; 1 without one.
        next_logits: of the token after the text, by the model itself.
        follows: a function from the name of a property to its value.
        tokenizer: of the model; None without one.
    """

    ids: Int[Tensor, " time"]
    layers: tuple[LayerTrace, ...]
    stream: Float[Tensor, "time d_model"]
    scale: Float[Tensor, " time"]
    next_logits: Float[Tensor, " vocab"]
    follows: Callable[[str], Tensor]
    tokenizer: Any = None

    axes: ClassVar[dict[str, str]] = {"x": "next token", "y": "probability"}

    def facts(self) -> list[Fact]:
        return [
            ("tokens", len(self.ids)),
            ("layers", len(self.layers)),
            ("width", self.stream.shape[-1]),
        ]

    def frame(self) -> "pd.DataFrame":
        """Return the ten most likely next tokens, with their probabilities."""
        likely = self.next_logits.float().softmax(-1).topk(min(10, len(self.next_logits)))
        numbers = likely.indices.tolist()
        names: list[Any] = numbers
        if self.tokenizer is not None:
            names = [repr(write_out(self.tokenizer, [number])) for number in numbers]
        return pd.DataFrame({"next token": names, "probability": likely.values.tolist()})

    @property
    def logits(self) -> Float[Tensor, "time vocab"]:
        """Logits of the model itself, computed again at each use if the text is long."""
        return self.follows("logits")


@detached
def traces(
    model: Any, parts: Parts, texts: Sequence[Int[Tensor, " time"]], tokenizer: Any = None
) -> list[Trace]:
    """Run a model on texts of any lengths at once; return their traces, in float32 or float64."""
    keeps = _numbers(parts, max(map(len, texts))) * parts.dtype.itemsize <= KEPT_BYTES
    if len(texts) > 1 and (
        not keeps or (rotates_by_length(model) and len(set(map(len, texts))) > 1)
    ):
        return [traces(model, parts, [text], tokenizer)[0] for text in texts]
    # Attention is causal: padding at the end changes no position before it.
    ids = pad_sequence(list(texts), batch_first=True)
    seen: Recorded = {}
    calls: dict[nn.Module, AttentionArguments] = {}
    hooks: list[tuple[nn.Module, Callable[..., None]]] = []

    def record(kind: str, module: nn.Module, read: Callable[..., Tensor]) -> None:
        def hook(module: nn.Module, *call: Any) -> None:
            seen[kind, module] = widened(read(module, *call))

        hooks.append((module, hook))

    def keep_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = AttentionArguments.of(args, kwargs)

    for layer in parts.layers:
        heads, mlp = layer.heads, layer.mlp
        for module in (layer.module, heads.norm_or_module, mlp.norm_or_module):
            record("input", module, first_input)
        for part, written in ((heads, heads.out.module), (mlp, mlp.writer)):
            record("scale", written, partial(_scale, part.out_norm))
        if keeps:
            record("pattern", heads.module, pattern_of_call)
            record("mixed", heads.out.module, first_input)
        if mlp.router is not None:
            # Recorded, not computed again: a token between two experts may fall to the other one
            # when its input is rounded differently.
            record("routing", mlp.router.module, lambda *call, of=mlp: of.routing(call[-1]))
        elif keeps:
            acted = mlp.reads[0]
            record("acted", acted.module, lambda *call, of=acted: of.select(call[-1], -1))
    # Its input is the stream after the last layer, of any architecture.
    last = parts.norm_or_module
    record("input", last, first_input)
    before = [(layer.heads.module, keep_call) for layer in parts.layers]
    # Only eager attention returns its pattern.
    with attends_by(model, "eager"), hooked(before, after=hooks):
        output = run(model, ids)
    layers = [layer_trace(model, seen, calls, layer, keeps=keeps) for layer in parts.layers]
    streams, logits = seen["input", last], widened(getattr(output, "logits", output))
    result = []
    for row, text in enumerate(texts):
        time = len(text)
        of_text = tuple(batch.of_text(row, time, keeps=keeps) for batch in layers)
        stream, of_model = streams[row, :time], logits[row, :time]
        follows: Callable[[str], Tensor] = partial(_logits_again, model, last, stream)
        if keeps:
            follows = {"logits": of_model}.__getitem__
        # A copy, since a row would keep all of them.
        ends = of_model[-1].clone()
        result.append(Trace(text, of_text, stream, parts.scale(stream), ends, follows, tokenizer))
    return result


def _numbers(parts: Parts, time: int) -> int:
    """Return how many numbers follow from the streams of a text."""
    heads, mlp = parts.layers[0].heads, parts.layers[0].mlp
    of_position = heads.n_heads * (time + heads.d_head) + mlp.up.n_out + 2 * parts.unembed.n_in
    return time * (len(parts.layers) * of_position + parts.unembed.n_out)


def _logits_again(model: Any, last: nn.Module, stream: Tensor, _: str) -> Tensor:
    """Return the logits of the stream after the last layer, by the model itself."""

    # A text of one token, whose stream is exchanged where only the unembedding follows.
    def exchange(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_input(stream[None], args, kwargs)

    with hooked(before=[(last, exchange)]), torch.no_grad(), wide_passes(model):
        output = run(model, torch.zeros(1, 1, dtype=torch.int64, device=stream.device))
    # Some models reshape streams to a text of one token.
    return widened(getattr(output, "logits", output)).reshape(len(stream), -1)


def _scale(norm: Norm | None, _: nn.Module, __: Any, ___: Any, output: Tensor) -> Tensor:
    x = widened(output)
    return torch.ones_like(x[..., 0]) if norm is None else norm.scale(x)


@torch.no_grad()
def mlp_inputs(
    model: Any, mlp: MLP, ids: Int[Tensor, "batch time"]
) -> Float[Tensor, "batch time d_model"]:
    """Return the normalised input of an MLP at every position of texts, by a pass up to it."""
    args, _ = first_call(mlp.norm_or_module, lambda: run(model, ids))
    return mlp.normalised(widened(args[0]))
