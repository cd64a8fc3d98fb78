"""Circuits: edges add up to the model, circuits are those that their definition names."""

import numpy as np
import pytest
import torch
from experiments.edges import AttributedEdges
from experiments.gim import flat_softmax, gim_rules

from bilens.circuits.case import both_passes
from bilens.circuits.measures import Split
from bilens.circuits.search import Cases
from bilens.flows.question import Question
from bilens.flows.split import flows
from bilens.language import TokenDirection
from bilens.transformer import ResidualModel
from bilens.transformer.changes import Site
from bilens.transformer.passes import logit_of
from experiments import circuits as recipe
from tests.families import exact_norms, tiny
from tests.models import random_text, toy_tokenizer

DIRECTION = TokenDirection("t3", ("t7", "t8"))
FAMILIES = ["llama", "gemma3", "gpt2", "own-constant"]


@pytest.fixture(params=FAMILIES)
def case(request):
    with exact_norms():
        view = ResidualModel(tiny(request.param), toy_tokenizer())
        ids, other = random_text(seed=1), random_text(seed=2)
        # Positions that both texts begin with are not computed again.
        other[:2] = ids[:2]
        with torch.no_grad():
            runs = both_passes(view, [(ids, other, None)])
        yield view, (ids, other), runs


def test_flows_into_a_reader_add_up_to_the_flow_through_it(case):
    view, (ids, other), runs = case
    graph = AttributedEdges(view)
    question = Question.of(ids, DIRECTION, against=other)
    (through,) = flows(view, [question])
    change = graph.outputs(runs[0]) - graph.outputs(runs[1])
    scores = graph.scores(change, graph.flow_reads(question)).sum(1)
    per_layer = graph.first_reader(1)
    assert len(graph.readers) == per_layer * view.n_layers + 1
    # Queries, keys and values of all heads, and then the MLP.
    of_layers = scores[:-1].unflatten(0, (view.n_layers, per_layer))
    torch.testing.assert_close(of_layers[:, :-1].sum(1), through.heads.sum((1, 2)))
    torch.testing.assert_close(of_layers[:, -1], through.mlps.sum(1))
    assert float(scores[-1]) == pytest.approx(through.value)


def test_gradients_of_edges_into_a_part_add_up_to_that_of_its_input(case):
    view, _, runs = case
    graph, number = AttributedEdges(view), logit_of(view, DIRECTION.vector(view))
    reads = graph.gradient_reads(runs, number, [1.0])
    step = 1e-4 * torch.randn(reads.shape[1:], generator=torch.Generator().manual_seed(0)).double()
    # A step of the embedding reaches all readers through all paths; the last layer has only itself.
    layer = view.n_layers - 1
    values = []
    site = Site(view.modules.layers[layer].module, "input", layer)
    for sign in (1, -1):
        shift = (site, lambda x, s=sign: x + s * step)
        values.append(number(runs[0].changed([[shift]])[0])[0])
    slope = (values[0] - values[1]) / 2
    # The MLP and the logits read the step itself, and the heads' part is in their own readers.
    weights = reads[graph.first_reader(layer) :].sum(0)
    torch.testing.assert_close((weights * step).sum(), slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_gim_leaves_the_forward_pass_and_shares_gradients(name):
    model = tiny(name)
    ids, x = random_text(seed=1)[None], torch.randn(2, 3, model.config.hidden_size).to(model.dtype)
    layer, logits = model.model.layers[0], model(ids).logits
    slopes = {"mlp": _slope(layer.mlp, x), "norm": _slope(layer.input_layernorm, x)}
    with gim_rules(ResidualModel(model, toy_tokenizer())):
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(_slope(layer.mlp, x), slopes["mlp"] / 2)
        fixed = _slope(layer.input_layernorm, x)
    # Without the scale, a norm multiplies each number.
    torch.testing.assert_close(fixed, layer.input_layernorm(x) / x)
    assert not torch.allclose(fixed, slopes["norm"])
    torch.testing.assert_close(_slope(layer.mlp, x), slopes["mlp"])


def _slope(module, x):
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        return torch.autograd.grad(module(given).sum(), given)[0]


def test_a_flat_softmax_has_the_gradient_of_a_higher_temperature():
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    given = [scores.clone().requires_grad_() for _ in range(2)]
    weights = torch.arange(15.0).reshape(3, 5).double().cos()
    with torch.enable_grad():
        (flat_softmax(given[0]) * weights).sum().backward()
        (2 * (given[1] / 2).softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(flat_softmax(scores), scores.softmax(-1))
    torch.testing.assert_close(given[0].grad, given[1].grad)


def test_elimination_ranks_the_parts_that_add_up_by_what_they_add():
    class Added:
        """f is a sum of what each part adds, less than nothing for some."""

        shape = (2, 3)
        adds = torch.tensor([[0.1, -0.6, 0.5], [0.3, 0.0, 0.7]]).double()
        everything = torch.ones(2, 3, dtype=torch.bool)

        def scores(self, mask):
            return self.adds

    order = [(-recipe.eliminated(Added(), absolute=a)).flatten().argsort() for a in (False, True)]
    assert order[0].tolist() == [5, 2, 3, 0, 4, 1]
    assert order[1].tolist() == [5, 1, 2, 3, 0, 4]
    assert recipe.largest(Added.adds, 2).nonzero().tolist() == [[0, 2], [1, 2]]


def test_areas_are_trapezoids():
    straight = np.array(recipe.SHARES)
    assert recipe.areas(straight)["CPR"] == pytest.approx((1 - 1e-6) / 2)
    assert recipe.areas(straight)["CMD"] == pytest.approx((1 - 1e-3) ** 2 / 2)
    assert recipe.areas(np.ones(10))["CMD"] == 0


def test_the_measure_of_a_model_that_only_adds_is_known():
    # f is 0.5 at half of the nodes by one attribution, and 1 by the other.
    nothing, half, whole = [[0.0] * 2] * 9, [[0.0] * 2] * 8 + [[1.0, 3.0]], [[1.0, 3.0]] * 9
    rises = {"good": [half, whole], **dict.fromkeys(("bad", recipe.BASELINE), (nothing, nothing))}
    numbers = recipe.summary({"changes": [1.0, 3.0], "rises": rises})
    assert numbers["good"]["CPR"]["value"] == pytest.approx(0.3 / 2 + 0.5)
    assert numbers["bad"]["CPR"]["value"] == pytest.approx(0.5 / 2)
    assert numbers["good"]["CMD"]["value"] == 0
    assert numbers["bad"]["CMD"]["value"] == pytest.approx(0.5 - 0.001 + 0.25)
    difference = numbers["good"][f"CMD minus that of {recipe.BASELINE}"]
    assert difference["value"] == pytest.approx(-numbers["bad"]["CMD"]["value"])
    assert difference["low"] == difference["high"] == difference["value"]
    assert numbers["bad"]["CMD"]["low"] == numbers["bad"]["CMD"]["high"]


def test_edges_are_ranked_and_measured_like_parts(llama):
    texts = (("t1 t2 t3", "t1 t7 t3"), ("t2 t2 t9", "t2 t7 t9"), ("t3 t2 t1", "t3 t7 t1"))
    cases = Cases.of(llama, [Question(text, "t3", ("t7",), against) for text, against in texts])
    split = Split("", cases.some([0, 1]), cases.some([2]), cases.some([2]))
    result = recipe.compared_edges(llama, split)
    measured = {"gradient (AtP)", "EAP-IG inputs", "contrastive flow", "elimination"}
    assert result["rises"].keys() == measured
    assert np.array(result["rises"]["elimination"]).shape == (2, len(recipe.SHARES) - 1, 1)
    cases = recipe.EdgeCases(split.ordering)
    ranks, exists = recipe.eliminated(cases), cases.graph.exists
    assert (ranks > 0).equal(exists)
    assert sorted(ranks[exists].tolist()) == list(range(1, int(exists.sum()) + 1))


def test_a_circuit_is_a_graph_as_mib_reads_it(llama):
    ranks = torch.arange(llama.n_layers * (llama.n_heads + 1)).reshape(llama.n_layers, -1)
    graph = recipe.mib_graph(llama, ["head.0.1", "mlp.1"], ranks)
    assert graph["cfg"]["n_heads"] == llama.n_heads
    nodes = graph["nodes"]
    kept = {name for name, node in nodes.items() if node["in_graph"]}
    assert kept == {"input", "a0.h1", "m1", "logits"}
    assert nodes["a0.h1"]["score"] == 1
    assert nodes["m1"]["score"] == ranks[1, -1]
