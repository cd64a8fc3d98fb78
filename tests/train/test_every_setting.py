"""Every setting of a training from scratch changes what is trained, or is refused by name."""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file

from bilens.cli import main
from bilens.cli.training import Architecture, train_images, train_language
from bilens.nn.settings import LanguageSettings
from bilens.train.settings import ClassifierTraining, LanguageTraining
from tests.command_line import others, write_pictures
from tests.nightly import nightly
from tests.train.runs import lines, timeless

ELSEWHERE = {"output", "device", "report_to", "save_every", "resume"}
"""Options of where, how safely and how observed the same weights are trained."""
OF_IMAGES = others(
    "data=pictures data_dir=nowhere seeds=2 d_model=9 n_layers=2 d_hidden=5 gate=relu "
    "beta=0.5 norm=rms epochs=3 batch_size=50 learning_rate=0.01 seed=1 weight_decay=0.1 "
    "input_noise=0 latent_noise=1 decay=0.5 bias residual"
)
OF_TEXTS = others(
    "data=others.txt data_dir=nowhere clean=tinystories preset=paper vocab_size=50 "
    "d_model=16 n_layers=2 n_heads=4 n_kv_heads=1 d_hidden=9 n_ctx=9 mlp=relu norm=rms "
    "positions=learned attention=squared attention_scale=2 attention_norm=rms "
    "attention_constant qk_norm bias mlp_bias=out norm_eps=0.1 value_mix embed_mix "
    "logit_cap=1 rope_base=100 rope_bfloat16 precision=bf16 initializer_range=0.1 "
    "tie_word_embeddings batch_size=16 learning_rate=0.01 weight_decay=1 warmup=0.5 "
    "accumulate=2 log_every=1 evaluate_every=1 evaluate_texts=1 seed=1 target_loss=100 "
    "epochs=1 optimizer=muon"
)
KINDS: dict[str, tuple[Any, tuple[Any, ...], list[str], dict[str, str | None]]] = {
    "images": (
        train_images,
        (Architecture, ClassifierTraining),
        ["--data", "digits", "--epochs", "2", "--d-model", "8"],
        OF_IMAGES,
    ),
    "language": (
        train_language,
        (LanguageSettings, LanguageTraining),
        [
            *("--data", "texts.txt", "--preset", "tiny", "--vocab-size", "60", "--d-model", "8"),
            *("--n-heads", "2", "--d-hidden", "8", "--n-ctx", "8", "--epochs", "0.5"),
            *("--evaluate-every", "5"),
        ],
        OF_TEXTS,
    ),
}
"""By kind: its function and settings, a short training, and another value of each option."""
CASES = [(kind, name) for kind, (*_, others) in KINDS.items() for name in others]
# Without positions that turn, norms or a gate of that name, these have no effect.
IDLE = [
    ("language", ["--positions", "learned"], ("rope_base", "rope_bfloat16")),
    ("language", ["--norm", "none"], ("norm_eps",)),
    ("images", ["--gate", "silu"], ("beta",)),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BILENS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("texts.txt", "others.txt")):
        words = Random(seed).choices(("a", "girl", "saw", "the", "red", "dog", "and"), k=4000)
        rows = [" ".join(words[i : i + 9]) for i in range(0, len(words), 9)]
        Path(name).write_text("\n".join(rows))
    write_pictures(tmp_path / "pictures")


def trained(place: str, kind: str, *words: str) -> tuple[str, Any]:
    main(["train", kind, *KINDS[kind][2], *words, "--output", place])
    metrics = [timeless(lines(path.parent)) for path in Path(place).rglob("metrics.jsonl")]
    weights = [load_file(path) for path in sorted(Path(place).glob("**/model.safetensors"))]
    sizes = [(name, w.shape, w.double().sum().item()) for x in weights for name, w in x.items()]
    return repr(metrics), sizes


def changed(kind: str, name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *filter(None, [KINDS[kind][3][name]])]


@pytest.mark.parametrize(("kind", "name"), nightly(CASES, CASES[::12]))
def test_a_setting_changes_the_training_or_is_refused(kind, name, capsys):
    before = trained("before", kind)
    try:
        after = trained("after", kind, *changed(kind, name))
    except SystemExit:
        message = capsys.readouterr().err.rpartition("error: ")[2]
        assert changed(kind, name)[0] in message, message
        return
    assert after != before


@pytest.mark.parametrize(("kind", "words", "names"), IDLE)
def test_a_setting_without_effect_is_refused(kind, words, names, capsys):
    for name in names:
        with pytest.raises(SystemExit):
            trained("idle", kind, *words, *changed(kind, name))
        assert changed(kind, name)[0] in (message := capsys.readouterr().err), message
        assert "has no effect with" in message


@pytest.mark.parametrize("kind", KINDS)
def test_no_setting_is_forgotten(kind):
    function, groups, _, others = KINDS[kind]
    hidden = {"n_inputs", "n_classes", "image_shape", "class_names"}
    names = {*signature(function).parameters} - {"architecture", "training", "model"}
    names |= {field.name for group in groups for field in fields(group)} - hidden
    assert names - ELSEWHERE == others.keys()
