"""Runs with some edges: all edges are the first text, those between some parts are the parts."""

import pytest
import torch

from bilens.read.flow import circuit
from bilens.read.flow.circuit_search import Cases
from bilens.read.flow.edges import EdgeCases, find_edges
from tests.families import exact_norms, family_view
from tests.read.flow.flows import QUESTIONS, answered, check_gradient


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "own-constant"])
def test_all_edges_are_the_first_text_and_none_the_second(name):
    with exact_norms():
        cases = EdgeCases(Cases.of(family_view(name), QUESTIONS[:2]))
        ends = torch.stack([torch.ones(cases.shape), torch.zeros(cases.shape)]).double()
        values = cases.values(ends)
    torch.testing.assert_close(values[0], cases.changes, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values[1], 0 * cases.changes, rtol=0, atol=1e-5)


def test_a_model_of_one_layer_has_its_edges_too(one_layer):
    cases = EdgeCases(Cases.of(one_layer, QUESTIONS[:2]))
    assert cases.graph.first_reader(1) == len(cases.graph.readers) - 1
    values = cases.values(torch.ones(1, *cases.shape).double())
    torch.testing.assert_close(values[0], cases.changes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "own-constant"])
def test_the_edges_between_some_parts_are_these_parts(name):
    with exact_norms():
        parts = Cases.of(family_view(name), QUESTIONS[:2])
        edges = EdgeCases(parts)
        mask = torch.rand(parts.shape, generator=torch.Generator().manual_seed(0)) < 0.5
        by_parts = parts.values(mask[None].double())
        by_edges = edges.values(edges.graph.between(mask)[None].double())
    assert 0 < int(mask.sum()) < mask.numel()
    torch.testing.assert_close(by_edges, by_parts, rtol=1e-4, atol=1e-6)


def test_gradients_by_edges_are_central_differences(view):
    check_gradient(EdgeCases(Cases.of(view, QUESTIONS[:3])))


def test_edges_keep_what_is_asked_and_are_named(view):
    cases = Cases.of(view, QUESTIONS[:3])
    parts = torch.ones(cases.shape, dtype=torch.bool)
    parts[1, 0] = False
    found = find_edges([cases], cases, cases, parts)
    whole = float(cases.faithfulness(parts[None].double())[0])
    assert 0.9 * whole - 1e-4 <= found.restored.value <= 1.5
    assert len(found.edges) == int(found.mask.sum()) < found.candidates
    left_out = {("head", 1, 0)}
    for edge in found.edges:
        for part in (*edge.readers, edge.source):
            assert part is None or part[:3] not in left_out
    # The logits read something, and something reads the embedding.
    assert any(not edge.readers for edge in found.edges)
    assert any(edge.source is None for edge in found.edges)


def test_a_circuit_of_edges_is_a_part_of_the_reading(view):
    reading = circuit(view, answered(view, QUESTIONS), keep=0.8, level="edges")
    found = reading.circuits[0].edges
    assert (
        f"{len(found.edges)} of the {found.candidates} edges between them" in reading.facts()[0][1]
    )
    table = next(s for s in reading.sections() if s.title == "Edges").rows[0][0].frame
    assert len(table) == len(found.edges)
    assert {"embedding", "logits"} <= {*table["from"], *table["to"]}
