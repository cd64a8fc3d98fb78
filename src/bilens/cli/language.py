"""`bilens ngrams`, `heads`, `contexts` and `generate`: what one asks of a language model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from bilens.cli.console import DataDir, Device, ModelName, choose_device
from bilens.cli.terminal import out, show_table
from bilens.errors import BilensError
from bilens.files import write_json, written_whole
from bilens.lazy_imports import lazy_import, pd
from bilens.models import load
from bilens.reading import signed
from bilens.train import read_training

if TYPE_CHECKING:
    from bilens.read import language
    from bilens.report import language as pages
    from bilens.report import neuronpedia
    from bilens.report.page import ContextLine
    from bilens.residual import ResidualModel
else:  # transformers takes seconds to import, and `--help` does without it.
    language = lazy_import("bilens.read.language")
    pages = lazy_import("bilens.report.language")
    neuronpedia = lazy_import("bilens.report.neuronpedia")

__all__ = ["Contexts", "Generate", "Heads", "NGrams", "load_language", "trained_on"]


@dataclass(frozen=True)
class NGrams:
    """Print the n-grams of a token from the weights: no text is read.

    Which tokens it follows and which follow it, through the residual stream and through the MLP;
    and the skip-trigrams of each head that end in it, where the MLP is bilinear.

        bilens ngrams runs/grammar --token soup
        bilens ngrams runs/grammar --token rice --minus soup,jam --json

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        token: the token, as the tokenizer spells it.
        minus: tokens whose mean is subtracted from it, separated by commas, in skip-trigrams.
        layer: number of the layer whose heads and MLP count, from 0.
        position: where the tokens stand; only learned and shortformer positions ask for it.
        k: how many of each.
        output: folder to write the tables to as CSV.
    """

    model: ModelName
    token: str
    minus: str = ""
    layer: int = 0
    position: int | None = None
    k: int = 10
    output: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Read and print."""
        model = load_language(self.model, self.device)
        found = language.read_ngrams(
            model,
            direction_of(self.token, self.minus),
            self.layer,
            k=self.k,
            position=self.position,
        )
        frames = {"preceding": found.preceding, "following": found.following}
        frames |= {f"head-{number}": frame for number, frame in enumerate(found.heads)}
        show_frames(frames, self.output, about=f" {found.direction}")
        if found.left_out:
            out.print(found.left_out)
        return {"left_out": found.left_out, **frames}


@dataclass(frozen=True)
class Heads:
    """Print what the heads of a layer do, from the weights: no text is read.

    For each head the pairs of tokens of which one attends to the other most and least, at a
    distance; the outputs that it raises and lowers when it looks at a token; and the singular
    components of the latter. At the end, how much of what heads and MLPs write is read by later
    ones.

        bilens heads runs/grammar --head 1
        bilens heads runs/tinystories --among 2000 --output tables

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        layer: number of the layer, from 0.
        head: number of the head; all of the layer by default.
        distance: how far back the token stands that is attended to.
        position: of the token that looks; only learned and shortformer positions ask for it.
        k: how many of each.
        components: how many singular components.
        among: only this many tokens, the first of the vocabulary, which tokenizers often order by
            frequency; all pairs of 50,000 tokens take a minute a head on two cores.
        output: folder to write the tables to as CSV.
    """

    model: ModelName
    layer: int = 0
    head: int | None = None
    distance: int = 1
    position: int | None = None
    k: int = 10
    components: int = 2
    among: int | None = None
    output: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Read and print."""
        model = load_language(self.model, self.device)
        found = language.read_attention(
            model,
            self.layer,
            heads=None if self.head is None else [self.head],
            k=self.k,
            components=self.components,
            distance=self.distance,
            position=self.position,
            among=None if self.among is None else range(min(self.among, model.vocab_size)),
        )
        frames = {}
        for reading in found.heads:
            name = f"head {self.layer}.{reading.head}"
            if reading.attends is not None:
                frames[f"{name} attends most"] = reading.attends.highest
                frames[f"{name} attends least"] = reading.attends.lowest
            frames[f"{name} raises"] = reading.outputs.highest
            frames[f"{name} lowers"] = reading.outputs.lowest
            frames[f"{name} components"] = reading.components
        frames["composition"] = found.composition.frame(self.k)
        show_frames(frames, self.output)
        return frames


@dataclass(frozen=True)
class Contexts:
    """Print the eigenvectors of a token and the texts in which they are most active.

    The token whose successor is predicted stands in brackets. Colours say what each token
    contributes to the activation: blue where positive, red where negative.

        bilens contexts runs/grammar --token soup
        bilens contexts runs/annealed --token rain --data stories.txt --k 10

    Attributes:
        model: run directory, or folder or name of a bilinear model of a known family.
        token: the output, as the tokenizer spells it.
        minus: tokens whose mean is subtracted from it, separated by commas.
        layer: number of the layer, from 0.
        data: texts to look in; by default those of the training's validation set.
        data_dir: where the data is; see `bilens train language --help`.
        eigenvectors: how many of either sign.
        k: contexts of each.
        neuronpedia: folder to also write them to, as features for Neuronpedia's dashboards.
    """

    model: ModelName
    token: str
    minus: str = ""
    layer: int = 0
    data: str | None = None
    data_dir: DataDir = None
    eigenvectors: int = 3
    k: int = 5
    neuronpedia: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Read and print."""
        model = load_language(self.model, self.device)
        corpus = language.corpus_for(model, self.data or trained_on(self.model), self.data_dir)
        reading = language.read_direction(
            model,
            corpus,
            direction_of(self.token, self.minus),
            self.layer,
            eigenvectors=self.eigenvectors,
            k=self.k,
        )
        found = []
        for value, some in zip(reading.spectrum.values.tolist(), reading.contexts, strict=True):
            out.print(f"\neigenvalue {signed(value, '.4g')}", style="bold", highlight=False)
            lines = [pages.context_line(model, one) for one in some]
            for line in lines:
                out.print(coloured(line))
            found.append({"eigenvalue": value, "contexts": [asdict(line) for line in lines]})
        if self.neuronpedia is not None:
            name = Path(self.model).stem
            batch = neuronpedia.feature_batch(model, reading, name=name, data=corpus.name)
            write_json(self.neuronpedia / "batch-0.json", batch)
        return {"direction": str(reading.direction), "layer": self.layer, "eigenvectors": found}


@dataclass(frozen=True)
class Generate:
    """Let a language model continue a text.

        bilens generate runs/grammar --prompt "then ben"

    Attributes:
        model: run directory, folder or name of a model of a known family, .gguf or llama2.c file.
        prompt: how the text begins.
        tokens: at most how many to add.
        temperature: 0 takes the most likely token each time; 1 draws from what the model says.
        seed: of the sampling.
    """

    model: ModelName
    prompt: str = "once upon a time"
    tokens: int = 120
    temperature: float = 0.7
    seed: int = 0
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Write and print."""
        text = language.generate_text(
            load_language(self.model, self.device),
            self.prompt,
            tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        out.print(text)
        return {"text": text}


def load_language(source: str, device: str) -> "ResidualModel":
    """A language model and its tokenizer.

    Raises:
        CheckpointError: one of them is missing or damaged.
        BilensError: the model is of another kind, or there is no such device.
    """
    model: Any = load(source, device=choose_device(device))
    if not hasattr(model, "parts"):
        raise BilensError(
            f"{source} holds {type(model).__name__}, and this command reads language models; "
            "`bilens decompose` and `bilens report` read classifiers"
        )
    return model


def trained_on(source: str) -> str:
    """The data that a run was trained on.

    Raises:
        BilensError: the model does not say.
    """
    if not (Path(source) / "training.json").is_file():
        raise BilensError(
            f"{source} does not say what it was trained on; name texts with --data, such as "
            "--data tinystories or --data FILE.txt"
        )
    return str(read_training(source)["data"])


def direction_of(token: str, minus: str) -> "language.TokenDirection":
    """A direction from a token and others separated by commas."""
    return language.TokenDirection(token, tuple(name for name in minus.split(",") if name))


def show_frames(frames: "dict[str, pd.DataFrame]", folder: Path | None, *, about: str = "") -> None:
    """Print frames, each under its name, and write them as CSV where a folder is given."""
    for name, frame in frames.items():
        rows = [
            [f"{value:z.2f}" if isinstance(value, float) else str(value) for value in row]
            for row in frame.itertuples(index=False)
        ]
        words = sum(frame[column].dtype.kind not in "fi" for column in frame.columns)
        show_table(list(frame.columns), rows, name + about, words=words)
        if folder is not None:
            with written_whole(folder / f"{name.replace(' ', '-')}.csv") as path:
                frame.to_csv(path, index=False)


def coloured(line: "ContextLine") -> Text:
    """A context for the terminal, coloured by contributions."""
    text = Text(f"{signed(line.value, '#.3g'):>9} ")
    for number, (name, share) in enumerate(line.tokens):
        strength = abs(share) / line.strongest
        style = "" if strength < 0.1 else f"{'blue' if share > 0 else 'red'}"
        # Pieces of words join; marks of a space before a word are spaces.
        joined, piece = name.startswith("##") and name != "##", name.removeprefix("##")
        piece = piece.lstrip("▁Ġ") or piece
        text.append("" if joined else " ")
        shown = f"[{piece}]" if number == line.focal else piece
        text.append(shown, style=f"bold {style}" if strength > 0.5 else style)
    return text
