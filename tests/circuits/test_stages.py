"""Stages are exchanges of parts at roles, cuts are exchanges of the stream, and both are measured.

Own hooks on a model of transformers are the reference.
"""

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.transforms import Bbox
from safetensors import safe_open

from bilens.circuits import Cases, circuit, find_stages
from bilens.circuits.cases import ROLES
from bilens.circuits.cuts import Cuts, find_cuts, last_true, passed
from bilens.circuits.directions import MLPDirections
from bilens.circuits.measures import Split
from bilens.circuits.questions import USES
from bilens.circuits.reading import cuts_said
from bilens.circuits.stages import ROWS, Row, drop, mask_of, trimmed
from bilens.errors import BilensError
from bilens.flows import Question
from bilens.pages.exporters import write_directions
from bilens.pages.stages import stages_figure
from bilens.transformer import ResidualModel
from bilens.transformer.parts import Part
from tests.families import exact_norms, tiny
from tests.flows.flows import QUESTIONS, answered
from tests.models import toy_tokenizer, view_of

PAIRS = [(a, b) for a in (1, 2, 3, 4, 8, 9) for b in (1, 3, 9)]
SENTENCES = {"short": "t{1} {0} t{2} t4", "long": "t8 t{1} t{2} {0} t1"}
WORD, SECOND, BETWEEN, END, BOTH, SECOND_BOTH = range(len(ROLES))
PLACES = {
    "word": [WORD, BOTH],
    "word 2": [SECOND, SECOND_BOTH],
    "between": [BETWEEN],
    "end": [END, BOTH, SECOND_BOTH],
}


def questions(name, sentence, task="one"):
    return [
        Question(
            sentence.format("t2", a, b), "t5", ("t6",), sentence.format("t7", a, b), task, name
        )
        for a, b in PAIRS
    ]


@pytest.fixture(scope="module")
def templates(view):
    return [answered(view, questions(*one)) for one in SENTENCES.items()]


@pytest.fixture(scope="module")
def reading(view, templates):
    return circuit(view, [*templates[0], *templates[1]], controls=True)


@pytest.fixture(scope="module")
def llama():
    with exact_norms():
        yield ResidualModel(tiny("llama"), toy_tokenizer())


def by_hooks(view, text, other, live, before=()):
    """Return the last logits of a text where only some parts are its own, and others of another.

    `live` says of a layer, a part (the last is the MLP) and a position whether it is its own.
    `before` are layers before which only some positions of the stream are the text's own.
    """
    model, kept, hooks = view.model, {}, []
    layers = model.model.layers
    ids, other_ids = view.ids(text)[None], view.ids(other)[None]

    def keep(name, x):
        kept[name] = x.detach()

    def mix(name, x, number, heads):
        x, second = x.clone(), kept[name]
        width = x.shape[-1] // heads
        for part in range(heads):
            for position in range(x.shape[1]):
                if not live(number, part if heads > 1 else view.n_heads, position):
                    columns = slice(part * width, (part + 1) * width)
                    x[:, position, columns] = second[:, position, columns]
        return x

    def stream(number, x, positions):
        x = x.clone()
        for position in range(x.shape[1]):
            if position not in positions:
                x[:, position] = kept["stream", number][:, position]
        return x

    for number, layer in enumerate(layers):
        out, mlp = layer.self_attn.o_proj, layer.mlp
        hooks += [
            layer.register_forward_pre_hook(lambda _, a, n=number: keep(("stream", n), a[0])),
            out.register_forward_pre_hook(lambda _, a, n=number: keep(("heads", n), a[0])),
            mlp.register_forward_hook(lambda _, __, y, n=number: keep(("mlp", n), y)),
        ]
    model(other_ids)
    for hook in hooks:
        hook.remove()
    hooks = []
    cut = dict(before)
    for number, layer in enumerate(layers):
        if number in cut:
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda _, a, n=number: (stream(n, a[0], cut[n]), *a[1:])
                )
            )
        hooks += [
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, a, n=number: (mix(("heads", n), a[0], n, view.n_heads),)
            ),
            layer.mlp.register_forward_hook(lambda _, __, y, n=number: mix(("mlp", n), y, n, 1)),
        ]
    try:
        return model(ids).logits[0, -1].double()
    finally:
        for hook in hooks:
            hook.remove()


def rises_by_hooks(view, cases, live_of, before_of=lambda roles: ()):
    """Return how far each question's number rises, by own hooks; live by layer, part and roles."""
    rises = []
    for case, roles in zip(cases.cases, cases.roles, strict=True):
        asked = case.question

        def live(layer, part, position, roles=roles):
            return roles[position] >= 0 and live_of(layer, part, roles[position])

        logits = by_hooks(view, asked.text, asked.against, live, before_of(roles))
        number = float(logits[view.token(asked.token)] - logits[view.token(asked.minus[0])])
        rises.append((number - case.ends[1]) * (1 if case.change > 0 else -1))
    return torch.tensor(rises)


@torch.no_grad()
@pytest.mark.parametrize(
    "sentence",
    ["t1 {0} t{1} t{2} t4", "t9 t{1} t{2} {0}", "t9 {0} t{1} {0} t{2}", "t9 t{2} {0} t{1} {0}"],
)
def test_stages_are_exchanges_by_own_hooks(llama, sentence):
    asked = answered(llama, questions("", sentence))[:9]
    cases = Cases.of(llama, asked)
    found = find_stages([Split.of(cases, range(len(asked)), "")])
    measuring = Cases.joined([Split.of(cases, range(len(asked)), "").measuring]).by("role")

    def share(mask):
        rises = rises_by_hooks(llama, measuring, lambda n, part, role: bool(mask[n, role, part]))
        return float(rises.sum() / measuring.changes.sum())

    has_second = any(role in (SECOND, SECOND_BOTH) for roles in measuring.roles for role in roles)
    assert has_second is (sentence.count("{0}") == 2)
    # Each stage as JSON has it.
    ranges = {Row(x.kind, x.role): (x.first, x.last) for x in found.stages}
    mask = torch.zeros(found.mask.shape, dtype=torch.bool)
    for stage in found.stages:
        parts = [llama.n_heads] if stage.kind == "mlps" else range(llama.n_heads)
        for layer in range(stage.first, stage.last + 1):
            for part in parts:
                mask[layer, PLACES[stage.role], part] = True
    assert mask.equal(found.mask)
    assert found.measured.restored.value == pytest.approx(share(mask), abs=1e-5)
    assert found.measured.left.value == pytest.approx(share(~mask), abs=1e-5)
    for stage in found.stages:
        others = {row: x for row, x in ranges.items() if row != (stage.kind, stage.role)}
        assert stage.without == pytest.approx(share(mask_of(llama, others)), abs=1e-5)
        for name, alone in stage.strongest:
            _, layer, head = Part.parse(name, llama)[:3]
            one = mask_of(llama, others)
            one[layer, PLACES[stage.role], head] = True
            assert alone == pytest.approx(share(one), abs=1e-5)
    of_roles = mask[:, [WORD, SECOND, BETWEEN, END] if has_second else [WORD, BETWEEN, END]]
    assert found.inside == (int(of_roles.sum()), of_roles.numel())


@torch.no_grad()
@pytest.mark.parametrize("sentence", [SENTENCES["long"], "t9 {0} t{1} {0} t{2} t4"])
def test_cuts_are_exchanges_of_the_stream_by_own_hooks(llama, sentence):
    asked = answered(llama, questions("", sentence))[:6]
    cases = Cases.of(llama, asked).by("role")
    whole = torch.eye(llama.d_model).double()
    for layer in range(llama.n_layers):
        for place, here in (("word", (WORD, SECOND)), ("end", (END,))):
            expected = rises_by_hooks(
                llama,
                cases,
                lambda *_: True,
                lambda roles, n=layer, r=here: {n: [i for i, x in enumerate(roles) if x in r]},
            )
            for directions in (None, MLPDirections(whole, whole)):
                f = passed(cases, {(layer, place): directions})
                assert f == pytest.approx(float(expected.sum() / cases.changes.sum()), abs=1e-5)
        none = MLPDirections(0 * whole[:1], whole[:1])
        assert passed(cases, {(layer, "word"): none}) == pytest.approx(0, abs=1e-5)


def test_roles_are_where_texts_differ_and_what_predicts(view):
    def roles(text, against, **others):
        asked = Question(text, "t5", () if "token" in others else ("t6",), against)
        (found,) = Cases.of(view, [replace(asked, **others)], any_length=True).roles
        return found

    assert roles("t1 t2 t3 t4", "t1 t7 t3 t4") == (-1, WORD, BETWEEN, END)
    assert roles("t1 t2 t3 t4", "t1 t7 t3 t8") == (-1, WORD, BETWEEN, SECOND_BOTH)
    assert roles("t1 t2 t3", "t1 t2 t4") == (-1, -1, BOTH)
    assert roles("t2 t3 t2 t4", "t7 t3 t7 t4") == (WORD, BETWEEN, SECOND, END)
    assert roles("t2 t3 t2 t4 t2", "t7 t3 t7 t4 t7") == (
        WORD,
        BETWEEN,
        SECOND,
        BETWEEN,
        SECOND_BOTH,
    )
    assert roles("t1 t2 t3 t4", "t1 t7 t3 t4", position=2) == (-1, WORD, END)
    assert roles("t1 t2 t9 t4 t4", "t7 t9 t4 t4") == (WORD, WORD, BETWEEN, BETWEEN, END)


@pytest.mark.parametrize("axis", ["", "position", "role"])
def test_all_parts_restore_everything_and_no_parts_nothing(view, axis):
    cases = Cases.of(view, QUESTIONS[:1]).by(axis)
    masks = torch.stack([torch.ones(cases.shape), torch.zeros(cases.shape)]).double()
    assert cases.faithfulness(masks).tolist() == pytest.approx([1, 0], abs=1e-5)


def test_trimmed_ends_sum_to_at_most_the_tolerance():
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        worths = torch.rand(8, generator=generator).double() ** 4
        for tolerance in (0.01, 0.1, 0.3):
            found = trimmed(worths, tolerance)
            if found is None:
                assert float(worths.sum()) <= 2 * tolerance or float(worths.max()) <= tolerance
                continue
            first, last = found
            assert float(worths[:first].sum()) <= tolerance < float(worths[: first + 1].sum())
            assert float(worths[last + 1 :].sum()) <= tolerance < float(worths[last:].sum())
    assert trimmed(torch.zeros(3).double(), 0.0) is None


def test_the_last_number_at_which_something_holds_is_found():
    for last in range(-1, 9):
        assert last_true(lambda i, last=last: i <= last, 9, -1) == last
    assert last_true(lambda _: False, 5) == 0


def test_stages_that_are_not_needed_are_dropped():
    """Only one head and one MLP write anything: the MLP of the last layer, at the end."""
    view = view_of(n_layers=3, norm="none", mlp="bilinear", attention="softmax")
    first, *_, last = view.model.blocks
    for block in view.model.blocks:
        if block is not first:
            block.attn.out.weight.zero_()
        if block is not last:
            block.mlp.out.weight.zero_()
    last.mlp.out.weight.mul_(30)
    # The last token is the same in both texts, so that only the head moves what differs.
    cases = Cases.of(view, [q for q in QUESTIONS if q.text.split()[-1] == q.against.split()[-1]])
    everything = dict.fromkeys(ROWS, (0, 2))
    ranges = drop(everything, [cases.by("role")])
    assert ranges == {Row("heads", "end"): (0, 0), Row("mlps", "end"): (2, 2)}


def test_a_reading_has_stages_cuts_and_all_questions(view, templates, reading):
    (answer,), (found,) = reading.answers, reading.circuits
    both = [*templates[0], *templates[1]]
    (record,) = json.loads(json.dumps(reading.record(), allow_nan=False))["answers"]
    stages = record["circuit"]["stages"]
    assert [(x["kind"], x["role"], x["first"], x["last"]) for x in stages] == [
        (x.kind, x.role, x.first, x.last) for x in found.stages
    ]
    assert [x["without"] for x in stages] == [x.without for x in found.stages]
    roles = [one.use for one in answer.questions]
    sizes = {name: roles.count(name) for name in (*USES, "left out")}
    parts = [Split.shares(range(len(one))) for one in templates]
    expected = [sum(len(split[i]) for split in parts) for i in range(3)]
    assert list(sizes.values()) == [*expected, 0]
    cases = Cases.of(view, both).by("role")
    f = cases.values(found.mask.double()[None])[0] / cases.changes
    assert [one.restored for one in answer.questions] == pytest.approx(f.tolist())
    assert [one.values for one in answer.questions] == [case.ends for case in cases.cases]
    assert record["circuit"]["cuts"]["curves"].keys() == {"word", "end"}
    assert [*found.left_out] == ["short", "long"]
    assert found.left_out["short"].measured.questions == parts[0][2][-1] + 1 - parts[0][2][0]
    titles = [section.title for section in reading.sections()]
    assert titles[1:3] == ["Stages", "Templates"]
    assert titles[-1] == "Questions"
    text = reading.text(answer)
    assert text.startswith(
        f"Over {len(both)} questions the logit of the answer minus that of the other one is "
    )
    assert f"{len(found.stages)} stages alone restore {found.measured.restored}" in text
    inside, every = found.inside
    assert f"They hold {inside} of {every} heads and MLPs, counted at each kind of place" in text
    assert ("so that they say little" in text) == (2 * inside > every)
    assert "The answers can" in text


def test_what_the_model_does_not_answer_is_said_first(view, templates):
    asked = templates[0]
    turned = [replace(q, token=q.minus[0], minus=(q.token,)) for q in asked[4:6]]
    reading = circuit(view, [*asked[:4], *turned, *asked[6:], asked[0]])
    (answer,) = reading.answers
    first = "Left out: 2 questions that the model answers otherwise and 1 repeated question."
    assert first in answer.premise
    why = [x.why for x in answer.questions]
    assert why[4:6] == ["the model answers otherwise"] * 2
    assert why[-1] == "repeats another"
    for question in (turned[0], asked[0]):
        (answer,) = circuit(view, [question]).answers
        (case,) = Cases.of(view, [question]).cases
        said = {
            (False, False): "does not give this answer after either",
            (True, True): "after both",
            (True, False): "after the first",
            (False, True): "after the second text, not",
        }
        assert said[case.answers] in answer.premise
        assert "there is little to explain" in answer.premise
        assert [x.use for x in answer.questions] == ["all"]


def test_large_changes_are_worth_explaining():
    view = view_of(n_layers=2)
    view.model.unembed.weight.mul_(100)
    assert (
        "there is little to explain"
        not in circuit(view, answered(view, questions("", SENTENCES["short"]))).facts()[0][1]
    )


def test_options_of_parts_are_refused_for_stages(view):
    for options in ({"size": 3}, {"heads": True}, {"keep": 0.5}):
        (name,) = options
        with pytest.raises(BilensError, match=f"{name}=.* is of parts; add level='parts'"):
            circuit(view, QUESTIONS, **options)
    with pytest.raises(BilensError, match="keep=0.5 has no effect beside size"):
        circuit(view, QUESTIONS, level="parts", size=3, keep=0.5)


def test_the_answer_says_where_the_change_stands_and_how_wide_it_is():
    layers = {"word": 20, "end": 26}
    cuts = Cuts(True, 20, 26, (1.01, 0.99), {}, layers, {}, 1, {1: 1.02})
    stands, width = cuts_said(cuts, {"end": ("are", "is")})
    assert "until layer 20 (1.01), that at the end alone from layer 26 (0.99)." in stands
    at = (
        "one direction of the stream at the word before layer 20 and one at the end before layer 26"
    )
    assert f"1.02 of the change passes through {at}; at the end it raises are and" in width
    wide = replace(cuts, width=None, through={16: 0.7})
    at = at.replace("one direction", "16 directions").replace("one", "16")
    width = f"Not even {at} carry it on every template; over all they restore 0.70 of the change."
    assert cuts_said(wide, {})[1] == width
    # No place is named that never carries it.
    (stands,) = cuts_said(replace(wide, since=None, at=(1.01, None)), {})
    assert stands.endswith("that at the end alone never: it is spread over positions.")
    assert "nothing has to move" in cuts_said(replace(cuts, apart=False), {})[0]


def test_directions_pass_as_they_were_measured(view, templates):
    splits = [Split.of(Cases.of(view, asked), range(len(asked)), "") for asked in templates]
    cuts = find_cuts(splits)
    measuring = Cases.joined([split.measuring for split in splits]).by("role")
    passing = {(cuts.layers[place], place): x for place, x in cuts.directions.items()}
    assert cuts.through[max(cuts.through)] == pytest.approx(passed(measuring, passing))
    for written, read in cuts.directions.values():
        torch.testing.assert_close(written @ read.T, torch.eye(len(read)).double())


@pytest.mark.parametrize("width", [240, 380, 800, 1500])
def test_no_letters_stand_on_a_dashed_line(reading, width):
    """Each is on a ground that hides the line: of its own, or a bar's. Nor on letters, or marks."""
    (found,) = reading.circuits
    n_layers, crossed = len(found.mask), 0
    for layer in range(n_layers + 1):
        cuts = replace(found.cuts, apart=True, until=layer, since=layer)
        figure = stages_figure(replace(found, cuts=cuts), n_layers, "why", width)
        figure.canvas.draw()
        (axes,) = figure.axes
        ends = [axes.transData.transform(x.get_segments()[0]) for x in axes.collections]
        lines = [Bbox(points).padded(1) for points in ends]
        bars = [bar.get_window_extent() for bar in axes.patches]
        marks = [mark.get_window_extent() for mark in axes.lines if mark.get_marker() == "v"]
        assert len(marks) == sum(bool(stage.strongest) for stage in found.stages)
        for text in axes.texts:
            place = text.get_window_extent()
            others = [other.get_window_extent() for other in axes.texts if other is not text]
            assert not any(map(place.overlaps, [*marks, *others]))
            if not any(place.overlaps(line) for line in lines):
                continue
            crossed += 1
            on_bar = any(b.x0 <= place.x0 and place.x1 <= b.x1 for b in bars if b.overlaps(place))
            assert text.get_bbox_patch() is not None or on_bar, text.get_text()
        assert all(line.zorder < min(x.zorder for x in axes.patches) for line in axes.collections)
    assert crossed


def test_only_directions_that_carry_the_change_are_written(reading, tmp_path):
    (stages,) = reading.circuits
    layers = {"word": 1, "end": 2}
    rows = {place: MLPDirections(torch.eye(2), torch.eye(2)) for place in layers}
    carry = Cuts(True, 1, 2, (1.0, 1.0), {}, layers, rows, 2, {2: 0.97})

    def written(*cuts):
        answers = tuple(
            replace(reading.answers[0], circuit=replace(stages, task=f"task{i}", cuts=one))
            for i, one in enumerate(cuts)
        )
        path = tmp_path / "steer.safetensors"
        path.unlink(missing_ok=True)
        try:
            write_directions(replace(reading, answers=answers), path)
        finally:
            assert path.exists() is any(one is carry for one in cuts)
        with safe_open(path, "pt") as file:
            return set(file.keys()), file.metadata()

    names, notes = written(carry)
    assert names == {f"{place}.{side}" for place in layers for side in ("written", "read")}
    assert {"restored": "0.97", "word.layer": "1", "end.layer": "2"}.items() <= notes.items()
    never = replace(carry, since=None, at=(1.0, None), through={16: 0.4}, width=None)
    few = replace(carry, through={16: 0.7}, width=None)
    for one, reason in ((never, "at the end alone never"), (few, "they restore 0.70 of the")):
        with pytest.raises(BilensError, match=f"directions: none carry the change.*{reason}"):
            written(one)
        names, notes = written(one, carry)
        assert all(name.startswith("task1.") for name in names)
        assert notes["task1.restored"] == "0.97"
    with pytest.raises(BilensError, match="directions: none"):
        written(replace(carry, since=None, at=(1.0, None)))
