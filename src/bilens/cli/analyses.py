"""Commands of registered analyses: their options are the parameters of a function."""

import shlex
from dataclasses import MISSING, dataclass, field, make_dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.text import Text

from bilens.analysis import Analysis, Reading, find_analysis
from bilens.cli.console import Device, ModelName, check_own, choose_device, out, show_table
from bilens.errors import BilensError
from bilens.options import REQUIRED, Option
from bilens.question_files import read_pair_lines
from bilens.sections import ContextLine, ContextList, Table, fact_text, signed
from bilens.settings import Between, check_settings

Files = tyro.conf.UseAppendAction[tuple[Path, ...]]
"""An option that may be given several times."""


@dataclass(frozen=True)
class Exporter:
    """An option that writes the readings of one kind to further files.

    The writer is a function in `bilens.report.exporters` from a reading, a path, a name and the
    model's name. A path has one of the endings, and a folder none.
    """

    writer: str
    name: str = "arrays"
    help: str = "Folder to also write the arrays to, with the numbers as JSON."
    endings: tuple[str, ...] = ()

    def write(
        self, reading: Reading, path: Path, name: str, model: str, **settings: int | None
    ) -> None:
        write = getattr(import_module("bilens.report.exporters"), self.writer)
        write(reading, path, name, model, **settings)


FIGURE = Exporter(
    "write_figure",
    "figure",
    "File to also draw the picture to: a name that ends in .png, .svg or .pdf.",
    (".png", ".svg", ".pdf"),
)
WIDTH = Option(
    "width",
    Annotated[int, Between(200, 2000)] | None,
    None,
    "Width of the figure in points, such as 240 for a column of a paper; labels have 6 points or "
    "more at every width.",
)

EXPORTERS: dict[str, tuple[Exporter, ...]] = {
    "ClassifierReading": (Exporter("write_spectra"),),
    "DeepReading": (Exporter("write_paths"),),
    "BondReading": (Exporter("write_bonds"),),
    "CircuitReading": (FIGURE,),
    "FlowReading": (
        FIGURE,
        Exporter(
            "write_viewer",
            "viewer",
            "Folder to also write the graph to, in the files that circuit-tracer's viewer reads.",
        ),
        Exporter(
            "write_graph",
            "save_graph",
            "File to also write the graph to, as an attribution graph for Neuronpedia.",
            (".json",),
        ),
    ),
}
"""By the name of the type of a reading."""


QUESTION_FILES = {"circuit": "questions", "task-directions": "questions"}
"""The option of an analysis that names a file of questions."""


ENDINGS = ("", ".html", ".json", ".tsv")
"""Of the names of files that a reading is written to; a folder has none."""


class ReadingCommand:
    """The settings of an analysis, with fields of its parameters."""

    analysis: Analysis
    model: str
    output: Path | None
    device: str
    low_memory: bool
    __post_init__ = check_settings

    def check(self) -> None:
        """Raise if its file of questions has a mistake, without an import of torch."""
        if path := getattr(self, QUESTION_FILES.get(self.analysis.name, ""), ""):
            read_pair_lines(path)

    def run(self) -> dict[str, Any]:
        """Read the model, print the reading, and write the files that are asked for."""
        if self.output is not None and self.output.suffix not in ENDINGS:
            raise BilensError(
                f"--output={self.output}: expected PAGE.html, NUMBERS.json, TABLE.tsv or a folder"
            )
        exporters = EXPORTERS.get(self.analysis.hints["return"].__name__, ())
        targets = [(one, path) for one in exporters for path in getattr(self, one.name)]
        for exporter, path in targets:
            if exporter.endings and path.suffix not in exporter.endings:
                option, endings = exporter.name.replace("_", "-"), " or ".join(exporter.endings)
                raise BilensError(f"--{option}={path}: expected a name that ends in {endings}")
        width = getattr(self, "width", None)
        if width is not None and not getattr(self, "figure", ()):
            raise BilensError(
                f"--width={width} is that of a figure; add --figure NAME.pdf, or leave it out"
            )
        if self.output is not None and self.output.suffix == ".html":
            check_own(self.output.with_suffix(".json"), self.output)

        from bilens.figures.paper import require_matplotlib
        from bilens.inputs import check_data, loader
        from bilens.models import load

        if getattr(self, "figure", ()):
            require_matplotlib()
        if data := getattr(self, "data", None):
            check_data(self.model, data, getattr(self, "data_dir", None))
        model = load(self.model, device=choose_device(self.device), low_memory=self.low_memory)
        # vars holds more than the analysis needs, which picks its own by name.
        load_data = loader(model, self.model)
        entry = find_analysis(self.analysis.name)
        reading = entry.run(model, vars(self), load_data, source=self.model)
        show_reading(reading)
        if self.output is not None:
            about = f"{self.command_line()} · {datetime.now().astimezone():%d %B %Y}"
            write_reading(reading, self.output, about)
            out.print(f"written: {self.output}")
        for exporter, path in targets:
            of = Path(self.model).stem
            name = self.output.stem if self.output else of
            settings = {"width": width} if exporter is FIGURE else {}
            exporter.write(reading, path, name, of, **settings)
            out.print(f"written: {path}")
        return reading.record()

    def command_line(self) -> str:
        """Return the command with the options that change its numbers."""
        words = ["bilens", self.analysis.name, self.model]
        for option in self.analysis.options:
            value = getattr(self, option.name)
            if value == option.default:
                continue
            words.append(f"--{option.name.replace('_', '-')}")
            values = value if isinstance(value, tuple) else (value,)
            words += [] if value is True else [",".join(map(str, values))]
        return shlex.join(words)


def command_of(analysis: Analysis) -> type[ReadingCommand]:
    """Return the command of an analysis: a dataclass with its options, for tyro."""
    model_help = "run directory, folder or name of a model of a known family, or .gguf file."
    fields: list[Any] = [("model", Annotated[ModelName, tyro.conf.arg(help=model_help)])]
    output_help = (
        "Also write a page (a name that ends in .html) with the numbers in a .json beside it, the "
        "numbers only (.json), the main table only (.tsv), or a folder with each table as CSV."
    )
    options = [*analysis.options, Option("output", Path | None, None, output_help)]
    for exporter in EXPORTERS.get(analysis.hints["return"].__name__, ()):
        options.append(Option(exporter.name, Files, (), exporter.help))
        options += [WIDTH] if exporter is FIGURE else []
    low_memory_help = (
        "Leave the weights in their files and read those of a layer when it is worked on, for "
        "transformers larger than memory."
    )
    options.append(Option("low_memory", bool, False, low_memory_help))
    # tyro reads names, types, help and defaults from the fields of a class.
    for option in options:
        kind: Any = Annotated[option.type, tyro.conf.arg(help=option.help)]
        default = MISSING if option.default is REQUIRED else option.default
        fields.append((option.name, kind, field(default=default)))
    fields.append(("device", Device, field(default="auto")))
    namespace = {"analysis": analysis}
    command = make_dataclass(analysis.name, fields, bases=(ReadingCommand,), namespace=namespace)
    command.__doc__ = analysis.about
    return command


def show_reading(reading: Reading) -> None:
    """Print the facts, tables and texts of a reading."""
    out.print(", ".join(fact_text(name, value) for name, value in reading.facts()))
    rows = 30
    for section in reading.sections():
        for part in section.parts:
            if isinstance(part, Table):
                table = replace(part, frame=part.frame.head(rows))
                caption = part.caption or section.title
                show_table(table.header, table.rows, caption, words=table.is_word)
                if len(part.frame) > rows:
                    out.print(f"{rows} of {len(part.frame):,} rows; --json and --output have all")
            elif isinstance(part, ContextList):
                out.print(f"\n{part.title}", style="bold", highlight=False)
                for line in part.lines:
                    out.print(coloured(line))


def write_reading(reading: Reading, path: Path, about: str = "") -> None:
    """Write a page, numbers as JSON, a table, or a folder with tables as CSV, by the ending.

    `about` is a line at the top of the page, such as the command.
    """
    from bilens.files import file_names, write_json, written_whole
    from bilens.report import write_report

    # A page is for reading, and the JSON beside it for programs.
    if path.suffix == ".html":
        write_report(path, [reading], title=about or reading.title)
        write_json(path.with_suffix(".json"), reading.record())
    elif path.suffix == ".json":
        write_json(path, reading.record())
    elif path.suffix == ".tsv":
        with written_whole(path) as file:
            reading.frame().to_csv(file, index=False, sep="\t")
    else:
        tables = reading.tables()
        for name, frame in zip(file_names(tables), tables.values(), strict=True):
            with written_whole(path / f"{name}.csv") as file:
                frame.to_csv(file, index=False)
        write_json(path / "reading.json", reading.record())


def coloured(line: ContextLine) -> Text:
    """Return a context for the terminal, coloured by contributions."""
    text = Text(f"{signed(line.value, '#.3g'):>9} ")
    for number, (name, share) in enumerate(line.tokens):
        # Weak contributions stay uncoloured, or every word would be.
        strength = abs(share) / line.strongest
        style = "" if strength < 0.1 else f"{'blue' if share > 0 else 'red'}"
        # Pieces of words join; marks of a space before a word are spaces.
        joined, piece = name.startswith("##") and name != "##", name.removeprefix("##")
        piece = piece.lstrip("▁Ġ") or piece
        text.append("" if joined else " ")
        word = f"[{piece}]" if number == line.focal else piece
        text.append(word, style=f"bold {style}" if strength > 0.5 else style)
    return text
