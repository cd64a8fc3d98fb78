"""The readings of a model's report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bilens.analyses import check_once, find_analyses, find_analysis
from bilens.analyses.refusals import of_report
from bilens.analysis import Analysis, Reading
from bilens.errors import BilensError
from bilens.flows.summary import is_bilinear, read_summary
from bilens.images.bonds import recorded_settings
from bilens.inputs import loader, names_data
from bilens.language import TokenDirection
from bilens.language.outputs import read_language
from bilens.nn import ImageClassifier
from bilens.options import token_list
from bilens.train.run_directory import last_loss
from bilens.transformer import ResidualModel


def report_readings(
    model: Any, settings: Mapping[str, Any], *, source: str | Path = "", add: Sequence[str] = ()
) -> list[Reading]:
    """Return the readings of a model's report: those of its kind, then added ones.

    The settings are options of `bilens report`, where None stands for the default. `source` is the
    name or folder of the model, which says what data it was trained on.
    """
    of_report({**dict.fromkeys(("token", "minus", "prompt", "against")), **settings})
    args = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(model, ImageClassifier | ResidualModel):
        raise BilensError(
            f"source is {type(model).__name__}, expected a model that bilens.load returns, its "
            "folder or name, or a reading"
        )
    entries = [entry for name in add for entry in find_analyses(name)]
    first: list[Reading] = []
    if isinstance(model, ImageClassifier):
        entries.insert(0, find_analysis("bonds" if len(model.layers) > 1 else "eigenvectors"))
        _check_effects(args, set(), entries)
    check_once(entries)
    if isinstance(model, ResidualModel):
        first = _language_readings(model, args, source, entries)
    own = {"bonds": recorded_settings(source)} if source else {}
    load_data = loader(model, source)
    # The data of a report are those of readings that need them.
    of_data: dict[str, Any] = {
        name: args.pop(name) for name in ("data", "data_dir") if name in args
    }

    def load(settings: Mapping[str, Any], images: bool, optional: bool) -> Any:
        return None if optional else load_data({**settings, **of_data}, images, optional)

    return first + [
        entry.run(model, own.get(entry.name, {}) | args, load, source=source) for entry in entries
    ]


def _check_effects(settings: Mapping[str, Any], names: set[str], extra: Sequence[Analysis]) -> None:
    accepted = names | {option.name for entry in extra for option in entry.options}
    for name, value in settings.items():
        if name in ("data", "data_dir"):
            continue
        if name not in accepted:
            raise BilensError(
                f"{name}={value!r} has no effect in the report of this model; leave it out"
            )
        if value == "":
            raise BilensError(f"{name}='' is empty; leave it out, or give it a value")


def _language_readings(
    model: ResidualModel, settings: Mapping[str, Any], source: str | Path, extra: Sequence[Analysis]
) -> list[Reading]:
    reads_layer = "layer" in settings or is_bilinear(model)
    names = {"token", "minus", "prompt", "against", "layer"} | ({"among"} if reads_layer else set())
    _check_effects(settings, names, extra)
    # Any model has a flow; its loss and contexts need texts.
    corpus = loader(model, source)(settings, False, not names_data(source))
    layer = settings.get("layer", 0)
    model.layer(layer)  # refused before any work if it does not exist
    direction = None
    if "token" in settings:
        direction = TokenDirection(settings["token"], token_list(settings.get("minus", "")))
    texts = settings.get("prompt", ""), settings.get("against", "")
    loss = last_loss(source)
    overview = read_summary(
        model, corpus, texts[0], direction, against=texts[1], training_loss=loss
    )
    if not reads_layer:
        # Weights of one layer among many say little, and take longer than all of the above.
        return [overview]
    among = settings.get("among", 5000)
    question = overview.flow.question
    directions = [TokenDirection(question.tokens[0], question.minus)]
    return [overview, read_language(model, corpus, directions, layer=layer, among=among)]
