"""What the commands on language models share; importing it takes as long as transformers does."""

from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from pandas.api.types import is_numeric_dtype
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from bilens.convert import open_tokenizer
from bilens.data import Corpus, load_corpus
from bilens.errors import BilensError
from bilens.models import load
from bilens.nn.language import LanguageModel
from bilens.read.language import (
    AttentionReading,
    FoundContext,
    Output,
    example_outputs,
    read_attention,
    read_direction,
    read_ngrams,
    salient_bigrams,
)
from bilens.report.language import context_line, write_language_report
from bilens.train import read_training

__all__ = [
    "coloured",
    "frame_table",
    "open_corpus",
    "open_language",
    "output_of",
    "report_language",
]


def open_language(run: Path) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """The model of a run and its tokenizer.

    Raises:
        CheckpointError: one of them is missing or damaged.
        BilensError: the run is of another kind.
    """
    model = load(run)
    if not isinstance(model, LanguageModel):
        raise BilensError(f"{run} holds an image classifier; this command reads language models")
    return model, open_tokenizer(run, model)


def open_corpus(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    run: Path,
    data: str | None,
    data_dir: Path | None,
) -> Corpus:
    """Texts in the model's tokens: those it was trained on, or others."""
    return load_corpus(
        data or read_training(run)["data"],
        n_ctx=model.config.n_ctx,
        vocab_size=model.config.vocab_size,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        data_dir=data_dir,
    )


def output_of(token: str, minus: str) -> Output:
    """An output from a token and others separated by commas."""
    return Output(token, tuple(name for name in minus.split(",") if name))


def frame_table(frame: pd.DataFrame, title: str) -> Table:
    """A frame for the terminal."""
    table = Table(title=Text(title), title_justify="left")
    for name in frame.columns:
        table.add_column(name, justify="right" if is_numeric_dtype(frame[name]) else "left")
    for row in frame.itertuples(index=False):
        table.add_row(*(Text(f"{v:.2f}" if isinstance(v, float) else str(v)) for v in row))
    return table


def coloured(tokenizer: PreTrainedTokenizerBase, found: FoundContext) -> Text:
    """A context for the terminal, coloured by contributions."""
    line = context_line(tokenizer, found)
    text = Text(f"{line.value:+8.2f} ")
    for number, (name, share) in enumerate(line.tokens):
        strength = abs(share) / line.strongest
        style = "" if strength < 0.1 else f"{'blue' if share > 0 else 'red'}"
        piece = name.removeprefix("##") or name
        text.append("" if name.startswith("##") and piece != name else " ")
        shown = f"[{piece}]" if number == line.focal else piece
        text.append(shown, style=f"bold {style}" if strength > 0.5 else style)
    return text


def report_language(
    model: LanguageModel,
    run: Path,
    data_dir: Path | None,
    token: str | None,
    minus: str,
    page: Path,
    title: str,
) -> dict[str, go.Figure]:
    """Read a run and write its page."""
    settings = read_training(run)
    tokenizer = open_tokenizer(run, model)
    corpus = open_corpus(model, tokenizer, run, None, data_dir)
    outputs = [output_of(token, minus)] if token else example_outputs(corpus)
    plain = not model.config.obstacles
    ngrams = [read_ngrams(model, tokenizer, output) for output in outputs] if plain else []
    salient = salient_bigrams(model, tokenizer) if plain else {}
    directions = [read_direction(model, corpus, output) for output in outputs]
    config = model.config
    facts = [
        ("data", str(settings["data"])),
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("blocks", str(config.n_layers)),
        ("width", str(config.d_model)),
        ("heads", str(config.n_heads)),
        ("hidden units", str(config.d_hidden)),
    ]
    return write_language_report(
        page,
        tokenizer,
        salient,
        ngrams,
        directions,
        facts,
        title=title,
        attention=_attention(model, tokenizer),
    )


def _attention(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> AttentionReading | None:
    """The heads of the first block, where two tokens alone say how much one looks at the other."""
    if model.config.attention == "differential":
        return None
    absolute = model.config.positions in ("learned", "shortformer")
    return read_attention(model, tokenizer, position=1 if absolute else None)
