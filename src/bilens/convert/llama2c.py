"""Models and tokenizers of llama2.c, as ordinary ones of transformers.

Source: A. Karpathy, llama2.c, run.c: the legacy float32 export (version 0) and its tokenizer.
"""

import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens.errors import CheckpointError

HEADER = 7
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "▁"


def is_llama2c(source: str | Path) -> bool:
    """Return True for a file of llama2.c, by its name."""
    return Path(source).suffix == ".bin" and Path(source).is_file()


def llama2c_model(path: Path) -> LlamaForCausalLM:
    """Read a model of llama2.c from its .bin file.

    The file is seven int32 (widths, layers, heads, vocabulary, length) and the weights in float32,
    layer after layer for each kind. A negative vocabulary means an untied unembedding. Rotary
    positions turn neighbouring coordinates in llama2.c, and coordinates half a head apart in
    transformers. The rows of queries and keys are permuted accordingly.

    Raises:
        CheckpointError: it is no such file, or cut.
    """
    config = _read_config(path)
    state = dict(_read_weights(path, config))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.eval()
    return model


def llama2c_tokenizer(path: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Read a tokenizer of llama2.c: pieces with scores; the best pair is merged first.

    The file is the longest piece's length, then score, length and bytes of each.

    Raises:
        CheckpointError: it is missing, no such file, or of another size.
    """
    pieces = list(_read_pieces(path, vocab_size))
    names = [*SPECIAL, *(piece.replace(" ", SPACE) for _, piece in pieces[len(SPECIAL) :])]
    scores = dict(zip(names, (score for score, _ in pieces), strict=True))
    vocabulary = {name: number for number, name in enumerate(names)}
    how = {"unk_token": SPECIAL[0], "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(scores), **how))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    # The first word keeps its space, so that a part of a text may follow another.
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    unk, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos
    )


def _read_config(path: Path) -> LlamaConfig:
    raw = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(raw) < HEADER:
        raise CheckpointError(f"{path} has no header of {HEADER} int32; it is not a llama2.c model")
    *sizes, vocab_size, n_ctx = map(int, raw)
    d_model, d_hidden, n_layers, n_heads, n_kv_heads = sizes
    if min(*sizes, abs(vocab_size), n_ctx) < 1 or d_model % n_heads or n_heads % n_kv_heads:
        raise CheckpointError(
            f"{path} begins with {list(map(int, raw))}, which are not the sizes of a llama2.c "
            "model; expected the legacy export, version 0"
        )
    config = LlamaConfig(
        vocab_size=abs(vocab_size),
        hidden_size=d_model,
        intermediate_size=d_hidden,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=n_ctx,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocab_size > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    expected = 4 * (HEADER + sum(prod(shape) for _, shape in _layout(config)))
    if path.stat().st_size != expected:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes; its header asks for {expected:,}. Fetch it "
            "again."
        )
    return config


def _layout(config: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the weights in the order of the file, with shapes; {} is the number of a layer."""
    d, h, n = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    d_head = d // config.num_attention_heads
    kv, half, vocab = config.num_key_value_heads * d_head, d_head // 2, config.vocab_size
    layer = "model.layers.{}"
    return [
        ("model.embed_tokens.weight", (vocab, d)),
        (f"{layer}.input_layernorm.weight", (n, d)),
        (f"{layer}.self_attn.q_proj.weight", (n, d, d)),
        (f"{layer}.self_attn.k_proj.weight", (n, kv, d)),
        (f"{layer}.self_attn.v_proj.weight", (n, kv, d)),
        (f"{layer}.self_attn.o_proj.weight", (n, d, d)),
        (f"{layer}.post_attention_layernorm.weight", (n, d)),
        (f"{layer}.mlp.gate_proj.weight", (n, h, d)),
        (f"{layer}.mlp.down_proj.weight", (n, d, h)),
        (f"{layer}.mlp.up_proj.weight", (n, h, d)),
        ("model.norm.weight", (d,)),
        # Cosines and sines of rotary positions, which transformers works out itself.
        ("", (2, config.max_position_embeddings, half)),
        *([] if config.tie_word_embeddings else [("lm_head.weight", (vocab, d))]),
    ]


def _read_weights(path: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    # Mapped: only one weight at a time is copied.
    numbers = np.memmap(path, dtype="<f4", mode="r", offset=4 * HEADER)
    d_head, start = config.hidden_size // config.num_attention_heads, 0
    for name, shape in _layout(config):
        part = torch.from_numpy(numbers[start : start + prod(shape)].reshape(shape).copy())
        start += prod(shape)
        if "{}" in name:
            for layer, weight in enumerate(part):
                turned = "q_proj" in name or "k_proj" in name
                yield name.format(layer), _half_split(weight, d_head) if turned else weight
        elif name:
            yield name, part


def _half_split(
    weight: Float[Tensor, "n_out d_model"], d_head: int
) -> Float[Tensor, "n_out d_model"]:
    """Return rows of neighbouring pairs in the order of pairs half a head apart."""
    return rearrange(weight, "(h i two) d -> (h two i) d", i=d_head // 2, two=2).contiguous()


def _read_pieces(path: Path, vocab_size: int) -> Iterator[tuple[float, str]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}, the tokenizer, cannot be read: {error}") from error
    place = 4
    for number in range(vocab_size):
        if place + 8 > len(raw):
            raise CheckpointError(
                f"{path} ends after {number} pieces; the model has {vocab_size} tokens, so they do "
                "not belong together"
            )
        score, length = struct.unpack_from("<fi", raw, place)
        piece = raw[place + 8 : place + 8 + length]
        place += 8 + length
        yield score, piece.decode("utf-8", errors="replace")
    if place != len(raw):
        raise CheckpointError(
            f"{path} has more than {vocab_size} pieces, the tokens of the model; they do not "
            "belong together"
        )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, the best score first."""
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        if piece in SPECIAL or (piece.startswith("<0x") and len(piece) == 6):
            continue
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    return merges
