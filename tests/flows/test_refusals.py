"""What flows, circuits, patches and edits refuse."""

from dataclasses import replace
from functools import partial

import torch
import transformers

from bilens.analyses import find_analysis
from bilens.circuits import (
    Cases,
    circuit,
    eap_ig,
    edit,
    edit_heads,
    edit_mlp_along,
    find_circuit,
    patch,
    patched,
    task_directions,
)
from bilens.circuits.search import search_circuit
from bilens.flows import Node, flow, measure, remove
from bilens.flows.question import second_run
from bilens.language import TokenDirection
from bilens.options import replaced
from bilens.transformer import ResidualModel
from tests.families import family_view, tiny
from tests.flows.flows import DIRECTION, QUESTIONS, TWO
from tests.models import VOCAB
from tests.refusals import refused

NAN, INFINITE = float("nan"), float("inf")
NONE_OR_EMPTY = r"words as keys=key,was=is|an empty name"


def circuit_of(**options):
    return lambda view: circuit(
        **{"model": view, "questions": QUESTIONS[:2], "level": "parts", **options}
    )


CIRCUITS = {
    "level='foo', expected one of stages, parts": circuit_of(level="foo"),
    "size=0, expected a whole number, at least 1": circuit_of(size=0),
    "keep=nan, expected a finite number": circuit_of(keep=NAN),
    "keep=inf, expected a finite number": circuit_of(keep=INFINITE),
    "keep='0.9', expected a finite number": circuit_of(keep="0.9"),
    "keep=-0.1, expected a finite number, at least 0": circuit_of(keep=-0.1),
    "keep=1.6, expected a finite number, .* at most 1.15": circuit_of(keep=1.6),
    "controls=1, expected": circuit_of(controls=1),
    "questions holds a str, expected Questions, dict": circuit_of(questions=[QUESTIONS[0].text]),
    "there must be at least one": [
        circuit_of(questions=[]),
        lambda view: circuit(view, (x for x in ())),
    ],
    "questions holds a str, expected Questions": lambda view: circuit(view, (x for x in ["t1"])),
    "model is a Linear, whose structure is not known": circuit_of(model=torch.nn.Linear(2, 2)),
    "numbers=2, expected 0 to 1": lambda view: Cases.of(view, QUESTIONS[:2]).some([0, 2]),
    "there are no cases": [lambda: Cases.joined([]), lambda: find_circuit([], 0.9)],
    "ordering is empty": lambda view: search_circuit([], Cases.of(view, QUESTIONS[:2]), 0.9),
}
test_what_no_circuit_takes_is_refused_by_its_name = refused(CIRCUITS)


def asked(**options):
    return lambda view: find_analysis("circuit").run(view, options, lambda *_: None)


def directions(*questions):
    return lambda view: task_directions(view, questions)


FIRST, SECOND = QUESTIONS[:2]
TASKS = {
    "is no file and no task": asked(questions="none"),
    "nothing is asked; expected either --prompt": asked(),
    "both ask; expected either --prompt": asked(prompt="t1", questions="a.tsv"),
    "one question, expected at least two different ones": directions(FIRST),
    "needs a second text of as many tokens": asked(prompt="t1 t2", token="t3"),
    "need a second text each": [directions(FIRST, replace(SECOND, against="")), directions()],
    "against has": [
        asked(prompt="t4 t2", token="t3", against="t4"),
        directions(FIRST, replace(SECOND, against="t4 t2")),
    ],
    "same logit": [
        asked(prompt="t4 t2", token="t3", against="t4 t2"),
        directions(FIRST, replace(SECOND, against=SECOND.text)),
    ],
}
test_what_is_no_task_is_said = refused(TASKS)


def flow_of(**options):
    return lambda view: flow(view, **{"text": "t4 t5 t6", "token": "t3", "minus": "t7"} | options)


def split(**options):
    return lambda view: flow(view, TWO[0], **{"token": DIRECTION, **options})


FLOWS = {
    "position=9, expected -9 to 8": [
        split(position=9),
        lambda view: patch(view, TWO[0], DIRECTION, 9, against=TWO[1]),
    ],
    "vector has 3 numbers, expected 16, the width": split(token=torch.zeros(3).double()),
    "expected a token by its text or its number, a list of tokens, a TokenDirection, or a v": [
        split(token=7.5),
        lambda view: patch(view, TWO[0], [True], against=TWO[1]),
    ],
    "token=30, expected 0 to 29, the number of a token": split(token=30),
    "token=-1, expected the number of a token": split(token=[3, -1]),
    "token='t99', expected a single token": split(token=TokenDirection("t99")),
    r"against has shape \(2, 16\), expected \(3, 16": flow_of(against=torch.zeros(2, 16).double()),
    "against holds no texts": flow_of(against=[]),
    "against: ids holds the number 30, expected": flow_of(against=torch.tensor([4, 5, 30])),
    "against: text=' ' holds no token": flow_of(against=["t4 t5 t7", " "]),
    "replace names 't9', which is not a word of 't4 t5 t6'": flow_of(replace={"t9": "t4"}),
    "each name the second": lambda view: find_analysis("flow").run(
        view, {"prompt": "t3", "mean": True, "against": "t4"}, lambda *_: None
    ),
    "expected one of them": flow_of(replace={"t4": "t9"}, against="t4 t5 t7"),
    "target='odds', expected": flow_of(target="odds", against="t4 t5 t7"),
    "circuit and task_directions take several questions": flow_of(text=["t4 t5", "t4 t6"]),
    "'x', which is not a word of 'a b'": lambda: replaced("a b", {"x": "y"}),
    "'', which is not a word": lambda: replaced("a b", {"": "y"}),
    "'x', which is not a word": lambda: replaced("a b", {"a": "b", "x": "y"}),
    NONE_OR_EMPTY: [
        lambda view, pairs=pairs: second_run(view, "t1 t2 t3 t4", replace=pairs)
        for pairs in ("t1", "t1=t2,t1=t3", "=t2", "t1=t2,,t2=t1")
    ],
}
test_what_cannot_be_split_is_said = refused(FLOWS)


def with_patch(text, *parts):
    def run(view):
        with patched(view, parts, text):
            pass

    return run


test_what_cannot_be_patched_is_said = refused(
    {
        "against and replace name the second run": lambda view: patch(view, TWO[0], DIRECTION),
        "the position 7, expected one of the 2 tokens of against": with_patch("t3 t4", "mlp.0@7"),
        "no address of a part": with_patch("t3", "x"),
        "questions is empty": lambda view: eap_ig(view, []),
    }
)


def field(**changes):
    return lambda: replace(FIRST, **changes)


vector = partial(field, vector=torch.ones(16))
FIELDS = {
    "minus=0.5, expected a token by its text or its number, or a list": field(minus=0.5),
    "target='foo', expected one of logit, log-probability, probability": field(target="foo"),
    "position=0.5, expected a whole number": field(position=0.5),
    "position=None, expected a whole number": field(position=None),
    "token is empty": field(token=""),
    "token=-5, expected the number of a token, 0 or more": field(token=-5),
    "minus=.* beside a TokenDirection": field(token=TokenDirection("t5"), minus="t6"),
    "text=": field(text=["t1", "t2"]),
    "text is a tensor": field(text=torch.ones(3)),
    "against=3": field(against=3),
    "task=None, expected text": field(task=None),
    "token='t5' and minus=.*beside a vector": vector(),
    "beside a vector": vector(token="", minus=("t6",)),
    "vector is a tensor": field(vector=torch.ones(2, 8), token="", minus=()),
    "target='probability' with a direction": vector(token="", minus=(), target="probability"),
}
test_what_is_no_field_is_refused_by_its_name = refused(FIELDS)


def hide_a_direction():
    view = ResidualModel(tiny("llama"))
    view.layer(0).mlp.norm.module.weight[2] = 0
    edit(view, 0, torch.ones(1, 16).double())


def read_a_model_of_both_sides():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=VOCAB, intermediate_size=16, **sizes)
    ResidualModel(transformers.BertLMHeadModel(config))


ONES, LONG, WIDE = torch.ones(2, 4).double(), torch.ones(1, 16).double(), torch.ones(4, 9)
mlp_along = partial(edit_mlp_along, layer=0)
EDITS = {
    "a row that is zero": lambda llama: edit(llama, 0, 0 * LONG),
    r"shape \(2, 4\), expected rows of 16": lambda llama: edit(llama, 0, ONES),
    "scale=-1.0, expected a fin": lambda llama: edit(llama, 0, LONG, scale=-1.0),
    "has no bias, which these vect": lambda llama: edit(llama, 0, torch.ones(1, 17).double()),
    "has a gain of 0, so that no map": hide_a_direction,
    "head=9, expected 0 to 3": lambda llama: edit_heads(llama, 0, [9]),
    r"\(4, 9\) and \(4, 9\), expected \(k, 16\) of both": lambda view: mlp_along(view, WIDE, WIDE),
    r"read is a tensor of shape \(1, 16\)": lambda view: mlp_along(view, torch.ones(2, 16), LONG),
    "norm after its output": lambda: mlp_along(family_view("gemma3"), LONG, LONG),
    "BertLMHeadModel, whose structure is not known": read_a_model_of_both_sides,
}
test_edits_that_cannot_be_are_refused = refused(EDITS)


def split_of(view, **two):
    return flow(view, TWO[0], DIRECTION, **two)


def away(call, **place):
    """Return the call of a function of a flow with a node that is not in it."""
    node = Node("mlp", 1.0, layer=0, part="mlp", position=8)
    if "number" in place:
        node = Node("head", 1.0, layer=0, part="attention", position=8, number=0)
    return lambda view: call(view, split_of(view), [replace(node, **place)])


CALLS = [
    measure,
    remove,
    lambda _, flows, nodes: flows.edges(nodes),
    lambda _, flows, nodes: flows.written(nodes),
    lambda _, flows, nodes: flows.adjoint(nodes[0]),
]
PLACES = [{"layer": 2}, {"layer": -1}, {"position": 9}, {"number": 4}, {"number": 0, "source": -1}]
test_what_is_of_another_model_or_flow_is_refused = refused(
    {
        "nodes holds .*, expected nodes of this flow, of 2 layers of 4 heads and 9 tokens": [
            away(call, **place) for call in CALLS for place in PLACES
        ],
        "nodes is empty": lambda view: remove(view, split_of(view), []),
        # Also of the same shape, which would answer with numbers of neither.
        "model is not that of the flow": [
            lambda view, llama: measure(llama, split_of(view), split_of(view).nodes_above(1)),
            lambda view, llama: measure(llama, split_of(view, against=TWO[1]), []),
            lambda view, llama: remove(llama, split_of(view), [Node("mlp", 1.0, 0, "mlp", 8)]),
        ],
        r"a mask has shape \(3, 5\), expected \(2, 5\)": lambda view: Cases.of(
            view, QUESTIONS
        ).values(torch.ones(1, 3, 5)),
    }
)
