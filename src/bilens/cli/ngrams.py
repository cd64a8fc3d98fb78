"""`bilens ngrams`, `contexts` and `generate`: what one asks of a language model."""

from dataclasses import dataclass
from pathlib import Path

from bilens.cli.console import DataDir, RunDir
from bilens.cli.terminal import out
from bilens.errors import BilensError

__all__ = ["Contexts", "Generate", "NGrams"]


@dataclass(frozen=True)
class NGrams:
    """Print the n-grams of a token from the weights: no text is read.

    Which tokens it follows and which follow it, through the residual stream and the MLP's
    diagonal; and the skip-trigrams of each head that end in it.

    Attributes:
        run_dir: directory that `bilens train language` wrote.
        token: the token, as the tokenizer spells it.
        minus: tokens to take the mean of away from it, separated by commas, in skip-trigrams.
        k: how many of each.
        output: folder to write the tables to as CSV.
    """

    run_dir: RunDir
    token: str
    minus: str = ""
    k: int = 10
    output: Path | None = None

    def run(self) -> None:
        """Read and print."""
        from bilens.cli.language import frame_table, open_language, output_of  # noqa: PLC0415
        from bilens.read.language import read_ngrams  # noqa: PLC0415

        model, tokenizer = open_language(self.run_dir)
        found = read_ngrams(model, tokenizer, output_of(self.token, self.minus), k=self.k)
        frames = {"preceding": found.preceding, "following": found.following}
        frames |= {f"head-{number}": frame for number, frame in enumerate(found.heads)}
        for name, frame in frames.items():
            out.print(frame_table(frame, f"{name} {found.output}"))
            if self.output:
                self.output.mkdir(parents=True, exist_ok=True)
                frame.to_csv(self.output / f"{name}.csv", index=False)


@dataclass(frozen=True)
class Contexts:
    """Print the eigenvectors of a token and the texts in which they are most active.

    The token whose successor is predicted stands in brackets. Colours say what each token
    contributes to the activation: blue where positive, red where negative.

    Attributes:
        run_dir: directory that `bilens train language` wrote.
        token: the output, as the tokenizer spells it.
        minus: tokens to take the mean of away from it, separated by commas.
        data: texts to look in; by default those of the training's validation set.
        data_dir: where the data is; see `bilens train language --help`.
        eigenvectors: how many of either sign.
        k: contexts of each.
    """

    run_dir: RunDir
    token: str
    minus: str = ""
    data: str | None = None
    data_dir: DataDir = None
    eigenvectors: int = 3
    k: int = 5

    def run(self) -> None:
        """Read and print."""
        from bilens.cli.language import (  # noqa: PLC0415
            coloured,
            open_corpus,
            open_language,
            output_of,
        )
        from bilens.read.language import read_direction  # noqa: PLC0415

        model, tokenizer = open_language(self.run_dir)
        corpus = open_corpus(model, tokenizer, self.run_dir, self.data, self.data_dir)
        reading = read_direction(
            model,
            corpus,
            output_of(self.token, self.minus),
            eigenvectors=self.eigenvectors,
            contexts=self.k,
        )
        for number, value in enumerate(reading.spectrum.values.tolist()):
            out.print(f"\neigenvalue {value:+.4g}", style="bold", highlight=False)
            for found in reading.contexts[number]:
                out.print(coloured(tokenizer, found))


@dataclass(frozen=True)
class Generate:
    """Let a language model go on with a text.

    Attributes:
        run_dir: directory that `bilens train language` wrote.
        prompt: how the text begins.
        tokens: at most how many to add.
        temperature: 0 takes the most likely token each time; 1 draws from what the model says.
        seed: of the drawing.
    """

    run_dir: RunDir
    prompt: str = "once upon a time"
    tokens: int = 120
    temperature: float = 0.7
    seed: int = 0

    def run(self) -> None:
        """Write and print."""
        from bilens.cli.language import open_language  # noqa: PLC0415
        from bilens.read.language import write_on  # noqa: PLC0415

        if self.tokens < 1 or self.temperature < 0:
            raise BilensError(
                f"--tokens={self.tokens} and --temperature={self.temperature}: expected at least "
                "1, and 0 or more"
            )
        model, tokenizer = open_language(self.run_dir)
        text = write_on(
            model,
            tokenizer,
            self.prompt,
            tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        out.print(text, highlight=False, markup=False)
