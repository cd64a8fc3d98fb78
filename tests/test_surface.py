"""Names: the promised ones and none by accident, private ones of other libraries, and lists."""

import ast
import graphlib
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import bilens
import bilens.analysis
from bilens.cli.readings import EXPORT_ENDINGS, EXPORTS
from bilens.cli.running import OPTIONAL
from bilens.cli.training import train_images, train_language
from bilens.convert.processing import STEPS
from bilens.data.corpus import LANGUAGES
from bilens.data.image_sets import KNOWN
from bilens.data.texts import HUB, SUFFIXES
from bilens.nn.layers import ACTIVATIONS, GATES
from bilens.nn.settings import ATTENTIONS, AttentionNorm, GateName, LanguageSettings, MlpName
from bilens.options import StepName
from bilens.train.settings import PRESETS, SCHEDULES, PresetName, ScheduleName, Tracker
from tests.command_line import ROOT, python
from tests.families import tiny
from tests.models import digit_model, digits
from tests.nightly import nightly
from tests.source import SOURCE, all_nodes, nodes_of_files

ROOMS = ["circuits", "convert", "data", "explore", "flows", "images", "kernels", "language", "nn"]
ROOMS += ["nn.language", "pages", "tensor", "train", "transformer"]
SLOW = ["torch", "huggingface_hub", "matplotlib", "datasets", "sklearn", "pyarrow", "tokenizers"]
SLOW += ["transformers"]
NAMES = (
    "BilensError BilinearTensor CheckpointError DataError Family NotBilinearError QuadraticForm "
    "ResidualModel Spectrum TensorSVD TokenDirection __version__ bonds certify circuit "
    "class_spectra diff flow lens load load_graph register_family task_directions"
)


FIRST_SESSION = """
import sys
from urllib.request import urlopen
import bilens
run, page = sys.argv[1:]
model = bilens.load(run)
assert bilens.class_spectra(model).vectors.shape[0] == 10
assert "read from its weights" in bilens.pages.report(run, page, data="digits").read_text()
reading = bilens.images.read_classifier(model, bilens.data.load_images("digits"))
assert reading.title in bilens.pages.report([reading], page).read_text()
try:
    bilens.pages.report(run, page, colour="red")
except bilens.BilensError as error:
    assert str(error).startswith("colour is no setting of a report")
else:
    raise AssertionError
address = bilens.explore.explorer(run, data="digits").launch(wait=False)
assert "Draw on the sheet" in urlopen(address).read().decode()
assert bilens.pages.write_report
"""


def public(*rooms):
    """Return what the modules of some rooms list as their names."""
    modules = [importlib.import_module(f"bilens.{room}") for room in rooms]
    return [getattr(module, name) for module in modules for name in module.__all__]


def test_the_top_level_names():
    assert sorted(bilens.__all__) == NAMES.split()
    assert all(hasattr(bilens, name) for name in bilens.__all__)


@pytest.mark.long
@pytest.mark.parametrize("alone", nightly([True, False], [False]))
def test_a_first_session_takes_few_names(tmp_path, monkeypatch, alone):
    """At night in a process of its own, where nothing else has imported a room."""
    digit_model().save_files(tmp_path / "run")
    arguments = ["-c", str(tmp_path / "run"), str(tmp_path / "page.html")]
    if alone:
        python("-c", FIRST_SESSION, *arguments[1:])
        return
    launch = "bilens.explore.app.Explorer.launch"
    monkeypatch.setattr(launch, lambda self, **how: f"data:text/html,Draw%20on%20the%20sheet {how}")
    monkeypatch.setattr(sys, "argv", arguments)
    exec(FIRST_SESSION, {})


def test_a_public_class_has_at_most_twenty_members():
    # Fields of a dataclass are its data, and what every Reading has is learned once.
    counts = {}
    for kind in filter(inspect.isclass, public(*ROOMS)):
        bases = [base for base in kind.__mro__ if base.__module__.startswith("bilens")]
        members = {name for base in bases for name in vars(base) if not name.startswith("_")}
        members -= set(getattr(kind, "__dataclass_fields__", ()))
        if issubclass(kind, bilens.analysis.Reading):
            members -= set(dir(bilens.analysis.Reading))
        counts[kind.__qualname__] = len(members)
    assert counts["ResidualModel"] > 15
    assert {name: count for name, count in counts.items() if count > 20} == {}


def test_text_goes_in_as_a_string_or_as_ids():
    # By the annotations, which every call is checked against.
    takes = {}
    for function in filter(inspect.isfunction, public("images", "flows", "circuits", "language")):
        for name, parameter in inspect.signature(function).parameters.items():
            if "Int[Tensor, 'time']" in str(parameter.annotation):
                takes[f"{function.__name__}({name})"] = "str" in str(parameter.annotation)
    for method in (bilens.ResidualModel.ids, bilens.transformer.Pass.of):
        parameters = inspect.signature(method).parameters
        takes[method.__qualname__] = "str" in str([*parameters.values()][1].annotation)
    assert len(takes) > 6
    assert [name for name, text in takes.items() if not text] == []


def test_a_path_goes_in_as_text_too():
    unlike = []
    for function in filter(inspect.isfunction, public(*ROOMS)):
        for name, parameter in inspect.signature(function).parameters.items():
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            if Path in kinds and str not in kinds:
                unlike.append(f"{function.__name__}({name})")
    assert unlike == []


def test_text_is_written_to_like_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = bilens.pages.new_figure()[0]
    bilens.pages.save_figure(figure, "figure.svg")
    bilens.pages.write_page("page.html", "title", "", [], [])
    bilens.convert.save_model("model", tiny("llama"), None)
    brief = bilens.train.ClassifierTraining(epochs=1)
    config = bilens.nn.ClassifierConfig(64, 10, 4)
    bilens.train.train_classifier(config, digits(), brief, "run")
    bilens.train.train_classifiers(config, digits(), brief, [0], "runs")
    names = ["figure.svg", "page.html", "model", "run", "runs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


PARTICIPLES = (
    "asked both drawn found given kept known moved named said shown taken told used wanted"
)


def test_local_variables_are_nouns():
    """They say what a thing is, not what was done to it."""
    wrong = set()
    for path, nodes in nodes_of_files().items():
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        names = (x for f in functions for x in ast.walk(f) if isinstance(x, ast.Name))
        stored = (x for x in names if isinstance(x.ctx, ast.Store) and x.id in PARTICIPLES.split())
        wrong |= {f"{path.name}:{x.lineno} {x.id}" for x in stored}
    assert sorted(wrong) == []


def test_no_two_classes_have_one_name():
    names = Counter(node.name for node in all_nodes() if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def does_something(method):
    """Return whether a method is more than abstract, or a default that reads no data."""
    marks = {mark.id for mark in method.decorator_list if isinstance(mark, ast.Name)}
    body = [x for x in method.body if not isinstance(getattr(x, "value", None), ast.Constant)]
    own = [x for x in ast.walk(method) if isinstance(x, ast.Attribute)]
    reads = any(isinstance(x.value, ast.Name) and x.value.id in ("self", "cls") for x in own)
    return "abstractmethod" not in marks and (len(body) > 1 or reads)


def names_above(node):
    """Return the names of a class's bases, without their parameters."""
    bases = [getattr(base, "value", base) for base in node.bases]
    return [base.id for base in bases if isinstance(base, ast.Name)]


def test_no_method_that_does_something_is_overridden():
    """What a method does is seen where it is, as in Equinox: a class is abstract or final."""
    classes = {node.name: node for node in all_nodes() if isinstance(node, ast.ClassDef)}
    methods = {
        name: {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
        for name, node in classes.items()
    }
    overridden = []
    for name, node in classes.items():
        above = names_above(node)
        while above:
            base = above.pop()
            if base in classes:
                above += names_above(classes[base])
                for method in methods[name].keys() & methods[base].keys():
                    if not method.startswith("__") and does_something(methods[base][method]):
                        overridden.append(f"{name}.{method}, of {base}")
    assert overridden == []


def test_names_come_from_their_rooms_and_unknown_ones_are_said():
    module_of = importlib.import_module
    assert bilens.BilinearTensor is module_of("bilens.tensor").BilinearTensor
    assert bilens.load is module_of("bilens.models").load
    assert bilens.images is module_of("bilens.images")
    with pytest.raises(AttributeError, match="module 'bilens' has no attribute 'lode'"):
        bilens.lode  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_of_a_room_and_their_methods_are_explained(room):
    module = importlib.import_module(f"bilens.{room}")
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name))
    for name in module.__all__:
        member = getattr(module, name)
        explains = inspect.isclass(member) or inspect.isfunction(member)
        assert not explains or member.__doc__, name
        if inspect.isclass(member) and member.__module__.startswith("bilens"):
            for method, function in inspect.getmembers(member, inspect.isfunction):
                # Functions that are defaults of fields have another name.
                if method in vars(member) and function.__name__ == method and method[0] != "_":
                    assert inspect.getdoc(function), f"{name}.{method}"


def modules_after(*steps):
    """Return the modules that are loaded after each step of one fresh process."""
    code = "\n".join(f"{step}\nprint(*sys.modules)" for step in ("import sys", *steps))
    _, *shown = python("-c", code).stdout.splitlines()
    return [set(line.split()) for line in shown]


def test_importing_is_lazy():
    """Each of the libraries takes a second or more; the mathematics needs three of them."""
    steps = (
        "finders = [*sys.meta_path]; import bilens; assert sys.meta_path == finders",
        # Annotations, which the help of a command reads.
        "import bilens.options, bilens.settings",
        "import torch, einops, jaxtyping",
        "from bilens import BilinearTensor; import bilens.tensor.tree",
        "import bilens.data",
    )
    top, annotations, libraries, mathematics, data = modules_after(*steps)
    assert "bilens" in top
    assert not {*SLOW, "numpy", "jaxtyping"} & annotations
    packages = {name.partition(".")[0] for name in mathematics - libraries}
    assert packages - set(sys.stdlib_module_names) == {"bilens"}
    assert not set(SLOW[3:]) & data


def test_no_module_imports_itself_through_others():
    # Lazy imports count too: a circle that is hidden by them is still one.
    modules = {}
    for path, nodes in nodes_of_files().items():
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = nodes
    graph: dict[str, set[str]] = {}
    for name, nodes in modules.items():
        names = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & modules.keys() or {node.module}
            elif isinstance(node, ast.Constant) and "bilens." in str(node.value):
                names.add(node.value)
        graph[name] = names & modules.keys() - {name}
    # The last line of a cell shows a reading, whose page is imported then: the one way up.
    graph["bilens.analysis"].remove("bilens.pages.layout")
    graphlib.TopologicalSorter(graph).prepare()


PRIVATE_NAMES = {
    "torch 2.13": "_C _global_forward_hooks _global_forward_pre_hooks",
    "tensors of torch 2.13": "_is_view",
    "modules of torch 2.13": "_forward_hooks _forward_pre_hooks _compiled_call_impl",
    "hooks that take keywords in torch 2.13": (
        "_forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs"
    ),
    "what no_grad calls in a TorchFunctionMode of torch 2.13": "_set_grad_enabled",
    "the Trainer of transformers 5.23: the sum since the last record": "_tr_loss",
    "configurations of transformers 5.23": "_attn_implementation",
    "cached_file of transformers 5.23": "_raise_exceptions_for_missing_entries",
    "modules that accelerate 1.15 has dispatched": "_hf_hook",
    "huggingface_hub 1.0; named tuples of Python": "_hub_mixin_config _replace",
}
"""By the version of the library that has them; a new one may take them away."""


def private_names() -> Iterator[tuple[str, str]]:
    """Yield private names that the package uses and does not define, and where."""
    defined: set[str] = set()
    for node in all_nodes():
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Subscript(slice=ast.Constant(value=name)):
                defined.add(str(name))
            case ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            # Of the package's own objects; one of another library is stored to through a name.
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                defined.add(name)
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            name = getattr(node, "attr", "")
            if isinstance(node, ast.keyword):
                name = node.arg or ""
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "vars"):
                name = next((str(a.value) for a in node.args if isinstance(a, ast.Constant)), "")
            if name.startswith("_") and not name.startswith("__") and name not in defined:
                yield name, f"{path.relative_to(SOURCE)}:{node.lineno}"


def test_every_private_name_of_another_library_is_listed():
    used, listed = {*private_names()}, {*" ".join(PRIVATE_NAMES.values()).split()}
    assert [place for name, place in used if name not in listed] == []
    assert listed <= {name for name, _ in used}
    # `model.__class__ = ...` of objects that other libraries made.
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert not stored or node.attr != "__class__" or path.name == "lazy_imports.py"


STUDIES = ("experiments", "benchmarks", "docs")


def documented():
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: (bilens\S*)$", pages, re.MULTILINE))


def is_public(name):
    """Return whether a dotted name is listed by a module, or stands on a page without a list."""
    module, _, last = name.rpartition(".")
    if not module or last.startswith("__") or name in documented():
        return True
    listed = getattr(importlib.import_module(module), "__all__", ())
    return last in listed or (not listed and module in documented() and last[0] != "_")


def imported(nodes):
    """Yield dotted names of bilens that a file imports, or takes from the package."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bilens":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == "bilens")
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("bilens."):
            yield re.match(r"bilens(\.[a-z]\w*(?=\.))?\.\w+", ast.unparse(node) + ".")[0]


def hidden(nodes):
    """Yield names with an underscore that a file takes from other objects than its own."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield from re.findall("^_(?!fields|asdict|replace)[a-z]\\w*", node.attr)


def test_studies_import_public_names_only():
    kinds, found = (ast.FunctionDef, ast.ClassDef), []
    defined = {node.name for node in all_nodes() if isinstance(node, kinds)}
    for path in (p for name in STUDIES for p in sorted((ROOT / name).rglob("*.py"))):
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        names = {name for name in imported(nodes) if not is_public(name)}
        names |= {*hidden(nodes)} & defined - own
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not found, "\n".join(found)


HOWTO = ROOT / "docs" / "howto"
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
    "images in help": (train_images, {*KNOWN, "digits"}),
    "texts in help": (train_language, {*HUB, *LANGUAGES}),
    "kinds of files in help": (train_language, {s.split(".")[1] for s in SUFFIXES} - {"txt"}),
    "presets in help": (train_language, {*PRESETS}),
    "attentions in help": (LanguageSettings, {*ATTENTIONS}),
    "MLPs in help": (LanguageSettings, {*get_args(MlpName)}),
    "images on the page": (HOWTO / "images.md", {*KNOWN, "digits"}),
    "presets on the page": (HOWTO / "language.md", {*PRESETS}),
}
"""By what they name: a text that lists names for readers, and the names of the tables."""


@pytest.mark.parametrize("name", TYPES)
def test_a_type_has_the_names_of_its_table(name):
    kind, table = TYPES[name]
    assert {*get_args(kind)} == table


@pytest.mark.parametrize("name", LISTS)
def test_a_text_has_the_names_of_its_table(name):
    place, table = LISTS[name]
    text = place.read_text() if isinstance(place, Path) else place.__doc__
    pattern = r"`([^`\n]+)`" if isinstance(place, Path) else r"[\w-]+"
    assert table <= {*re.findall(pattern, text)}


def test_every_activation_is_that_of_a_gate_or_an_mlp():
    assert {*ACTIVATIONS} <= {*get_args(GateName), *get_args(MlpName)}


def test_endings_of_files_are_in_the_help_of_their_options():
    options = {option.name: option for row in EXPORTS.values() for option in row}
    for name, endings in EXPORT_ENDINGS.items():
        if len(endings) > 1:
            assert all(ending in options[name].help for ending in endings), name
