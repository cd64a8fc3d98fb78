"""Readings of attention against the model's own pattern and against whole matrices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bilens.errors import BilensError, NotBilinearError
from bilens.read.language import (
    composition_scores,
    look_pairs,
    output_pairs,
    ov_maps,
    qk_maps,
    read_attention,
    token_components,
    token_outputs,
    token_scores,
)
from bilens.tensor import FactoredMatrix
from tests.language import VOCAB, parts, random_model, random_text, toy_tokenizer

TOKENS = toy_tokenizer()
ABSOLUTE = ("learned", "shortformer")
plain = {name: part for name, part in parts.items() if name != "norm"}
products = st.sampled_from(["squared", "bilinear"])


def numbers(names) -> list[int]:
    return TOKENS.convert_tokens_to_ids(list(names))


def place(model, position):
    """Where the query stands, for models that ask for it."""
    return position if model.config.positions in ABSOLUTE else None


def weighed(model, scores):
    """The pattern of one row of scores, by its definition."""
    if model.config.attention in ("squared", "bilinear"):
        return scores[0] * scores[-1]
    soft = [score.softmax(-1) for score in scores]
    if model.config.attention == "softmax":
        return soft[0]
    return soft[0] - model.blocks[0].attn.diff_lambda * soft[1]


@given(**parts, length=st.integers(1, 6))
def test_scores_make_the_pattern_of_the_model(length, **options):
    model, ids = random_model(**options), random_text(length)
    last = length - 1
    x, pos_embed, rope = model.embed_text(ids[None], torch.arange(length)[None])
    block = model.blocks[0]
    read, v_first = block.attn_norm(block.mixed(x, x)), model.first_block_values(x)
    expected = block.attn.attention_pattern(read, pos_embed, rope, v_first)[0, :, last]
    columns = [
        [
            matrix.entries(ids[-1:], ids[last - distance : length - distance])
            for matrix in token_scores(model, distance=distance, position=place(model, last))
        ]
        for distance in range(last, -1, -1)
    ]
    scores = [torch.cat(pair, -1) for pair in zip(*columns, strict=True)]
    found = weighed(model, scores)
    # Rotary angles are known to float32, and a key at position 0 is not turned.
    product = model.config.attention in ("squared", "bilinear")
    exact = 1 if model.config.positions == "rotary" else length
    if product or exact == length:
        torch.testing.assert_close(found[:, :exact], expected[:, :exact], rtol=0, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@given(**plain, distance=st.integers(0, 3))
def test_later_blocks_are_read_on_the_embeddings(distance, **options):
    model = random_model(n_layers=2, **(options | {"qk_norm": False, "embed_mix": False}))
    some, attn = [3, 8, 11], model.blocks[1].attn
    found = token_scores(model, 1, distance=distance, position=place(model, 4), among=some)
    times = torch.tensor(
        [4 if place(model, 4) else distance, 4 - distance if place(model, 4) else 0]
    )
    x, pos_embed, rope = model.embed_text(torch.tensor([some]).T.expand(3, 2), times.expand(3, 2))
    found_qk = attn.queries_keys(x, pos_embed, rope)
    for matrix, (q, k) in zip(found, found_qk, strict=True):
        expected = attn.scale * torch.einsum("ahd,bhd->hab", q[:, :, 0], k[:, :, 1])
        torch.testing.assert_close(matrix.dense(), expected)


@given(bias=st.booleans(), n_kv_heads=st.sampled_from([1, 2, 4]), n_layers=st.integers(1, 2))
def test_outputs_are_what_heads_send_to_the_logits(bias, n_kv_heads, n_layers):
    model = random_model(bias=bias, n_kv_heads=n_kv_heads, n_layers=n_layers)
    layer = n_layers - 1
    found, attn = token_outputs(model, layer), model.blocks[layer].attn
    # Under a softmax a token that stands alone is looked at with weight 1, by all heads.
    alone = attn(
        model.W_E[:, None],
        None,
        model.embed_text(torch.zeros(1, 1).long(), torch.zeros(1, 1).long())[2],
    )
    expected = alone[:, 0] - (attn.out.bias if bias else 0)
    torch.testing.assert_close(found.dense().sum(0), expected @ model.W_U)


def test_learned_positions_are_values_too():
    model = random_model(positions="learned")
    values = model.W_E + model.pos_embed.weight[5]
    expected = values @ model.blocks[0].attn.W_V @ model.blocks[0].attn.W_O @ model.W_U
    torch.testing.assert_close(token_outputs(model, position=5).dense(), expected)


@given(
    **{name: plain[name] for name in ("positions", "bias", "qk_norm")},
    attention=st.sampled_from(["softmax", "squared", "bilinear"]),
    head=st.integers(0, 3),
    distance=st.integers(0, 4),
)
def test_look_pairs_are_those_of_the_whole_square(head, distance, attention, **options):
    model = random_model(attention=attention, norm="rms", **options)
    where = {"distance": distance, "position": place(model, 7)}
    scores = [m[head].dense() for m in token_scores(model, **where)]
    whole = scores[0] if attention == "softmax" else scores[0] * scores[-1]
    found = look_pairs(model, TOKENS, head, k=9, **where)
    for frame, sign in ((found.highest, 1), (found.lowest, -1)):
        best = (sign * whole).flatten().topk(9).values
        assert (sign * frame.value).tolist() == pytest.approx(best.tolist())
        pairs = numbers(frame["query"]), numbers(frame.key)
        assert whole[pairs].tolist() == pytest.approx(frame.value.tolist())
    if attention == "bilinear":
        assert (frame["first"] * frame.second).tolist() == pytest.approx(frame.value.tolist())
        assert scores[1][pairs].tolist() == pytest.approx(frame.second.tolist())
    if attention == "squared":
        assert (frame.score**2).tolist() == pytest.approx(frame.value.tolist())


@given(bias=st.booleans(), head=st.integers(0, 3))
def test_output_pairs_are_those_of_the_whole_square(bias, head):
    model = random_model(bias=bias, n_kv_heads=2)
    attn = model.blocks[0].attn
    values = model.W_E @ attn.W_V[head]
    if bias:
        values += attn.value.bias.reshape(2, 4)[head // 2]
    whole = values @ attn.W_O[head] @ model.W_U
    found = output_pairs(model, TOKENS, head, k=9)
    for frame, sign in ((found.highest, 1), (found.lowest, -1)):
        best = (sign * whole).flatten().topk(9).values
        assert (sign * frame.value).tolist() == pytest.approx(best.tolist())
        assert whole[numbers(frame.key), numbers(frame.output)].tolist() == pytest.approx(
            frame.value.tolist()
        )


def test_blocks_of_the_vocabulary_make_one_ranking(monkeypatch):
    model = random_model(attention="bilinear")
    whole = look_pairs(model, TOKENS, 1, k=25)
    monkeypatch.setattr("bilens.read.language.head_pairs.ROWS", 7)
    again = look_pairs(model, TOKENS, 1, k=25)
    assert again.highest.equals(whole.highest)
    assert again.lowest.equals(whole.lowest)


@given(some=st.lists(st.integers(0, 29), min_size=2, max_size=12, unique=True))
def test_pairs_among_some_tokens_are_those_of_all_without_the_rest(some):
    model, names = random_model(attention="bilinear"), set(TOKENS.convert_ids_to_tokens(some))
    every = look_pairs(model, TOKENS, 2, k=VOCAB**2).highest
    every = every[every["query"].isin(names) & every.key.isin(names)]
    found = look_pairs(model, TOKENS, 2, k=4, among=some).highest
    assert found.value.tolist() == pytest.approx(every.value.tolist()[:4])
    assert found.key.tolist() == every.key.tolist()[:4]


def test_a_pattern_is_a_factored_matrix_too():
    model = random_model(attention="bilinear")
    first, second = token_scores(model, distance=2)
    torch.testing.assert_close((first * second).dense(), first.dense() * second.dense())


@given(**plain, norm=st.sampled_from(["none", "rms", "layer"]), distance=st.integers(0, 3))
def test_maps_act_on_the_stream_before_the_norm(distance, norm, **options):
    left_out = {"bias": False, "qk_norm": False, "value_mix": False, "norm_eps": None}
    model = random_model(norm=norm, **(options | left_out))
    x, block = torch.randn(5, 16).double(), model.blocks[0]
    if norm == "layer":
        block.attn_norm.bias.zero_()
    read = block.attn_norm(x)
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    size = 1 if norm == "none" else centred.square().mean(-1, keepdim=True).sqrt()
    times = torch.tensor([[0, distance]])
    turns = model.embed_text(torch.zeros(1, 2).long(), times)[2]
    for number, found in enumerate(qk_maps(model, distance=distance)):
        after, before = (
            block.attn.queries_keys(
                read[None], None, turns and tuple(t[:, [i]].expand(1, 5, -1) for t in turns)
            )[number]
            for i in (1, 0)
        )
        expected = size * (after[0][0] @ before[1][0].mT) * (size if norm == "none" else size.T)
        torch.testing.assert_close(x @ found.dense() @ x.T, expected, rtol=1e-4, atol=1e-4)
    sharing = 4 // model.config.n_kv_heads
    values = block.attn.values(read[None])[0].repeat_interleave(sharing, 0)
    written = torch.einsum("htd,hde->hte", values, block.attn.W_O)
    torch.testing.assert_close(x @ ov_maps(model).dense(), size * written, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 99))
def test_components_make_the_whole_table(seed):
    matrix = token_outputs(random_model(seed))[1]
    frame = token_components(matrix, TOKENS, sides=("key", "output"), components=4, k=VOCAB)
    rebuilt = torch.zeros(VOCAB, VOCAB).double()
    for _, part in frame.groupby("component"):
        left, right = torch.zeros(2, VOCAB).double()
        left[numbers(part.key)] = torch.tensor(part["key weight"].tolist()).double()
        right[numbers(part.output)] = torch.tensor(part["output weight"].tolist()).double()
        rebuilt += part.sigma.iloc[0] * torch.outer(left, right)
        assert part["key weight"].iloc[0] > 0
        assert part["output weight"].abs().is_monotonic_decreasing
    torch.testing.assert_close(rebuilt, matrix.dense())


def test_components_of_some_tokens_name_them():
    some = [4, 9, 2, 20]
    matrix = token_scores(random_model(), among=some)[0][0]
    frame = token_components(matrix, TOKENS, sides=("query", "key"), k=4, among=some)
    assert set(numbers(frame["query"])) == set(some)


def dense_composition(model, writer, reader):
    """The ratio of norms, with whole matrices."""
    where = [int(part) for part in writer.split()[1].split(".")]
    block = model.blocks[where[0]]
    if writer.startswith("mlp"):
        W = block.mlp.W_D.T
    else:
        gain = torch.diag(getattr(block.attn_norm, "weight", torch.ones(16).double()))
        W = gain @ block.attn.W_V[where[1]] @ block.attn.W_O[where[1]]
    _, place_, side = reader.split()
    block = model.blocks[int(place_[0])]
    if reader.startswith("mlp"):
        gain = torch.diag(getattr(block.mlp_norm, "weight", torch.ones(16).double()))
        R = gain @ {"L": block.mlp.W_L, "R": block.mlp.W_R}[side].T
    else:
        gain = torch.diag(getattr(block.attn_norm, "weight", torch.ones(16).double()))
        attn, head, second = block.attn, int(place_[2:]), side.endswith("2")
        Q, K = (attn.W_Q2, attn.W_K2) if second else (attn.W_Q, attn.W_K)
        QK = gain @ Q[head] @ K[head].T @ gain
        V = gain @ attn.W_V[head] @ attn.W_O[head]
        R = {"Q": QK, "K": QK.T, "V": V}[side[0]]
    return float((W @ R).norm() / (W.norm() * R.norm()))


@given(
    attention=st.sampled_from(["softmax", "bilinear"]),
    norm=st.sampled_from(["none", "rms"]),
    n_kv_heads=st.sampled_from([1, 2]),
    positions=plain["positions"],
)
def test_composition_is_the_ratio_of_norms(**options):
    model = random_model(n_layers=2, n_heads=2, bias=True, **options)
    found = composition_scores(model)
    pairs = 2 if options["attention"] == "bilinear" else 1
    assert found.scores.shape == (2 + 1 + 2, 2 + 2 * (2 * pairs + 1) + 2)
    assert not found.scores.isnan().all(0).any() | found.scores.isnan().all(1).any()
    for row, writer in enumerate(found.writers):
        for column, reader in enumerate(found.readers):
            score = float(found.scores[row, column])
            order = [
                2 * int(name.split()[1][0]) + name.startswith("mlp") for name in (writer, reader)
            ]
            if order[0] >= order[1]:
                assert math.isnan(score)
            else:
                assert score == pytest.approx(dense_composition(model, writer, reader))


def test_random_weights_compose_as_the_baseline_says():
    found = composition_scores(random_model(n_layers=2, d_model=32))
    there = found.scores[found.scores.isfinite()]
    assert float(there.square().mean()) == pytest.approx(found.baseline**2, rel=0.05)
    frame = found.frame(5)
    assert frame.score.tolist() == sorted(there.tolist(), reverse=True)[:5]
    assert (frame.score - frame.excess).tolist() == pytest.approx([found.baseline] * 5)
    best = found.writers.index(frame.writer[0]), found.readers.index(frame.reader[0])
    assert float(found.scores[best]) == frame.score[0]
    assert len(found.frame(10_000)) == len(there)


def test_what_writes_or_reads_nothing_composes_with_nothing():
    model = random_model(mlp="gelu")
    model.blocks[0].attn.out.weight.zero_()
    found = composition_scores(model)
    assert found.readers[-1] == "mlp 0 in"
    assert found.scores[:4, -1].tolist() == [0] * 4


def test_heads_are_read_together():
    model = random_model(attention="bilinear")
    found = read_attention(model, TOKENS, heads=[2, 0], k=3, distance=2)
    assert [reading.head for reading in found.heads] == [2, 0]
    assert (found.layer, found.distance) == (0, 2)
    alone = look_pairs(model, TOKENS, 2, k=3, distance=2)
    assert found.heads[0].looks.lowest.equals(alone.lowest)
    assert len(found.heads[0].outputs.highest) == 3
    assert torch.equal(found.composition.scores[:4, -2:], composition_scores(model).scores[:4, -2:])


def test_heads_with_norms_and_positions_are_read_as_far_as_weights_go():
    assert len(read_attention(random_model(), TOKENS).heads) == 4
    assert read_attention(random_model(norm="rms"), TOKENS).heads[0].outputs is None
    model = random_model(positions="learned")
    found = read_attention(model, TOKENS, heads=[1], distance=2, position=6).heads[0]
    there = output_pairs(model, TOKENS, 1, position=4, k=10)
    assert found.outputs.highest.equals(there.highest)


class Entries(nn.Module):
    """Some numbers of a reading, as a function of the model's parameters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rows, columns):
        first, second = token_scores(self.model, distance=2)
        outputs = token_outputs(self.model).entries(rows, columns)
        return first.entries(rows, columns) * second.entries(rows, columns), outputs


def test_gradients():
    model = random_model(
        attention="bilinear", d_model=4, n_heads=2, qk_norm=True, bias=True, n_kv_heads=1
    )
    reading, some = Entries(model), (torch.tensor([3, 5]), torch.tensor([4, 5]))
    free = {
        name: value.clone().requires_grad_()
        for name, value in reading.named_parameters()
        if "attn" in name
    }

    def entries(*values):
        given = dict(zip(free, values, strict=True))
        return torch.func.functional_call(reading, given, some)

    assert torch.autograd.gradcheck(entries, tuple(free.values()))


REFUSALS = [
    (
        lambda: token_scores(random_model(n_layers=2, norm="rms"), 1),
        NotBilinearError,
        "In block 1 norm='rms' and qk_norm=False divide by what depends on the text",
    ),
    (
        lambda: token_scores(random_model(n_layers=2, qk_norm=True), 1),
        NotBilinearError,
        "norm='none' and qk_norm=True",
    ),
    (
        lambda: token_scores(random_model(n_layers=2, embed_mix=True), 1),
        NotBilinearError,
        "In block 1 embed_mix=True, which mixes the embedding",
    ),
    (lambda: token_outputs(random_model(norm="rms")), NotBilinearError, "has norm='rms'"),
    (lambda: token_outputs(random_model(value_mix=True)), NotBilinearError, "value_mix=True"),
    (lambda: token_scores(random_model(), 1), BilensError, "layer=1, expected 0 to 0"),
    (lambda: qk_maps(random_model(), 1), BilensError, "layer=1, expected 0 to 0"),
    (lambda: token_scores(random_model(), distance=-1), BilensError, "distance=-1, expected 0"),
    (
        lambda: token_scores(random_model(positions="learned")),
        BilensError,
        "position=None, and the model has learned positions",
    ),
    (
        lambda: token_scores(random_model(positions="shortformer"), position=12),
        BilensError,
        "position=12, expected 1 to 11",
    ),
    (
        lambda: token_scores(random_model(), distance=3, position=2),
        BilensError,
        "position=2, expected 3 or more",
    ),
    (lambda: token_outputs(random_model(positions="learned")), BilensError, "position=None"),
    (
        lambda: look_pairs(random_model(attention="differential"), TOKENS, 0),
        BilensError,
        "subtracts one softmax from another",
    ),
    (lambda: look_pairs(random_model(), TOKENS, 4), BilensError, "head=4, expected 0 to 3"),
    (lambda: look_pairs(random_model(), TOKENS, 0, k=0), BilensError, "k=0, expected at least 1"),
    (lambda: output_pairs(random_model(), TOKENS, -1), BilensError, "head=-1, expected 0 to 3"),
    (
        lambda: token_components(token_scores(random_model())[0], TOKENS, sides=("a", "b")),
        BilensError,
        r"matrix is of shape \(4, 30, 30\), expected a table",
    ),
    (
        lambda: token_components(
            FactoredMatrix(torch.ones(3, 1), torch.ones(2, 1)), TOKENS, sides=("a", "b")
        ),
        BilensError,
        r"matrix is of shape \(3, 2\), expected a table",
    ),
    (
        lambda: token_components(
            token_scores(random_model())[0][0], TOKENS, sides=("a", "b"), among=[1, 2]
        ),
        BilensError,
        "among has 2 tokens and matrix 30 rows",
    ),
    (
        lambda: token_components(
            token_scores(random_model())[0][0], TOKENS, sides=("a", "b"), k=31
        ),
        BilensError,
        "k=31, expected 1 to 30",
    ),
    (
        lambda: token_components(
            token_scores(random_model())[0][0], TOKENS, sides=("a", "b"), components=5
        ),
        BilensError,
        "components=5, expected 1 to 4",
    ),
]


@pytest.mark.parametrize(("read", "error", "message"), REFUSALS)
def test_what_cannot_be_read_is_refused_by_name(read, error, message):
    with pytest.raises(error, match=message):
        read()
