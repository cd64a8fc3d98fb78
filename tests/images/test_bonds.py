import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import bilens
from bilens.images import accurate_ranks, classifier_bonds, classifier_function_bonds, read_bonds
from bilens.images.bonds import BondReading, as_sum
from bilens.images.cuts import chosen_edges
from bilens.images.fidelity import (
    clopper_pearson,
    held_out,
    loss_bound,
    product_accuracies,
    promised,
    rank_accuracies,
)
from bilens.nn import ImageClassifier
from bilens.tensor import bonds, with_constant
from bilens.tensor.factors import affine
from tests.models import digit_bonds, digit_model, digits


@pytest.mark.parametrize("bias", [False, True])
def test_the_cut_keeps_the_accuracy_on_the_images_it_was_chosen_on(bias):
    model, data, result = digit_model(n_layers=2, bias=bias), digits(), digit_bonds(bias)
    small, trained = result.cut_model(), (data.train_images, data.train_labels)
    assert small.accuracy(*trained) >= model.accuracy(*trained) - 0.02
    assert result.cut.ranks == result.ranks[result.kind]
    assert sum(result.cut.ranks) == min(map(sum, result.ranks.values())) < 2 * 24
    assert result.held_out.accuracy == small.accuracy(data.test_images, data.test_labels)
    assert result.accuracy == model.accuracy(data.test_images, data.test_labels)
    assert result.by_rank[-1][1:] == (pytest.approx(result.accuracy, abs=0.01), 0)
    logits = model(data.test_images).detach()
    expected = held_out(logits, small(data.test_images).detach(), data.test_labels)
    assert result.held_out.error == pytest.approx(expected.error, abs=1e-3)
    kept = pytest.approx(result.held_out.accuracy)
    assert result.by_products[-1] == (len(result.cut.products()), kept)
    assert max(accuracy for _, accuracy in result.by_products[:3]) < result.held_out.accuracy
    record = result.record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    low, high = result.held_out.interval
    assert low < result.held_out.accuracy < high


@pytest.mark.long
@pytest.mark.parametrize("n", [30, 100, 300])
@pytest.mark.parametrize("drop", [0.001, 0.01, 0.05, 0.2])
def test_a_cut_that_loses_more_is_promised_as_rarely_as_is_said(n, drop):
    """The chance that a check passes, summed over all its outcomes."""
    for loss in (drop, 1.3 * drop, 3 * drop):
        for gain in (0.0, 0.02):
            losses = stats.binom(n, loss + gain).pmf(range(n + 1))
            chance = 0.0
            for lost in np.flatnonzero(losses > 1e-12):
                # Of the images that are not lost, a share is gained.
                gains = stats.binom(n - lost, gain / (1 - loss - gain)).pmf(range(n - lost + 1))
                for gained in np.flatnonzero(gains > 1e-9):
                    if loss_bound(int(lost), int(gained), n) <= drop:
                        chance += losses[lost] * gains[gained]
            assert chance <= 0.001 / 2


def test_looking_often_costs_no_confidence():
    """Cuts whose real losses rise to the limit and above it, checked on the same images."""
    generator, n, drop, draws, wrong = np.random.default_rng(0), 300, 0.05, 4_000, 0
    losses = [0.0, 0.01, 0.03, 0.0501, 0.0502, 0.051, 0.06, 0.08]
    for _ in range(draws):
        places = generator.random(n)
        lost = {(rank,): int((places < loss).sum()) for rank, loss in enumerate(losses)}
        chosen = promised(list(lost), lambda r, lost=lost: loss_bound(lost[r], 0, n), drop)
        wrong += chosen is not None and losses[chosen[0]] > drop
    assert stats.binomtest(wrong, draws, 0.001 / 2, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize(("n", "drop"), [(4, 0.5), (40, 0.01), (300, 0.01), (1437, 0.0)])
def test_what_images_cannot_promise_is_said(n, drop, caplog):
    data, function = digits(), classifier_function_bonds(digit_model(n_layers=2), digits())
    few = replace(data, train_images=data.train_images[:n], train_labels=data.train_labels[:n])
    assert accurate_ranks(function, few, drop) == tuple(bond.k for bond in function.bonds)
    assert "can promise no loss below" in caplog.text


def test_what_is_said_of_few_images_is_said_once_and_no_cut_twice(caplog):
    data, model = digits(), digit_model(n_layers=2)
    few = replace(data, train_images=data.train_images[:40], train_labels=data.train_labels[:40])
    readings = [read_bonds(model, few), read_bonds(model, data, drop=0.02)]
    assert len(caplog.records) == 1
    whole, small = ([*zip(*x.accuracies().values(), strict=True)] for x in readings)
    for rows in (whole, small):
        assert len({row[1:] for row in rows}) == len(rows)
    assert whole[-1][0] == readings[0].by_rank[-1][0]
    assert small[-1][0] == as_sum(readings[1].cut.ranks)


def test_a_promised_cut_is_checked_on_images_that_did_not_choose_it():
    data, function = digits(), classifier_function_bonds(digit_model(n_layers=2), digits())
    full = [bond.k for bond in function.bonds]
    checked = torch.arange(len(data.train_images)) % 4 != 0
    x, labels = data.train_images[checked], data.train_labels[checked]
    before = function.cut(full)(x).argmax(-1) == labels
    sizes = []
    for drop in (0.02, 0.05, 0.1):
        ranks = accurate_ranks(function, data, drop)
        after = function.cut(ranks)(x).argmax(-1) == labels
        lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
        assert loss_bound(lost, gained, len(x)) <= drop
        sizes.append(sum(ranks))
    assert sum(full) > sizes[0] > sizes[1] > sizes[2]


def test_a_cut_model_is_saved_and_opened_as_any_other(tmp_path):
    result = digit_bonds(bias=True)
    result.cut_model().save_files(tmp_path)
    opened = bilens.load(tmp_path)
    x = digits().test_images
    assert torch.equal(opened(x), result.cut_model()(x))
    assert (opened(x).argmax(-1) == result.cut(x).argmax(-1)).float().mean() > 0.99
    assert len(classifier_bonds(opened, digits(), "weights").bonds) == 2


def check_centred_logits(bonds, model):
    """Compare all bonds of a model with its logits less their mean."""
    x = digits().test_images[:20]
    logits = model(x).detach().double()
    expected = logits - logits.mean(-1, keepdim=True)
    assert (bonds.cut(100)(x.double()) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("bias", [False, True])
def test_bonds_are_of_the_logits_less_their_mean(bias):
    model, data = digit_model(n_layers=2, bias=bias), digits()
    result = classifier_bonds(model, data)
    check_centred_logits(result, model)
    images = data.train_images.double()
    images = with_constant(images) if bias else images
    E = affine(model.embed.weight, model.embed.bias) if bias else model.embed.weight
    assert torch.equal(E, model.embedding())
    moment = images.T @ images / len(images)
    by_hand = bonds(model.layer_tensors(), torch.eye(10) - 0.1, moment, E.detach())
    for a, b in zip(result.bonds, by_hand.bonds, strict=True):
        assert (a.shares - b.shares).abs().max() < 1e-6
    alone = classifier_bonds(model, data, "weights")
    assert (alone.bonds[0].shares - result.bonds[0].shares).abs().max() > 1e-3


def test_directions_tell_what_they_do():
    result, data = digit_bonds(), digits()
    z = result.cut.coordinates(data.test_images)
    for bond, number in ((b, k) for b, rank in enumerate(result.cut.ranks) for k in range(rank)):
        direction = result.cut_reading.direction(bond, number)
        assert (direction.bond, direction.number) == (bond, number)
        amounts, (highest, lowest) = z[bond][:, number], direction.images
        assert amounts[highest[0]] == amounts.max()
        assert amounts[lowest[0]] == amounts.min()
        assert len(highest) == 4
    # One end of a coordinate behind the first layer, by hand.
    direction, core = result.cut_reading.direction(1, 0), result.cut.cores[1]
    near = z[1][:, 0].argsort(descending=True)[: round(0.02 * len(z[1]))]
    without = z[1][near].clone()
    without[:, 0] = 0
    expected = (core(z[1][near]) - core(without)).mean(0)
    assert torch.allclose(torch.tensor(direction.effects[0]).double(), expected)


def test_pictures_are_the_strongest_ends_of_a_coordinate():
    """One picture for each sign, along the strongest eigenvectors of each layer below."""
    remaining = digit_bonds().cut_reading
    core, write = remaining.cut.cores[0], remaining.cut.write
    assert torch.equal(remaining.pixels(0, 2)[0], write[:, 2])
    high, low = (remaining.cut.read @ x for x in remaining.pixels(1, 1))
    values = torch.linalg.eigvalsh(core.dense()[1])
    for v, value in ((high, values[-1]), (low, values[0])):
        assert torch.allclose(core(v)[1] / v.square().sum(), value)
    above = torch.linalg.eigh(remaining.cut.cores[1].dense()[4])[1][:, -1]
    (v, _) = (remaining.cut.read @ x for x in remaining.pixels(2, 4))
    below = torch.linalg.eigvalsh(torch.einsum("o,oij->ij", above, core.dense()))
    assert torch.allclose((core(v) @ above).abs(), below.abs().max())


def test_curves_measure_ordinary_models():
    result, data = digit_bonds(), digits()
    ((k, share, error),) = rank_accuracies(result.bonds, data, [3])
    cut = ImageClassifier.from_cut(result.bonds.cut(3), result.model.config)
    logits, smaller = (part(data.test_images).detach() for part in (result.model, cut))
    expected = held_out(logits, smaller, data.test_labels)
    assert (k, share) == (3, expected.accuracy)
    assert error == pytest.approx(expected.error, rel=1e-3)
    plain = result.bonds.cut(result.cut.ranks)
    kept = result.held_out.accuracy
    assert product_accuracies(plain, data)[-1][1] == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize("metric", ["images", "gaussian", "weights"])
def test_bonds_of_the_function_are_the_model(metric):
    model = digit_model(n_layers=2, bias=True)
    check_centred_logits(classifier_function_bonds(model, digits(), metric), model)


def test_held_out_errors_are_those_of_the_images():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 10, generator=generator)
    smaller = logits + 0.1 * torch.randn(4000, 10, generator=generator) + 3
    labels = logits.argmax(-1)
    result = held_out(logits, smaller, labels)
    assert result.accuracy == float((smaller.argmax(-1) == labels).double().mean())
    assert result.changed == pytest.approx(1 - result.accuracy)
    assert result.error == pytest.approx(0.1, rel=0.02)
    assert result.error < result.error_bound < 1.1 * result.error
    one, two = (held_out(logits[i::2], smaller[i::2], labels[i::2]) for i in (0, 1))
    assert one.error <= two.error_bound
    assert two.error <= one.error_bound


def test_clopper_pearson_against_tails_of_the_binomial():
    # The table of the source, and limits that are known in closed form.
    low, high = clopper_pearson(9, 10)
    assert (round(low, 4), round(high, 4)) == (0.5550, 0.9975)
    assert clopper_pearson(0, 50) == (0.0, pytest.approx(1 - 0.025 ** (1 / 50)))
    assert clopper_pearson(50, 50) == (pytest.approx(0.025 ** (1 / 50)), 1.0)
    low, high = clopper_pearson(9_600, 10_000)
    assert low < 0.96 < high
    assert high - low == pytest.approx(2 * 1.96 * (0.96 * 0.04 / 10_000) ** 0.5, rel=0.02)


def drawn(result: BondReading) -> tuple:
    """Return all that the networks of a model show: nodes, percentages, colours and images."""
    reading, edges, images = result.cut_reading, [], {}
    for label in range(10):
        edges += chosen_edges(reading.products, 2, label)
    for node in {node for edge in edges for node in edge.sources}:
        images[node] = list(reading.direction(*node).images)
    return [(e.target, e.sources, e.coefficient > 0, f"{e.part:.0%}") for e in edges], images


def test_a_model_has_one_picture():
    """On any number of threads, and within rounding of its weights."""
    expected = drawn(digit_bonds())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert drawn(read_bonds(digit_model(2), digits(), drop=0.02)) == expected
    finally:
        torch.set_num_threads(before)
    other, generator = copy.deepcopy(digit_model(2)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + 1e-7 * torch.randn(weight.shape, generator=generator))
    assert drawn(read_bonds(other, digits(), drop=0.02)) == expected
