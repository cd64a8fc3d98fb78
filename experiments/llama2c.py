"""Models and tokenizers of llama2.c as folders of transformers, for recipes with stories260K.

    python -m experiments.llama2c stories260K.bin FOLDER

Source: A. Karpathy, llama2.c, run.c: the legacy float32 export (version 0) and its tokenizer.
"""

import struct
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens.convert import save_model
from bilens.errors import CheckpointError, DataError
from experiments.context import RecipeContext

HEADER = 7
SPECIAL = ("<unk>", "<s>", "</s>")
SPACE = "▁"


def converted(path: Path, folder: Path) -> Path:
    """Return a folder with the model of a .bin file and the tokenizer tokN.bin beside it.

    Raises:
        CheckpointError: a file is missing, cut or no such file, or they do not belong together.
    """
    if not (folder / "config.json").is_file():
        model = llama2c_model(path)
        size = model.config.vocab_size
        save_model(folder, model, llama2c_tokenizer(path.with_name(f"tok{size}.bin"), size))
    return folder


def stories260K(context: RecipeContext) -> Path:
    """Return the folder of the converted stories260K, made from its files in the data folder."""
    path = context.folder / "llama2c" / "stories260K.bin"
    if not path.is_file():
        raise DataError(
            f"{path} is missing; this recipe needs stories260K.bin and tok512.bin of "
            "karpathy/tinyllamas in the folder llama2c of --data-dir"
        )
    return converted(path, context.models / path.stem)


def llama2c_model(path: Path) -> LlamaForCausalLM:
    """Read a model from its .bin file.

    The file is seven int32 (widths, layers, heads, vocabulary, length) and the weights in float32,
    layer after layer for each kind. A negative vocabulary means an untied unembedding.
    """
    raw = np.fromfile(path, dtype="<i4", count=HEADER).tolist()
    if len(raw) < HEADER or min(map(abs, raw)) < 1 or raw[0] % raw[3]:
        raise CheckpointError(f"{path} begins with {raw}, expected the seven sizes of llama2.c")
    d_model, d_hidden, n_layers, n_heads, n_kv_heads, vocab, n_ctx = raw
    config = LlamaConfig(
        vocab_size=abs(vocab),
        hidden_size=d_model,
        intermediate_size=d_hidden,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=n_ctx,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocab > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    d_head = d_model // n_heads
    d_kv = n_kv_heads * d_head
    of_layers = "model.layers.{}."
    shapes = {
        "model.embed_tokens": (abs(vocab), d_model),
        f"{of_layers}input_layernorm": (n_layers, d_model),
        f"{of_layers}self_attn.q_proj": (n_layers, d_model, d_model),
        f"{of_layers}self_attn.k_proj": (n_layers, d_kv, d_model),
        f"{of_layers}self_attn.v_proj": (n_layers, d_kv, d_model),
        f"{of_layers}self_attn.o_proj": (n_layers, d_model, d_model),
        f"{of_layers}post_attention_layernorm": (n_layers, d_model),
        f"{of_layers}mlp.gate_proj": (n_layers, d_hidden, d_model),
        f"{of_layers}mlp.down_proj": (n_layers, d_model, d_hidden),
        f"{of_layers}mlp.up_proj": (n_layers, d_hidden, d_model),
        "model.norm": (d_model,),
        # Cosines and sines of rotary positions, which transformers computes itself.
        "rotary": (2, n_ctx, d_head // 2),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (abs(vocab), d_model)
    numbers = torch.from_numpy(np.fromfile(path, dtype="<f4", offset=4 * HEADER))
    sizes = [prod(shape) for shape in shapes.values()]
    if len(numbers) != sum(sizes):
        raise CheckpointError(
            f"{path} holds {len(numbers):,} weights, and its header asks for {sum(sizes):,}; fetch "
            "it again"
        )
    state: dict[str, Any] = {}
    for (name, shape), part in zip(shapes.items(), numbers.split(sizes), strict=True):
        weights = part.reshape(shape)
        if "q_proj" in name or "k_proj" in name:
            # Rotary positions turn neighbouring coordinates in llama2.c, and coordinates half a
            # head apart in transformers.
            pairs = {"i": d_head // 2, "two": 2}
            weights = rearrange(weights, "n (h i two) d -> n (h two i) d", **pairs)
        if of_layers in name:
            for layer, weight in enumerate(weights):
                state[f"{name.format(layer)}.weight"] = weight.clone()
        elif name != "rotary":
            state[f"{name}.weight"] = weights.clone()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def llama2c_tokenizer(path: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Read a tokenizer: pieces with scores; the best pair is merged first.

    The file is the longest piece's length, then score, length and bytes of each.
    """
    pieces = _read_pieces(path, vocab_size)
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


def _read_pieces(path: Path, vocab_size: int) -> list[tuple[float, str]]:
    raw, place, pieces = path.read_bytes(), 4, []
    while place + 8 <= len(raw):
        score, length = struct.unpack_from("<fi", raw, place)
        pieces.append((score, raw[place + 8 : place + 8 + length].decode(errors="replace")))
        place += 8 + length
    if len(pieces) != vocab_size or place != len(raw):
        raise CheckpointError(
            f"{path} has {len(pieces)} pieces, and the model {vocab_size} tokens; they do not "
            "belong together"
        )
    return pieces


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, the best score first."""
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        if piece in SPECIAL or (piece.startswith("<0x") and len(piece) == 6):
            continue
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                merges.append((piece[:cut], piece[cut:]))
    return merges


if __name__ == "__main__":
    converted(Path(sys.argv[1]), Path(sys.argv[2]))
