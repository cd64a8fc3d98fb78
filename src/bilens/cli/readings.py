"""Commands of analyses, whose options are the parameters of a function, and of tables of flows."""

import inspect
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.text import Text
from tyro.conf import arg

from bilens.analysis import Analysis, Option, Reading
from bilens.cli.commands import Command, flag_of
from bilens.cli.console import (
    DEVICE_HELP,
    Device,
    ModelName,
    check_own,
    choose_device,
    out,
    show_table,
)
from bilens.errors import BilensError
from bilens.options import Positional
from bilens.sections import ContextLine, Table, captioned, fact_text, signed
from bilens.settings import Between
from bilens.shipped import find_model

Files = tyro.conf.UseAppendAction[tuple[Path, ...]]
"""An option that may be given several times."""


ARRAYS = Option(
    "arrays",
    Files,
    (),
    "Folder to also write the arrays to, with the numbers as JSON; for bonds also the smallest cut "
    "that keeps the accuracy, an ordinary run in the folder cut.",
)
FIGURE = Option(
    "figure", Files, (), "File to also draw the picture to: a name that ends in .png, .svg or .pdf."
)
WIDTH = Option(
    "width",
    Annotated[int, Between(200, 2000)] | None,
    None,
    "Width of the figure in points, such as 240 for a column of a paper; labels have 6 points or "
    "more at every width.",
)
VIEWER = Option(
    "viewer",
    Files,
    (),
    "Folder to also write the graph to, in the files that circuit-tracer's viewer reads.",
)
GRAPH = Option(
    "save_graph",
    Files,
    (),
    "File to also write the graph to, as an attribution graph for Neuronpedia.",
)
DIRECTIONS = Option(
    "directions",
    Files,
    (),
    "File to also write the directions of the stream at both cuts to, such as a vector to steer "
    "with: a name that ends in .safetensors.",
)
EXPORTS: dict[str, tuple[Option, ...]] = {
    **dict.fromkeys(("eigenvectors", "paths", "bonds"), (ARRAYS,)),
    **{"circuit": (FIGURE, WIDTH, DIRECTIONS), "flow": (FIGURE, WIDTH, VIEWER, GRAPH)},
    "lens": (FIGURE,),
}
"""Options of analyses that write their readings to further files, by `bilens.pages.exporters`."""
EXPORT_ENDINGS = {
    "figure": (".png", ".svg", ".pdf"),
    "save_graph": (".json",),
    "directions": (".safetensors",),
}
"""Of the names of these files."""
CHAT = Option(
    "chat",
    bool,
    False,
    "Read each text as what a user says in a chat, in the tokenizer's own template, up to where "
    "the model answers.",
)
"""An option of analyses that take texts."""
ENDINGS = ("", ".html", ".json", ".tsv")
"""Of the names of files that a reading is written to; a folder has none."""
OWN = (
    Option(
        "output",
        Path | None,
        None,
        "Also write a page (a name that ends in .html) with the numbers in a .json beside it, the "
        "numbers only (.json), the main table only (.tsv), or a folder with each table as CSV.",
    ),
    Option(
        "low_memory",
        bool,
        False,
        "Leave the weights in their files and read those of a layer when it is worked on, for "
        "transformers larger than memory.",
    ),
    Option("device", str, "auto", DEVICE_HELP),
    Option(
        "device_map",
        str | None,
        None,
        "In place of a device: spread a transformer that is larger than one GPU over all, memory "
        "and files, as accelerate does: auto, balanced or sequential.",
    ),
)
"""Options of every command of an analysis beside its own."""


def analysis_command(entry: Analysis) -> Command:
    """Return the command of an analysis."""
    chat = [CHAT] if {"prompt", "questions"} & {option.name for option in entry.options} else []
    options = [*entry.options, *chat, OWN[0], *EXPORTS.get(entry.name, ())]
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("model", by_name, annotation=ModelName)]
    for one in [*options, *OWN[1:]]:
        kind: Any = Annotated[one.type, arg(help=one.help)]
        parameters.append(
            inspect.Parameter(one.name, by_name, annotation=kind, default=one.default)
        )

    def check(settings: Mapping[str, Any]) -> None:
        entry.check(settings)
        find_model(settings["model"])
        _targets(settings["output"], settings)

    return Command(partial(run_analysis, entry), entry.about, parameters, check)


def run_analysis(
    entry: Analysis,
    model: str,
    *,
    output: Path | None = None,
    device: str = "auto",
    device_map: str | None = None,
    low_memory: bool = False,
    chat: bool = False,
    **settings: Any,
) -> dict[str, Any] | None:
    """Read a model, print the reading, and write the files that are asked for.

    Of several processes the first one prints and writes.
    """
    targets = _targets(output, settings)

    from bilens.inputs import check_data, loader
    from bilens.models import load
    from bilens.progress import is_first_process

    if data := settings.get("data"):
        check_data(model, data, settings["data_dir"])
    place: dict[str, Any] = {"device_map": device_map} if device_map else {}
    if not place or device != "auto":
        place["device"] = choose_device(device)
    network = load(model, low_memory=low_memory, **place)
    if chat:
        from bilens.transformer import ResidualModel, in_chat

        if not isinstance(network, ResidualModel):
            raise BilensError(f"--chat: {model} is no language model; leave it out")
        network = in_chat(network)
    reading = entry.run(network, settings, loader(network, model), source=model)
    if not is_first_process():
        return None
    show_reading(reading)
    if output is not None:
        date = f"{datetime.now().astimezone():%d %B %Y}"
        words = command_line(entry, model, settings) + " --chat" * chat
        write_reading(reading, output, f"{words} · {date}")
        out.print(f"written: {output}")
    for name, path in targets:
        from bilens.pages import exporters

        model_name = Path(model).stem
        labels = {
            "model": model_name,
            "name": output.stem if output else model_name,
            "width": settings.get("width"),
        }
        getattr(exporters, f"write_{name}")(reading, path, **labels)
        out.print(f"written: {path}")
    return reading.record()


def _targets(output: Path | None, settings: Mapping[str, Any]) -> list[tuple[str, Path]]:
    """Return the further files to write, with the name of their option; raise for bad names."""
    if output is not None and output.suffix not in ENDINGS:
        raise BilensError(
            f"--output={output}: expected PAGE.html, NUMBERS.json, TABLE.tsv or a folder"
        )
    names = [option.name for option in (ARRAYS, FIGURE, VIEWER, GRAPH, DIRECTIONS)]
    targets = [(name, path) for name in names for path in settings.get(name, ())]
    for name, path in targets:
        endings = EXPORT_ENDINGS.get(name, (path.suffix,))
        if path.suffix not in endings:
            expected = f"a name that ends in {' or '.join(endings)}"
            raise BilensError(f"{flag_of(name)}={path}: expected {expected}")
    width = settings.get("width")
    if width is not None and not settings["figure"]:
        raise BilensError(
            f"--width={width} is that of a figure; add --figure NAME.pdf, or leave it out"
        )
    if settings.get("answer") or settings.get("generate"):
        for name in filter(settings.get, ("viewer", "save_graph", "width")):
            of_one = f"{flag_of(name)} is of the graph of a single flow"
            raise BilensError(f"{of_one}; leave it out beside --answer and --generate")
    if output is not None and output.suffix == ".html":
        check_own(output)
        check_own(output.with_suffix(".json"), output)
    return targets


def command_line(entry: Analysis, model: str, settings: Mapping[str, Any]) -> str:
    """Return the command with the options that change its numbers."""
    words = ["bilens", entry.name, model]
    for option in entry.options:
        value = settings.get(option.name, option.default)
        if value == option.default:
            continue
        if option.type is not Positional:
            words.append(flag_of(option.name))
        values = value if isinstance(value, list | tuple) else (value,)
        words += [] if value is True else map(str, values)
    return shlex.join(words)


def show_reading(reading: Reading) -> None:
    """Print the facts, tables and texts of a reading; sentences, such as its answer, come last."""
    texts = [fact_text(name, value) for name, value in reading.facts()]
    if numbers := [text for text in texts if text[-1:] != "."]:
        out.print(", ".join(numbers))
    for section in reading.sections():
        # What a page folds away is for looking up.
        rows = 5 if section.folded else 30
        for caption, part in captioned([section]):
            if isinstance(part, Table):
                frame = part.frame
                few = frame.groupby(part.by, sort=False).head(2) if part.by else frame.head(rows)
                table = replace(part, columns=few)
                show_table(table.header, table.rows, caption, words=table.is_word)
                if len(frame) > len(few):
                    out.print(f"{len(few)} of {len(frame):,} rows; --json and --output have all")
            else:
                out.print(f"\n{caption}", style="bold", highlight=False)
                for line in part.lines:
                    out.print(coloured(line))
    if answer := reading.said:
        out.print(answer, soft_wrap=not out.is_terminal)


def write_reading(reading: Reading, path: Path, about: str = "") -> None:
    """Write a page, numbers as JSON, a table, or a folder with tables as CSV, by the ending.

    `about` is a line at the top of the page, such as the command.
    """
    from bilens.files import file_names, write_json, written_whole
    from bilens.pages import write_report

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


def flow_table(
    model: ModelName,
    *,
    questions: str,
    output: Path,
    low_memory: bool = False,
    device: Device = "auto",
) -> dict[str, Any] | None:
    """Split the changes of any number of questions over a model's parts, a row for each.

    Writes files of rows, with both numbers of a question and the flow of each head and MLP, and a
    page: the parts of each task and template, and clusters of questions that the same parts answer.
    Started again after a stop it goes on. Under `torchrun` processes share the questions.

        bilens flow-table model.gguf --questions agreement.parquet --output runs/agreement

    Args:
        questions: file with a question in each line, as for `bilens circuit`, or in each row of
            .jsonl or .parquet; the name of a task that comes with bilens, or of a data set of the
            hub.
        output: folder for the rows, in the folder rows, and for table.html and table.json.
        low_memory: leave the weights in their files and read those of a layer when it is worked on.
    """
    check_own(output / "table.html")
    check_own(output / "table.json", output / "table.html")

    from bilens.flows import flow_table as read
    from bilens.models import load
    from bilens.progress import is_first_process

    network = load(model, device=choose_device(device), low_memory=low_memory)
    table = read(network, questions, output / "rows")
    if not is_first_process():
        return None
    show_reading(table)
    write_reading(table, output / "table.html", f"bilens flow-table {model} {questions}")
    out.print(f"written: {output}")
    return table.record()


def coloured(line: ContextLine) -> Text:
    """Return a context for the terminal, coloured by contributions."""
    text = Text(f"{signed(line.value, '#.3g'):>9} ")
    for i, (name, share) in enumerate(line.tokens):
        # Weak contributions stay uncoloured, or every word would be.
        strength = abs(share) / line.strongest
        style = "" if strength < 0.1 else f"{'blue' if share > 0 else 'red'}"
        # Pieces of words join; marks of a space before a word are spaces.
        is_piece, piece = name.startswith("##") and name != "##", name.removeprefix("##")
        piece = piece.lstrip("▁Ġ") or piece
        text.append("" if is_piece else " ")
        word = f"[{piece}]" if i == line.focal else piece
        text.append(word, style=f"bold {style}" if strength > 0.5 else style)
    return text
