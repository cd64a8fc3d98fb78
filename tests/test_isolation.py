"""A result does not depend on what ran before it or beside it, and a module stays as it was."""

import gc
import py_compile
import signal
import time
import zipfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

import bilens
from bilens.analyses import language
from bilens.circuits import patch
from bilens.errors import BilensError
from bilens.flows import Question, remove
from bilens.images.chain import accuracy, predict
from bilens.language.contexts import generate_text
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.families import FAMILIES
from tests.families import tiny
from tests.models import TOKENS, random_text
from tests.nightly import nightly
from tests.transformer.test_intact import rotating

pytestmark = pytest.mark.long

LENGTH = 8
QUESTIONS = []
for seed in range(4):
    first = random_text(LENGTH, seed)
    second = first.clone()
    second[3] = (first[3] + 7) % 30
    QUESTIONS.append(Question(first, "t5", ("t6",), second, "one"))
TEXT, OTHER = QUESTIONS[0].text, QUESTIONS[0].against


def numbers(*values):
    """Return tensors and numbers as one row."""
    return torch.cat([torch.as_tensor(x, dtype=torch.float64).flatten() for x in values])


def traced(view):
    made = Pass.of(view, TEXT)
    return numbers(made.stream, made.logits, *map(made.pattern, range(view.n_layers)))


def flows(view, **options):
    return numbers([node.flow for node in bilens.flow(view, TEXT, "t5", **options).nodes])


def circuit(view):
    # The model answers each question of a direction.
    direction = {"token": "", "minus": (), "vector": view.direction("t5", minus="t6")}
    asked = [replace(one, **direction) for one in QUESTIONS]
    (found,) = bilens.circuit(view, asked, level="parts").circuits
    effects = [(effect.noising, effect.denoising) for effect in found.effects]
    return numbers(found.mask, found.measured.restored.value, found.measured.left.value, effects)


def patched(view):
    effects = patch(view, TEXT, "t5", minus="t6", against=OTHER)
    return numbers(effects.change, effects.noising, effects.denoising)


def directions(view):
    found = bilens.task_directions(view, QUESTIONS)
    return numbers(found.share, found.r2)


def removed(view):
    flow = bilens.flow(view, TEXT, "t5", labels=0)
    nodes = [node for node in flow.nodes if node.is_removable]
    return numbers([remove(view, flow, [node]).actual for node in nodes[:3]])


def labelled(view):
    nodes = bilens.flow(view, TEXT, "t5", against=OTHER, ablate=4).nodes
    tokens = [view.token(name) for node in nodes for name in (node.raises or ())]
    return numbers(tokens, [node.measured or 0.0 for node in nodes])


def generated(view):
    text = generate_text(view, "t3 t4 t5", tokens=8, temperature=0)
    return numbers([view.token(word) for word in text.split()])


READINGS = {
    "trace": traced,
    "flow": partial(flows, labels=0),
    "flow of two texts": partial(flows, against=OTHER, labels=0),
    "circuit": circuit,
    "patch": patched,
    "task directions": directions,
    "removal": removed,
    "labels": labelled,
    "generation": generated,
}
MODELS = {
    "llama": partial(tiny, "llama"),
    "own": partial(tiny, "own-rms"),
    # Dropout everywhere, if a model is in training mode.
    "gpt2": partial(tiny, "gpt2"),
    "dynamic": partial(rotating, "dynamic"),
    "longrope": partial(rotating, "longrope"),
    "dynamic-gemma3": partial(rotating, "dynamic", "gemma3"),
    "norms of queries": partial(tiny, "qwen3"),
    "fused": partial(tiny, "phi3"),
}
DAILY = [("llama", name) for name in READINGS]
DAILY += [("own", "circuit"), ("own", "generation"), ("gpt2", "flow"), ("gpt2", "circuit")]
DAILY += [("dynamic", name) for name in READINGS if name != "removal"]
DAILY += [("longrope", "patch"), ("dynamic-gemma3", "flow of two texts")]
DAILY += [(name, "flow of two texts") for name in ("gpt2", "norms of queries", "fused")]
EACH = nightly([(model, reading) for model in MODELS for reading in READINGS], DAILY)


def view_of(model):
    return ResidualModel(model, TOKENS)


def of_fresh(name, reading):
    return READINGS[reading](view_of(MODELS[name]()))


def close(result, expected, rtol=1e-6):
    torch.testing.assert_close(result, expected, rtol=rtol, atol=1e-7)


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS += tuple(f"{kind}_with_kwargs" for kind in HOOKS)


def state(model):
    """Return all of a module that a reading could change."""
    modules = dict(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "modes": {name: module.training for name, module in modules.items()},
        "forwards": [name for name, module in modules.items() if "forward" in vars(module)],
        "hooks": [[*getattr(module, kind)] for module in modules.values() for kind in HOOKS],
        "buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()},
        "lengths": [int(getattr(module, "max_seq_len_cached", 0)) for module in modules.values()],
        "devices": {parameter.device for parameter in model.parameters()},
        "weights": [id(parameter) for parameter in model.parameters()],
    }


@torch.no_grad()
def longer_text(model):
    model(torch.arange(1, 13)[None])


@torch.no_grad()
def shorter_text(model):
    longer_text(model)
    model(torch.arange(1, 4)[None])


def training(model):
    model.train()
    # Some parts may be frozen in evaluation mode.
    list(model.modules())[3].eval()


def other_attention(model):
    if hasattr(model, "set_attn_implementation") and not hasattr(model, "embed_text"):
        model.set_attn_implementation("eager")


BEFORE = {
    "a longer text": longer_text,
    "a longer and a shorter text": shorter_text,
    "training": training,
    "another attention": other_attention,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(("name", "reading"), EACH)
def test_a_result_is_that_of_a_fresh_model_and_the_module_stays(name, reading, before):
    model = MODELS[name]()
    view = view_of(model)
    BEFORE[before](model)
    # Two functions of attention round differently.
    own, rtol = state(model), 1e-3 if before == "another attention" else 1e-6
    close(READINGS[reading](view), of_fresh(name, reading), rtol=rtol)
    assert state(model) == own


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_opened_as_it_is(name):
    model = MODELS[name]()
    training(model)
    own = state(model)
    assert bilens.load(model).model is model
    assert state(model) == own


class Stop(TorchFunctionMode):
    """Raise at one of the operations of torch."""

    def __init__(self, error=None, at=-1):
        super().__init__()
        self.error, self.at, self.count = error, at, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        # What leaves torch's own no_grad in the middle leaves gradients off, whoever uses it.
        is_leaving = function is torch._C._set_grad_enabled
        self.count += not is_leaving
        if self.count == self.at and not is_leaving:
            raise self.error
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize(
    ("name", "reading"), nightly([(n, r) for n in MODELS for r in READINGS], DAILY[: len(READINGS)])
)
def test_an_exception_in_the_middle_leaves_nothing(name, reading, error):
    if (error, reading) == (ValueError, "labels"):
        error = ArithmeticError  # rules take the other for an operation that labels do without
    model = MODELS[name]()
    view = view_of(model)
    training(model)
    own, counting = state(model), Stop()
    READINGS[reading](view)  # the first one also checks attention
    with counting:
        expected = READINGS[reading](view)
    for share in (0.1, 0.4, 0.6, 0.9):
        with pytest.raises(error), Stop(error("here"), int(share * counting.count)):
            READINGS[reading](view)
        assert torch.is_grad_enabled()
        assert state(model) == own
    close(READINGS[reading](view), expected)


def test_an_exception_of_a_users_hook_leaves_nothing():
    model = tiny("llama")
    view = view_of(model)
    own, expected = state(model), READINGS["circuit"](view)

    def fail(*_):
        raise ValueError("of the user")

    hook, kinds = model.model.layers[1].mlp.register_forward_hook, (BilensError, ValueError)
    for reading in READINGS.values():
        with hook(fail), pytest.raises(kinds, match=r"of the user|has a forward hook"):
            reading(view)
        assert state(model) == own
    close(READINGS["circuit"](view), expected)


@contextmanager
def interrupted(seconds):
    """Interrupt the main thread after some time, as Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timers")
def test_ctrl_c_at_any_moment_leaves_nothing():
    model = rotating("dynamic")
    view = view_of(model)
    training(model)
    own, expected = state(model), traced(view)
    start = time.perf_counter()
    traced(view)
    duration = time.perf_counter() - start
    for number in range(100):
        is_of_torch = False
        try:
            with interrupted(duration * (number + 1) / 101):
                traced(view)
        except KeyboardInterrupt:
            pass
        except RuntimeError as error:
            # An interrupt inside torch's own stack of modes takes one that it puts back later.
            is_of_torch = isinstance(error.__context__, KeyboardInterrupt)
            assert is_of_torch
        if is_of_torch:
            gc.collect()
            while _get_current_function_mode_stack():
                _pop_mode()
        # An interrupt inside the exit of torch's own no_grad leaves gradients off for the process.
        torch.set_grad_enabled(True)
        assert state(model) == own
    close(traced(view), expected)


def side_by_side(*functions):
    """Run functions in threads, each until all have run; return the exceptions."""
    errors, done, counts = [], Event(), [0] * len(functions)

    def run(number):
        try:
            while counts[number] == 0 or not done.is_set():
                functions[number]()
                counts[number] += 1
                if min(counts) >= 2:
                    done.set()
        except BaseException as error:
            errors.append(error)
            done.set()

    threads = [Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(("name", "reading"), EACH)
def test_other_threads_run_the_model_as_it_is_during_a_reading(name, reading):
    model, ids = MODELS[name](), random_text(5, seed=9)[None]
    view = view_of(model)
    with torch.no_grad():
        logits = model(ids).logits
    own, expected = state(model), of_fresh(name, reading)

    @torch.no_grad()
    def users_pass():
        close(model(ids).logits, logits)

    assert side_by_side(users_pass, lambda: close(READINGS[reading](view), expected)) == []
    assert state(model) == own


PAIRS = [(reading, reading) for reading in READINGS] + [("trace", "flow of two texts")]
PAIRS += [("flow of two texts", "circuit"), ("patch", "generation")]


@pytest.mark.parametrize("readings", PAIRS)
@pytest.mark.parametrize("name", nightly(MODELS, ("llama", "dynamic")))
def test_two_readings_of_one_model_run_side_by_side(name, readings):
    model = MODELS[name]()
    training(model)
    own, view = state(model), view_of(model)

    def again(reading):
        expected = of_fresh(name, reading)
        return lambda: close(READINGS[reading](view), expected)

    assert side_by_side(*map(again, readings)) == []
    assert state(model) == own


def test_passes_of_two_models_do_not_wait_for_each_other():
    """Each waits in the middle of its pass until the other is there."""
    reached = [Event(), Event()]

    class Meeting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is nn.functional.silu:
                here, other = self.events
                here.set()
                assert other.wait(20)
            return function(*args, **kwargs or {})

    def read(*events):
        view, mode = view_of(tiny("llama")), Meeting()
        mode.events = events
        with mode:
            Pass.of(view, TEXT)

    assert side_by_side(partial(read, *reached), partial(read, *reached[::-1])) == []


def test_layers_that_are_called_by_name_have_the_same_readings():
    model = tiny("llama")
    view = view_of(model)

    class ByName(type(model.model.layers[0])):
        def __call__(self, x, *args, **options):
            return super().__call__(*args, hidden_states=x, **options)

    for layer in model.model.layers:
        layer.__class__ = ByName
    check_all(view)


def check_all(view):
    for name, reading in READINGS.items():
        close(reading(view), of_fresh("llama", name))


class Product(nn.Module):
    """A stack of bilinear layers with parts that training mode changes."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.left(x) * self.right(x)))


def test_a_stack_of_your_own_stays_as_it_is():
    module = Product().train()
    module.right.eval()
    mean, modes = module.norm.running_mean.clone(), [m.training for m in module.modules()]
    stack, x = bilens.load(module), torch.randn(3, 6)
    given = x if stack.embedding() is None else x @ stack.embedding().T
    close(stack(x).double(), stack.layer_tensors()[0](given).double(), rtol=1e-4)
    assert [m.training for m in module.modules()] == modes
    assert torch.equal(module.norm.running_mean, mean)


def test_a_classifier_in_training_mode_is_read_and_stays_as_it_is():
    """A norm with a running mean would learn from the samples of a reading."""
    model = ImageClassifier(ClassifierConfig(16, 3, 6, norm="scalar"))
    x, labels = torch.randn(20, 16), torch.arange(20) % 3
    model(x)  # in training mode, so that the norms have seen something
    weights, frozen = deepcopy(model.state_dict()), deepcopy(model).eval()
    view = bilens.load(model)
    close(predict(view, x), frozen(x))
    assert view.accuracy(x, labels) == accuracy(view, x, labels) == frozen.accuracy(x, labels)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [Product, lambda: tiny("llama")])
def test_a_module_is_not_moved(make):
    module = make()
    assert bilens.load(module, device="cpu")
    module.to("meta")
    with pytest.raises(BilensError, match="own module is on meta; expected its device"):
        bilens.load(module, device="cpu")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}


def paged(view):
    return language.circuit(view, "t1 t2 t3 t4", "t5", against="t1 t7 t3 t4").circuits[0].mask


@pytest.mark.parametrize("reading", READINGS)
def test_readings_under_inference_mode_are_the_same(reading):
    read = paged if reading == "circuit" else READINGS[reading]
    view = view_of(tiny("llama"))
    expected = read(view)
    with torch.inference_mode():
        result, against = read(view), view.W_E.mean(0)
        assert against.is_inference()
        bilens.flow(view, TEXT, "t5", against=against)
    torch.testing.assert_close(result, expected)
    # The module has no tensors of that mode, which would have no gradients.
    assert not any(buffer.is_inference() for buffer in view.model.buffers())


def test_a_folder_is_loaded_under_inference_mode(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with torch.inference_mode():
        view = bilens.load(tmp_path)
    assert traced(view).isfinite().all()


ARCHIVED = """from transformers import LlamaForCausalLM
class ArchivedForCausalLM(LlamaForCausalLM): pass
"""


def test_a_class_without_a_source_is_read_as_any_other(tmp_path, monkeypatch):
    """Of a file of bytecode in an archive."""
    source, code = tmp_path / "archived.py", tmp_path / "archived.pyc"
    source.write_text(ARCHIVED)
    py_compile.compile(str(source), cfile=str(code), optimize=2)
    with zipfile.ZipFile(tmp_path / "models.zip", "w") as archive:
        archive.write(code, code.name)
    monkeypatch.syspath_prepend(tmp_path / "models.zip")
    monkeypatch.setattr("bilens.transformer.families.FAMILIES", dict(FAMILIES))
    kind = import_module("archived").ArchivedForCausalLM
    bilens.register_family(kind.__name__, FAMILIES["LlamaForCausalLM"])
    model = tiny("llama")
    model.__class__ = kind
    check_all(view_of(model))
