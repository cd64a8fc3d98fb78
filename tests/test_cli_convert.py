"""The commands on other people's models, from a folder to spectra."""

import pytest
import torch
from transformers import LlamaForCausalLM

import bilens
from bilens.cli import main
from bilens.convert import open_model, save_model
from bilens.files import read_json
from tests.command_line import in_json, output_of, refusal
from tests.convert import foreign
from tests.families import log_probabilities, tiny
from tests.models import toy_tokenizer

BRIEF = ["--length", "8", "--batch-size", "4", "--tokens", "64", "--device", "cpu"]
OF_TEXTS = ["--length", "8", "--tokens", "256", "--held-out", "16"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("HF_HOME", folder)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "model"
    save_model(folder, tiny("llama", dtype=torch.float32), toy_tokenizer())
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = [" ".join(f"t{3 + (i * 7 + j) % 20}" for j in range(9)) for i in range(60)]
    path.write_text("\n".join(f"{line} t{i % 30}" for i, line in enumerate(lines)))
    return path


@pytest.fixture(scope="module")
def annealed(model, texts, tmp_path_factory):
    run = tmp_path_factory.mktemp("annealed") / "run"
    main(["anneal", str(model), "--data", str(texts), "--output", str(run), *BRIEF])
    return run


def test_process(model, tmp_path, capsys):
    shown = output_of(capsys, "process", model, "--output", tmp_path / "done")
    assert "fold_norms" in shown
    assert "an RMSNorm" in shown
    result = in_json(capsys, "process", model, "--output", tmp_path / "again")
    assert result["model"] == str(tmp_path / "again")
    processed, original = map(open_model, (tmp_path / "done", model))
    difference = log_probabilities(processed) - log_probabilities(original)
    record = read_json(tmp_path / "done" / "processing.json")
    assert max(difference.abs().max(), result["change"], record["change"]) < 5e-5
    assert {*record["folded"]} == {"fold_norms", "fold_value_biases", "center_unembed"}


def test_process_says_what_plain_transformers_cannot_hold(tmp_path, capsys):
    save_model(tmp_path / "gpt2", tiny("gpt2", dtype=torch.float32), toy_tokenizer())
    shown = output_of(capsys, "process", tmp_path / "gpt2", "--output", tmp_path / "done")
    assert "embedding and unembedding were one matrix and are two now" in shown
    assert "1 maps have a bias that plain transformers has no room for" in shown


def test_export(annealed, capsys):
    bilinear = annealed / "bilinear"
    assert in_json(capsys, "export", annealed) == {"model": str(bilinear)}
    assert LlamaForCausalLM.from_pretrained(bilinear).config.hidden_act == "linear"
    assert bilens.load(bilinear).mlp(1).n_out == 16


def test_linearise_then_anneal(model, texts, tmp_path, capsys):
    run = tmp_path / "linear"
    small = ["--data", texts, "--length", "8", "--tokens", "0.256K", "--device", "cpu", "--output"]
    given = ["linearise", model, "--held-out", "16", "--steps", "3", *small]
    shown = output_of(capsys, *given, run)
    for part in ("loss alone", "layers that suffer most: ", "linear: 2 of "):
        assert part in shown
    assert str(run) in shown.replace("\n", "")
    annealed = output_of(capsys, "anneal", run, "--batch-size", "4", *small, tmp_path / "run")
    assert "beta 0, validation loss" in annealed
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.hidden_act == "linear"


def test_linearise_some_layers_within_a_budget(model, texts, tmp_path, capsys):
    command = ["linearise", model, "--data", texts, *OF_TEXTS]
    shown = output_of(capsys, *command, "--layers", "1", "--output", tmp_path / "one")
    assert "linear: 1 of " in shown
    assert bilens.load(tmp_path / "one").mlp(1).n_out == 16
    full = in_json(capsys, *command, "--budget", "10", "--output", tmp_path / "a")
    assert (full["layers"], {*full["distances"]}) == ([0, 1], {"0", "1"})


def test_linearise_resumes_and_leaves_weights_in_files(model, texts, tmp_path, capsys):
    given = ["linearise", model, "--data", texts, *OF_TEXTS]
    command = [*given, "--steps", "3", "--device", "cpu", "--output"]
    first = in_json(capsys, *command, tmp_path / "a")
    layers = list((tmp_path / "a" / "stages" / "gates").glob("*.safetensors"))
    written = [path.stat().st_mtime_ns for path in layers]
    assert len(layers) == 2
    assert in_json(capsys, *command, tmp_path / "a", "--resume") == first
    assert [path.stat().st_mtime_ns for path in layers] == written
    assert in_json(capsys, *command, tmp_path / "b", "--low-memory")["stages"] == first["stages"]
    assert "expected each once" in refusal(
        capsys, "linearise", model, *OF_TEXTS, "--data", texts, texts
    )


def test_export_needs_beta_zero(model, texts, tmp_path, capsys):
    run, held = tmp_path / "run", [*BRIEF, "--schedule", "held"]
    result = in_json(capsys, "anneal", model, "--data", texts, "--output", run, *held)
    assert (result["run"], result["beta"]) == (str(run), 1)
    assert "not bilinear yet: beta=1, expected 0" in refusal(capsys, "export", run)
    assert not (run / "bilinear").exists()


def test_commands_on_a_released_model(tmp_path, capsys):
    state = foreign.random_state(foreign.released_shapes(foreign.RELEASED), torch.float32)
    toy_tokenizer().save_pretrained(tmp_path / "released")
    released = foreign.write(tmp_path / "released", foreign.RELEASED, state, "pytorch_model.bin")
    assert "t" in output_of(capsys, "generate", released, "--prompt", "t3", "--tokens", "3")
    shown = output_of(capsys, "process", released, "--output", tmp_path / "processed")
    assert "rows of a pattern do not sum to 1" in " ".join(shown.split())
    shown = output_of(capsys, "ngrams", released, "--token", "t3", "--layer", "1")
    assert "\nhead 1\n" in shown


def test_commands_on_a_model_of_the_paper(texts, tmp_path, capsys):
    settings = foreign.PAPER | {"n_layer": 1, "n_ctx": 8, "normalization": False}
    state = foreign.random_state(foreign.paper_shapes(settings), torch.float32)
    toy_tokenizer().save_pretrained(tmp_path / "paper")
    folder = foreign.write(tmp_path / "paper", settings, state, "model.safetensors")
    assert "\nhead 1\n" in output_of(capsys, "ngrams", folder, "--token", "t5", "--k", "2")
    options = ["--token", "t5", "--data", texts, "--eigenvectors", "1"]
    assert "\nP1  λ = " in output_of(capsys, "contexts", folder, *options)
