"""N-grams, directions, contexts and streams against the model itself and against whole matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError, NotBilinearError
from bilens.language import (
    TokenDirection,
    attention_pairs,
    bigrams,
    contribution,
    following,
    generate_text,
    pair_trigrams,
    preceding,
    read_ngrams,
    read_stream,
    skip_trigrams,
    token_names,
    top_contexts,
)
from bilens.language.contexts import Context, _Best, contributions
from bilens.transformer import ResidualModel
from tests.families import EACH_READ, exact_norms, family_view, some_text
from tests.models import TOKENS, VOCAB, numbers, parts, place, random_text, view_of

FEW_PARTS = {name: parts[name] for name in ("norm", "positions", "bias")}


def has_constant(options):
    return options["bias"] or options["mlp_bias"] or options["norm"] == "layer"


@given(**parts, layer=st.integers(0, 1), position=st.integers(0, 8))
def test_the_parts_of_a_stream_add_up_to_it(layer, position, **options):
    view, ids = view_of(n_layers=2, **options), random_text()
    stream = read_stream(view, ids, position, layer=layer)
    torch.testing.assert_close(stream.total(), view.mlp_inputs(layer, ids[None])[0, position])
    assert has_constant(options) or not stream.constant.any()


@pytest.mark.parametrize("name", EACH_READ)
def test_streams_of_every_family_add_up(name):
    view, ids = family_view(name), some_text()[0]
    with exact_norms():
        stream = read_stream(view, ids, 5, layer=1)
        expected = view.mlp_inputs(1, ids[None])[0, 5]
    torch.testing.assert_close(stream.total(), expected, rtol=1e-5, atol=1e-5)
    assert stream.heads.shape == (4, 6, view.d_model)
    assert bool(stream.heads.any()) != view.modules.parallel


def token_alone(view, token, layer):
    """Bigrams by their definition, with the modules of a model that mixes nothing."""
    model, at = view.model, place(view)
    e = model.W_E + (model.pos_embed.weight[at] if model.config.positions == "learned" else 0)
    e = e[token]
    block = model.blocks[layer]
    added = block.mlp(block.mlp_norm(e))
    full = model.unembed(model.norm(e + added)) - view.b_U
    scale = 1.0 if view.modules.norm is None else view.modules.norm.scale(e + added)[:, None]
    mlp = scale * added @ view.W_U
    return full - mlp, mlp


def check_best(frame, full, k, *names):
    """Compare a table with the largest numbers of a tensor, whose axes are tokens of columns."""
    best = full.flatten().topk(k)
    assert frame.value.tolist() == pytest.approx(best.values.tolist())
    for name, places in zip(names, torch.unravel_index(best.indices, full.shape), strict=True):
        assert numbers(frame[name]) == places.tolist()


@given(
    part=st.sampled_from(["direct", "mlp", "both"]),
    token=st.integers(0, 29),
    layer=st.integers(0, 1),
    mlp=st.sampled_from(["bilinear", "swiglu", "gelu"]),
    **FEW_PARTS,
)
def test_bigrams_are_those_of_the_whole_matrix(part, token, layer, **options):
    view = view_of(n_layers=2, **options)
    direct, mlp = token_alone(view, torch.arange(VOCAB), layer)
    full = {"direct": direct, "mlp": mlp, "both": direct + mlp}[part]
    given_ = {"part": part, "layer": layer, "position": place(view)}
    result = following(view, token, k=7, **given_)
    check_best(result, full[token], 7, "token")
    both = (direct + mlp)[token, numbers(result.token)].tolist()
    assert (result.direct + result.mlp).tolist() == pytest.approx(both)
    check_best(preceding(view, token, k=7, **given_), full[:, token], 7, "token")
    check_best(bigrams(view, k=9, **given_), full, 9, "input", "output")


def test_bigrams_of_one_layer_are_exact_parts_of_the_logits():
    """A text of one token, whose heads are silent, says nothing but its bigrams."""
    view = view_of(positions="learned")
    view.model.blocks[0].attn.out.weight.zero_()
    logits = view.logits(torch.tensor([[4]]))[0, 0]
    result = following(view, 4, layer=0, k=VOCAB, position=0)
    assert result.value.tolist() == pytest.approx(logits[numbers(result.token)].tolist())


@given(part=st.sampled_from(["ov", "mlp", "both"]), head=st.integers(0, 3), **FEW_PARTS)
def test_skip_trigrams_are_those_of_the_whole_matrix(part, head, **options):
    view = view_of(n_kv_heads=2, **options)
    model, at = view.model, place(view)
    u, block, attn = view.direction(4, [5, 6]), model.blocks[0], model.blocks[0].attn
    e = model.W_E + (model.pos_embed.weight[at] if model.config.positions == "learned" else 0)
    values = block.attn_norm(e) @ attn.W_V[head]
    if options["bias"]:
        values = values + attn.value.bias.reshape(2, 4)[head // 2]
    written = values @ attn.W_O[head]
    full = e + block.mlp(block.mlp_norm(e))
    last = torch.ones(VOCAB) if view.modules.norm is None else view.modules.norm.scale(full)
    before = view.layer(0).mlp.norm
    M = torch.ones(VOCAB) if before is None else before.scale(e)
    n = e if before is None else before.normalised(e)
    centred = written if before is None else before.centred(written)
    B = view.mlp(0)
    # What both together make of the MLP, less what each makes alone: twice the mixed product.
    both = torch.zeros(VOCAB, VOCAB).double()
    zero = B(torch.zeros(16).double())
    for b in range(VOCAB):
        past = centred * M[b]
        mixed = B(n[b] + past) - B(past) - B(n[b]) + zero
        # Biases count as a part of B, so that A meets them too.
        meets = B(past) - B(-past)
        both[:, b] = last[b] * (mixed + meets / 2) @ u
    ov = (written @ u)[:, None] * last
    full = {"ov": ov, "mlp": both, "both": ov + both}[part]
    result = skip_trigrams(view, u, head, layer=0, k=8, part=part, position=at)
    assert result.value.tolist() == pytest.approx(full.flatten().topk(8).values.tolist())
    pairs = numbers(result.virtual), numbers(result.direct)
    assert full[pairs].tolist() == pytest.approx(result.value.tolist())
    assert both[pairs].tolist() == pytest.approx(result.mlp.tolist())
    assert ov[pairs].tolist() == pytest.approx(result.ov.tolist())


@given(**parts, start=st.sampled_from([None, 1]))
def test_pair_trigrams_are_those_of_all_texts_of_two_tokens(start, **options):
    view = view_of(n_layers=2, bos_token_id=start, **options)
    several, begin = [3, 8, 11, 20], [] if start is None else [start]
    texts = torch.tensor([[*begin, a, b] for a in several for b in several])
    next_tokens = view.logits(texts)[:, -1].softmax(-1).reshape(4, 4, VOCAB)
    gain = next_tokens - next_tokens.mean(0)
    best = gain.flatten().topk(6)
    result = pair_trigrams(view, k=6, among=several)
    assert result.value.tolist() == pytest.approx(best.values.tolist())
    where = torch.unravel_index(best.indices, gain.shape)
    assert numbers(result.virtual) == [several[i] for i in where[0]]
    assert numbers(result.direct) == [several[j] for j in where[1]]
    assert numbers(result.output) == where[2].tolist()


PAIRS = [
    (bigrams, ["input", "output"]),
    (lambda view, **how: skip_trigrams(view, view.direction(3), 1, **how), ["virtual", "direct"]),
    (
        lambda _, **how: attention_pairs(view_of(attention="bilinear"), [2], **how)[0].frame(),
        ["query", "key"],
    ),
]


@pytest.mark.parametrize(("read", "sides"), PAIRS)
@given(several=st.lists(st.integers(0, 29), min_size=2, max_size=12, unique=True))
def test_pairs_among_some_tokens_are_those_of_all_without_the_rest(biased, read, sides, several):
    every = read(biased, layer=0, k=VOCAB**2)
    every = every[every[sides].isin(TOKENS.convert_ids_to_tokens(several)).all(axis=1)]
    result = read(biased, layer=0, k=4, among=several)
    assert result.value.tolist() == pytest.approx(every.value.tolist()[:4])
    assert result[sides].values.tolist() == every[sides].values.tolist()[:4]


@pytest.mark.parametrize("name", EACH_READ)
def test_n_grams_of_every_family(name):
    view = family_view(name)
    options = {"layer": 1, "k": 5, "position": place(view)}
    reading = read_ngrams(view, "t3", **options)
    assert [len(side["token"]) for side in (reading.preceding, reading.following)] == [5, 5]
    if name.startswith("own") and view.layer(1).mlp.gate is not None:
        assert (len(reading.heads), reading.left_out) == (4, "")
    else:
        for unused in ({"minus": "t4"}, {"among": [3, 4]}):
            with pytest.raises(NotBilinearError, match=f"{next(iter(unused))} counts in skip"):
                read_ngrams(view, "t3", **options, **unused)
        assert reading.heads == []
        assert "is not a tensor" in reading.left_out


@given(**parts, layer=st.integers(0, 1), number=st.integers(0, 3))
def test_contributions_add_up_to_the_activation(layer, number, **options):
    view, ids = view_of(n_layers=2, **options), random_text()
    spectrum = view.mlp(layer).interaction(view.direction(3)).eigh(4)
    activation = float(spectrum.activations(view.mlp_inputs(layer, ids[None]))[0, 6, number])
    result = contribution(view, spectrum, number, Context(ids, 6, activation), layer=layer)
    assert result.heads.shape == (4, 7)
    assert result.total() == pytest.approx(activation, rel=1e-8, abs=1e-12)
    last = float(result.direct + result.heads[:, -1].sum())
    assert float(result.tokens()[-1]) == pytest.approx(last)


def test_contributions_of_many_contexts_are_those_of_each(view):
    spectrum = view.mlp(1).interaction(view.direction(3)).eigh(4)
    pairs = [(n % 4, Context(random_text(seed=n), 2 + n % 5, 0.0)) for n in range(20)]
    found = contributions(view, spectrum, pairs, layer=1)
    for (number, context), result in zip(pairs, found, strict=True):
        alone = contribution(view, spectrum, number, context, layer=1)
        assert result.total() == pytest.approx(alone.total())
        torch.testing.assert_close(result.heads, alone.heads)
    with pytest.raises(BilensError, match="position=9, expected 0 to"):
        contributions(view, spectrum, [(0, Context(random_text(), 9, 0.0))], layer=1)


def test_any_number_of_contexts_may_be_asked_for():
    """Each is put in its place; sorting all of them for each one took hours."""
    compared = []

    class Activation(float):
        def __abs__(self):
            compared.append(self)
            return super().__abs__()

    best = _Best(10**9)
    for number in range(500):
        best.add(Context(torch.tensor([number]), 0, Activation(number % 17)))
    assert len(best.contexts) == 500
    assert len(compared) < 500 * 12


@given(**parts, k=st.integers(1, 4), batch_size=st.integers(1, 7))
def test_contexts_are_the_best_places_of_the_best_texts(k, batch_size, **options):
    view = view_of(**options)
    texts = [random_text(seed=seed) for seed in (*range(8), 3, 5)]
    spectrum = view.mlp(0).interaction(view.direction(3)).eigh(3)
    result = top_contexts(view, spectrum, iter(texts), layer=0, k=k, batch_size=batch_size)
    active = spectrum.activations(view.mlp_inputs(0, torch.stack(texts)))
    for number, contexts in enumerate(result):
        best = active[..., number].abs().max(1)
        order, seen = [], set()
        for row in best.values.argsort(descending=True, stable=True).tolist():
            beginning = tuple(texts[row][: best.indices[row] + 1].tolist())
            if beginning not in seen:
                order.append(row)
                seen.add(beginning)
        for context, row in zip(contexts, order[:k], strict=True):
            assert torch.equal(context.ids, texts[row])
            assert context.position == best.indices[row]
            assert context.activation == pytest.approx(float(active[row, context.position, number]))


def test_rows_without_a_token_have_a_number(view):
    assert token_names(view, [3, 29, 30, 99]) == ["t3", "t29", "[30]", "[99]"]
    assert token_names(ResidualModel(view.model), torch.tensor([3])) == ["[3]"]


def test_directions_by_name(view):
    direction = TokenDirection("t3", ("t7", "t8"))
    assert str(direction) == "t3 minus t7, t8"
    torch.testing.assert_close(direction.vector(view), view.direction(3, [7, 8]))


def test_texts_of_any_length_have_contexts(view):
    texts = ["t3 t4 t5 t6 t9 t8", "t7 t3", torch.tensor([5, 6, 7, 3])]
    spectrum = view.mlp(1).interaction(view.direction(3)).eigh(3)
    result = top_contexts(view, spectrum, texts, layer=1, k=3, batch_size=2)
    for number, contexts in enumerate(result):
        ids = sorted(view.ids(text).tolist() for text in texts)
        assert sorted(c.ids.tolist() for c in contexts) == ids
        for context in contexts:
            active = spectrum.activations(view.mlp_inputs(1, context.ids[None]))[0, :, number]
            assert context.position == int(active.abs().argmax())
            assert context.activation == pytest.approx(float(active[context.position]))


def test_a_token_by_name_is_the_token_by_number(view):
    options = {"layer": 0, "k": 5}
    for read in (following, preceding):
        assert read(view, "t3", **options).equals(read(view, 3, **options))
    u = view.direction(3, minus=[4, 5])
    by_vector = skip_trigrams(view, u, 1, **options)
    assert by_vector.equals(skip_trigrams(view, "t3", 1, minus=["t4", 5], **options))
    with pytest.raises(BilensError, match="beside a vector"):
        skip_trigrams(view, u, 1, minus="t4", **options)
    assert str(read_ngrams(view, 3, minus=[4], **options).direction) == "t3 minus t4"
    streams = [read_stream(view, x, 2, layer=0) for x in ("t3 t4 t5", torch.tensor([3, 4, 5]))]
    assert torch.equal(*(stream.total() for stream in streams))


@pytest.mark.parametrize("length", [1, 11, 12])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "rotary", "learned", "shortformer"])
def test_a_written_text_ends_where_the_model_reads_no_further(kind, length):
    own = kind not in ("gpt2", "llama")
    view = view_of(positions=kind) if own else family_view(kind)
    prompt = " ".join(["t3"] * length)
    endless, few = ({"temperature": 0.7, "seed": 1, "tokens": n} for n in (100, 1))
    # One that ends itself, by t2, is no case.
    view.model.generation_config.eos_token_id = view.model.config.eos_token_id = None
    assert len(generate_text(view, prompt, **few).split()) <= length + 1
    assert length <= len(generate_text(view, prompt, **endless).split()) <= 13
