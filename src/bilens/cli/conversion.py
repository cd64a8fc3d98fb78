"""Commands that convert a pretrained model: to process, anneal, export, linearise and tensorise."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bilens
from bilens.cli.console import (
    Device,
    PretrainedName,
    RunDir,
    TextDir,
    TrainingDevice,
    choose_device,
    out,
    own_place,
    show_table,
)
from bilens.cli.training import check_effects
from bilens.errors import BilensError
from bilens.options import StepName
from bilens.sections import signed
from bilens.settings import Count, Size
from bilens.train.settings import AnnealTraining, Distillation, TensoriseTraining

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bilens.train.linearise import Linearised

ANNEALING, TENSORISING = AnnealTraining(), TensoriseTraining()


def process(
    model: PretrainedName,
    *,
    steps: tuple[StepName, ...] = (),
    output: Path | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Fold norms and biases into the weights and centre them, so that they are easier to read.

    The model's function stays the same; the largest change of a log-probability on random
    tokens is measured and printed. For bilens transformers, GPT-2, GPT-NeoX (Pythia), Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3, Granite, OLMo 2, Helium, GLM and Cohere 2.
    Mixtures of experts may be Mixtral, OLMoE or Qwen 3 MoE.

        bilens process runs/grammar
        bilens process gpt2 --steps fold_norms --output gpt2-folded

    Args:
        steps: which to apply; by default every step but factor_heads that leaves the model's
            function unchanged.
        output: folder for the processed model and processing.json; by default
            runs/processed-NAME.
    """
    output = own_place(output, _place("processed", model))

    from bilens.convert.loading import find_tokenizer
    from bilens.files import write_json

    network: Any = bilens.convert.open_model(model).to(choose_device(device))  # type: ignore[arg-type]
    tokenizer = find_tokenizer(model, network)
    # In place: two copies of a large model may not fit.
    network, report = bilens.convert.process(network, steps or None, in_place=True)
    bilens.convert.save_model(output, network, tokenizer)
    write_json(output / "processing.json", report.record())
    outcomes = {step: f"{len(places)} times" for step, places in report.folded.items()}
    for step, reason in report.refused.items():
        outcomes[step] = f"{outcomes.get(step, 'no')}: {reason}"
    show_table(("step", "applied"), outcomes.items(), words=2)
    if report.untied:
        out.print("embedding and unembedding were one matrix and are two now")
    if not report.loads_in_transformers:
        out.print(
            f"{len(report.added_biases)} maps have a bias that plain transformers has no room "
            "for; open the model with bilens.load, or choose other --steps"
        )
    out.print(f"largest change of a log-probability: {report.change:.1e}")
    out.print(f"model: {output}")
    return {"model": output, **report.record()}


def anneal(
    model: PretrainedName,
    *,
    data: str,
    data_dir: TextDir = None,
    output: Path | None = None,
    shortest: Count | None = None,
    resume: bool = False,
    device: TrainingDevice = "auto",
    training: AnnealTraining = ANNEALING,
) -> dict[str, Any] | None:
    """Train a pretrained gated model further while its activation becomes a straight line.

    The activation becomes Swish, whose beta falls from the model's (1 for SiLU, 1.702 for
    GELU) to 0; the model is then bilinear. The run directory holds the model with its beta,
    training.json, metrics.jsonl and checkpoints. For several processes write `torchrun
    --nproc-per-node=N -m bilens` instead of `bilens`, or `accelerate launch` for FSDP.

        bilens anneal HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/annealed

    Args:
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        output: run directory; by default runs/annealed-NAME.
        shortest: keep only texts of this many tokens up to length, each on its own (384 in the
            paper); by default all are joined and cut.
        resume: continue an earlier annealing in output.
    """
    output = own_place(output, _place("annealed", model), resume=resume)

    from bilens.convert.gates import gated_mlps
    from bilens.inputs import check_folder
    from bilens.processes import from_main_process, this_process
    from bilens.train import linearise
    from bilens.train.run_directory import check_begin

    check_folder(data_dir, data)
    cpu = device == "cpu"
    state = this_process(cpu=cpu)
    begin = partial(check_begin, output, resume=resume, report_to=training.report_to)
    from_main_process(begin)
    network, tokenizer = _open(model)
    _check_length(network, training.length)
    gated_mlps(network)
    corpus = _texts(data, tokenizer, training.length, data_dir, shortest=shortest)
    history = linearise.anneal(network, corpus, training, output, resume=resume, use_cpu=cpu)
    if not state.is_main_process:
        return None
    # Not every record of the history is of a validation.
    last = next(record for record in reversed(history) if "eval_loss" in record)
    beta, loss = last["beta"], last["eval_loss"]
    out.print(f"{output}: beta {beta:.4g}, validation loss {loss:.4f} nats a token")
    return {"run": output, "beta": beta, "validation_loss": loss}


def export(run_dir: RunDir, *, output: Path | None = None) -> dict[str, Any]:
    """Save an annealed model as an ordinary Hugging Face checkpoint with hidden_act "linear".

    Plain transformers loads and runs it, without bilens.

        bilens export runs/annealed --output bilinear

    Args:
        run_dir: directory that `bilens anneal` wrote.
        output: folder for the model; by default RUN/bilinear.
    """
    output = own_place(output, run_dir / "bilinear")
    model, tokenizer = _open(run_dir)
    bilens.convert.make_bilinear(model)
    bilens.convert.save_model(output, model, tokenizer)
    out.print(f"model: {output}")
    return {"model": output}


def linearise(
    model: PretrainedName,
    *,
    data: tuple[str, ...],
    data_dir: TextDir = None,
    output: Path | None = None,
    held_out: Count = 8192,
    resume: bool = False,
    device: TrainingDevice = "auto",
    low_memory: bool = False,
    layers: tuple[int, ...] | None = None,
    budget: float | None = None,
    steps: int = 0,
    tokens: Count = 8192,
    length: Size = 256,
) -> dict[str, Any] | None:
    """Make the gates of a pretrained gated model linear, so that its layers are bilinear.

    Gates become their nearest lines on a text, and down maps are fitted to outputs, in closed form.

        bilens linearise HuggingFaceTB/SmolLM2-135M --data stories.txt --budget 0.1

    Args:
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        output: folder for the model and its stages; by default runs/linear-NAME.
        layers: which layers, by their numbers; all by default.
        budget: most nats a token that the loss may rise; layers that cost most are left gated.
        steps: of Adam, by which each layer then learns, by itself, to return its former output.
        tokens: to fit on, as 8192, 32K or 1M. For a try 2048 will do, with --held-out 512.
        length: tokens of a text.
        held_out: tokens of other texts of each name to measure on.
        resume: continue from the last finished layer or checkpoint in output.
        low_memory: leave weights and streams in files, except for those of one layer.
    """
    output = own_place(output, _place("linear", model), resume=resume)
    if tokens < length:
        raise BilensError(f"--tokens={tokens}, expected at least --length={length}")

    import torch

    from bilens.processes import this_process
    from bilens.train import layers as stages
    from bilens.train import linearise as lines
    from bilens.train import tensorise
    from bilens.train.trainer import shape_of

    distillation = Distillation(steps=steps)
    network, tokenizer, train_texts, validation = _begin(
        model,
        data,
        data_dir,
        length,
        output=None if resume else output,
        n_texts=tokens // length,
        held_out=held_out,
        device=device,
        low_memory=low_memory,
        ready=lambda network: lines.gated_layers(network, layers, budget),
    )
    texts = _first_tokens(tensorise.interleaved(train_texts), tokens, length)
    measurements = tensorise.Measurements(output, stages.sharing_copy(network), validation)
    record = {**asdict(distillation), "layers": layers, "budget": budget}
    record["model"] = shape_of(network.config)
    with stages.open_stages(output, record, texts, resume=resume) as folder:
        measurements.add("original", network)
        result = lines.linearise(
            network,
            texts,
            torch.cat(list(validation.values())),
            layers,
            budget=budget,
            distillation=distillation,
            run=folder / "gates",
        )
    measurements.add("gates", network)
    if not this_process().is_main_process:
        return None
    bilens.convert.save_model(output, network, tokenizer)
    summary = _show_linearised(result)
    return {"model": output, **summary, "stages": _show(measurements.finish(network), output)}


def _first_tokens(texts: "Tensor", tokens: int, length: int) -> "Tensor":
    """Return the first texts of a length, of so many tokens together; warn of fewer."""
    from bilens.progress import logger

    texts = texts[: tokens // length]
    if len(texts) < tokens // length:
        logger.warning(
            "the texts have %d tokens to fit on, fewer than --tokens=%d", texts.numel(), tokens
        )
    return texts


def _show_linearised(result: "Linearised") -> dict[str, Any]:
    """Print the loss with each layer linear alone, and with all of them; return the numbers."""
    rows = []
    for layer, loss in result.alone.items():
        fit = result.fits.get(layer)
        distance = "" if fit is None else f"{fit.distance:.3f}"
        rise = signed(loss - result.before, ".4f")
        rows.append((str(layer), "yes" if fit else "no", f"{loss:.4f}", rise, distance))
    header = ("layer", "linear", "loss alone", "rise", "distance of the MLP's output")
    show_table(header, rows, words=2)
    worst = sorted(result.alone, key=lambda layer: -result.alone[layer])[:5]
    out.print(f"layers that suffer most: {', '.join(map(str, worst))}")
    out.print(
        f"linear: {len(result.layers)} of {len(result.alone)} layers; "
        f"{result.after:.4f} nats a token, {result.before:.4f} before"
    )
    return {
        "layers": result.layers,
        "loss_before": result.before,
        "loss": result.after,
        "loss_alone": result.alone,
        "distances": {layer: fit.distance for layer, fit in result.fits.items()},
    }


def tensorise(
    model: PretrainedName,
    *,
    data: tuple[str, ...] = (),
    data_dir: TextDir = None,
    output: Path | None = None,
    held_out: Count = 16_384,
    resume: bool = False,
    device: TrainingDevice = "auto",
    low_memory: bool = False,
    training: TensoriseTraining = TENSORISING,
) -> dict[str, Any] | None:
    """Turn a pretrained Llama-like model into a tensor: linear gates, attention without softmax.

    Gates become lines, attention becomes squared with rows divided by their sum, and then all
    weights learn the next-token distribution of the original. The text is drawn from the model
    itself. Each stage is saved in the folder stages of the run directory, and its loss is printed.

        bilens tensorise HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/tensor

    Args:
        data: texts to measure on, and to learn from besides own text: tinystories, or a text,
            parquet or jsonl file, or a folder of them. Without any, held-out own text is measured.
        output: run directory; by default runs/tensor-NAME.
        held_out: tokens of other texts of each name to measure on.
        resume: continue from the last finished layer or checkpoint in output.
        low_memory: leave weights and streams in files, except for those of one layer.
    """
    output = own_place(output, _place("tensor", model), resume=resume)
    squares = ("attention", ("squared",))
    needs = {
        "pattern_steps": squares,
        "pattern_batch": squares,
        "layer_steps": ("mlp", ("bilinear",)),
    }
    check_effects(training, needs)
    if not data and training.data_share != TENSORISING.data_share:
        raise BilensError(
            f"--data-share={training.data_share} has no effect without texts; add --data, or leave "
            "it out"
        )

    from bilens.processes import this_process
    from bilens.train import linearise as lines
    from bilens.train import tensorise as stages

    def ready(network: Any) -> None:
        if training.mlp == "bilinear":
            lines.gated_layers(network)

    network, tokenizer, train_texts, validation = _begin(
        model,
        data,
        data_dir,
        training.length,
        output=None if resume else output,
        n_texts=max(training.steps * training.batch_size, training.calibration_tokens),
        held_out=held_out,
        device=device,
        low_memory=low_memory,
        ready=ready,
    )
    result = stages.tensorise(
        network,
        tokenizer,
        validation,
        training,
        output,
        texts=stages.interleaved(train_texts) if train_texts else None,
        resume=resume,
        use_cpu=device == "cpu",
    )
    if not this_process().is_main_process:
        return None
    return {"model": output, "stages": _show(result, output)}


def _place(kind: str, model: str) -> Path:
    return Path("runs") / f"{kind}-{Path(model).stem}"


def _open(source: str | Path, **options: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer."""
    model = bilens.convert.open_model(source, **options)
    return model, bilens.convert.open_tokenizer(source, model)


def _check_length(model: Any, length: int) -> None:
    """Raise if texts are longer than those that a model takes."""
    from bilens.transformer.tokens import max_tokens

    if length > (most := max_tokens(model.config)):
        raise BilensError(f"--length={length}, expected at most {most}, the positions of the model")


def _texts(
    name: str, tokenizer: Any, length: int, data_dir: TextDir, **options: Any
) -> "bilens.data.Corpus":
    """Load texts in the model's tokens; one process fills the cache, and the others open it."""
    from bilens.processes import this_process

    with this_process().main_process_first():
        corpus = bilens.data.load_documents(
            name, tokenizer, n_ctx=length, data_dir=data_dir, **options
        )
        len(corpus.train)  # tokenized on this first use
        return corpus


def _begin(
    source: str,
    data: tuple[str, ...],
    data_dir: TextDir,
    length: int,
    *,
    output: Path | None,
    n_texts: int,
    held_out: int,
    device: str,
    low_memory: bool,
    ready: Callable[[Any], Any],
) -> "tuple[Any, Any, list[Any], dict[str, torch.Tensor]]":
    """Return a model and its tokenizer, texts to learn from, and texts to measure on by name.

    `output` has to be free, and `ready` raises if the model cannot be converted: both are checked
    before any text is read. At most `n_texts` of each name are to learn from.
    """
    from bilens.inputs import check_folder
    from bilens.processes import from_main_process, this_process
    from bilens.train.run_directory import check_free

    check_folder(data_dir, *data)
    this_process(cpu=device == "cpu")
    if output is not None:
        from_main_process(partial(check_free, output))
    model, tokenizer = _open(source, low_memory=low_memory)
    _check_length(model, length)
    ready(model)
    corpora = [_texts(name, tokenizer, length, data_dir) for name in data]
    # At least one text, however long texts are.
    n_held_out = max(1, held_out // length)
    names = [Path(c.name).name for c in corpora]  # a card shows no folder of this machine
    if len(set(names)) < len(names):
        raise BilensError(f"--data has names {names}, expected each once")
    validation_texts = [c.validation[:n_held_out]["input_ids"] for c in corpora]
    train_texts = [c.train[:n_texts]["input_ids"] for c in corpora]
    validation = dict(zip(names, validation_texts, strict=True))
    return model.to(choose_device(device)), tokenizer, train_texts, validation


def _show(result: Any, output: Path) -> Any:
    """Print the agreement with the original after each stage, and return it."""
    frame = result.frame()
    rows = [
        (stage, text, f"{loss:.4f}", f"{rise:+.4f}", f"{kl:.4f}", f"{top1:.1%}")
        for stage, text, loss, rise, kl, top1 in frame.itertuples(index=False)
    ]
    show_table(("stage", "text", "loss", "rise", "KL", "same top token"), rows, words=2)
    out.print(f"model: {output}")
    return frame
