"""`bilens train language`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bilens.cli.console import DataDir, out
from bilens.nn import AttentionName, AttentionNorm, MlpName, NormName, PositionName
from bilens.train.language_settings import PRESETS, LanguageTraining, Precision, Tracker

__all__ = ["TrainLanguage"]


@dataclass(frozen=True)
class Sizes:
    """What differs from the preset's model; see `bilens.nn.language.LanguageConfig`.

    Attributes:
        vocab_size: number of tokens; a tokenizer of at most this size is trained.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: attention heads of a block.
        n_kv_heads: heads of keys and values, which others may share.
        d_hidden: hidden units of each MLP.
        n_ctx: tokens of a text.
        mlp: only bilinear is a tensor; the others are for comparison.
        norm: before attention, MLP and unembedding; n-grams can be read without one.
        positions: how the model knows them.
        attention: only squared and bilinear are tensors; the others are for comparison.
        attention_scale: of each score.
        attention_norm: none leaves squared and bilinear attention the tensors that they are.
        qk_norm: queries and keys divided by their root mean square.
        bias: biases in attention and MLP.
        tie_word_embeddings: embedding and unembedding are one matrix.
    """

    vocab_size: int | None = None
    d_model: int | None = None
    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_hidden: int | None = None
    n_ctx: int | None = None
    mlp: MlpName | None = None
    norm: NormName | None = None
    positions: PositionName | None = None
    attention: AttentionName | None = None
    attention_scale: float | None = None
    attention_norm: AttentionNorm | None = None
    qk_norm: bool | None = None
    bias: bool | None = None
    tie_word_embeddings: bool | None = None


@dataclass(frozen=True)
class Schedule:
    """What differs from the preset's training; see `bilens.train.language.LanguageTraining`.

    Attributes:
        epochs: passes over the training set.
        batch_size: texts in a step, over all processes and accumulated parts.
        learning_rate: at the start; it falls linearly to zero.
        weight_decay: of AdamW.
        warmup: share of the steps in which the learning rate rises.
        accumulate: parts that each process does its share of a batch in.
        precision: bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        save_every: steps between checkpoints.
        report_to: a tracker that gets the metrics too.
        seed: of the weights and the order of the texts.
    """

    epochs: float | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup: float | None = None
    accumulate: int | None = None
    precision: Precision | None = None
    log_every: int | None = None
    save_every: int | None = None
    report_to: Tracker | None = None
    seed: int | None = None


@dataclass(frozen=True)
class TrainLanguage:
    """Train a language model from scratch and save it with its tokenizer.

    The run directory holds the model and the tokenizer as Hugging Face folders do, training.json,
    metrics.jsonl and checkpoints, from the last of which --resume goes on. For several processes
    put `torchrun --nproc-per-node=N -m bilens` in the place of `bilens`.

    Attributes:
        data: grammar (a synthetic language made on the spot), tinystories, or a text, parquet or
            jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        preset: grammar, tiny (minutes on two cores) or paper (a GPU); by default grammar for the
            grammar and tiny for all else.
        output: run directory; by default runs/NAME-OF-THE-DATA.
        resume: go on from where an earlier training in output was stopped.
        device: auto takes a GPU where there is one; cpu leaves it alone.
    """

    data: str = "grammar"
    data_dir: DataDir = None
    preset: Literal["grammar", "tiny", "paper"] | None = None
    output: Path | None = None
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"
    model: Sizes = Sizes()
    training: Schedule = Schedule()

    def run(self) -> None:
        """Train one model."""
        # transformers takes seconds to import, and other commands do without it.
        from accelerate import PartialState  # noqa: PLC0415

        from bilens.data import load_corpus  # noqa: PLC0415
        from bilens.nn.language import LanguageConfig  # noqa: PLC0415
        from bilens.train.language import train_language  # noqa: PLC0415

        preset = PRESETS[self.preset or ("grammar" if self.data == "grammar" else "tiny")]
        config = LanguageConfig(**{**preset.model, **_given(self.model)})
        training: LanguageTraining = replace(preset.training, **_given(self.training))
        run = self.output or Path("runs") / Path(self.data).name
        state = PartialState(cpu=self.device == "cpu")
        # One process fills the cache of token ids, and the others open it.
        with state.main_process_first():
            corpus = load_corpus(
                self.data,
                n_ctx=config.n_ctx,
                vocab_size=config.vocab_size,
                data_dir=self.data_dir,
            )
        # A small corpus may have fewer tokens than were asked for.
        config.vocab_size = len(corpus.tokenizer)
        model, history = train_language(
            config, corpus, training, run, resume=self.resume, use_cpu=self.device == "cpu"
        )
        if state.is_main_process:
            loss = next(r["eval_loss"] for r in reversed(history) if "eval_loss" in r)
            size = sum(parameter.numel() for parameter in model.parameters())
            out.print(
                f"{run}: {size:,} parameters, validation loss {loss:.4f} nats a token",
                highlight=False,
            )


def _given(options: Sizes | Schedule) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}
