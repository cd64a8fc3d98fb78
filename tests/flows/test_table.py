"""Flows of many questions: each row is that of its question alone, and a stopped run loses none."""

import json
from functools import partial
from itertools import count, islice
from random import Random

import datasets
import numpy as np
import pandas as pd
import pytest
import torch

import bilens
from bilens.cli import main
from bilens.errors import BilensError
from bilens.flows import Question, flow_table, rows, table
from bilens.flows.interval import Interval
from bilens.flows.sources import as_questions, count_questions, question_stream
from bilens.flows.table import clustered
from bilens.shipped import TASKS
from tests.families import family_view
from tests.models import view_of
from tests.nightly import nightly

FAMILIES = nightly(["gpt2", "gemma2", "cohere2", "mixtral", "own-mixed", "own-none"], ["gemma2"])
NO_QUESTION = [
    BilensError("line 3 has 2 columns"),
    Question("t4 t5 t6", "t99", "t7", "t4 t8 t6"),
    Question("", "t7", "t8", "t4 t5"),
    {"text": "t4", "answer": "t5"},
]
REASONS = ["line 3 has", "token='t99', expected", "holds no token", "has 'answer', which is"]


def some_questions(number: int, seed: int = 0) -> list[Question]:
    """Return questions of three lengths, some of which have no second text or another number."""
    draw, asked = Random(seed), []
    for i in range(number):
        words = [f"t{draw.randrange(3, 10)}" for _ in range(3 + i % 3)]
        other = [words[0], f"t{draw.randrange(3, 10)}", *words[2:]]
        token, minus = (f"t{number}" for number in draw.sample(range(3, 10), 2))
        against = " ".join(other[: 2 if i % 7 == 5 else None]) if i % 4 else None
        target = "log-probability" if i % 5 == 2 else "logit"
        kind = {"task": f"task{i % 2}", "template": "one", "target": target}
        asked.append(Question(" ".join(words), token, minus, against, **kind))
    return asked


def rows_in(folder):
    return pd.read_parquet(folder).sort_values("number", ignore_index=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_the_flow_of_its_question_alone(family, tmp_path):
    view, asked = family_view(family), some_questions(9)
    found = flow_table(view, asked, tmp_path, shard=6)
    written = rows_in(tmp_path)
    assert found.questions == len(written) == 9
    assert written["number"].tolist() == list(range(9))
    for question, (_, row) in zip(asked, written.iterrows(), strict=True):
        if family == "own-mixed" and len(question.against.split()) == 2:
            assert "texts of equally many tokens" in row["reason"]
            continue
        alone = bilens.flow(
            view,
            question.text,
            question.token,
            minus=question.minus,
            against=question.against or None,
            target=question.target,
            labels=0,
        )
        expected = torch.cat([alone.heads.sum(-1), alone.mlps.sum(-1)[:, None]], 1).flatten()
        flows = torch.tensor(row[[*found.parts]].to_numpy(float))
        assert (row["clean"], row["corrupt"]) == pytest.approx(alone.values, rel=1e-9)
        torch.testing.assert_close(flows, expected.double(), rtol=1e-5, atol=1e-6)
        assert (row["text"], row["task"]) == (question.text, question.task)
    assert found.parts[: view.n_heads + 1] == (
        *(f"head.0.{head}" for head in range(view.n_heads)),
        "mlp.0",
    )


def test_what_is_no_question_is_a_row_with_the_reason(view, tmp_path):
    good = some_questions(4)
    asked = [good[0], NO_QUESTION[0], good[1], *NO_QUESTION[1:], *good[2:]]
    found = flow_table(view, asked, tmp_path, shard=3)
    written = rows_in(tmp_path)
    assert (found.questions, found.unread) == (8, 4)
    unread = written[written["reason"] != ""]
    assert unread["number"].tolist() == [1, 3, 4, 5]
    assert all(a in b for a, b in zip(REASONS, unread["reason"], strict=True))
    assert unread[["clean", "corrupt", *found.parts]].isna().all(axis=None)
    assert found.reasons["number"] == [1, 3, 4, 5]
    flow_table(view, good, tmp_path / "good")
    read = written[written["reason"] == ""].reset_index(drop=True)
    pd.testing.assert_frame_equal(read.drop(columns="number"), drop_number(tmp_path / "good"))
    with pytest.raises(BilensError, match="model can read, of 2, question 0: line 3 has 2 col"):
        flow_table(view, NO_QUESTION[:2], tmp_path / "none")


def drop_number(folder):
    return rows_in(folder).drop(columns="number")


def test_one_that_cannot_run_beside_others_is_a_row_too(view, tmp_path, monkeypatch):
    together = rows.flows_of_length

    def refuse(model, asked):
        if any(fitted.question.text == asked_about for fitted in asked):
            raise BilensError("its parts cancel beyond rounding")
        return together(model, asked)

    asked = some_questions(7)
    asked_about = asked[3].text
    monkeypatch.setattr(rows, "flows_of_length", refuse)
    found = flow_table(view, asked, tmp_path)
    assert (found.questions, found.unread) == (7, 1)
    assert found.reasons == {"number": [3], "reason": ["its parts cancel beyond rounding"]}


class Killed(BaseException):
    """The end of a process, which nothing catches."""


def test_rows_are_kept_where_no_progress_is_shown(view, tmp_path, monkeypatch):
    asked = some_questions(5)
    flow_table(view, asked, tmp_path, shard=2)
    monkeypatch.setenv("RANK", "1")  # only the first process shows it
    monkeypatch.setattr(rows, "_rows", None)
    assert len(rows.write_shards(view, asked, tmp_path, size=2)) == 3


def test_a_run_that_is_killed_anywhere_ends_as_one_that_is_not(view, tmp_path, monkeypatch):
    asked, together, write = some_questions(11), rows.flows_of_length, rows.parquet.write_table
    whole = flow_table(view, asked, tmp_path / "whole", shard=3)

    def dies(call, calls, last, *, half):
        def killed(*args):
            if half and next(calls) == last:
                args[1].write_bytes(b"PAR1")  # half of a file
                raise Killed
            if not half and next(calls) == last:
                raise Killed
            return call(*args)

        return killed

    killed_runs = 0
    for last in count():
        monkeypatch.setattr(rows, "flows_of_length", dies(together, count(), last, half=False))
        monkeypatch.setattr(rows.parquet, "write_table", dies(write, count(), last % 2, half=True))
        try:
            found = flow_table(view, asked, tmp_path / "killed", shard=3)
            break
        except Killed:
            killed_runs += 1
            # What a process leaves that has no time to tidy up.
            (tmp_path / "killed" / f".unfinished-{last}.parquet").write_bytes(b"PAR1")
    assert killed_runs > 4
    assert found.record() == whole.record()
    pd.testing.assert_frame_equal(rows_in(tmp_path / "killed"), rows_in(tmp_path / "whole"))
    names = [sorted(p.name for p in (tmp_path / x).iterdir()) for x in ("killed", "whole")]
    assert names[0] == names[1]
    assert len(names[0]) == 4


def test_what_is_there_is_not_made_again(view, tmp_path, monkeypatch):
    asked = some_questions(7)
    first = flow_table(view, asked, tmp_path, shard=3)
    monkeypatch.setattr(rows, "flows_of_length", None)
    assert flow_table(view, asked, tmp_path, shard=3).record() == first.record()


def test_a_folder_of_another_model_or_of_other_questions_is_refused(view, tmp_path):
    asked = some_questions(7)
    flow_table(view, asked, tmp_path, shard=3)
    other, changed = view_of(n_layers=2, norm="rms", seed=1), [*asked]
    changed[4] = Question("t3 t4 t5", "t7", "t8", "t3 t9 t5")
    for given in ((other, asked), (view, changed), (view, asked[:3]), (view, asked[:5])):
        with pytest.raises(BilensError, match="has rows of another model or of other questions"):
            flow_table(*given, tmp_path, shard=3)


def test_processes_write_shards_of_their_own_and_all_of_them(view, tmp_path):
    asked = some_questions(11)
    (tmp_path / "two").mkdir()
    write = partial(rows.write_shards, view, asked, tmp_path / "two", size=2)
    paths = write(turn=(1, 2))
    assert [path.exists() for path in paths] == [False, True, False, True, False, True]
    assert write(turn=(0, 2)) == paths
    assert all(path.exists() for path in paths)
    flow_table(view, asked, tmp_path / "one", shard=2)
    pd.testing.assert_frame_equal(rows_in(tmp_path / "two"), rows_in(tmp_path / "one"))


def test_questions_are_taken_when_it_is_their_turn(view, tmp_path):
    taken, written = [], []

    def stream():
        for question in some_questions(12):
            taken.append(question)
            written.append(len([*tmp_path.glob("0*")]))
            yield question

    flow_table(view, stream(), tmp_path, shard=4)
    assert written == [0] * 4 + [1] * 4 + [2] * 4


LINES = "text,token,minus,against\n" + "".join(
    f"t{i} t4 t5,t6,t7,t{i} t8 t5\n" for i in (3, 4, 5, 9, 11)
)


def in_forms(folder):
    """Yield the name of each form of the same questions, and the questions in it."""
    (folder / "q.csv").write_text(LINES)
    frame = pd.read_csv(folder / "q.csv")
    frame.to_json(folder / "q.jsonl", orient="records", lines=True)
    frame.to_parquet(folder / "q.parquet")
    yield from ((x, folder / f"q.{x}") for x in ("csv", "jsonl", "parquet"))
    yield "a table", frame
    yield "a stream of datasets", datasets.Dataset.from_pandas(frame).to_iterable_dataset()
    yield "a generator", (dict(row) for row in frame.to_dict("records"))


def test_every_form_has_the_same_rows(view, tmp_path):
    expected = None
    for name, questions in in_forms(tmp_path):
        known = count_questions(questions)
        assert known == (None if name in ("a stream of datasets", "a generator") else 5), name
        flow_table(view, questions, tmp_path / name.replace(" ", "-"))
        found = rows_in(tmp_path / name.replace(" ", "-"))
        expected = found if expected is None else expected
        pd.testing.assert_frame_equal(found, expected)


def test_a_file_of_rows_says_which_row_is_none(tmp_path):
    lines = ['{"text": "t3 t4", "token": "t5"}', "{", "[1]", '{"text": "t3", "tok": "t5"}']
    (tmp_path / "q.jsonl").write_text("\n\n".join(lines) + "\n")
    first, *others = question_stream(tmp_path / "q.jsonl")
    assert first == Question("t3 t4", "t5")
    for number, (error, words) in enumerate(
        zip(others, ["expected a JSON object", "holds a list", "'tok', which is no"], strict=True)
    ):
        assert isinstance(error, BilensError)
        assert words in str(error)
        assert number == 1 or f"q.jsonl, row {number + 2}" in str(error)
    with pytest.raises(BilensError, match=r"row 2: .*expected a JSON object"):
        as_questions(tmp_path / "q.jsonl")


def test_reasons_are_the_same_wherever_a_file_is_named_from(view, tmp_path, monkeypatch):
    (tmp_path / "q.tsv").write_text("t3 t4\tt5\tt6\tt7 t4\nno columns\n")
    flow_table(view, tmp_path / "q.tsv", tmp_path / "rows")
    monkeypatch.chdir(tmp_path)
    flow_table(view, "q.tsv", "rows")
    assert (
        rows_in(tmp_path / "rows")["reason"]
        .iloc[1]
        .startswith("line 2: expected columns with tabs")
    )


def test_shares_are_those_of_all_rows_of_a_kind(view, tmp_path):
    found = flow_table(view, some_questions(24), tmp_path, shard=5)
    written = rows_in(tmp_path)
    assert [kind.name for kind in found.kinds] == ["task0: one", "task1: one"]
    for kind, task in zip(found.kinds, ("task0", "task1"), strict=True):
        of_task = written[written["task"] == task]
        changes = torch.tensor((of_task["clean"] - of_task["corrupt"]).to_numpy())
        for part, name in enumerate(found.parts):
            flows = torch.tensor(of_task[name].to_numpy(float)) * changes.sign()
            expected = Interval.of(flows, changes.abs())
            share = kind.share(part)
            assert share.value == pytest.approx(expected.value, rel=1e-9)
            assert (share.low is None) == (expected.low is None)
            if share.low is not None:
                ends = share.low, share.high
                assert ends == pytest.approx((expected.low, expected.high), rel=1e-6)


@pytest.mark.parametrize("planted", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_as_many_as_were_planted(planted, seed):
    """Of a normal distribution along few directions there is one, however long it is."""
    draw = np.random.default_rng(seed)
    long = draw.standard_normal((400, 3)) @ draw.standard_normal((3, 40))
    centers = 12 * draw.standard_normal((planted, 40))
    labels = draw.integers(planted, size=400)
    shares = long + 0.3 * draw.standard_normal((400, 40)) + (planted > 1) * centers[labels]
    found = clustered(shares)
    assert found.n_clusters == planted
    pairs = {*zip(found.predict(shares).tolist(), labels.tolist(), strict=True)}
    assert len(pairs) == planted


def test_rows_that_are_all_alike_are_one_cluster():
    for rows_alike in (np.ones((40, 3)), np.zeros((1, 3))):
        assert clustered(rows_alike).n_clusters == 1


def test_a_sample_of_many_is_drawn_from_all(view, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "SAMPLE", 10)
    found = flow_table(view, some_questions(24), tmp_path, shard=5)
    assert sum(found.clusters["questions"]) == 10
    assert found.questions == 24


def test_the_command_writes_rows_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = (TASKS / "pronouns.tsv").read_text().splitlines()
    (tmp_path / "q.tsv").write_text("\n".join([*islice(lines, 12), "too few\tcolumns"]) + "\n")
    main(["flow-table", "story", "--questions", "q.tsv", "--output", "out"])
    shown = capsys.readouterr().out
    assert "questions 12, not read 1" in shown
    assert "line 13 has 2 columns" in shown
    page = (tmp_path / "out" / "table.html").read_text()
    assert "Clusters of questions" in page
    record = json.loads((tmp_path / "out" / "table.json").read_text())
    assert record["questions"] == 12
    assert record["Parts of each kind"][0]["part"] == "mlp.0"
    assert len(rows_in(tmp_path / "out" / "rows")) == 12
