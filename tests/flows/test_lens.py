"""The lens: changes of all logits, their sums over cuts, and the labels and the page of them."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilens
from bilens import BilensError
from bilens.cli import main
from bilens.convert import save_model
from bilens.flows import flow, lens, read_lens
from bilens.flows.nodes import WRITING
from bilens.flows.token_lens import logit_changes
from bilens.transformer import ResidualModel
from tests.families import EACH, MIXTURES, exact_norms, family_view
from tests.models import TOKENS, random_model, view_of
from tests.nightly import nightly

TEXT = torch.tensor([3, 9, 4, 12, 7])
OTHER = torch.tensor([3, 9, 14, 12, 5])
ROUNDED = ("gemma2", "cohere2")  # families whose own code rounds to float32
READ_OTHERWISE = "own-mixed"  # its layers read the embeddings, and values of the first layer


def logit_difference(view: ResidualModel) -> torch.Tensor:
    """Return the change of all logits of the model itself, before a soft cap."""
    first, second = (view.logits(ids[None])[0, -1] for ids in (TEXT, OTHER))
    cap = view.modules.softcap
    if cap is not None:
        first, second = (cap * torch.atanh(z / cap) for z in (first, second))
    return first - second


@pytest.mark.parametrize("name", EACH)
def test_cuts_add_up_to_the_change_of_all_logits(name):
    view = family_view(name)
    allowed = 1e-6 if name.startswith(ROUNDED) else 1e-9
    if name == READ_OTHERWISE:
        with pytest.raises(BilensError, match="before layer 0 adds up to"):
            read_lens(view, TEXT, OTHER)
        return
    with exact_norms():
        change = logit_difference(view)
        through = flow(view, TEXT, "t5", minus="t7", against=OTHER, labels=0)
        tokens = [node for node in through.nodes if node.kind == "token"]
        total = torch.stack([lens(through, node) for node in tokens]).sum(0)
        reading = read_lens(view, TEXT, OTHER)
    size = float(change.abs().max())
    assert float((total - change).abs().max()) < allowed * size
    assert reading.error < allowed
    for layer in {cell.layer for cell in reading.cells}:
        cells = [cell.answer for cell in reading.cells if cell.layer == layer]
        assert math.isclose(sum(cells), reading.value, abs_tol=allowed * size)


@pytest.mark.long
@pytest.mark.parametrize("name", EACH)
def test_weights_of_16_bits_are_widened_for_tangents_too(name):
    """Most models of the hub are stored so: their nodes have labels, and the lens adds up."""
    view = family_view(name, dtype=torch.bfloat16)
    through = flow(view, TEXT, 5, minus=7, against=OTHER, labels=3)
    assert through.named
    if name == READ_OTHERWISE:
        return
    tokens = [node for node in through.nodes if node.kind == "token"]
    total = torch.stack([lens(through, node) for node in tokens]).sum(0)
    change = float(total[5] - total[7])
    assert math.isclose(change, through.value, abs_tol=1e-4 * float(total.abs().max()))


@pytest.mark.parametrize("name", [*EACH, *nightly(list(MIXTURES), ["qwen3-experts"])])
def test_at_the_answer_the_lens_of_each_node_is_its_flow(name):
    view = family_view(name)
    with exact_norms():
        through = flow(view, TEXT, "t5", minus="t7", against=OTHER, labels=0)
        nodes = [node for node in through.nodes if node.kind in WRITING]
        kept, found = logit_changes(through, nodes)
    # All but what layers read otherwise than from the stream.
    missing = {node.place for node in nodes} - {node.place for node in kept}
    assert bool(missing) is (name == READ_OTHERWISE)
    assert len(kept) > 10
    for node, changes in zip(kept, found.changes[0], strict=True):
        at_answer = float(changes[5] - changes[7])
        assert math.isclose(at_answer, node.flow, abs_tol=1e-6 * through.absolute)


@pytest.mark.parametrize("name", EACH)
def test_a_small_change_of_large_logits_is_not_refused_for_rounding(name):
    view = family_view(name, dtype=torch.float32)
    if name == READ_OTHERWISE:
        return
    with torch.no_grad():
        rows = view.places.embed.weight
        rows[14], rows[5] = rows[4] + 1e-3 * rows[14], rows[7] + 1e-3 * rows[5]
    reading = read_lens(view, TEXT, OTHER)
    assert reading.error < 0.01


@given(
    seed=st.integers(0, 2**16), token=st.integers(0, 29), target=st.sampled_from(["mlp", "head"])
)
def test_each_number_of_the_lens_is_a_flow_of_its_own(seed, token, target):
    """Dense: one backward pass for one token, and one forward pass for all of them."""
    view = view_of(n_layers=2, norm="rms", mlp="swiglu")
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randint(3, 20, (2, 6), generator=generator)
    if torch.equal(first, second):
        return
    through = flow(view, first, 29, against=second, labels=0)
    node = next((x for x in through.nodes if x.kind == target), None)
    if node is None:
        return
    found = lens(through, node)
    of_token = flow(view, first, token, against=second, labels=0)
    same = [x.flow for x in of_token.nodes_above(0) if x.place == node.place]
    assert math.isclose(float(found[token]), sum(same), rel_tol=1e-3, abs_tol=1e-5)


def test_labels_are_the_tokens_of_the_lens():
    view = family_view("llama")
    through = flow(view, TEXT, "t5", minus="t7", against=OTHER, labels=4)
    assert len(through.named) == 4
    assert {node.place for node in through.named} == {x.place for x in through.nodes[:4]}
    assert all(node.measured is None for node in through.named)
    logits = [view.logits(ids[None])[0, -1].double() for ids in (TEXT, OTHER)]
    for node in through.named:
        change, scores = lens(through, node), torch.zeros(30)
        # It is taken from the first text, and put into the second one.
        for present, absent in ((logits[0], logits[0] - change), (logits[1] + change, logits[1])):
            p1, p0 = present.softmax(-1), absent.softmax(-1)
            scores += ((p1 / p0).log() * ((p1 + p0) / 2).sqrt()).float()
        order = scores.argsort().tolist()
        assert node.raises == tuple(f"t{i}" for i in order[::-1] if scores[i] > 0)[:4]
        assert node.lowers == tuple(f"t{i}" for i in order if scores[i] < 0)[:4]


def test_an_answer_of_several_tokens_has_labels_of_all_of_its_places():
    view = family_view("llama")
    through = flow(view, TEXT, "t5 t6", against=OTHER, labels=3)
    assert through.fitted.spoken
    assert all(node.raises or node.lowers for node in through.named)
    positions = {node.position for node in through.nodes}
    assert max(positions) == len(TEXT)  # the text and the first token of the answer


def test_what_is_read_otherwise_is_refused_and_has_no_label():
    view = family_view(READ_OTHERWISE)
    through = flow(view, TEXT, "t5", minus="t7", against=OTHER)
    token = next(node for node in through.nodes if node.kind == "token")
    assert not token.raises
    assert through.named
    with pytest.raises(BilensError, match=r"token@. is read otherwise than from the stream"):
        lens(through, token)
    with pytest.raises(BilensError, match=r"node is the logit, expected a head, an MLP or a token"):
        lens(through, through.output)
    with pytest.raises(BilensError, match="nothing changes"):
        read_lens(family_view("llama"), TEXT, TEXT)


def test_the_command_prints_each_layer_and_draws_the_map(tmp_path, capsys):
    save_model(tmp_path / "model", random_model(norm="rms"), TOKENS)
    picture, page = tmp_path / "lens.svg", tmp_path / "lens.html"
    texts = ["--prompt", "t3 t9 t4", "--against", "t3 t9 t8"]
    files = ["--figure", str(picture), "--output", str(page)]
    main(["lens", str(tmp_path / "model"), *texts, *files])
    assert "error of the sum over all tokens" in capsys.readouterr().out
    record = json.loads(page.with_suffix(".json").read_text())
    reading = read_lens(bilens.load(tmp_path / "model"), *texts[1::2])
    assert record["value"] == pytest.approx(reading.value)
    drawn = picture.read_text()
    for cell in reading.cells:
        assert cell.raises[0] in drawn
    frame = reading.frame()
    sums = frame[frame["token"] == "sum"]["answer"]
    assert sums.tolist() == pytest.approx([reading.value] * len(sums))


def test_a_model_and_texts_are_sent_to_the_reading_of_them():
    with pytest.raises(BilensError, match="flow is .*, expected a Flow; read_lens takes a model"):
        bilens.lens(view_of(), "t1 t2", "t1 t3")
