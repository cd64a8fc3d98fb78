"""The flow of each token of an answer is that of its own question, and each row adds up."""

import pytest
import torch

from bilens.cli import main
from bilens.errors import BilensError
from bilens.flows import answer_flows, flow
from bilens.pages import write_report
from tests.families import exact_norms, family_view, some_text
from tests.nightly import nightly
from tests.refusals import refused

# Learned and rotary positions, windows, a soft cap, and experts, whose choices have a flow.
FAMILIES = ["llama", "mixtral", "gpt2", "gemma2", "cohere2", "neox"]
SECONDS = ["another text", "a shorter text", "neutral", "one embedding", "embeddings", "texts"]


def second_of(view, name, text, before):
    """Return the second run of a text, and that of the text with earlier tokens of an answer."""
    other, row = some_text()[1, :4], view.W_E[3]
    rows = view.places.rows
    names = [" ".join(f"t{i}" for i in ids) for ids in (other.tolist(), other.flip(0).tolist())]
    mean = (rows(other) + rows(other.flip(0))) / 2
    return {
        "another text": (other, torch.cat([other, before])),
        "a shorter text": (other[1:], torch.cat([other[1:], before])),
        "neutral": (None, None),
        "one embedding": (row, row),
        "embeddings": (2 * rows(text), torch.cat([2 * rows(text), rows(before)])),
        "texts": (names, torch.cat([mean, rows(before)])),
    }[name]


@pytest.mark.long
@pytest.mark.parametrize("second", nightly(SECONDS, SECONDS[:4]))
@pytest.mark.parametrize("name", nightly(FAMILIES, FAMILIES[:3]))
def test_a_row_is_the_flow_of_its_token_and_adds_up_to_its_change(name, second):
    view = family_view(name)
    ids = some_text()[0]
    text, answer = ids[:4], ids[4:7]
    with exact_norms():
        found = answer_flows(view, text, answer, against=second_of(view, second, text, ids[:0])[0])
        assert found.flows.shape == (3, 6)
        for row, token in enumerate(answer.tolist()):
            before = answer[:row]
            against = second_of(view, second, text, before)[1]
            longer = torch.cat([text, before])
            target = "log-probability"
            alone = flow(view, longer, token, against=against, target=target, labels=0)
            end = len(alone.embeddings)
            torch.testing.assert_close(found.flows[row, :end], alone.embeddings)
            assert not found.flows[row, end:].any()
            # The change by the model itself.
            first = view.logits(longer[None])[0, -1].log_softmax(-1)[token]
            assert float(found.values[row, 0]) == pytest.approx(float(first), rel=1e-6)
            assert found.values[row].tolist() == pytest.approx(alone.values)
            total = float(found.flows[row].sum() + found.choices[row])
            assert total == pytest.approx(float(found.changes[row]), rel=1e-5)
        assert ("choices" in found.columns()) is (name == "mixtral")


def test_rows_between_two_texts_add_up_to_the_flow_of_the_whole_answer():
    view = family_view("llama")
    found = answer_flows(view, "t3 t4 t5", "t6 t7 t8", against="t3 t9 t5")
    whole = flow(view, "t3 t4 t5", "t6 t7 t8", against="t3 t9 t5", labels=0)
    torch.testing.assert_close(found.values.sum(0).tolist(), list(whole.values))
    torch.testing.assert_close(found.flows.sum(0), whole.embeddings)
    # Earlier tokens of the answer are the same in both runs.
    assert not found.flows[:, 3:].any()
    assert found.flows[:, 1].all()


def test_a_model_writes_the_answer_by_its_likeliest_tokens():
    view, ids = family_view("llama"), torch.tensor([3, 4, 5])
    longer = ids
    for _ in range(4):
        likeliest = view.logits(longer[None])[0, -1].argmax()
        longer = torch.cat([longer, likeliest[None]])
    found = answer_flows(view, ids, generate=4)
    assert found.record() == answer_flows(view, ids, longer[3:]).record()
    assert found.spoken == tuple(f"t{i}" for i in longer[3:])


def test_a_page_has_the_map_and_a_row_for_each_token(tmp_path):
    view = family_view("llama")
    found = answer_flows(view, "t3 t4 t3", "t6 t7", target="probability")
    frame = found.frame()
    assert [*frame.columns] == ["answer", "change", "t3", "t4", "t3 2", "t6"]
    assert frame["t6"].isna().tolist() == [True, False]
    sums = frame.drop(columns=["answer", "change"]).sum(axis=1)
    assert sums.tolist() == pytest.approx(frame["change"].tolist(), rel=1e-6)
    write_report(tmp_path / "page.html", [found], title="page")
    page = (tmp_path / "page.html").read_text()
    assert "Where does each token of “t6 t7” come from?" in page
    assert "count as those of the text do" in page
    (picture,) = found.figures().values()
    assert [x.get_text() for x in picture.axes[0].get_yticklabels()] == ["t6", "t7"]
    # The first token is the same in the neutral text.
    assert [x.get_text() for x in picture.axes[0].get_xticklabels()] == ["t4", "t3", "t6"]
    name, strongest = next(iter(found.strongest(1).items()))
    assert strongest == frame[name][1]
    assert abs(strongest) == found.flows[1].abs().max()


test_what_is_refused = refused(
    {
        "text has one token": lambda: answer_flows(family_view("llama"), "t3", "t4 t5"),
        "token='nothing'": lambda: answer_flows(family_view("llama"), "t3 t4", "nothing"),
        "answer.*expected the text of an answer": lambda: answer_flows(
            family_view("llama"), "t3", 5
        ),
        "generate=0": lambda: answer_flows(family_view("llama"), "t3 t4", generate=0),
    },
    BilensError,
)


@pytest.mark.parametrize(
    "words",
    ["--save-graph a.json", "--viewer a", "--figure a.svg --width 300", "--token t3", "--ablate 3"],
)
def test_options_of_a_single_flow_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(["flow", "story", "--prompt", "the girl", "--generate", "2", *words.split()])
    error = capsys.readouterr().err
    assert words.split()[-2].lstrip("-") in error
    assert "leave" in error
