"""Flows between texts of unlike length: exact, and each text is as the model reads it alone."""

import pytest
import torch
from experiments.families import make

from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.flows import flow, measure, read_lens
from bilens.flows import split as splitting
from bilens.flows.question import Question
from bilens.flows.reading import answer_question
from bilens.transformer import ResidualModel
from tests.families import exact_norms, family_view, some_text, tiny
from tests.flows.flows import DIRECTION, check, logit
from tests.models import TOKENS
from tests.nightly import nightly
from tests.refusals import refused

# Learned and rotary positions, windows of six tokens, experts, parallel blocks, and an own model.
FAMILIES = ["gpt2", "llama", "cohere2", "gemma3", "neox", "mixtral", "own-layer", "own-none"]
LENGTHS = ["7 and 5", "2 and 4", "6 and 1"]


@pytest.mark.parametrize("lengths", nightly(LENGTHS, LENGTHS[:2]))
@pytest.mark.parametrize("name", nightly(FAMILIES, FAMILIES[:6]))
def test_a_flow_is_exact_and_conserves(name, lengths):
    view, rows = family_view(name), some_text()
    sizes = [int(n) for n in lengths.split(" and ")]
    first, second = (row[-n:] for row, n in zip(rows, sizes, strict=False))
    with exact_norms():
        through = flow(view, first, DIRECTION, against=second, labels=0)
        check(through, logit(view, first) - logit(view, second), tolerance=1e-6)
    lacked = max(sizes) - min(sizes)
    assert bool((through.embeddings[:lacked] != 0).all())
    # Where one text has no tokens, no part of the model has a change of its own.
    size = 1e-6 * through.absolute
    assert float(through.heads[..., :lacked].abs().max()) < size
    assert float(through.mlps[:, :lacked].abs().max()) < size


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_long_text_and_several_questions_have_the_same_flow(name, monkeypatch):
    view, rows = family_view(name), some_text()
    asked = [Question(rows[i], "t3", "t7", rows[i + 1][5:]) for i in range(2)]
    asked.append(Question(rows[0], "t3", "t7", rows[1]))
    alone = [splitting.flows(view, [question])[0] for question in asked]
    monkeypatch.setattr(splitting, "KEPT_BYTES", 0)
    for one, other in zip(alone, splitting.flows(view, asked), strict=True):
        assert not other.adjoints.keep
        for field in ("embeddings", "heads", "mlps", "choices"):
            torch.testing.assert_close(
                getattr(one, field), getattr(other, field), rtol=1e-5, atol=1e-7
            )


def test_a_page_names_the_tokens_that_one_text_lacks():
    view = family_view("llama")
    reading = answer_question(view, Question("t3 t4 t5 t9", "t5", "t6", "t7 t9"))
    assert any("neither labels" in note for note in reading.notes)
    page = reading.page
    assert page.tokens == ("t3", "t4", "t5", "t9")
    assert page.second == ("t3", "t4", "t7", "t9")
    assert {name for name, through in page.leaves if through} >= {'token@0 "t3"', 'token@1 "t4"'}
    shorter = answer_question(view, Question("t7 t9", "t5", "t6", "t3 t4 t5 t9")).page
    assert shorter.value == pytest.approx(-page.value, rel=1e-5)
    assert len(shorter.tokens) == len(shorter.second) == 4


@pytest.mark.parametrize("second", ["t7 t9", "t3 t8 t5 t2", "t6 t3 t8 t5 t9"])
def test_rows_of_tokens_name_those_of_both_texts_where_they_differ(second):
    view = family_view("llama")
    reading = answer_question(view, Question("t3 t4 t5 t9", "t5", "t6", second), shown=500)
    page, through = reading.page, reading.flow
    expected = set()
    for i, (token, other) in enumerate(zip(page.tokens, page.second, strict=True)):
        differs = token != other
        expected.add(f'token@{i} "{token}"' + f' / "{other}"' * differs)
    tables = [x["node"] for x in (reading.columns(), through.columns(), through.top(500).columns())]
    for names in (*tables, [node.name for node in page.nodes]):
        tokens = {name for name in names if name.startswith("token")}
        assert tokens <= expected
        assert {name for name in expected if " / " in name} <= tokens


@pytest.fixture(scope="module")
def unlike():
    view = family_view("llama")
    return view, flow(view, "t3 t4 t5", "t5", minus="t6", against="t4 t5", labels=0)


TWO = {"against": torch.tensor([4, 5]), "labels": 0}
test_what_is_refused = refused(
    {
        "texts of the flow have unlike numbers of tokens.*patch and circuit take": lambda unlike: (
            measure(*unlike, unlike[1].strongest(1))
        ),
        "takes no positions, by which a shorter text is padded": [
            lambda name=name: flow(ResidualModel(make(name)), torch.tensor([3, 4, 5]), 7, **TWO)
            for name in ("bloom", "mamba")
        ],
        "OPTForCausalLM has other numbers for a shorter text behind padding": lambda: flow(
            ResidualModel(make("opt")), torch.tensor([3, 4, 5]), 7, **TWO
        ),
        "against has 2 tokens, expected 3": [
            lambda: flow(family_view("llama"), "t3 t4 t5", "t5", 1, against="t4 t5"),
            lambda: read_lens(family_view("llama"), "t3 t4 t5", "t4 t5"),
            lambda: patch(family_view("gpt2"), "t3 t4 t5", "t5", against="t4 t5"),
        ],
    },
    BilensError,
)


def test_nodes_have_no_labels_and_no_effects():
    view = ResidualModel(tiny("llama", dtype=torch.float32), TOKENS)
    through = flow(view, "t3 t4 t5 t9", "t5", minus="t6", against="t7 t9", labels=5, ablate=5)
    assert through.value
    assert not any(node.raises or node.measured for node in through.nodes)
