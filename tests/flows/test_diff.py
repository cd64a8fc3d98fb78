"""What tuning changed: sums over weights of two models, adapters, and measured shares."""

import copy
import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

import bilens
from bilens import BilensError
from bilens.convert import save_model
from bilens.flows import diff, tuning
from bilens.sections import Table
from bilens.transformer import ResidualModel
from tests.families import EACH, MIXTURES, exact_norms, family_view
from tests.models import TOKENS, random_model
from tests.nightly import nightly

TEXT = torch.tensor([3, 9, 4, 12, 7])
OTHER = torch.tensor([3, 9, 14, 12, 7])
FLOAT32 = ("gemma2", "cohere2", *MIXTURES)  # families whose own code rounds to float32


def tuned_from(view: ResidualModel, size: float = 0.1, seed: int = 1) -> ResidualModel:
    """Return a model all of whose weights are changed a little."""
    model, generator = copy.deepcopy(view.model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += size * noise.to(parameter)
    return ResidualModel(model, view.tokenizer)


def total(reading) -> float:
    return sum(reading.weights.values()) + float(reading.of_tokens.sum()) + reading.choices


@pytest.mark.parametrize("name", [*EACH, *nightly(list(MIXTURES), ["qwen3-experts"])])
def test_flows_of_all_weights_add_up_to_the_change(name):
    view = family_view(name)
    other = tuned_from(view)
    allowed = 1e-5 if name.startswith(FLOAT32) else 1e-9
    for against in (None, OTHER):
        with exact_norms():
            reading = diff(view, other, TEXT, "t5", "t7", against=against)
            first = other.logits(TEXT[None])[0, -1]
            second = view.logits((TEXT if against is None else against)[None])[0, -1]
        change = float(first[5] - first[7] - second[5] + second[7])
        assert math.isclose(reading.value, change, abs_tol=allowed)
        assert math.isclose(total(reading), change, abs_tol=allowed)
        assert all(reading.weights.values())  # every weight of these models does something
        assert (float(reading.of_tokens.abs().sum()) > 0) is (against is not None)


@pytest.mark.parametrize("name", EACH)
def test_a_small_change_of_large_logits_is_not_refused_for_rounding(name):
    view = family_view(name, dtype=torch.float32)
    logits = view.logits(TEXT[None])[0, -1]
    order = logits.argsort()
    near = int(logits[order].diff().argmin())
    for size in (1e-3, 1e-5):
        reading = diff(view, tuned_from(view, size), TEXT, int(order[near]), int(order[near + 1]))
        assert abs(total(reading) - reading.value) < 1e-3


def test_heads_are_columns_of_the_output_map_and_tokens_are_where_it_reads():
    view = family_view("llama")
    model = copy.deepcopy(view.model)
    weight = model.model.layers[1].self_attn.o_proj.weight
    width = weight.shape[1] // 4
    weight.data[:, width : 2 * width] *= 1.5  # head 1 of layer 1 alone
    with exact_norms():
        reading = diff(view, ResidualModel(model, TOKENS), TEXT, "t5", "t7")
    assert list(reading.weights) == ["model.layers.1.self_attn.o_proj.weight"]
    assert math.isclose(float(reading.heads[1, 1]), reading.value, rel_tol=1e-9)
    others = reading.heads.abs().sum() - reading.heads[1, 1].abs()
    assert float(others) == 0
    (by_token,) = reading.by_token.values()
    assert by_token.shape == TEXT.shape
    assert math.isclose(float(by_token.sum()), reading.value, rel_tol=1e-9)
    # The page and the terminal have the same views.
    (inside,) = [x for x in reading.sections() if x.title == "By token, head and rank"]
    of_tokens, of_heads = (row[0].columns for row in inside.rows)
    assert of_heads == {"head": ("head.1.1",), "flow": (float(reading.heads[1, 1]),)}
    strongest = int(by_token.abs().argmax())
    assert of_tokens["token"][0] == f"{reading.tokens[strongest]}@{strongest}"
    assert sum(of_tokens["flow"]) == pytest.approx(reading.value)


def write_adapter(folder, view, kind: dict, rank: int = 3, modules=("q_proj", "down_proj")):
    """Write an adapter in PEFT's form, and return the model that it makes, by hand."""
    model, tensors = copy.deepcopy(view.model), {}
    generator = torch.Generator().manual_seed(0)
    scale = 6 / (rank**0.5 if kind.get("use_rslora") else rank)
    for name, module in model.named_modules():
        if not name.endswith(modules):
            continue
        A, B = (
            0.2 * torch.randn(*shape, generator=generator)
            for shape in ((rank, module.in_features), (module.out_features, rank))
        )
        tuned = module.weight.data + scale * (B @ A).to(module.weight)
        start = f"base_model.model.{name}"
        tensors |= {f"{start}.lora_A.weight": A, f"{start}.lora_B.weight": B}
        if kind.get("use_dora"):
            length = torch.rand(module.out_features, generator=generator) + 0.5
            tensors[f"{start}.lora_magnitude_vector"] = length
            tuned = length[:, None].to(tuned) * functional.normalize(tuned, dim=1)
        module.weight.data = tuned
    if kind.get("modules_to_save"):
        model.lm_head.weight.data += 0.1
        tensors["base_model.model.lm_head.weight"] = model.lm_head.weight.data.clone()
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, **kind}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return ResidualModel(model, TOKENS)


@pytest.mark.parametrize(
    "kind",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}],
    ids=str,
)
def test_an_adapter_is_the_model_that_it_makes(kind, tmp_path):
    view = family_view("llama")
    merged = write_adapter(tmp_path / "adapter", view, kind)
    of_adapter = diff(view, tmp_path / "adapter", TEXT, "t5", "t7")
    of_model = diff(view, merged, TEXT, "t5", "t7")
    assert of_adapter.weights.keys() == of_model.weights.keys()
    for name, flow in of_model.weights.items():
        assert math.isclose(of_adapter.weights[name], flow, abs_tol=1e-6)
    # Ranks of a low-rank change are a third split of the same flow.
    for name, ranks in of_adapter.ranks.items():
        assert math.isclose(float(ranks.sum()), of_adapter.weights[name], abs_tol=1e-9)
    assert bool(of_adapter.ranks) is not bool(kind.get("use_dora"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"peft_type": "IA3"}, "adapter of kind IA3, expected LORA"),
        ({"lora_bias": True}, "an adapter with lora_bias"),
        ({"use_dora": True}, "no magnitude of"),
    ],
)
def test_other_adapters_are_refused_by_name(kind, message, tmp_path):
    view = family_view("llama")
    write_adapter(tmp_path / "adapter", view, {})
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, **kind}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(BilensError, match=message):
        diff(view, tmp_path / "adapter", TEXT, "t5")


def test_an_adapter_of_tied_weights_or_of_another_model_is_refused(tmp_path):
    tied, deeper = family_view("llama-tied"), family_view("qwen2")
    write_adapter(tmp_path / "tied", tied, {"modules_to_save": ["lm_head"]})
    with pytest.raises(BilensError, match=r"lm_head.weight, which the base model ties to"):
        diff(tied, tmp_path / "tied", TEXT, "t5")
    write_adapter(tmp_path / "other", family_view("mistral"), {})
    with pytest.raises(BilensError, match="expected .* that of the base model"):
        diff(deeper, tmp_path / "other", TEXT, "t5")


def test_shares_are_measured_in_runs(tmp_path):
    view = ResidualModel(random_model(n_layers=3), TOKENS)
    other = tuned_from(view, 0.05)
    reading = diff(view, other, TEXT, "t5", "t7")
    logits = [x.logits(TEXT[None])[0, -1] for x in (other, view)]
    change = [float(x[5] - x[7]) for x in logits]
    assert math.isclose(float(reading.models.run(reading.weights)), change[0], abs_tol=1e-12)
    assert math.isclose(float(reading.models.run([])), change[1], abs_tol=1e-12)
    for everything in reading.undo(len(reading.weights)).values():
        assert math.isclose(everything.lost.value, 1, abs_tol=1e-9)
        assert math.isclose(everything.won.value, 1, abs_tol=1e-9)
    # One weight, changed by hand: the one that carries most in the direction of the change.
    sign = math.copysign(1, reading.value)
    name = max(reading.weights, key=lambda name: sign * reading.weights[name])
    by_hand = copy.deepcopy(other.model)
    by_hand.get_parameter(name).data = view.model.get_parameter(name).data
    undone = ResidualModel(by_hand, TOKENS).logits(TEXT[None])[0, -1]
    lost = (change[0] - float(undone[5] - undone[7])) / (change[0] - change[1])
    assert math.isclose(reading.undo(1)["flow"].lost.value, lost, abs_tol=1e-9)
    # Shapley values of one order add up, and so do gradients along the path.
    assert math.isclose(sum(reading.measure(2).values()), reading.value, abs_tol=1e-9)
    assert math.isclose(sum(reading.path(12).values()), reading.value, rel_tol=1e-4)
    with pytest.raises(BilensError, match="k=0"):
        reading.undo(0)


def test_models_that_do_not_fit_are_refused(tmp_path):
    view = family_view("llama")
    with pytest.raises(BilensError, match="only (base|tuned) has the parameter|of shape"):
        diff(view, family_view("gpt2"), TEXT, "t5")
    with pytest.raises(BilensError, match="of shape"):
        diff(view, family_view("mistral"), TEXT, "t5")
    reading = diff(view, view, TEXT, "t5")
    assert reading.value == 0
    assert "the same weights" in reading.answer()
    save_model(tmp_path / "tuned", tuned_from(view).model, TOKENS)
    assert "Tuning changes" in bilens.diff(view, tmp_path / "tuned", "t3 t9 t4", "t5").answer()


@pytest.mark.parametrize("against", [None, OTHER], ids=["one text", "two texts"])
@pytest.mark.parametrize("size", [0.1, 1e-5])
def test_the_sentence_says_both_parts_with_digits_of_any_size(against, size):
    view = family_view("llama")
    reading = diff(view, tuned_from(view, size), TEXT, "t5", against=against)
    sentence, numbers = reading.answer(), [reading.value]
    if against is not None:
        numbers += [reading.of_weights, float(reading.of_tokens.sum())]
    assert ("second text" in sentence) is ("tokens and choices" in sentence) is (len(numbers) > 1)
    assert reading.of_weights == pytest.approx(sum(reading.weights.values()), rel=1e-12)
    told = [float(x) for x in re.findall(r"by ([+-]\S+?)[:,;.]?(?= |$)", sentence)]
    assert told == pytest.approx(numbers, rel=5e-3)
    # Shares are of the weights' part, in the sentence and in the table.
    assert sum(reading.columns()["share"]) == pytest.approx(1)
    layers = reading.layers()
    first, last = tuning.carrying_layers(layers, 0.7)
    share = sum(x for layer, x in layers.items() if first <= layer <= last) / reading.of_weights
    assert f"{tuning._place(first, last)} {share:.2f} of " in sentence
    # Every column of flows shows the size of its numbers, on each table of the page.
    for section in reading.sections():
        for table in (part for part in section.parts if isinstance(part, Table)):
            if "flow" in table.header:
                cells = [row[table.header.index("flow")] for row in table.rows]
                flows = table.frame["flow"].tolist()
                assert [*map(float, cells)] == pytest.approx(flows, rel=5e-3)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (1, 1, "layer 1 carries"),
        (0, 2, "layers 0 to 2 carry"),
        (-1, -1, "the weights of no layer carry"),
        (-1, 0, "the weights of no layer and layer 0 carry"),
    ],
)
def test_layers_in_words(first, last, words):
    assert tuning._place(first, last) == words
