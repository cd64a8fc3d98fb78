"""Questions on small models, and what every flow adds up to."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from bilens.errors import BilensError
from bilens.flows import Flow, Question, flow
from bilens.flows.nodes import LEAVES
from bilens.language import TokenDirection
from tests.models import random_text

DIRECTION = TokenDirection("t3", ("t7", "t8"))
TWO = torch.stack([random_text(seed=1), random_text(seed=2)])
QUESTIONS = [
    Question("t1 t2 t3 t4", "t5", ("t6",), "t1 t7 t3 t4", "one"),
    Question("t2 t2 t9 t4", "t5", ("t6",), "t2 t7 t9 t4", "one"),
    Question("t3 t2 t1 t8", "t5", ("t6",), "t3 t7 t1 t8", "one"),
    Question("t4 t2 t8 t1", "t5", ("t6",), "t4 t7 t8 t1", "one"),
]


def answered(view, questions):
    """Return questions with the token that the model prefers to the one that is subtracted."""
    asked = []
    for question in questions:
        logits = view.logits(view.ids(question.text)[None])[0, -1]
        token, (minus,) = question.token, question.minus
        if logits[view.token(token)] < logits[view.token(minus)]:
            asked.append(replace(question, token=minus, minus=(token,)))
        else:
            asked.append(question)
    return asked


def write_questions(path, questions):
    rows = [(q.text, q.token, *q.minus, q.against, q.task) for q in questions]
    path.write_text("\n".join("\t".join(row) for row in rows) + "\n\n")


def uncapped(view, logits):
    cap = view.modules.softcap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def logit(view, ids):
    """Return the number along `DIRECTION` at the end of a text, before a cap."""
    logits = uncapped(view, view.logits(ids[None])[0, -1])
    return float(logits[3] - logits[[7, 8]].mean())


def part_modules(view):
    """Return what reads the mixed values of heads, and the MLP, of each layer; None without any."""
    if view.places.modules is None:
        return [(layer.heads, layer.mlp) for layer in view.places.layers]
    return [(layer.heads.out.module, layer.mlp.module) for layer in view.modules.layers]


@contextmanager
def watched(view, keep):
    """Call `keep` with a name and the mixed values of heads or the output of an MLP, by layer."""
    with ExitStack() as hooks:
        for i, (out, mlp) in enumerate(part_modules(view)):
            before = lambda _, args, i=i: keep(("head", i), args[0])  # noqa: E731
            after = lambda _, __, y, i=i: keep(("mlp", i), y)  # noqa: E731
            if out is not None:
                hooks.enter_context(out.register_forward_pre_hook(before))
            if mlp is not None:
                hooks.enter_context(mlp.register_forward_hook(after))
        yield hooks


def falls(view, ids, other, number):
    """Return the falls of a number of one text with one part of the other, one full run each."""
    found, n_heads = {}, view.n_heads
    with watched(view, found.__setitem__):
        number(view, other)
    result = torch.zeros(view.n_layers, n_heads + 1).double()
    for i, (out, mlp) in enumerate(part_modules(view)):
        for head in range(n_heads) if out is not None else ():

            def give(_, args, head=head, i=i):
                x, given = (
                    y.clone().unflatten(-1, (n_heads, -1)) for y in (args[0], found["head", i])
                )
                x[..., head, :] = given[..., head, :]
                return (x.flatten(-2), *args[1:])

            with out.register_forward_pre_hook(give):
                result[i, head] = number(view, ids)
        if mlp is not None:
            with mlp.register_forward_hook(lambda *_, i=i: found["mlp", i]):
                result[i, -1] = number(view, ids)
    return number(view, ids) - result


def leaves(result):
    return sum(node.flow for node in result.nodes if node.kind in LEAVES)


def check(result, value, tolerance=1e-9):
    """Compare sums of a flow's leaves, and of what flows into and out of each node."""
    graph = result.graph(result.nodes_above(0))
    flows = torch.tensor([node.flow for node in graph.nodes], dtype=torch.float64)
    edges, largest = graph.edges, max(float(graph.edges.abs().max()), float(flows.abs().max()))
    leaf = torch.tensor([node.kind in LEAVES for node in graph.nodes])
    assert result.value == pytest.approx(value, abs=tolerance * largest)
    assert leaves(result) == pytest.approx(value, abs=tolerance * largest)
    torch.testing.assert_close(edges.sum(1)[~leaf], flows[~leaf], rtol=0, atol=tolerance * largest)
    torch.testing.assert_close(edges.sum(0)[1:], flows[1:], rtol=0, atol=tolerance * largest)
    assert edges.triu(1).equal(edges)
    assert [node.kind for node in graph.nodes].count("output") == 1


def check_gradient(cases):
    """Compare the gradient of f by masks with central differences."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(2, *cases.shape, generator=generator, dtype=torch.float64)
    slope = cases.gradient(masks, [1.0, 0.5])
    step = torch.randn(cases.shape, generator=generator, dtype=torch.float64) * 1e-6
    ends = [cases.faithfulness(masks + sign * step) for sign in (1, -1)]
    expected = ((ends[0] - ends[1]) @ torch.tensor([1.0, 0.5]).double()) / 2
    assert float((slope * step).sum()) == pytest.approx(float(expected), rel=1e-4)
    assert float(slope.abs().max()) > 1e-3


def nodes_of(result, **wanted):
    """Return the nodes that have these values."""
    return [
        node
        for node in result.nodes_above(0)
        if all(getattr(node, name) == value for name, value in wanted.items())
    ]


def flow_unless_rounded(view, text, token, minus, second) -> Flow | None:
    """Return a flow, or None if the change is refused as too small beside its rounding."""
    try:
        return flow(view, text, token, minus=minus, against=second, labels=0)
    except BilensError as error:
        refused = str(error)
    assert "beside their rounding" in refused
    return None
