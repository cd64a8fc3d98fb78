"""The public names: the promised ones, and none by accident."""

import ast
import graphlib
import importlib
import inspect
import subprocess
import sys

import pytest

import bilens
import bilens.analysis
from tests.models import digit_model
from tests.nightly import nightly
from tests.source import SOURCE, nodes_of_files

ROOMS = (
    *("convert", "data", "explore", "kernels", "nn", "nn.language", "read", "read.flow"),
    *("pages", "read.language", "residual", "tensor", "train"),
)


SLOW = ["torch", "huggingface_hub", "plotly", "datasets", "sklearn", "pyarrow", "tokenizers"]
SLOW += ["transformers"]


NAMES = (
    "BilensError BilinearTensor CheckpointError DataError Family NotBilinearError QuadraticForm "
    "ResidualModel Spectrum TensorSVD TokenDirection __version__ bonds circuit class_spectra flow "
    "load register_family task_directions"
)


def test_the_top_level_names():
    assert sorted(bilens.__all__) == NAMES.split()
    assert all(hasattr(bilens, name) for name in bilens.__all__)


@pytest.mark.parametrize("alone", nightly([True, False], [False]))
def test_a_first_session_takes_few_names(tmp_path, monkeypatch, alone):
    """At night in a process of its own, where nothing else has imported a room."""
    digit_model().save_files(tmp_path / "run")
    code = """
import sys
from urllib.request import urlopen
import bilens
run, page = sys.argv[1:]
model = bilens.load(run)
assert bilens.class_spectra(model).vectors.shape[0] == 10
assert "read from its weights" in bilens.pages.report(run, page, data="digits").read_text()
reading = bilens.read.read_classifier(model, bilens.data.load_images("digits"))
assert reading.title in bilens.pages.report([reading], page).read_text()
try:
    bilens.pages.report(run, page, colour="red")
except bilens.BilensError as error:
    assert str(error).startswith("colour is no setting of a report")
else:
    raise AssertionError
address = bilens.explore.explore(run, data="digits", wait=False)
assert "gradio" in urlopen(address).read().decode()
assert bilens.pages.write_report and bilens.explore.explorer
"""
    arguments = ["-c", str(tmp_path / "run"), str(tmp_path / "page.html")]
    if alone:
        subprocess.run([sys.executable, "-c", code, *arguments[1:]], check=True)
        return
    launch = "bilens.explore.Explorer.launch"
    monkeypatch.setattr(launch, lambda self, **how: f"data:text/html,gradio {how}")
    monkeypatch.setattr(sys, "argv", arguments)
    exec(code, {})


def test_a_public_class_has_at_most_twenty_members():
    # Methods and properties, with those of its bases in bilens; fields of a dataclass are its data,
    # and what every Reading has is learned once.
    common = set(dir(bilens.analysis.Reading))
    counts = {}
    for room in ROOMS:
        module = importlib.import_module(f"bilens.{room}")
        for kind in filter(inspect.isclass, (getattr(module, name) for name in module.__all__)):
            bases = [base for base in kind.__mro__ if base.__module__.startswith("bilens")]
            members = {name for base in bases for name in vars(base) if not name.startswith("_")}
            members -= set(getattr(kind, "__dataclass_fields__", ()))
            if issubclass(kind, bilens.analysis.Reading):
                members -= common
            counts[kind.__qualname__] = len(members)
    assert counts["ResidualModel"] > 15
    assert {name: count for name, count in counts.items() if count > 20} == {}


def test_text_goes_in_as_a_string_or_as_ids():
    # By the annotations, which every call is checked against.
    takes = {}
    for room in ("read", "read.flow", "read.language"):
        module = importlib.import_module(f"bilens.{room}")
        for function in filter(inspect.isfunction, (getattr(module, n) for n in module.__all__)):
            for name, parameter in inspect.signature(function).parameters.items():
                if "Int[Tensor, 'time']" in str(parameter.annotation):
                    takes[f"{function.__name__}({name})"] = "str" in str(parameter.annotation)
    for method in (bilens.ResidualModel.ids, bilens.residual.Pass.of):
        parameters = inspect.signature(method).parameters
        takes[method.__qualname__] = "str" in str([*parameters.values()][1].annotation)
    assert len(takes) > 8
    assert [name for name, text in takes.items() if not text] == []


def test_no_two_classes_have_one_name():
    nodes = [node for nodes in nodes_of_files().values() for node in nodes]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


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
    nodes = [node for nodes in nodes_of_files().values() for node in nodes]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
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
    assert bilens.BilinearTensor is importlib.import_module("bilens.tensor").BilinearTensor
    assert bilens.load is importlib.import_module("bilens.models").load
    assert bilens.read is importlib.import_module("bilens.read")
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
            for method, function in vars(member).items():
                # Functions that are defaults of fields have another name.
                is_method = inspect.isfunction(function) and function.__name__ == method
                if is_method and not method.startswith("_"):
                    assert inspect.getdoc(getattr(member, method)), f"{name}.{method}"


def modules_after(*steps):
    """Return the modules that are loaded after each step of one fresh process."""
    code = "\n".join(f"{step}\nprint(*sys.modules)" for step in steps)
    command = [sys.executable, "-c", f"import sys\n{code}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in shown.splitlines()]


def test_importing_is_lazy():
    """Each of the libraries takes a second or more; the mathematics needs three of them."""
    steps = (
        "finders = [*sys.meta_path]; import bilens; assert sys.meta_path == finders",
        "import torch, einops, jaxtyping",
        "from bilens import BilinearTensor; import bilens.tensor.tree",
        "import bilens.data",
    )
    top, libraries, mathematics, data = modules_after(*steps)
    assert "bilens" in top
    assert not set(SLOW) & top
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
    graphlib.TopologicalSorter(graph).prepare()
