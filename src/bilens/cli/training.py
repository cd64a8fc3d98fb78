"""Commands that train a model from scratch: `bilens train images` and `train language`."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bilens.cli.console import TextDir, choose_device, out, own_place
from bilens.errors import BilensError
from bilens.nn.settings import ClassifierConfig, LanguageSettings
from bilens.options import Cleaning
from bilens.settings import Between
from bilens.train.settings import (
    PRESETS,
    ClassifierTraining,
    LanguageTraining,
    PresetName,
    check_precision,
)

Hidden = Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress]


@dataclass(frozen=True)
class Architecture(ClassifierConfig):
    """The model, without the sizes of the data. Defaults are Table 2 of Pearce et al. 2024."""

    n_inputs: Hidden = 1
    n_classes: Hidden = 1
    image_shape: tyro.conf.Fixed[tyro.conf.Suppress[tuple[int, int] | None]] = None
    class_names: tyro.conf.Fixed[tyro.conf.Suppress[tuple[str, ...]]] = ()


ARCHITECTURE, IMAGES, PAPER = Architecture(), ClassifierTraining(), PRESETS["paper"]


def train_images(
    *,
    data: str = "digits",
    data_dir: Path | None = None,
    output: Path | None = None,
    seeds: Annotated[int, Between(1, 1024)] = 1,
    resume: bool = False,
    device: str = "auto",
    architecture: Architecture = ARCHITECTURE,
    training: ClassifierTraining = IMAGES,
) -> dict[str, Any]:
    """Train an image classifier from scratch and save it.

    The run directory holds config.json and model.safetensors, which bilens.load and
    from_pretrained read. Besides, it has training.json, a line of metrics.jsonl for each epoch, and
    checkpoints. --resume continues from the last intact one. Ctrl-C stops between two steps
    and loses nothing.

        bilens train images --data mnist
        bilens train images --seeds 5 --n-layers 2 --output runs/five

    Args:
        data: digits (bundled, 8x8), mnist, fashion-mnist, hub:owner/name, or a folder: of class
            folders with pictures, of four IDX files, or of parquet files.
        data_dir: folder that holds the IDX files of mnist or fashion-mnist; by default the
            environment variable BILENS_DATA, and without that the Hugging Face hub.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        seeds: train this many models, from --seed on, each in a directory of its own below output.
        resume: continue an earlier training in output.
        device: cpu, cuda, cuda:1, mps, ...; auto takes a GPU if the machine has one.
    """
    run = own_place(output, f"runs/{Path(data).resolve().name}", resume=resume)
    check_effects(architecture, {"beta": ("gate", ("swish",))})

    from bilens.data import load_images
    from bilens.inputs import check_folder
    from bilens.train import train_classifier, train_classifiers
    from bilens.train.run_directory import check_begin

    check_folder(data_dir, data)
    if seeds == 1:
        check_begin(run, resume=resume)
    images = load_images(data, data_dir).to(choose_device(device))
    sizes = {"n_inputs": images.n_inputs, "n_classes": images.n_classes}
    labels = {"image_shape": images.shape, "class_names": images.class_names}
    config = ClassifierConfig(**asdict(architecture) | sizes | labels)
    if seeds == 1:
        results = [train_classifier(config, images, training, run, resume=resume)]
        runs = [run]
    else:
        numbers = range(training.seed, training.seed + seeds)
        results = train_classifiers(config, images, training, numbers, run, resume=resume)
        runs = [run / f"seed-{seed}" for seed in numbers]
    accuracies = [history[-1]["test_accuracy"] for _, history in results]
    for folder, accuracy in zip(runs, accuracies, strict=True):
        out.print(f"{folder}: test accuracy {accuracy:.2%}")
    mean, spread = statistics.mean(accuracies), None
    if len(accuracies) > 1:
        spread = statistics.stdev(accuracies)
        out.print(
            f"{len(accuracies)} seeds: {mean:.2%} on average, standard deviation {spread:.2%}"
        )
    accuracy_of = dict(zip(map(str, runs), accuracies, strict=True))
    return {"test_accuracy": mean, "standard_deviation": spread, "runs": accuracy_of}


def train_language(
    *,
    data: str = "grammar",
    data_dir: TextDir = None,
    clean: Cleaning | None = None,
    preset: PresetName | None = None,
    device: Literal["auto", "cpu"] = "auto",
    model: LanguageSettings = PAPER.model,
    training: LanguageTraining = PAPER.training,
    output: Path | None = None,
    resume: bool = False,
) -> dict[str, Any] | None:
    """Train a language model from scratch and save it with its tokenizer.

    The run directory holds the model and the tokenizer as Hugging Face folders do. Besides, it has
    training.json, metrics.jsonl and checkpoints. --resume continues from the last intact one. For
    several processes write `torchrun --nproc-per-node=N -m bilens` instead of `bilens`.

        bilens train language --data grammar
        bilens train language --data stories.txt --preset tiny --report-to tensorboard

    Args:
        data: grammar or deep-grammar (synthetic languages made on the spot), tinystories, or a
            text, parquet or jsonl file, or a folder of them.
        clean: none keeps texts as they are, with capitals and line ends; tinystories makes them
            lower-case ASCII on one line, as in the paper. By default tinystories for that data set,
            and none for texts of your own.
        preset: grammar or tiny (minutes on two cores), story (an hour), paper (a GPU) or 500m
            (several GPUs): values of the settings below. By default grammar for the grammar and
            tiny for other data.
        device: auto takes a GPU if the machine has one; cpu does not use it.
        model: of the preset, with the settings that are given.
        training: the same.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        resume: continue an earlier training in output.
    """
    run = own_place(output, f"runs/{Path(data).resolve().name}", resume=resume)
    rotary, norms = ("positions", ("rotary",)), ("norm", ("scalar", "rms", "layer"))
    check_effects(model, {"rope_base": rotary, "rope_bfloat16": rotary, "norm_eps": norms})
    check_precision(model.attention, training.precision)

    from bilens.data import load_corpus
    from bilens.data.corpus import LANGUAGES, cleaning_of
    from bilens.inputs import check_folder
    from bilens.nn.language import LanguageConfig
    from bilens.processes import from_main_process, this_process
    from bilens.train import language
    from bilens.train.run_directory import check_begin

    config = LanguageConfig(**model.settings())
    check_folder(data_dir, data)
    use_cpu = device == "cpu"
    state = this_process(cpu=use_cpu)
    begin = partial(check_begin, run, resume=resume, report_to=training.report_to)
    from_main_process(begin)
    if state.is_main_process and data not in LANGUAGES:
        words = {"none": "kept as they are", "tinystories": "cleaned, lower-case ASCII on one line"}
        out.print(f"texts of {Path(data).name}: {words[clean or cleaning_of(data)]} (--clean)")
    # One process fills the cache of token ids, and the others open it.
    with state.main_process_first():
        corpus = load_corpus(
            data, n_ctx=config.n_ctx, vocab_size=config.vocab_size, data_dir=data_dir, clean=clean
        )
    # A small corpus may have fewer tokens than were asked for.
    config.vocab_size = len(corpus.tokenizer)
    network, history = language.train_language(
        config, corpus, training, run, resume=resume, use_cpu=use_cpu
    )
    if not state.is_main_process:
        return None
    loss = next(r["eval_loss"] for r in reversed(history) if "eval_loss" in r)
    size = sum(parameter.numel() for parameter in network.parameters())
    out.print(f"{run}: {size:,} parameters, validation loss {loss:.4f} nats a token")
    return {"run": run, "parameters": size, "validation_loss": loss}


def check_effects(settings: Any, needs: Mapping[str, tuple[str, tuple[str, ...]]]) -> None:
    """Raise if a setting was given that has no effect without one of some values of another."""
    for name, (other, values) in needs.items():
        value, default = getattr(settings, name), getattr(type(settings), name)
        if value != default and getattr(settings, other) not in values:
            raise BilensError(
                f"{name}={value} has no effect with {other}={getattr(settings, other)}, expected "
                f"{other}={' or '.join(values)}; leave {name} out"
            )


def of_preset(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of the preset in the words of a command line, by their parameters."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Before the real parser, whose defaults depend on the preset.
    parser.add_argument("--preset")
    parser.add_argument("--data", default="grammar")
    arguments, _ = parser.parse_known_args(words)
    preset = PRESETS.get(arguments.preset or ("grammar" if arguments.data == "grammar" else "tiny"))
    return {} if preset is None else {"model": preset.model, "training": preset.training}
