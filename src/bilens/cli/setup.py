"""What the commands that train language models share: sizes, schedule, preset and data."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from bilens.cli.console import DataDir
from bilens.nn import AttentionNorm, NormName, PositionName
from bilens.train.language_settings import PRESETS, LanguageTraining, Precision, Tracker

if TYPE_CHECKING:
    from bilens.data import Corpus
    from bilens.nn.language import LanguageConfig

__all__ = ["Schedule", "Setup", "is_main_process"]


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
        norm: before attention, MLP and unembedding; n-grams can be read without one.
        positions: how the model knows them.
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
    norm: NormName | None = None
    positions: PositionName | None = None
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
        weight_decay: on matrices.
        warmup: share of the steps in which the learning rate rises.
        accumulate: parts that each process does its share of a batch in.
        precision: bf16 or fp16 for mixed precision.
        log_every: steps between records of the loss.
        save_every: steps between checkpoints.
        report_to: a tracker that gets the metrics too.
        optimizer: muon (with AdamW for embeddings and norms), or one that transformers knows, such
            as adamw_torch.
        evaluate_every: steps between validations; by default one after each pass.
        evaluate_texts: texts of a validation; by default all of them.
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
    optimizer: str | None = None
    evaluate_every: int | None = None
    evaluate_texts: int | None = None


@dataclass(frozen=True)
class Setup:
    """What is trained, on what and how.

    Attributes:
        data: grammar (a synthetic language made on the spot), tinystories, or a text, parquet or
            jsonl file, or a folder of them.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
        preset: grammar, tiny (minutes on two cores), paper (a GPU) or 500m (several GPUs); by
            default grammar for the grammar and tiny for all else.
        device: auto takes a GPU where there is one; cpu leaves it alone.
    """

    data: str = "grammar"
    data_dir: DataDir = None
    preset: Literal["grammar", "tiny", "paper", "500m"] | None = None
    device: Literal["auto", "cpu"] = "auto"
    model: Sizes = Sizes()
    training: Schedule = Schedule()

    @property
    def use_cpu(self) -> bool:
        """Whether GPUs are left alone."""
        return self.device == "cpu"

    def prepare(self, **parts: Any) -> "tuple[LanguageConfig, LanguageTraining, Corpus]":
        """The model's settings, the training's and the texts, which one process makes ready.

        Args:
            parts: settings of the model that the command takes itself.
        """
        # transformers takes seconds to import, and other commands do without it.
        from accelerate import PartialState  # noqa: PLC0415

        from bilens.data import load_corpus  # noqa: PLC0415
        from bilens.nn.language import LanguageConfig  # noqa: PLC0415

        preset = PRESETS[self.preset or ("grammar" if self.data == "grammar" else "tiny")]
        config = LanguageConfig(**{**preset.model, **_given(self.model), **parts})
        training = replace(preset.training, **_given(self.training))
        # One process fills the cache of token ids, and the others open it.
        with PartialState(cpu=self.use_cpu).main_process_first():
            corpus = load_corpus(
                self.data,
                n_ctx=config.n_ctx,
                vocab_size=config.vocab_size,
                data_dir=self.data_dir,
            )
        # A small corpus may have fewer tokens than were asked for.
        config.vocab_size = len(corpus.tokenizer)
        return config, training, corpus


def is_main_process() -> bool:
    """Whether this is the process that speaks, of one or several."""
    # transformers takes seconds to import, and other commands do without it.
    from accelerate import PartialState  # noqa: PLC0415

    return bool(PartialState().is_main_process)


def _given(options: Sizes | Schedule) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}
