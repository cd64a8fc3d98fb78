"""Readings of heads against the model's own pattern and against whole matrices."""

import math
from contextlib import nullcontext
from functools import partial

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError
from bilens.language import (
    attention_pairs,
    attention_scores,
    bigram_matrix,
    composition_scores,
    head_outputs,
    output_pairs,
    read_attention,
    token_components,
)
from bilens.language.ngrams import skip_trigram_matrix
from bilens.testing import check_family
from bilens.transformer import Pass, ResidualModel
from tests.families import ALL, DAILY, EACH_READ, exact_norms, family_view, some_text
from tests.models import TOKENS, VOCAB, numbers, parts, place, random_model, random_text, view_of
from tests.nightly import nightly
from tests.transformer.test_intact import ROTATIONS, rotating


def weighed(view, scores):
    """Return the pattern of one row of scores, by its definition."""
    if view.modules.attention in ("squared", "bilinear"):
        return scores[0] * scores[-1]
    soft = [score.softmax(-1) for score in scores]
    if view.modules.attention == "softmax":
        return soft[0]
    return soft[0] - view.model.blocks[0].attn.diff_lambda * soft[1]


def last_row(view, ids, position=None, layer=0):
    """Return the pattern of the last token's row from scores of pairs of tokens."""
    last, columns = len(ids) - 1, []
    position = place(view, last) if position is None else position
    for at, key in enumerate(ids):
        scores = attention_scores(view, layer=layer, distance=last - at, position=position)
        columns.append([matrix.entries(ids[-1:], key[None]) for matrix in scores])
    return weighed(view, [torch.cat(several, -1) for several in zip(*columns, strict=True)])


@given(**parts, length=st.integers(1, 6))
def test_scores_make_the_pattern_of_the_model(length, **options):
    view, ids = view_of(**options), random_text(length)
    expected = Pass.of(view, ids).pattern(0)[0, :, -1]
    torch.testing.assert_close(last_row(view, ids), expected)


@pytest.mark.parametrize("name", nightly([n for n in ALL if not n.startswith("gemma2")], DAILY))
def test_scores_make_the_pattern_of_every_family(name):
    view, ids = family_view(name), some_text()[0][:5]
    with exact_norms():
        expected = Pass.of(view, ids).pattern(0)[0, :, -1]
        torch.testing.assert_close(last_row(view, ids), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ROTATIONS)
def test_the_length_of_the_text_rotates_queries_and_keys_alike(kind):
    """Of a text that ends at the query, also where a key is at a position of shorter ones."""
    view, ids = ResidualModel(rotating(kind), TOKENS), some_text()[0][:9]
    check_family(view, ids)
    expected = Pass.of(view, ids).pattern(0)[0, :, -1]
    torch.testing.assert_close(last_row(view, ids, position=8), expected, rtol=1e-4, atol=1e-6)


def test_a_distance_that_a_layer_does_not_see_is_refused():
    view, ids = family_view("cohere2"), some_text()[0][:9]
    of_text = Pass.of(view, ids)
    for layer in range(2):
        row = of_text.pattern(layer)[0, 0, -1].flip(0)
        for distance, weight in enumerate(row.tolist()):
            scores = partial(attention_scores, view, layer=layer, distance=distance, position=8)
            error = pytest.raises(BilensError, match=f"0 to {distance - 1}|got {distance}")
            for ask in (partial(view.qk, layer, distance), scores):
                with nullcontext() if weight else error:
                    ask()


@given(bias=st.booleans(), n_kv_heads=st.sampled_from([1, 2, 4]), norm=parts["norm"])
def test_outputs_are_what_heads_send_to_the_logits(bias, n_kv_heads, norm):
    view = view_of(bias=bias, n_kv_heads=n_kv_heads, norm=norm, positions="learned")
    block = view.model.blocks[0]
    # Under a softmax a token that stands alone is looked at with weight 1, by all heads.
    e = view.model.W_E + view.model.pos_embed.weight[5]
    alone = block.attn(block.attn_norm(e)[:, None])[:, 0] - (block.attn.out.bias if bias else 0)
    result = head_outputs(view, layer=0, position=5).dense().sum(0)
    torch.testing.assert_close(result, alone @ view.W_U)


def test_mixed_values_count_in_outputs():
    view = view_of(n_layers=2, value_mix=True)
    e, blocks = view.model.W_E[:, None], view.model.blocks
    alone = blocks[1].attn(e, v_first=blocks[0].attn.own_values(e))[:, 0]
    torch.testing.assert_close(head_outputs(view, layer=1).dense().sum(0), alone @ view.W_U)


def check_both_ends(result, full, *sides):
    """Compare the highest and lowest of 9 pairs with a whole square."""
    for frame, sign in ((result.frame(), 1), (pd.DataFrame(result.lowest), -1)):
        best = (sign * full).flatten().topk(9).values
        assert (sign * frame.value).tolist() == pytest.approx(best.tolist())
        assert full[pairs_of(frame, *sides)].tolist() == pytest.approx(frame.value.tolist())


def pairs_of(frame, *sides):
    return tuple(numbers(frame[side]) for side in sides)


@given(
    **{name: parts[name] for name in ("positions", "bias", "qk_norm")},
    attention=st.sampled_from(["softmax", "squared", "bilinear"]),
    head=st.integers(0, 3),
    distance=st.integers(0, 4),
)
def test_attention_pairs_are_those_of_the_whole_square(head, distance, attention, **options):
    view = view_of(attention=attention, norm="rms", **options)
    where = {"layer": 0, "distance": distance, "position": place(view, 7)}
    scores = [m[head].dense() for m in attention_scores(view, **where)]
    full = scores[0] if attention == "softmax" else scores[0] * scores[-1]
    [result] = attention_pairs(view, [head], k=9, **where)
    check_both_ends(result, full, "query", "key")
    frame = pd.DataFrame(result.lowest)
    if attention == "bilinear":
        assert (frame["first"] * frame.second).tolist() == pytest.approx(frame.value.tolist())
        second = scores[1][pairs_of(frame, "query", "key")].tolist()
        assert second == pytest.approx(frame.second.tolist())
    if attention == "squared":
        assert (frame.score**2).tolist() == pytest.approx(frame.value.tolist())


@given(bias=st.booleans(), head=st.integers(0, 3))
def test_output_pairs_are_those_of_the_whole_square(bias, head):
    view = view_of(bias=bias, n_kv_heads=2)
    full = head_outputs(view, layer=0)[head].dense()
    check_both_ends(output_pairs(view, [head], layer=0, k=9)[0], full, "key", "output")


@given(seed=st.integers(0, 99))
def test_components_make_the_whole_table(seed):
    view = view_of(seed=seed)
    matrix = head_outputs(view, layer=0)[1]
    frame = token_components(view, matrix, sides=("key", "output"), components=4, k=VOCAB)
    rebuilt = torch.zeros(VOCAB, VOCAB).double()
    for _, part in frame.groupby("component"):
        left, right = torch.zeros(2, VOCAB).double()
        left[numbers(part.key)] = torch.tensor(part["key weight"].tolist()).double()
        right[numbers(part.output)] = torch.tensor(part["output weight"].tolist()).double()
        rebuilt += part.sigma.iloc[0] * torch.outer(left, right)
        assert part["key weight"].iloc[0] > 0
        assert part["output weight"].abs().is_monotonic_decreasing
    torch.testing.assert_close(rebuilt, matrix.dense())


def test_components_of_some_tokens_name_them(view):
    several = [4, 9, 2, 20]
    matrix = attention_scores(view, layer=0, among=several)[0][0]
    frame = token_components(view, matrix, sides=("query", "key"), k=4, among=several)
    assert set(numbers(frame["query"])) == set(several)


def gain_of(norm):
    return torch.diag(getattr(norm, "weight", torch.ones(16).double()))


def dense_composition(model, writer, reader):
    """Compute the ratio of norms with full matrices."""
    where = [int(part) for part in writer.split()[1].split(".")]
    block = model.blocks[where[0]]
    if writer.startswith("mlp"):
        W = block.mlp.W_D.T
    else:
        W = gain_of(block.attn_norm) @ block.attn.W_V[where[1]] @ block.attn.W_O[where[1]]
    _, place_, side = reader.split()
    block = model.blocks[int(place_[0])]
    if reader.startswith("mlp"):
        R = gain_of(block.mlp_norm) @ {"L": block.mlp.W_L, "R": block.mlp.W_R}[side].T
    else:
        gain = gain_of(block.attn_norm)
        attn, head, second = block.attn, int(place_[2:]), side.endswith("2")
        maps = (attn.query2, attn.key2) if second else (attn.query, attn.key)
        Q, K = (linear.weight.unflatten(0, (-1, attn.d_head)) for linear in maps)
        QK = gain @ Q[head].T @ K[head * len(K) // len(Q)] @ gain
        V = gain @ attn.W_V[head] @ attn.W_O[head]
        R = {"Q": QK, "K": QK.T, "V": V}[side[0]]
    return float((W @ R).norm() / (W.norm() * R.norm()))


@given(
    attention=st.sampled_from(["softmax", "bilinear"]),
    norm=st.sampled_from(["none", "rms"]),
    n_kv_heads=st.sampled_from([1, 2]),
    positions=parts["positions"],
)
def test_composition_is_the_ratio_of_norms(**options):
    view = view_of(n_layers=2, n_heads=2, bias=True, **options)
    composition = composition_scores(view)
    pairs = 2 if options["attention"] == "bilinear" else 1
    assert composition.scores.shape == (2 + 1 + 2, 2 + 2 * (2 * pairs + 1) + 2)
    assert not composition.scores.isnan().all(0).any() | composition.scores.isnan().all(1).any()
    for row, writer in enumerate(composition.writers):
        for column, reader in enumerate(composition.readers):
            score = float(composition.scores[row, column])
            order = [
                2 * int(name.split()[1][0]) + name.startswith("mlp") for name in (writer, reader)
            ]
            if order[0] >= order[1]:
                assert math.isnan(score)
            else:
                assert score == pytest.approx(dense_composition(view.model, writer, reader))


def test_random_weights_compose_as_the_baseline_says():
    composition = composition_scores(view_of(n_layers=2, d_model=32))
    there = composition.scores[composition.scores.isfinite()]
    assert float(there.square().mean()) == pytest.approx(composition.baseline**2, rel=0.05)
    frame = composition.frame().head(5)
    assert frame.score.tolist() == sorted(there.tolist(), reverse=True)[:5]
    assert (frame.score - frame.excess).tolist() == pytest.approx([composition.baseline] * 5)
    best = composition.writers.index(frame.writer[0]), composition.readers.index(frame.reader[0])
    assert float(composition.scores[best]) == frame.score[0]
    assert len(composition.pairs(10_000)["score"]) == len(there)


def test_what_writes_or_reads_nothing_composes_with_nothing():
    view = view_of(mlp="gelu")
    view.model.blocks[0].attn.out.weight.zero_()
    composition = composition_scores(view)
    assert composition.readers[-1] == "mlp 0 in"
    assert composition.scores[:4, -1].tolist() == [0] * 4


@pytest.mark.parametrize("name", EACH_READ)
def test_heads_of_every_family_are_read(name):
    view = family_view(name)
    result = read_attention(view, layer=1, heads=[2, 0], k=3, distance=2, position=place(view, 6))
    assert [*result.heads] == [2, 0]
    assert (result.layer, result.distance) == (1, 2)
    seen = place(view, 4)
    [there] = output_pairs(view, [2], layer=1, k=3, position=seen)
    assert result.heads[2]["raises"] == there.highest
    assert len(result.heads[2]["components"]["sigma"]) == 2 * 3
    [alone] = attention_pairs(view, [2], layer=1, k=3, distance=2, position=place(view, 6))
    assert result.heads[2]["attends least"] == alone.lowest
    assert result.composition.scores.nan_to_num(0).max() <= 1


def test_differential_heads_have_outputs_alone():
    result = read_attention(view_of(attention="differential"), layer=0, k=2).heads[0]
    assert [*result] == ["raises", "lowers", "components"]
    assert len(result["raises"]["key"]) == 2


def test_later_layers_multiply_the_outputs_of_earlier_ones():
    def matrices(factor):
        model = random_model(embed_mix=True, n_layers=2)
        model.blocks[1].residual_mix[0] = factor
        view = ResidualModel(model, TOKENS)
        outputs = head_outputs(view, layer=0).dense()
        mlp = bigram_matrix(view, layer=0, part="mlp").dense()
        return outputs, mlp, skip_trigram_matrix(view, "t3", 1, layer=0, part="both").dense()

    for doubled, single in zip(matrices(2.0), matrices(1.0), strict=True):
        torch.testing.assert_close(doubled, 2 * single)
