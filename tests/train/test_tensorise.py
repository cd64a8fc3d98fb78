"""Transformers become tensors: exact copies, patterns without softmax, and distillation."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import MistralConfig, MistralForCausalLM

import bilens
from bilens.convert import process
from bilens.convert.language_model import as_language_model, without_softmax
from bilens.errors import BilensError, CheckpointError
from bilens.files import read_json
from bilens.flows import flow
from bilens.train import trainer
from bilens.train.layers import TrainingRows
from bilens.train.linearise import linearise
from bilens.train.settings import Distillation, TensoriseTraining
from bilens.train.tensorise import (
    OwnText,
    agreement,
    distillation_loss,
    interleaved,
    memory,
    pattern_loss,
    teach_patterns,
    tensorise,
)
from tests.families import FAMILIES, tiny
from tests.models import TOKENS, VOCAB, random_model
from tests.nightly import nightly
from tests.train.runs import ctrl_c, lines, run_of

TIME = 10
SMALL = TensoriseTraining(
    tokens=2 * 2 * TIME,
    length=TIME,
    calibration_tokens=64 * TIME,
    batch_size=2,
    layer_steps=2,
    pattern_steps=2,
    pattern_batch=4,
    sample_batch=16,
)


def texts(n=8, seed=0):
    return torch.randint(VOCAB, (n, TIME), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-tied", "qwen2", "phi3"])
def test_a_copy_has_the_logits_of_its_original(name):
    model = tiny(name)
    copy = as_language_model(model)
    torch.testing.assert_close(copy(texts()).logits, model(texts()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_copy_that_computes_something_else_is_an_error(dtype):
    model = tiny("llama", dtype=dtype)
    as_language_model(model)
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: (30 * args[2][0], None))
    with pytest.raises(BilensError, match="Copying this LlamaForCausalLM changed a log-prob"):
        as_language_model(model)


PARTS = {
    "attention": st.sampled_from(["squared", "bilinear"]),
    "attention_norm": st.sampled_from(["none", "rms"]),
    "n_kv_heads": st.sampled_from([1, 2, 4]),
    "positions": st.sampled_from(["rotary", "none"]),
}


@given(st.fixed_dictionaries(PARTS), st.integers(0, 5))
def test_constants_are_added_to_scores(parts, seed):
    model, plain = (random_model(seed, attention_constant=c, **parts) for c in (True, False))
    plain.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(2, TIME, 16, dtype=torch.float64)
    rope = model.embed_text(texts(2), torch.arange(TIME)[None])[2]
    for block, bare in zip(model.blocks, plain.blocks, strict=True):
        scores = [q @ k.mT for q, k in bare.attn.queries_keys(x, None, rope)]
        constants = block.attn.score_constant[..., None, None]
        shifted = [block.attn.scale * s + c for s, c in zip(scores, constants, strict=True)]
        pattern = (shifted[0] * shifted[-1]).tril()
        mixed = pattern @ block.attn.values(x).repeat_interleave(4 // parts["n_kv_heads"], 1)
        if parts["attention_norm"] == "rms":
            mixed = mixed * (mixed.square().mean(-1, keepdim=True) + 1e-20).rsqrt()
        expected = block.attn.out(mixed.transpose(1, 2).flatten(2))
        torch.testing.assert_close(block.attn(x, None, rope), expected)


def test_a_model_with_constants_continues_from_its_state():
    parts = {"attention": "squared", "attention_norm": "sum", "attention_constant": True}
    model, ids = random_model(norm="rms", n_layers=2, **parts), texts(2)
    start = model(ids[:, :6], use_cache=True)
    size = start.past_key_values.layers[0].keys.numel()
    end = model(ids[:, 6:], past_key_values=start.past_key_values, use_cache=True)
    torch.testing.assert_close(end.logits, model(ids).logits[:, 6:])
    assert end.past_key_values.layers[0].keys.numel() == size


def test_squared_attention_is_near_softmax_where_scores_are_small():
    teacher = as_language_model(tiny("llama"))
    for block in teacher.blocks:
        block.attn.query.weight.data *= 1e-3
    student = without_softmax(teacher)
    assert 0 < (student(texts()).logits - teacher(texts()).logits).abs().max() < 1e-4


@given(rank=st.integers(1, 6), n=st.integers(6, 9), sharp=st.booleans(), seed=st.integers(0, 9))
def test_squared_scores_attend_to_few_different_targets(rank, n, sharp, seed):
    # docs/ideas/tensorise.md, with a pattern of n later positions over n earlier ones.
    generator = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(2, n, rank, generator=generator, dtype=torch.float64)
    if sharp:
        queries = keys = torch.linalg.qr(keys).Q
    weights = (queries @ keys.T).square()
    share = float((weights / weights.sum(1, keepdim=True)).diagonal().mean())
    assert share <= rank / n + 1e-9
    assert not sharp or share == pytest.approx(rank / n), "a projector attains the bound"


def test_the_loss_of_patterns_is_its_formula():
    teacher = as_language_model(tiny("llama"))
    x = torch.randn(2, TIME, 16, dtype=torch.float64)
    rope = teacher.embed_text(texts(2), torch.arange(TIME)[None])[2]
    ours, theirs = without_softmax(teacher).blocks[0].attn, teacher.blocks[0].attn
    losses = []
    A, B = (part.attention_pattern(x, None, rope).flatten(0, 1) for part in (theirs, ours))
    V = theirs.values(x).repeat_interleave(theirs.n_heads // theirs.n_kv_heads, 1).flatten(0, 1)
    for pattern, other, values in zip(A, B, V, strict=True):
        size = (pattern @ values).square().sum(-1).mean()
        for a, b in zip(pattern, other, strict=True):
            entropy = -sum(a[s] * torch.log(b[s] + 1e-6) for s in range(TIME))
            losses.append(entropy + ((b - a) @ values).square().sum() / size)
    torch.testing.assert_close(pattern_loss(ours, theirs, x, rope), torch.stack(losses).mean())


def test_patterns_are_learned_and_everything_else_stays(tmp_path):
    teacher = as_language_model(tiny("llama", dtype=torch.float32)).requires_grad_()
    for block in teacher.blocks:
        block.attn.query.weight.data *= 8  # sharp patterns, far from squares of small scores
    student = without_softmax(teacher)
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    training = Distillation(steps=40, batch_size=16, learning_rate=2e-2, log_every=1)
    last = teach_patterns(student, teacher, texts(16), training, tmp_path)
    untaught = without_softmax(teacher)
    for part in (teacher, student, untaught):
        part.requires_grad_(False)
    x, _, rope = teacher.embed_text(texts(16), torch.arange(TIME)[None])
    for layer, block in enumerate(teacher.blocks):
        losses = [
            float(pattern_loss(copy.blocks[layer].attn, block.attn, block.attn_norm(x), rope))
            for copy in (untaught, student)
        ]
        first = lines(tmp_path / f"layer-{layer:03}")[0]["loss"]
        assert first == pytest.approx(losses[0], rel=1e-4)
        assert last[layer] == pytest.approx(losses[1], rel=1e-4)
        assert losses[1] < losses[0] - 0.02
        x = block(x, None, rope)
    moved = {n for n, w in student.state_dict().items() if not torch.equal(w, before[n])}
    assert moved
    assert all(name.endswith(("query.weight", "key.weight", "score_constant")) for name in moved)


def test_the_distillation_loss_is_the_divergence_of_counted_positions():
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 3, 4, 7).unbind(0)
    counted = torch.rand(3, 4) < 0.6
    given, wanted = ours[counted].log_softmax(-1), theirs[counted].softmax(-1)
    total = functional.kl_div(given, wanted, reduction="sum")
    torch.testing.assert_close(distillation_loss(ours, theirs, counted), total / len(given))
    torch.testing.assert_close(distillation_loss(ours, theirs, counted, 5), total / 5)


def test_agreement_of_a_model_with_itself_and_with_another():
    model, other = (as_language_model(tiny("llama", seed)) for seed in (0, 1))
    same, apart = (agreement(one, model, texts()) for one in (model, other))
    assert (same.rise, same.kl, same.top1) == (0, 0, 1)
    logits = other(texts()).logits[:, :-1].flatten(0, 1)
    loss = functional.cross_entropy(logits, texts()[:, 1:].flatten())
    assert apart.loss == pytest.approx(loss.item(), rel=1e-5)
    assert apart.kl > 0
    assert apart.top1 < 1


def test_own_text_is_drawn_from_the_model():
    model = as_language_model(tiny("llama"))
    # The next token is the same one, whatever came before.
    for part in (model.unembed, model.norm, model.embed):
        part.weight.data.zero_()
    settings = replace(SMALL, length=3)
    drawn, again, other = (OwnText(model, settings, 400, stage).all() for stage in (0, 0, 1))
    assert drawn.shape == (400, 3)
    assert torch.equal(again, drawn)
    assert not torch.equal(other, drawn)
    # A resumed training reads from the middle on, and no text repeats.
    assert torch.equal(OwnText(model, settings, 400, 0)[350]["input_ids"], drawn[350])
    assert not torch.equal(drawn[:16], drawn[16:32])
    counts = torch.bincount(drawn[:, 1:].flatten(), minlength=VOCAB).double()
    assert counts.min() > 0, "all tokens are equally likely in a model without weights"
    given = drawn[:10] + 100
    mixed = OwnText(model, replace(settings, data_share=0.25), 40, 0, given).all()
    assert torch.equal(mixed[mixed[:, 0] >= 100], given)
    assert torch.equal(mixed[mixed[:, 0] < 100], drawn[:30])
    assert interleaved([drawn[:4], drawn[4:6]]).tolist() == drawn[[0, 4, 1, 5, 2, 3]].tolist()


def small_llama():
    return tiny("llama", dtype=torch.float32).requires_grad_()


def make(run, settings=SMALL, model=None, held_out=None, **how):
    """Make a tensor of a model, by default of a small Llama; `how` are the other arguments."""
    model, held_out = model or small_llama(), held_out or {"a": texts()}
    return tensorise(model, TOKENS, held_out, settings, run, use_cpu=True, **how)


TWO = {"a": texts(), "b": texts(seed=1)}


def make_of_llama(run):
    model = small_llama()
    return model, make(run, SMALL, model, held_out=TWO)


made = run_of(make_of_llama)


def test_the_whole_way_is_saved_resumed_and_read_exactly(made):
    run, model, result = made
    assert list(result.stages) == ["original", "gates", "attention", "distilled"]
    assert len(result.frame()) == 2 * 4
    opened = bilens.load(run)
    again = agreement(opened.model, as_language_model(model), texts())
    assert again.kl == pytest.approx(result.stages["distilled"]["a"].kl, rel=1e-4)
    # Every layer is a tensor, and a logit is accounted for through the patterns.
    assert opened.mlp(0).out.shape[0] == 16
    split = flow(opened, texts()[0], opened.direction(3), labels=0)
    assert split.values[0] == pytest.approx(float(opened.logits(texts()[:1])[0, -1, 3]), rel=1e-4)
    stages = {path.name for path in (run / "stages").iterdir()}
    assert stages == {"gates", "attention", "text.safetensors", "training.json", ".lock"}
    written = read_json(run / "tensorise.json")
    for stage, by_text in result.stages.items():
        for text, row in by_text.items():
            assert written[stage][text]["kl"] == pytest.approx(row.kl)


def test_activations_computed_twice_are_the_same(made, tmp_path):
    computed = make(tmp_path, replace(SMALL, checkpointing=True), held_out=TWO)
    assert computed.facts()[0][1] == pytest.approx(made[2].facts()[0][1], abs=1e-5)


def test_gated_mlps_may_stay_as_they_are_and_the_last_stage_be_left_out(tmp_path):
    result = make(tmp_path, replace(SMALL, mlp="gated", tokens=0))
    assert list(result.stages) == ["original", "attention"]
    config = bilens.load(tmp_path).model.config
    assert (config.attention, config.mlp) == ("squared", "swiglu")


def test_an_interrupted_run_resumes_in_every_stage(tmp_path, monkeypatch):
    settings = replace(SMALL, layer_steps=4, pattern_steps=4, tokens=4 * 2 * TIME, save_every=1)
    run = partial(make, settings=settings)
    result, folder = run(tmp_path / "whole"), tmp_path / "parts"
    names = "gates/layer-000", "gates/layer-001", "attention/layer-000"
    layers = [folder / "stages" / f"{name}.safetensors" for name in names]
    # Inside layer 2 of the gates, layer 1 of the patterns, and the distillation.
    rows = TrainingRows, "__getitems__"
    for n_done, place in enumerate([(*rows, 8), (*rows, 6), (trainer, "collate", 3)], 1):
        with ctrl_c(*place):
            run(folder, resume=n_done > 1)
        assert [layer.exists() for layer in layers] == [number < n_done for number in range(3)]
    # Finished stages are taken as they are.
    monkeypatch.setattr("bilens.train.tensorise.linearise", None)
    monkeypatch.setattr("bilens.train.tensorise.teach_patterns", None)
    assert run(folder, resume=True).stages == result.stages
    with pytest.raises(CheckpointError, match="already. Resume that training with resume=True"):
        run(folder)


GATED = ["gemma2", "gemma3", "mistral", "qwen3", "mistral-window"]


@pytest.mark.parametrize("name", nightly(GATED, ["gemma3", "mistral-window"]))
def test_gates_of_any_family_become_linear_and_learn_while_attention_stays(name, tmp_path):
    model = windowed() if name == "mistral-window" else tiny(name, dtype=torch.float32)
    settings = replace(SMALL, attention="softmax", length=8)
    result = make(tmp_path, settings, model, {"a": texts()[:, :8]})
    assert list(result.stages) == ["original", "gates", "distilled"]
    opened = bilens.load(tmp_path)
    assert torch.isfinite(opened.mlp(1).dense()).all()
    assert opened.model.config.model_type == model.config.model_type
    assert opened.model.config.sliding_window == model.config.sliding_window


def test_sliding_windows_are_kept_or_named_before_any_work(tmp_path):
    model, near, far = windowed(), texts(1), texts(1)
    far[0, 0] = (far[0, 0] + 1) % VOCAB
    change = (model(near).logits - model(far).logits).abs().amax(-1)[0]
    assert change[0] > 0
    # Two layers with windows of 3 tokens do not reach back further than 4.
    torch.testing.assert_close(change[5:], torch.zeros(TIME - 5), rtol=0, atol=1e-5)
    with pytest.raises(BilensError, match="MistralConfig has sliding windows"):
        make(tmp_path / "run", SMALL, model)
    assert not (tmp_path / "run").exists()
    processed, report = process(model)
    assert "fold_norms" in report.folded
    assert (processed(near).logits.argmax(-1) == model(near).logits.argmax(-1)).all()


def windowed():
    sizes = {**FAMILIES["mistral"][1], "head_dim": 4, "sliding_window": 3}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes)).eval()


def test_a_model_of_ours_becomes_a_tensor_too(tmp_path):
    result = make(tmp_path, SMALL, random_model(norm="rms", mlp="swiglu", n_layers=2).float())
    assert result.stages["original"]["a"].kl == 0
    opened = bilens.load(tmp_path)
    assert opened.model.config.mlp == "bilinear"
    assert opened.mlp(1).out.shape[0] == 16
    with pytest.raises(BilensError, match="a model of bilens has one kind of MLP"):
        linearise(random_model(norm="rms", mlp="swiglu", n_layers=2), texts(), texts(), [0])


@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_is_that_of_a_training(tied):
    model = random_model(norm="rms", n_layers=2, tie_word_embeddings=tied).float()
    model.requires_grad_()
    needed, saved, ids = memory(model.config, 3, TIME), {}, texts(3)

    def save(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    target = deepcopy(model)(ids, use_cache=False).logits.detach()
    output = model(ids, use_cache=False).logits
    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        loss = distillation_loss(output, target, torch.ones_like(ids, dtype=torch.bool))
    optimizer = torch.optim.AdamW(model.parameters())
    loss.backward()
    optimizer.step()

    def size(tensors):
        return sum(x.numel() * x.element_size() for x in tensors)

    assert needed["weights"] == needed["original"] == size(model.parameters())
    assert needed["gradients"] == size(weight.grad for weight in model.parameters())
    moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in optimizer.state.values()]
    assert needed["moments"] == sum(map(size, moments))
    # Saved are log-probabilities and probabilities; the logits and their gradient live besides.
    assert needed["logits"] == pytest.approx(sum(saved.values()) + 2 * size([output]), rel=0.3)
    assert needed["inputs of layers"] == 4 * 2 * 3 * TIME * 16


def test_other_texts_or_settings_are_refused_when_resumed(tmp_path):
    def run(given, **changed):
        settings = replace(SMALL, mlp="gated", tokens=0, **changed)
        make(tmp_path, settings, texts=given, resume=(tmp_path / "stages").exists())

    run(texts(seed=2))
    before = (tmp_path / "model.safetensors").read_bytes()
    for other in (texts(seed=3), None):
        with pytest.raises(CheckpointError, match="stages was trained on other data"):
            run(other)
    with pytest.raises(CheckpointError, match=f"was trained with length={TIME}, not length=5"):
        run(texts(seed=2), length=5)
    (tmp_path / "stages" / "attention" / ".unfinished-streams").mkdir()
    (tmp_path / "stages" / "attention" / ".unfinished-0.safetensors").touch()
    run(texts(seed=2))
    assert not list(tmp_path.rglob(".unfinished*"))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_stages_of_an_earlier_version_are_not_mixed_with_new_ones(tmp_path):
    (tmp_path / "stages" / "gates").mkdir(parents=True)
    (tmp_path / "stages" / "gates" / "layer-000.safetensors").touch()
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="is of an earlier version and cannot be resumed"):
            make(tmp_path, resume=resume)
