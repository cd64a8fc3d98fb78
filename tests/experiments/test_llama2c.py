"""Files of llama2.c, against its own forward pass and its own merging, written out here."""

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from experiments.llama2c import converted, llama2c_model, llama2c_tokenizer

import bilens
from bilens.errors import CheckpointError
from tests.experiments.tiny import write_gzip

pytestmark = pytest.mark.long

D, H, N, HEADS, KV, VOCAB, TIME = 16, 20, 2, 4, 2, 30, 12
D_HEAD = D // HEADS


def weights(tied):
    generator = np.random.default_rng(0)
    shapes = {"embed": (VOCAB, D), "att_norm": (N, D), "q": (N, D, D), "k": (N, KV * D_HEAD, D)}
    shapes |= {"v": (N, KV * D_HEAD, D), "o": (N, D, D), "mlp_norm": (N, D), "gate": (N, H, D)}
    shapes |= {"down": (N, D, H), "up": (N, H, D), "norm": (D,), "freq": (2, TIME, D_HEAD // 2)}
    shapes |= {} if tied else {"unembed": (VOCAB, D)}
    drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    return {name: x.astype("<f4") / x.shape[-1] ** 0.5 for name, x in drawn.items()}


def write(path, parts):
    sign = -1 if "unembed" in parts else 1
    header = struct.pack("<7i", D, H, N, HEADS, KV, sign * VOCAB, TIME)
    path.write_bytes(header + b"".join(part.astype("<f4").tobytes() for part in parts.values()))


def rms(x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def turned(x):
    """Neighbouring pairs as complex numbers, turned by their position."""
    pairs = x.reshape(len(x), -1, D_HEAD // 2, 2)
    numbers = pairs[..., 0] + 1j * pairs[..., 1]
    speeds = 10_000.0 ** (-np.arange(0, D_HEAD, 2) / D_HEAD)
    numbers = numbers * np.exp(1j * np.arange(len(x))[:, None, None] * speeds)
    return np.stack([numbers.real, numbers.imag], -1).reshape(len(x), -1, D_HEAD)


def logits(parts, ids):
    w = {name: part.astype(np.float64) for name, part in parts.items()}
    x = w["embed"][ids]
    for layer in range(N):
        read = rms(x, w["att_norm"][layer])
        q, k = (turned(read @ w[name][layer].T) for name in "qk")
        v = (read @ w["v"][layer].T).reshape(len(ids), KV, D_HEAD)
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV)
            scores = q[:, head] @ k[:, group].T / D_HEAD**0.5
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            looks = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(looks / looks.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(mixed, -1) @ w["o"][layer].T
        read = rms(x, w["mlp_norm"][layer])
        gate = read @ w["gate"][layer].T
        hidden = gate / (1 + np.exp(-gate)) * (read @ w["up"][layer].T)
        x = x + hidden @ w["down"][layer].T
    return rms(x, w["norm"]) @ w.get("unembed", w["embed"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_what_llama2c_does(tmp_path, tied):
    parts = weights(tied)
    write(tmp_path / "model.bin", parts)
    model = llama2c_model(tmp_path / "model.bin")
    ids = np.random.default_rng(1).integers(VOCAB, size=TIME)
    result = model(torch.from_numpy(ids)[None]).logits[0].detach().double().numpy()
    np.testing.assert_allclose(result, logits(parts, ids), atol=1e-5)
    assert model.config.tie_word_embeddings is tied


PIECES = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256))]
MERGED = [" t", "he", " the", "re", " a", "th"]
LETTERS = [" ", "a", "e", "h", "r", "t", "é"]
ALL_PIECES = PIECES + MERGED + LETTERS


def write_tokenizer(path, pieces=ALL_PIECES):
    content = struct.pack("<i", 9)
    for number, raw in enumerate(piece.encode() for piece in pieces):
        content += struct.pack("<fi", min(0.0, len(PIECES) - number), len(raw)) + raw
    path.write_bytes(content)


def write_stories(folder, monkeypatch):
    """Write a model of the letters, its tokenizer and stories, where recipes look for them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("tests.experiments.test_llama2c.VOCAB", len(ALL_PIECES))
    (folder / "llama2c").mkdir()
    write(folder / "llama2c" / "stories260K.bin", weights(True))
    write_tokenizer(folder / "llama2c" / f"tok{len(ALL_PIECES)}.bin")
    stories = [f"the {'hare ' * (1 + i % 3)}ate {'tea ' * (i // 3)}there" for i in range(60)]
    for split, part in (("train", stories[:50]), ("valid", stories[50:])):
        write_gzip(folder / "tinystories" / f"{split}.txt.gz", "\n<|endoftext|>\n".join(part))


def encode(text):
    """Cut a text as run.c does: letters or bytes, then repeatedly merge the best pair."""
    ids = []
    for letter in " " + text:
        numbers = [3 + byte for byte in letter.encode()]
        ids += [ALL_PIECES.index(letter)] if letter in ALL_PIECES else numbers
    while True:
        joined = [ALL_PIECES[a] + ALL_PIECES[b] for a, b in pairwise(ids)]
        known = [(ALL_PIECES.index(x), place) for place, x in enumerate(joined) if x in MERGED]
        if not known:
            return [1, *ids]
        best, place = min(known)
        ids[place : place + 2] = [best]


@pytest.mark.parametrize("text", ["the ear there", "aé\nx", "hehe three  a", "<s>", "r"])
def test_the_tokenizer_merges_what_llama2c_does(tmp_path, text):
    write_tokenizer(tmp_path / "tok.bin")
    tokenizer = llama2c_tokenizer(tmp_path / "tok.bin", len(ALL_PIECES))
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert ids == encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == f" {text}"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_folder_holds_the_model_and_its_tokenizer(tmp_path):
    write(tmp_path / "model.bin", weights(True))
    write_tokenizer(tmp_path / "tok30.bin", ALL_PIECES[:29])
    with pytest.raises(CheckpointError, match="has 29 pieces, and the model 30 tokens"):
        converted(tmp_path / "model.bin", tmp_path / "model")
    write_tokenizer(tmp_path / "tok30.bin", ALL_PIECES[:30])
    view = bilens.load(converted(tmp_path / "model.bin", tmp_path / "model"))
    assert len(view.tokenizer) == view.vocab_size == 30


def test_files_that_are_no_models_are_refused(tmp_path):
    three, more = (D, H, N, 3, KV, VOCAB, TIME), (D, H, N, HEADS, KV, VOCAB, TIME, 0)
    for content, message in (
        (b"short", "expected the seven sizes of llama2.c"),
        (struct.pack("<7i", *three), r"begins with \[16, 20, 2, 3, "),
        (struct.pack("<8i", *more), "holds 1 weights, and its header"),
    ):
        (tmp_path / "model.bin").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            llama2c_model(tmp_path / "model.bin")
