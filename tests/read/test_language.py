"""Readings of language models against the model itself and against whole matrices."""

import pytest
import torch
from bilens.read.language.running import RunningTop
from hypothesis import given
from hypothesis import strategies as st

from bilens.errors import BilensError, NotBilinearError
from bilens.read.language import (
    Context,
    bigrams,
    block_inputs,
    contribution,
    exciting_tokens,
    following,
    head_map,
    interaction,
    output_direction,
    pair_trigrams,
    preceding,
    read_stream,
    skip_trigrams,
    split_logits,
    token_names,
    top_contexts,
)
from bilens.read.language import bigrams as bigrams_function
from tests.language import VOCAB, parts, plain, random_model, random_text, toy_tokenizer

TOKENS = toy_tokenizer()


def numbers(names) -> list[int]:
    return TOKENS.convert_tokens_to_ids(list(names))


@given(**parts, layer=st.integers(0, 1), position=st.integers(0, 8))
def test_the_parts_of_a_stream_add_up_to_it(layer, position, **options):
    model, ids = random_model(n_layers=2, **options), random_text()
    stream = read_stream(model, ids, position, layer)
    torch.testing.assert_close(stream.total(), block_inputs(model, ids[None], layer)[0, position])


def test_what_the_mlp_reads_is_what_it_is_given():
    model = random_model(norm="rms", n_layers=2, value_mix=True, embed_mix=True)
    ids, seen = random_text()[None], []
    model.blocks[1].mlp.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(ids)
    torch.testing.assert_close(block_inputs(model, ids, 1), seen[0])


@given(**plain, position=st.integers(-9, 8))
def test_all_paths_add_up_to_the_logits(position, **options):
    model, ids = random_model(**options), random_text()
    terms = split_logits(model, ids, position)
    logits = model(ids[None]).logits[0, position]
    assert (terms.total() - logits).abs().max() < 1e-10 * logits.abs().max()
    assert terms.sources[:2] == ("direct", "head 0")
    torch.testing.assert_close(terms.pairs, terms.pairs.transpose(0, 1))


def test_the_first_position_needs_no_pattern():
    model = random_model()
    terms = split_logits(model, random_text(), 0)
    e = model.W_E[random_text()[0]]
    torch.testing.assert_close(terms.residual[3], e @ head_map(model, 2) @ model.W_U)


def test_paths_need_one_block_without_norms():
    for options in ({"norm": "rms"}, {"n_layers": 2}, {"logit_cap": 30.0}, {"embed_mix": True}):
        with pytest.raises(NotBilinearError, match="a sum over paths for one block without norms"):
            split_logits(random_model(**options), random_text())
    with pytest.raises(BilensError, match=r"position=9, expected 0 to 8"):
        read_stream(random_model(), random_text(), 9)


@given(
    bias=st.booleans(), part=st.sampled_from(["direct", "mlp", "both"]), token=st.integers(0, 29)
)
def test_bigrams_are_those_of_the_whole_matrix(bias, part, token):
    model = random_model(bias=bias)
    direct = model.W_E @ model.W_U
    mlp = model.blocks[0].mlp(model.W_E) @ model.W_U
    whole = {"direct": direct, "mlp": mlp, "both": direct + mlp}[part]

    found = following(model, TOKENS, token, k=7, part=part)
    best = whole[token].topk(7)
    assert numbers(found.token) == best.indices.tolist()
    assert found.value.tolist() == pytest.approx(best.values.tolist())
    assert (found.direct + found.mlp).tolist() == pytest.approx(
        (direct + mlp)[token, best.indices].tolist()
    )

    found = preceding(model, TOKENS, token, k=7, part=part)
    assert numbers(found.token) == whole[:, token].topk(7).indices.tolist()
    assert found.value.tolist() == pytest.approx(whole[:, token].topk(7).values.tolist())

    found = bigrams(model, TOKENS, k=9, part=part)
    best = whole.flatten().topk(9)
    assert [
        a * VOCAB + b for a, b in zip(numbers(found.input), numbers(found.output), strict=True)
    ] == (best.indices.tolist())
    assert found.value.tolist() == pytest.approx(best.values.tolist())


@given(bias=st.booleans(), part=st.sampled_from(["ov", "mlp", "both"]), head=st.integers(0, 3))
def test_skip_trigrams_are_those_of_the_whole_matrix(bias, part, head):
    model = random_model(bias=bias, n_kv_heads=2)
    u = output_direction(model, 4, [5, 6])
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    past = model.W_E @ attn.W_V[head] @ attn.W_O[head]
    # What both tokens together make of the MLP, less what each makes alone.
    together = mlp(model.W_E + past[:, None])
    alone = mlp(model.W_E) + mlp(past)[:, None]
    zero = mlp(torch.zeros(16).double())
    Q = interaction(model, u).dense()[:16, :16]
    both = 2 * past @ Q @ model.W_E.T
    torch.testing.assert_close((together - alone + zero) @ u, both)
    if bias:
        # A also meets the biases, whatever B is.
        both += ((mlp(past) - zero) @ u - ((past @ Q) * past).sum(-1))[:, None]
    ov = (past @ u)[:, None].expand(-1, VOCAB)
    whole = {"ov": ov, "mlp": both, "both": ov + both}[part]
    found = skip_trigrams(model, TOKENS, u, head, k=8, part=part)
    assert found.value.tolist() == pytest.approx(whole.flatten().topk(8).values.tolist())
    pairs = numbers(found.virtual), numbers(found.direct)
    assert whole[pairs].tolist() == pytest.approx(found.value.tolist())
    assert both[pairs].tolist() == pytest.approx(found.mlp.tolist())
    assert ov[pairs].tolist() == pytest.approx(found.ov.tolist())


@given(**parts, start=st.sampled_from([None, 1]))
def test_pair_trigrams_are_those_of_all_texts_of_two_tokens(start, **options):
    model = random_model(n_layers=2, bos_token_id=start, **options)
    some = [3, 8, 11, 20]
    said = torch.zeros(4, 4, VOCAB).double()
    for i, a in enumerate(some):
        for j, b in enumerate(some):
            text = [a, b] if start is None else [start, a, b]
            said[i, j] = model(torch.tensor([text])).logits[0, -1].softmax(-1)
    gain = said - said.mean(0)
    best = gain.flatten().topk(6)
    found = pair_trigrams(model, TOKENS, k=6, among=some)
    assert found.value.tolist() == pytest.approx(best.values.tolist())
    where = torch.unravel_index(best.indices, gain.shape)
    assert numbers(found.virtual) == [some[i] for i in where[0]]
    assert numbers(found.direct) == [some[j] for j in where[1]]
    assert numbers(found.output) == where[2].tolist()


@given(some=st.lists(st.integers(0, 29), min_size=2, max_size=12, unique=True))
def test_n_grams_among_some_tokens_are_those_of_all_without_the_rest(some):
    model = random_model(bias=True)
    names, u = set(TOKENS.convert_ids_to_tokens(some)), output_direction(model, 3)
    every = bigrams(model, TOKENS, k=VOCAB**2)
    every = every[every.input.isin(names) & every.output.isin(names)]
    found = bigrams(model, TOKENS, k=4, among=some)
    assert found.value.tolist() == pytest.approx(every.value.tolist()[:4])
    assert found.input.tolist() == every.input.tolist()[:4]
    every = skip_trigrams(model, TOKENS, u, 1, k=VOCAB**2)
    every = every[every.virtual.isin(names) & every.direct.isin(names)]
    found = skip_trigrams(model, TOKENS, u, 1, k=4, among=some)
    assert found.value.tolist() == pytest.approx(every.value.tolist()[:4])
    assert found.direct.tolist() == every.direct.tolist()[:4]


def test_blocks_of_the_vocabulary_make_one_ranking(monkeypatch):
    model = random_model()
    whole = bigrams(model, TOKENS, k=25)
    trigrams = skip_trigrams(model, TOKENS, output_direction(model, 3), 1, k=25)
    monkeypatch.setitem(bigrams_function.__globals__, "ROWS", 7)
    monkeypatch.setitem(skip_trigrams.__globals__, "ROWS", 7)
    assert bigrams(model, TOKENS, k=25).equals(whole)
    assert skip_trigrams(model, TOKENS, output_direction(model, 3), 1, k=25).equals(trigrams)


@given(
    rows=st.integers(1, 3),
    k=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_running_top_is_the_top_of_all(rows, k, sizes, seed):
    scores = torch.randint(5, (rows, sum(sizes)), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(sum(sizes)).expand(rows, -1)[..., None]
    top = RunningTop(k)
    for some, where in zip(scores.float().split(sizes, 1), places.split(sizes, 1), strict=True):
        top.update(some, where)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(top.scores, scores.float().gather(1, order))
    assert torch.equal(top.labels[..., 0], order)


@given(**parts, layer=st.integers(0, 1))
def test_interactions_are_what_the_mlp_adds(layer, **options):
    model = random_model(n_layers=2, **options)
    u = output_direction(model, 3, [7, 8])
    y = torch.randn(5, 16).double()
    torch.testing.assert_close(interaction(model, u, layer)(y), model.mlp(layer)(y) @ u)


def test_a_direction_is_a_difference_of_unembeddings():
    model = random_model(norm="rms")
    expected = (model.W_U[:, 3] - (model.W_U[:, 7] + model.W_U[:, 8]) / 2) * model.norm.weight
    torch.testing.assert_close(output_direction(model, 3, [7, 8]), expected)


@given(**parts, layer=st.integers(0, 1), number=st.integers(0, 3))
def test_contributions_add_up_to_the_activation(layer, number, **options):
    model, ids = random_model(n_layers=2, **options), random_text()
    spectrum = interaction(model, output_direction(model, 3), layer).eigh(4)
    activation = spectrum.activations(block_inputs(model, ids[None], layer))[0, 6, number]
    found = contribution(model, spectrum, number, Context(ids, 6, float(activation)), layer)
    assert found.heads.shape == (4, 7)
    assert found.total() == pytest.approx(float(activation), rel=1e-10)
    assert float(found.tokens()[-1]) == pytest.approx(
        found.direct + float(found.heads[:, -1].sum())
    )


@given(**parts, k=st.integers(1, 4), batch_size=st.integers(1, 7))
def test_contexts_are_the_best_places_of_the_best_texts(k, batch_size, **options):
    model = random_model(**options)
    texts = [random_text(seed=seed) for seed in range(10)]
    spectrum = interaction(model, output_direction(model, 3)).eigh(3)
    found = top_contexts(model, spectrum, texts, k=k, batch_size=batch_size)
    active = spectrum.activations(block_inputs(model, torch.stack(texts)))
    for number, contexts in enumerate(found):
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


def test_the_same_beginning_is_one_context():
    model = random_model()
    spectrum = interaction(model, output_direction(model, 3)).eigh(1)
    texts = [random_text(seed=seed) for seed in range(4)]
    alone = top_contexts(model, spectrum, texts, k=3)[0]
    again = top_contexts(model, spectrum, [*texts, *texts, *texts], k=3)[0]
    assert [c.activation for c in again] == [c.activation for c in alone]


def test_contexts_come_from_a_stream_too():
    model = random_model()
    spectrum = interaction(model, output_direction(model, 3)).eigh(1)
    texts = [random_text(seed=seed) for seed in range(5)]
    found = top_contexts(model, spectrum, iter(texts), k=2)
    assert [c.position for c in found[0]] == [
        c.position for c in top_contexts(model, spectrum, texts, k=2)[0]
    ]


@pytest.mark.parametrize("head", [None, 2])
def test_exciting_tokens_are_those_of_the_embedding(head):
    model = random_model(bias=True)
    spectrum = interaction(model, output_direction(model, 3)).eigh(2)
    x = model.W_E if head is None else model.W_E @ head_map(model, head)
    overlap = x @ spectrum.vectors[1, :16]
    found = exciting_tokens(model, TOKENS, spectrum, 1, head=head, k=5)
    best = overlap.abs().topk(5).indices
    assert numbers(found.token) == best.tolist()
    assert found.activation.tolist() == pytest.approx(
        (spectrum.values[1] * overlap[best] ** 2).tolist()
    )


def test_reading_never_changes_the_model():
    model = random_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spectrum = interaction(model, output_direction(model, 3)).eigh(2)
    following(model, TOKENS, 1)
    bigrams(model, TOKENS)
    skip_trigrams(model, TOKENS, output_direction(model, 3), 0)
    top_contexts(model, spectrum, [random_text()])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_rows_without_a_token_have_a_number():
    assert token_names(TOKENS, torch.tensor([3, 29, 30, 99])) == ["t3", "t29", "[30]", "[99]"]


def refused(**options):
    model = random_model(**options)
    spectrum = interaction(random_model(), output_direction(random_model(), 3)).eigh(2)
    return model, spectrum


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m, s: following(m, TOKENS, 30), "token=30, expected 0 to 29"),
        (lambda m, s: following(m, TOKENS, 1, k=0), "k=0, expected at least 1"),
        (lambda m, s: bigrams(m, TOKENS, part="ov"), "part='ov', expected direct, mlp or both"),
        (lambda m, s: bigrams(m, TOKENS, layer=1), "layer=1, expected 0 to 0"),
        (
            lambda m, s: skip_trigrams(m, TOKENS, output_direction(m, 3), 4),
            "head=4, expected 0 to 3",
        ),
        (
            lambda m, s: skip_trigrams(m, TOKENS, output_direction(m, 3), 0, part="direct"),
            "part='direct', expected ov, mlp or both",
        ),
        (
            lambda m, s: skip_trigrams(m, TOKENS, output_direction(m, 3), 0, k=0),
            "k=0, expected at least 1",
        ),
        (lambda m, s: pair_trigrams(m, TOKENS, k=0), "k=0, expected at least 1"),
        (lambda m, s: bigrams(m, TOKENS, among=[]), "among: expected numbers of tokens"),
        (lambda m, s: bigrams(m, TOKENS, among=[30]), "tokens from 0 to 29, at least one"),
        (lambda m, s: output_direction(m, 30), "token=30, expected 0 to 29"),
        (lambda m, s: output_direction(m, 3, [2, -1]), "minus=-1, expected 0 to 29"),
        (lambda m, s: top_contexts(m, s, []), "texts is empty"),
        (lambda m, s: top_contexts(m, s, [random_text()], k=0), "k=0, expected at least 1"),
        (lambda m, s: exciting_tokens(m, TOKENS, s, 2), "number=2, expected 0 to 1"),
    ],
)
def test_bad_input_is_named(unchecked, read, message):
    with pytest.raises(BilensError, match=message):
        read(*refused())


def test_a_batch_of_spectra_has_no_contexts():
    model = random_model()
    batch = interaction(model, model.W_U[:, :2].T).eigh(2)
    with pytest.raises(BilensError, match="reads a single form"):
        top_contexts(model, batch, [random_text()])


def test_n_grams_need_a_model_without_norms():
    model, spectrum = refused(norm="layer")
    for read in (
        lambda: preceding(model, TOKENS, 1),
        lambda: skip_trigrams(model, TOKENS, output_direction(model, 3), 0),
        lambda: exciting_tokens(model, TOKENS, spectrum, 0),
    ):
        with pytest.raises(NotBilinearError, match="has norm='layer', whose scale depends"):
            read()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_cap": 30.0}, "has logit_cap=30.0, which its n-grams would leave out"),
        ({"value_mix": True, "embed_mix": True}, "has value_mix=True and embed_mix=True, which"),
    ],
)
def test_n_grams_need_a_model_without_mixes_and_cap(options, named):
    model, spectrum = refused(**options)
    for read in (
        lambda: following(model, TOKENS, 1),
        lambda: skip_trigrams(model, TOKENS, output_direction(model, 3), 0),
        lambda: exciting_tokens(model, TOKENS, spectrum, 0),
    ):
        with pytest.raises(NotBilinearError, match=named):
            read()
