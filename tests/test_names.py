"""Names that are listed beside the table that defines them are those of the table."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from bilens.cli.readings import EXPORT_ENDINGS, EXPORTS
from bilens.cli.running import OPTIONAL
from bilens.cli.training import train_images, train_language
from bilens.convert.processing import STEPS
from bilens.data.corpus import LANGUAGES
from bilens.data.images import KNOWN
from bilens.data.texts import HUB, SUFFIXES
from bilens.nn.layers import ACTIVATIONS, GATES
from bilens.nn.settings import ATTENTIONS, AttentionNorm, GateName, LanguageSettings, MlpName
from bilens.options import StepName
from bilens.train.settings import PRESETS, SCHEDULES, PresetName, ScheduleName, Tracker

DOCS = Path(__file__).parents[1] / "docs" / "howto"
TYPES: dict[str, tuple[Any, set[str]]] = {
    "presets": (PresetName, {*PRESETS}),
    "schedules": (ScheduleName, {*SCHEDULES}),
    "steps": (StepName, {*STEPS}),
    "gates": (GateName, {*GATES.values(), "identity", "swish"}),
    "MLPs": (MlpName, {*GATES} | {"relu", "relu2", "gelu"}),
    "norms of attention": (AttentionNorm, {n for kind in ATTENTIONS.values() for n in kind.norms}),
    "trackers": (Tracker, {n for n in OPTIONAL if OPTIONAL[n][1] == f"--report-to {n}"} | {"none"}),
}
"""By what they name: a type of names, and the names of the tables."""
LISTS: dict[str, tuple[Any, set[str]]] = {
    "images in help": (train_images, {*KNOWN, "digits", "modular-59"}),
    "texts in help": (train_language, {*HUB, *LANGUAGES}),
    "kinds of files in help": (train_language, {s.split(".")[1] for s in SUFFIXES} - {"txt"}),
    "presets in help": (train_language, {*PRESETS}),
    "attentions in help": (LanguageSettings, {*ATTENTIONS}),
    "MLPs in help": (LanguageSettings, {*get_args(MlpName)}),
    "images on the page": (DOCS / "images.md", {*KNOWN, "digits", "modular-59"}),
    "presets on the page": (DOCS / "language.md", {*PRESETS}),
}
"""By what they name: a text that lists names for readers, and the names of the tables."""


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_the_names_of_its_table(name):
    kind, table = TYPES[name]
    assert {*get_args(kind)} == table


@pytest.mark.parametrize("name", LISTS)
def test_a_text_has_the_names_of_its_table(name):
    place, table = LISTS[name]
    if isinstance(place, Path):
        absent = {n for n in table if f"`{n}`" not in place.read_text()}
    else:
        words = {*re.findall(r"[\w-]+", place.__doc__)}
        absent = table - words
    assert not absent, place


def test_every_activation_is_that_of_a_gate_or_an_mlp():
    assert {*ACTIVATIONS} <= {*get_args(GateName), *get_args(MlpName)}


def test_endings_of_files_are_in_the_help_of_their_options():
    options = {option.name: option for row in EXPORTS.values() for option in row}
    for name, endings in EXPORT_ENDINGS.items():
        if len(endings) > 1:
            assert all(ending in options[name].help for ending in endings), name
