"""The commands on other people's models, from a folder to spectra."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

import bilens
from bilens.cli import main
from bilens.convert import open_model, read_spectra, save_model
from tests.command_line import in_json, refusal
from tests.convert.foreign import (
    PAPER,
    RELEASED,
    paper_shapes,
    random_state,
    released_shapes,
    write,
)
from tests.families import log_probabilities, tiny
from tests.models import toy_tokenizer

BRIEF = ["--length", "8", "--batch-size", "4", "--tokens", "64", "--device", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("cache"))
        patch.setenv("HF_HOME", cache)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
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
    """Return the model after a brief annealing to the end."""
    run = tmp_path_factory.mktemp("annealed") / "run"
    main(["anneal", str(model), "--data", str(texts), "--output", str(run), *BRIEF])
    return run


def test_process(model, tmp_path, capsys):
    main(["process", str(model), "--output", str(tmp_path / "done")])
    shown = capsys.readouterr().out
    assert "fold_norms" in shown
    assert "an RMSNorm" in shown
    result = in_json(capsys, "process", model, "--output", tmp_path / "again")
    assert result["change"] < 5e-5
    assert result["model"] == str(tmp_path / "again")
    processed = open_model(tmp_path / "done")
    difference = log_probabilities(processed) - log_probabilities(open_model(model))
    assert difference.abs().max() < 5e-5
    record = json.loads((tmp_path / "done" / "processing.json").read_text())
    assert record["change"] < 5e-5
    assert set(record["folded"]) == {"fold_norms", "fold_value_biases", "center_unembed"}


def test_process_says_what_plain_transformers_cannot_hold(tmp_path, capsys):
    save_model(tmp_path / "gpt2", tiny("gpt2", dtype=torch.float32), toy_tokenizer())
    main(["process", str(tmp_path / "gpt2"), "--output", str(tmp_path / "done")])
    shown = capsys.readouterr().out
    assert "embedding and unembedding were one matrix and are two now" in shown
    assert "1 maps have a bias that plain transformers has no room for" in shown


def test_export_then_spectra(annealed, tmp_path, capsys):
    bilinear = annealed / "bilinear"
    assert in_json(capsys, "export", annealed) == {"model": str(bilinear)}
    assert LlamaForCausalLM.from_pretrained(bilinear).config.hidden_act == "linear"
    options = ["--layer", "1", "--top", "3", "--output", str(tmp_path / "s")]
    main(["token-spectra", str(bilinear), *options])
    assert "30 tokens" in capsys.readouterr().out
    names, spectrum = read_spectra(tmp_path / "s")
    assert names.tolist() == list(range(30))
    result = in_json(capsys, "token-spectra", bilinear, *options)["tokens"]
    assert result[2]["eigenvalues"] == spectrum.values[2].tolist()


def test_linearise_then_anneal(model, texts, tmp_path, capsys):
    run, small = tmp_path / "linear", ["--length", "8", "--tokens", "0.256K", "--device", "cpu"]
    given = ["--data", str(texts), "--held-out", "16", *small]
    main(["linearise", str(model), *given, "--output", str(run), "--steps", "3"])
    shown = capsys.readouterr().out
    assert "loss alone" in shown
    assert "layers that suffer most: " in shown
    assert "2 layers linear: " in shown
    assert str(run) in shown.replace("\n", "")
    training = ["--data", str(texts), "--batch-size", "4", *small]
    main(["anneal", str(run), *training, "--output", str(tmp_path / "run")])
    assert "beta 0, validation loss" in capsys.readouterr().out
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.hidden_act == "linear"


def test_linearise_some_layers_within_a_budget(model, texts, tmp_path, capsys):
    given = ["--data", str(texts), "--length", "8", "--tokens", "256", "--held-out", "16"]
    main(["linearise", str(model), *given, "--layers", "1", "--output", str(tmp_path / "one")])
    assert "1 layers linear" in capsys.readouterr().out
    assert bilens.load(tmp_path / "one").mlp(1).n_out == 16
    full = in_json(capsys, "linearise", model, *given, "--budget", "10", "--output", tmp_path / "a")
    assert full["layers"] == [0, 1]
    assert set(full["distances"]) == {"0", "1"}
    message = refusal(capsys, "linearise", model, *given, "--length", "16", "--tokens", "15")
    assert "--tokens=15, expected at least --length=16" in message


def test_linearise_resumes_and_leaves_weights_in_files(model, texts, tmp_path, capsys):
    given = ["--data", str(texts), "--length", "8", "--tokens", "256", "--held-out", "16"]
    command = ["linearise", model, *given, "--steps", "3", "--device", "cpu", "--output"]
    first = in_json(capsys, *command, tmp_path / "a")
    message = refusal(capsys, *command, tmp_path / "a")
    assert "already. Resume that training with --resume" in message
    layers = list((tmp_path / "a" / "stages" / "gates").glob("*.safetensors"))
    written = [path.stat().st_mtime_ns for path in layers]
    assert len(layers) == 2
    assert in_json(capsys, *command, tmp_path / "a", "--resume") == first
    assert [path.stat().st_mtime_ns for path in layers] == written
    low = in_json(capsys, *command, tmp_path / "b", "--low-memory")
    assert low["stages"] == first["stages"]
    assert f"| gates | {texts.name} |" in (tmp_path / "a" / "README.md").read_text()
    message = refusal(capsys, "linearise", model, "--data", texts, texts, *given[2:])
    assert "expected each once" in message


def test_spectra_of_some_tokens(annealed, tmp_path, capsys, monkeypatch):
    command = ["token-spectra", str(annealed), "--layer", "0"]
    output = ["--output", str(tmp_path / "s")]
    main([*command, *output, "--tokens", "t7,12"])
    assert read_spectra(tmp_path / "s")[0].tolist() == [7, 12]
    message = refusal(capsys, *command, *output, "--tokens", "t7,other")
    assert "token='other', expected a single token" in message
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / f"spectra-{annealed.stem}-0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert "bilens did not write it" in refusal(capsys, *command, "--tokens", "t7")


def test_processes_share_the_spectra(annealed, tmp_path, capsys, monkeypatch):
    for number in range(2):
        state = SimpleNamespace(process_index=number, num_processes=2, is_main_process=not number)
        monkeypatch.setattr("accelerate.PartialState", lambda state=state, **_: state)
        command = ["token-spectra", str(annealed), "--layer", "0", "--output", str(tmp_path / "s")]
        main([*command, "--batch", "7"])
        assert f"the part of process {number} is done" in capsys.readouterr().out
    assert len(read_spectra(tmp_path / "s")[0]) == 30


def test_export_needs_beta_zero(model, texts, tmp_path, capsys):
    run = tmp_path / "run"
    held = [*BRIEF, "--schedule", "held"]
    result = in_json(capsys, "anneal", model, "--data", texts, "--output", run, *held)
    assert (result["run"], result["beta"]) == (str(run), 1)
    assert "not bilinear yet: beta=1, expected 0" in refusal(capsys, "export", run)
    assert not (run / "bilinear").exists()


def test_commands_on_a_released_model(tmp_path, capsys):
    state = random_state(released_shapes(RELEASED), torch.float32)
    toy_tokenizer().save_pretrained(tmp_path / "released")
    released = write(tmp_path / "released", RELEASED, state, "pytorch_model.bin")
    main(["token-spectra", str(released), "--layer", "2", "--output", str(tmp_path / "s")])
    assert "30 tokens" in capsys.readouterr().out
    assert len(read_spectra(tmp_path / "s")[0]) == 30
    main(["generate", str(released), "--prompt", "t3", "--tokens", "3"])
    assert "t" in capsys.readouterr().out
    main(["process", str(released), "--output", str(tmp_path / "processed")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows of a pattern do not sum to 1" in shown
    main(["ngrams", str(released), "--token", "t3", "--layer", "1"])
    assert "\nhead 1\n" in capsys.readouterr().out


def test_commands_on_a_model_of_the_paper(texts, tmp_path, capsys):
    settings = PAPER | {"n_layer": 1, "n_ctx": 8, "normalization": False}
    state = random_state(paper_shapes(settings), torch.float32)
    toy_tokenizer().save_pretrained(tmp_path / "paper")
    folder = write(tmp_path / "paper", settings, state, "model.safetensors")
    main(["ngrams", str(folder), "--token", "t5", "--k", "2"])
    assert "\nhead 1\n" in capsys.readouterr().out
    main(["contexts", str(folder), "--token", "t5", "--data", str(texts), "--eigenvectors", "1"])
    assert "\nP1  λ = " in capsys.readouterr().out
