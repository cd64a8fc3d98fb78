"""Ground truth: a program whose weights are known by hand, and circuits of induction."""

import json
from itertools import product

import pytest
import torch
from experiments.context import RecipeContext
from experiments.edges import AttributedEdges
from safetensors.torch import load_file, save_file

from bilens.errors import BilensError
from bilens.transformer import Pass
from experiments import truth as recipe
from tests.experiments.tiny import check_rows

LABELS = ["indices:0", "one", "output_1", "share_2", "tokens:a", "tokens:b", "tokens:BOS", "unused"]
IDS = [2, 0, 1, 0, 0, 1, 0]
SHARES = torch.tensor([0, 1, 1, 2, 3, 3, 4]).double() / torch.arange(1, 8)


@pytest.fixture
def program(tmp_path):
    """Return the share of a among all tokens, copied by an MLP, in the layout of tracr's weights.

    Of two heads in two layers only 0.1 is used, and of the MLPs only that of the last layer.
    """
    width, key, heads = len(LABELS), 3, 2
    place = {name: i for i, name in enumerate(LABELS)}
    tokens, positions = torch.zeros(3, width).double(), torch.zeros(7, width).double()
    for token, name in enumerate(("tokens:a", "tokens:b", "tokens:BOS")):
        tokens[token, [place[name], place["one"]]] = 1
    weights = {"token_embed/embeddings": tokens, "pos_embed/embeddings": positions}
    shapes = dict.fromkeys(("attn/query", "attn/key", "attn/value"), (width, heads * key))
    shapes |= {"attn/linear": (heads * key, width)}
    shapes |= {"mlp/linear_1": (width, 4), "mlp/linear_2": (4, width)}
    for layer, (name, shape) in product(range(2), shapes.items()):
        weights[f"transformer/layer_{layer}/{name}/w"] = torch.zeros(shape).double()
        weights[f"transformer/layer_{layer}/{name}/b"] = torch.zeros(shape[1]).double()
    weights["transformer/layer_0/attn/value/w"][place["tokens:a"], key] = 1
    weights["transformer/layer_0/attn/linear/w"][key, place["share_2"]] = 1
    # Queries and keys of one head have the same score everywhere.
    weights["transformer/layer_0/attn/query/w"][place["one"], key] = 2
    weights["transformer/layer_0/attn/key/w"][place["one"], key] = 2
    weights["transformer/layer_1/mlp/linear_1/w"][place["share_2"], 2] = 1
    weights["transformer/layer_1/mlp/linear_2/w"][2, place["output_1"]] = 1
    # A head that reads the tokens, and whose output nobody reads.
    weights["transformer/layer_1/attn/value/w"][place["tokens:b"], 0] = 1
    weights["transformer/layer_1/attn/linear/w"][0, place["unused"]] = 1
    about = {"labels": LABELS, "tokens": [0, 1], "first": 2, "heads": heads, "layers": 2}
    about |= {"key_size": key, "hidden": 4}
    path = tmp_path / "compiled" / "share.safetensors"
    path.parent.mkdir()
    weights["ids"] = torch.tensor([IDS])
    stream = tokens[IDS]
    stream[:, place["share_2"]] = stream[:, place["output_1"]] = SHARES
    stream[:, place["unused"]] = torch.tensor([IDS]).eq(1).double().cumsum(1) / torch.arange(1, 8)
    weights["outputs"] = stream[None]
    save_file(weights, path, metadata={"about": json.dumps(about)})
    return path


def test_a_compiled_program_runs_as_its_weights_say(program):
    model, about = recipe.compiled_model(program)
    output = Pass.of(model, torch.tensor(IDS)).stream[0, :, about["labels"].index("output_1")]
    torch.testing.assert_close(output, SHARES)
    weights = load_file(program)
    weights["transformer/layer_0/mlp/linear_2/b"][2] += 1
    save_file(weights, program, metadata={"about": json.dumps(about)})
    with pytest.raises(BilensError, match="computes something else"):
        recipe.compiled_model(program)


def test_the_circuit_of_a_program_is_read_from_its_weights(program):
    model, about = recipe.compiled_model(program)
    graph = AttributedEdges(model)
    circuit = recipe.compiled_circuit(graph, [about["labels"].index("output_1")], about["tokens"])
    values_of_second_head, mlp = 5, graph.first_reader(2) - 1
    head, last = graph.source(0, 1), graph.source(1, 2)
    edges = {(values_of_second_head, 0), (mlp, head), (len(graph.readers) - 1, last)}
    assert set(map(tuple, circuit.nonzero().tolist())) == edges
    result = recipe.compiled(program)
    assert result["circuit"] == 3
    for name in ("contrastive flow", "frozen flow (LRP)", "gradient (AtP)", "EAP-IG inputs"):
        assert result[name] == 1
    assert result["direct logit attribution"] == pytest.approx(2 / 3)
    for kind, count in (("parts", 2), ("edges", 3)):
        assert (result[f"{kind} found"], result[f"{kind} in both"]) == (count, count)


@pytest.mark.parametrize("changed", range(5))
def test_a_chain_is_found_as_a_chain(changed):
    links = min(5 - changed, 4)
    result = recipe.chain(changed)
    assert result["circuit"] == links + 1
    assert (result["parts found"], result["parts in both"]) == (links, links)
    assert (result["edges found"], result["edges in both"]) == (links + 1, links + 1)


def test_the_area_is_the_chance_of_a_larger_score():
    scores = torch.tensor([3.0, 1.0, 2.0, 1.0])
    assert recipe.auroc(scores, torch.tensor([True, False, False, False])) == 1
    # 1 is equal to one of the others, half a hit, and less than two.
    assert recipe.auroc(scores, torch.tensor([False, True, False, False])) == pytest.approx(1 / 6)


def test_induction_is_trained_once_and_measured(tmp_path, monkeypatch):
    for name, value in {"STEPS": 3, "SEEDS": (1, 1), "PAIRS": 2}.items():
        monkeypatch.setattr(recipe, name, value)
    monkeypatch.setattr(recipe, "induction_heads", lambda model: ([(0, 1)], [(1, 2)]))
    outcome = check_rows(recipe.run(RecipeContext("small", tmp_path)))
    *_, row = outcome.numbers["models"]
    assert (row["heads"], row["circuit"]) == ("0.1 to 1.2", 5)
    value = {stated.claim: stated.value for stated in outcome.rows}
    assert value[f"induction: AUROC of edges by {recipe.OURS}"] == row[recipe.OURS]
    assert value["chain: share of the known parts and edges that are found"] == 1
    assert all(0 <= row[name] <= 1 for name in ("contrastive flow", "EAP-IG inputs", "random"))
    weights = tmp_path / "induction-0" / "model.safetensors"
    time = weights.stat().st_mtime_ns
    recipe.run(RecipeContext("small", tmp_path))
    assert weights.stat().st_mtime_ns == time


def test_induction_heads_are_named_by_their_patterns(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "STEPS", 1)
    model = recipe.trained_induction(0, tmp_path / "model")
    ids, n = recipe.repeated(recipe.PAIRS, torch.Generator().manual_seed(0))
    time = ids.shape[1]
    patterns = torch.zeros(2, 1, 4, time, time)
    patterns[0, 0, 0] = torch.eye(time).roll(-1, 1).tril()  # each token sees the one before it
    patterns[1, 0, 3, torch.arange(n, time), torch.arange(1, time - n + 1)] = 1
    monkeypatch.setattr(Pass, "pattern", lambda _, layer: patterns[layer])
    assert recipe.induction_heads(model) == ([(0, 0)], [(1, 3)])
