"""Odd values of every argument of every public function: results, refusals, and all else.

Each function is called as usual and then with one argument replaced, for each argument: by 0, 1,
-1, a half, NaN, infinity, none, an empty text, tensors that are empty, of one row, equal, NaN or
infinite, sequences that are empty, of one or of twice the same. It does so on a model of thirty
tokens and on one of seven. A result has no NaN, or else the call is refused by a BilensError.
"""

import contextlib
import importlib
import inspect
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from math import isnan
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bilens import BilensError, ResidualModel
from bilens.data import Corpus, ImageData, load_images
from bilens.flows import Question, flow
from bilens.images import classifier_bonds, explain, read_bonds, read_classifier
from bilens.language import head_outputs
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.tensor import BilinearTensor, FactoredMatrix, decompile
from bilens.train import ClassifierTraining

ROOMS = ("tensor", "kernels", "data", "transformer", "flows", "circuits", "language", "images")
ROOMS += ("convert", "train", "pages", "explore", "analysis")  # type: ignore[assignment]
NUMBERS = (0, 1, -1, 7, 0.5, float("nan"), float("inf"), -float("inf"), 2**70, True, None, "")
TEXTS = ("", " ", "\0", "nan", "é", "t3", None, 0)


@dataclass(frozen=True)
class Fault:
    """A call that is neither a result nor refused."""

    function: str
    argument: str
    value: str
    what: str


class World:
    """Small samples of everything that public functions take, with so many tokens."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.folder = Path(tempfile.mkdtemp())

    @cached_property
    def texts(self) -> str:
        path = self.folder / "texts.txt"
        words = ("t1 t2", "t3 t4", "t5 t6", "t2 t5")
        path.write_text(
            "<|endoftext|>".join(f"{a} {b} {c}" for a in words for b in words for c in words)
        )
        return str(path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        words = {f"t{number}": number for number in range(self.n_tokens)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")

    def llama(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
        return LlamaForCausalLM(LlamaConfig(vocab_size=self.n_tokens, **sizes, **heads)).eval()

    @cached_property
    def view(self) -> ResidualModel:
        return ResidualModel(self.llama(), self.tokenizer)

    @cached_property
    def own(self) -> ResidualModel:
        torch.manual_seed(0)
        sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "d_hidden": 20, "n_ctx": 16}
        model = LanguageModel(LanguageConfig(vocab_size=self.n_tokens, **sizes)).eval()
        return ResidualModel(model.requires_grad_(False), self.tokenizer)

    @cached_property
    def ids(self) -> Tensor:
        return torch.tensor([1, 3, 2, 5, 4]) % self.n_tokens

    @cached_property
    def corpus(self) -> Corpus:
        generator = torch.Generator().manual_seed(0)
        draw = [torch.randint(1, self.n_tokens, (9,), generator=generator) for _ in range(12)]
        rows: Any = [{"input_ids": ids} for ids in draw]
        return Corpus("toy", self.tokenizer, rows, rows)

    @cached_property
    def questions(self) -> list[Question]:
        pairs = (("t1 t3 t2", "t1 t4 t2"), ("t2 t3 t1", "t2 t4 t1"), ("t5 t3 t2", "t5 t4 t2"))
        return [Question(a, "t5", ("t6",), against=b) for a, b in pairs]

    @cached_property
    def answered(self) -> list[Question]:
        """Questions that the model answers: the likeliest token, and another text."""
        questions = []
        for number in range(12):
            ids = (torch.arange(4) * (number + 2) + number) % self.n_tokens
            other = ids.clone()
            other[1] = (other[1] + 1) % self.n_tokens
            order = self.view.logits(ids[None])[0, -1].argsort(descending=True).tolist()
            questions.append(Question(ids, order[0], (order[-1],), against=other))
        return questions

    @cached_property
    def tensor(self) -> BilinearTensor:
        torch.manual_seed(1)
        return BilinearTensor(torch.randn(6, 5), torch.randn(6, 5), torch.randn(4, 6))

    @cached_property
    def tensors(self) -> list[BilinearTensor]:
        torch.manual_seed(2)
        return [self.tensor, BilinearTensor(*torch.randn(2, 5, 4).unbind(), torch.randn(3, 5))]

    @cached_property
    def data(self) -> ImageData:
        return load_images("digits")

    @cached_property
    def shallow(self) -> ImageClassifier:
        torch.manual_seed(0)
        return ImageClassifier(ClassifierConfig(64, 10, d_model=8)).eval().requires_grad_(False)

    @cached_property
    def deep(self) -> ImageClassifier:
        torch.manual_seed(0)
        config = ClassifierConfig(64, 10, d_model=8, n_layers=2, norm="scalar")
        return ImageClassifier(config).eval().requires_grad_(False)

    def samples(self) -> dict[str, dict[str, Any]]:
        """Return usual arguments of functions by their names."""
        view, own, ids, tensor, tensors = self.view, self.own, self.ids, self.tensor, self.tensors
        x, labels = self.data.test_images[:20], self.data.test_labels[:20]
        spectrum = tensor.interaction(output=0).eigh()
        classes = read_classifier(self.shallow, self.data).spectrum
        bonds = classifier_bonds(self.deep, self.data)
        by_head = {"model": view, "layer": 0}
        asked = {"model": view, "text": ids, "token": view.direction(1 % self.n_tokens, minus=2)}
        both = {**asked, "against": ids.flip(0)}
        one_flow = flow(**both)
        paths = decompile(tensors, torch.eye(3), 4)
        layer_form = own.mlp(0).interaction(own.direction(1))
        pages: dict[str, dict[str, Any]] = {
            "add_legend": {},
            "heat_figure": {
                "values": torch.rand(2, 3),
                "rows": ["a", "b"],
                "columns": ["c", "d", "e"],
                "title": "title",
            },
            "new_figure": {"width": 300, "height": 200, "title": "title"},
            "path_figure": {"by_paths": [(1, 0.2), (3, 0.5)], "full": 0.9},
            "spectrum_figure": {"spectrum": spectrum, "title": "title"},
            "eigenvector_figure": {
                "spectrum": classes[0],
                "x": x,
                "shape": (8, 8),
                "title": "title",
                "k": 2,
            },
            "explanation_figure": {
                "explanation": explain(classes, x[0], k=2),
                "shape": (8, 8),
                "class_names": self.data.class_names,
                "title": "title",
            },
            "tree_figure": {"paths": paths.of(0), "shape": (1, 5), "title": "title"},
        }
        return {
            "bonds": {"tensors": tensors, "directions": torch.eye(3), "metric": torch.eye(5)},
            "cluster": {"vectors": torch.randn(6, 5), "weights": torch.rand(6)},
            "decompile": {"tensors": tensors, "directions": torch.eye(3), "k": 3},
            "function_bonds": {
                "tensors": tensors,
                "directions": torch.eye(3).double(),
                "x": torch.randn(50, 5).double(),
            },
            "with_constant": {"x": torch.randn(3, 4)},
            "bilinear_attention": self.heads() | {"scale": 0.5, "constant": None},
            "resume_attention": self.heads() | {"scale": 0.5},
            "clean": {"text": "one “two” three"},
            "fit_drawing": {"ink": np.eye(8), "data": self.data},
            "load_images": {"name": "digits", "seed": 0},
            "flow": {**both, "ablate": 2, "position": 4},
            "lens": {"flow": one_flow, "node": one_flow.nodes[0]},
            "read_lens": {"model": view, "text": ids, "against": ids.flip(0), "layers": 2},
            "answer_flows": {"model": view, "text": ids, "answer": ids[:2], "against": ids.flip(0)},
            "diff": {
                "base": view,
                "tuned": self.edited(),
                "text": ids,
                "token": 1,
                "against": ids.flip(0),
            },
            "diffs": {"base": view, "tuned": self.edited(), "questions": self.questions},
            "measure": {"model": view, "flow": one_flow, "nodes": one_flow.strongest(2)},
            "remove": {"model": view, "flow": one_flow, "nodes": one_flow.strongest(2)},
            "answered": {"model": view, "questions": self.questions},
            "circuit": {"model": view, "questions": self.answered, "level": "parts", "keep": 0.5},
            "eap_ig": {"model": view, "questions": self.questions, "steps": 2},
            "edit_heads": {"model": self.edited(), "layer": 0, "heads": [1]},
            "patch": {**both, "position": 4},
            "task_directions": {"model": view, "questions": self.questions, "k": 2, "strongest": 2},
            "attention_pairs": {"heads": [0], "k": 2, "distance": 1, **by_head},
            "attention_scores": {**by_head, "distance": 1, "among": [1, 2, 3]},
            "bigram_matrix": {"model": own, "layer": 0, "among": [1, 2, 3]},
            "bigrams": {"model": own, "layer": 0, "k": 2},
            "composition_scores": {"model": view},
            "following": {"model": own, "token": 3, "layer": 0, "k": 2},
            "preceding": {"model": own, "token": 3, "layer": 0, "k": 2},
            "generate_text": {"model": view, "prompt": "t1 t2", "tokens": 3},
            "head_outputs": {**by_head, "among": [1, 2, 3]},
            "output_pairs": {"heads": [0], "k": 2, **by_head},
            "pair_trigrams": {"model": view, "k": 2},
            "read_attention": {**by_head, "heads": [0], "k": 2},
            "read_direction": {
                "model": own,
                "corpus": self.corpus,
                "token": "t3",
                "layer": 0,
                "minus": ["t4"],
                "eigenvectors": 2,
                "k": 2,
            },
            "read_ngrams": {"model": own, "token": "t3", "layer": 0, "minus": ["t4"], "k": 2},
            "read_stream": {"model": view, "text": ids, "position": 3, "layer": 1},
            "skip_trigrams": {"model": own, "token": "t3", "head": 0, "layer": 0, "k": 2},
            "token_components": {
                "model": view,
                "matrix": head_outputs(view, layer=0)[0],
                "sides": ("values", "outputs"),
                "components": 2,
                "k": 2,
            },
            "token_names": {"model": view, "ids": ids},
            "top_contexts": {
                "model": own,
                "spectrum": layer_form.eigh(),
                "texts": ["t1 t2 t3"],
                "layer": 0,
                "k": 2,
            },
            "accurate_ranks": {"model_bonds": bonds, "data": self.data, "drop": 0.1},
            "attack": {
                "model": self.shallow,
                "x": x,
                "labels": labels,
                "mask": torch.randn(64),
                "label": 3,
                "norm": 1.0,
            },
            "certify": {"model": self.shallow, "x": x[:3], "labels": labels[:3]},
            "box_bounds": {"model": self.shallow, "x": x[:3], "classes": labels[:3]},
            "proved_agreement": {"model": self.shallow, "smaller": 3, "x": x[:3], "radii": (0.1,)},
            "class_mask": {"spectrum": classes},
            "class_spectra": {"model": self.shallow, "directions": torch.eye(10)},
            "classifier_bonds": {"model": self.deep, "data": self.data},
            "classifier_function_bonds": {"model": self.deep, "data": self.data},
            "explain": {"spectrum": classes, "x": x[0], "n_classes": 3, "k": 2},
            "held_out": {
                "logits": torch.randn(9, 3),
                "smaller": torch.randn(9, 3),
                "labels": labels[:9] % 3,
            },
            "path_accuracies": {"paths": paths, "data": self.small(), "counts": [1, 2]},
            "read_bonds": {"model": self.deep, "data": self.data, "drop": 0.1},
            "read_classifier": {"model": self.shallow, "data": self.data},
            "read_deep": {"model": self.deep, "data": self.data, "k": 20},
            "shared_by_classes": {"spectrum": classes, "k": 2},
            "shared_by_paths": {"paths": paths},
            "top_inputs": {"spectrum": classes, "x": x, "k": 2},
            "truncation_curve": {"spectrum": classes, "x": x, "labels": labels},
            "load_corpus": {
                "name": self.texts,
                "n_ctx": 8,
                "vocab_size": 60,
                "validation_share": 0.2,
                "seed": 0,
            },
            "load_documents": {
                "name": self.texts,
                "tokenizer": self.tokenizer,
                "n_ctx": 8,
                "shortest": None,
                "validation_share": 0.2,
            },
            "read_texts": {"source": self.texts},
            "train_classifier": {
                "config": ClassifierConfig(5, 3, d_model=4),
                "data": self.small(),
                "training": ClassifierTraining(epochs=1, batch_size=4),
            },
            "train_classifiers": {
                "config": ClassifierConfig(5, 3, d_model=4),
                "data": self.small(),
                "training": ClassifierTraining(epochs=1, batch_size=4),
                "seeds": [0, 1],
            },
            "edit": {
                "model": self.edited(),
                "layer": 0,
                "vectors": torch.ones(1, 16),
                "scale": 0.0,
            },
            "patched": {"model": view, "parts": ["mlp.0"], "against": "t1 t4 t2"},
            "process": {"model": self.llama(), "steps": ["fold_norms"]},
            "give_swish": {"model": self.llama()},
            **pages,
        }

    def heads(self) -> dict[str, Tensor]:
        """Return queries, keys and values."""
        torch.manual_seed(3)
        return {name: torch.randn(1, 2, 5, 4) for name in ("q1", "k1", "v", "q2", "k2")}

    def edited(self) -> ResidualModel:
        """Return a model that may change."""
        return ResidualModel(self.llama(), self.tokenizer)

    def small(self) -> ImageData:
        """Return images of five pixels and three classes."""
        torch.manual_seed(4)
        images, labels = torch.rand(9, 5), torch.arange(9) % 3
        return ImageData("small", images, labels, images, labels, (1, 5), ("a", "b", "c"))

    def objects(self) -> dict[str, Any]:
        """Return objects whose methods are called."""
        spectrum = self.tensor.interaction(output=0).eigh()
        bonds = classifier_bonds(self.deep, self.data)
        return {
            "BilinearTensor": self.tensor,
            "QuadraticForm": self.tensor.interaction(output=[0, 1]),
            "Spectrum": spectrum,
            "TensorSVD": self.tensor.svd(),
            "FactoredMatrix": FactoredMatrix(torch.randn(5, 3), torch.randn(3, 4)),
            "Paths": decompile(self.tensors, torch.eye(3), 4),
            "Bonds": bonds,
            "Cut": bonds.cut(3),
            "ResidualModel": self.view,
            "own": self.own,
            "BondReading": read_bonds(self.deep, self.data, drop=0.2),
        }


METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "BilinearTensor": {
        "interaction": {"output": 0, "minus": 1},
        "contract": {"x": torch.ones(5)},
        "change_basis": {"inputs": torch.eye(5)},
        "with_bias": {"left": torch.ones(6)},
        "inner": {},
        "svd": {},
    },
    "QuadraticForm": {"eigh": {"k": 2}, "apply": {"vectors": torch.ones(2, 5)}},
    "Spectrum": {
        "truncate": {"k": 2},
        "select": {"indices": [0, 1]},
        "outermost": {"k": 2},
        "activations": {"x": torch.ones(2, 5)},
        "effective_rank": {},
    },
    "TensorSVD": {"truncate": {"k": 2}},
    "FactoredMatrix": {
        "rows": {"index": torch.tensor([0, 1])},
        "entries": {"rows": torch.tensor([0, 1]), "columns": torch.tensor([1, 2])},
        "top_entries": {"k": 2},
        "svd": {"k": 2},
        "apply": {"x": torch.ones(2, 4)},
    },
    "Paths": {"truncate": {"k": 2}},
    "Bonds": {"cut": {"ranks": 3}, "certificate": {"ranks": 3}, "error": {"ranks": 3}},
    "Cut": {"coordinates": {"x": torch.rand(2, 64)}, "keep_products": {"k": 3}},
    "ResidualModel": {
        "ids": {"text": "t1 t2"},
        "token": {"name": "t3"},
        "direction": {"token": "t3", "minus": ["t4"]},
        "logits": {"ids": torch.tensor([[1, 2, 3]])},
        "ov": {"layer": 0},
        "qk": {"layer": 0},
        "layer": {"layer": 0},
    },
    "own": {"mlp": {"layer": 0}, "mlp_inputs": {"layer": 0, "ids": torch.tensor([[1, 2, 3]])}},
}
"""Usual arguments of methods, by the name of an object."""


def odd_tensors(usual: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield odd tensors in place of a usual one, each with a name."""
    for axis in range(usual.ndim):
        yield f"empty along axis {axis}", usual.narrow(axis, 0, 0)
        if usual.shape[axis] > 1:
            yield f"one along axis {axis}", usual.narrow(axis, 0, 1)
    first = usual.flatten()[0]
    yield "all equal", first.expand(usual.shape).contiguous()
    yield "zeros", torch.zeros_like(usual)
    if usual.is_floating_point():
        for number in (torch.nan, torch.inf, -torch.inf, 1e30, -1.0):
            changed = usual.clone()
            changed.view(-1)[0] = number
            yield f"{number} within", changed
        yield "all NaN", torch.full_like(usual, torch.nan)
    else:
        yield "-1", torch.full_like(usual, -1)
        yield "large", torch.full_like(usual, 2**40)
    yield "None", None


def odd_values(usual: Any) -> Iterator[tuple[str, Any]]:
    """Yield odd values in place of a usual one, each with a name."""
    if isinstance(usual, np.ndarray):
        for name, value in odd_tensors(torch.from_numpy(usual)):
            yield name, value if value is None else value.numpy()
    elif isinstance(usual, Tensor):
        yield from odd_tensors(usual)
    elif isinstance(usual, str):
        yield from ((repr(text), text) for text in TEXTS)
    elif isinstance(usual, list | tuple):
        for value in ([], list(usual[:1]), 2 * list(usual[:1]), [None], [float("nan")]):
            yield repr(value)[:40], type(usual)(value)
        yield from (("None", None), ("''", ""))
    elif usual is None or isinstance(usual, Number):
        yield from ((repr(number), number) for number in NUMBERS)
    else:
        yield from ((repr(value), value) for value in (None, 0, ""))


def holds_nan(result: Any, depth: int = 4) -> bool:  # noqa: PLR0911  one for each kind
    """Return whether a result holds NaN anywhere."""
    if isinstance(result, Tensor):
        return bool(result.is_floating_point() and result.isnan().any())
    if isinstance(result, np.ndarray):
        return bool(result.dtype.kind == "f" and np.isnan(result).any())
    if isinstance(result, float):
        return isnan(result)
    if isinstance(result, pd.DataFrame):
        return bool(result.select_dtypes("float").isna().any(axis=None))
    if depth == 0 or isinstance(result, torch.nn.Module | Corpus | ImageData | str):
        return False
    if isinstance(result, Mapping):
        return any(holds_nan(part, depth - 1) for part in result.values())
    if isinstance(result, list | tuple | set):
        return any(holds_nan(part, depth - 1) for part in result)
    if is_dataclass(result) and not isinstance(result, type):
        return any(holds_nan(getattr(result, f.name), depth - 1) for f in fields(result))
    return False


PLACED = ("with_constant", "bilinear_attention", "resume_attention")
PLACED += ("BilinearTensor.change_basis", "BilinearTensor.contract")  # type: ignore[assignment]
PLACED += ("QuadraticForm.apply", "FactoredMatrix.apply", "BilinearTensor.with_bias")  # type: ignore[assignment]
"""Operations on tensors that place or multiply NaN as torch does; readings of them refuse it."""
MISSING = ("composition_scores", "read_attention")
"""Tables in which NaN stands for what is not there, as their docstrings say."""


def outcome(call: Callable[[], Any]) -> str:
    """Return "" for a result without NaN, "refused" for a BilensError, or what else came."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call()
            if inspect.isgenerator(result):
                result = list(result)
            if isinstance(result, contextlib.AbstractContextManager):
                with result:
                    pass
    except BilensError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    return "NaN in the result" if holds_nan(result) else ""


SKIPPED = {
    "are no functions": ("Columns Fact"),
    "take a function or a plot, or none": ("counting_operations analysis log_axis styled"),
    "take a reading, whose kinds have tests of their own": (
        "ablation_figure network_figure plot_of report save_figure sections_of shared_figure "
        "truncation_figure write_page write_report contribution corpus_for"
    ),
    "take what another function made": (
        "adjoints_of balanced_bonds edit_mlp_along find_circuit find_cuts find_stages "
        "gradient_effects mask_of nonsense passed verdict"
    ),
    "open or write files, or serve": (
        "flow_table in_chat load_graph explorer make_bilinear open_model open_tokenizer "
        "read_pairs register_family save_model"
    ),
}
"""Functions that are not called, by the reason."""


def functions() -> dict[str, Callable[..., Any]]:
    """Return the public functions by their names."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"bilens.{room}")
        for name in getattr(module, "__all__", ()):
            public = getattr(module, name)
            if callable(public) and not inspect.isclass(public):
                found[name] = public
    return found


def calls(world: World) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield functions and methods with usual arguments."""
    public = functions()
    for name, arguments in world.samples().items():
        if arguments and name in public:
            known = inspect.signature(public[name]).parameters
            yield name, public[name], {k: x for k, x in arguments.items() if k in known}
    objects = world.objects()
    for owner, methods in METHODS.items():
        for name, arguments in methods.items():
            usual = {"other": world.tensor} if name == "inner" else arguments
            yield f"{owner}.{name}", getattr(objects[owner], name), usual


def check(world: World) -> tuple[int, int, list[Fault]]:
    """Return the number of functions and of calls, and those that are neither."""
    n_functions = n_calls = 0
    faults = []
    for name, call, usual in calls(world):
        n_functions += 1
        signature = inspect.signature(call).parameters
        what = outcome(lambda call=call, usual=usual: call(**usual))
        is_missing = name in MISSING and "NaN" in what
        if what and not is_missing and (what != "refused" or world.n_tokens > 7):
            faults.append(Fault(name, "", "as usual", what))
        optional = [key for key, p in signature.items() if p.default is not p.empty]
        for key in {**usual, **dict.fromkeys(o for o in optional if o not in usual)}:
            base = usual.get(key, signature[key].default)
            for value_name, value in odd_values(base):
                n_calls += 1
                changed = {**usual, key: value}
                what = outcome(lambda call=call, changed=changed: call(**changed))
                placed = name in PLACED and isinstance(value, Tensor)
                if "NaN" in what and (placed or name in MISSING):
                    continue
                if what not in ("", "refused"):
                    faults.append(Fault(name, key, value_name, what))
            # Rotary positions change no reading of single tokens.
            optional = isinstance(base, Number | None) and signature[key].default is None
            if optional and key != "position":
                faults += zero_is_none(name, call, usual, key)
    return n_functions, n_calls, faults


def zero_is_none(
    name: str, call: Callable[..., Any], usual: dict[str, Any], key: str
) -> list[Fault]:
    """Return a fault if an optional number of 0 gives the same result as none does."""
    results = []
    for value in (0, None):
        try:
            results.append(call(**{**usual, key: value}))
        except BilensError:
            return []
        except Exception:
            return []
    same = same_numbers(*results)
    return [Fault(name, key, "0", "the result of None")] if same else []


def same_numbers(a: Any, b: Any) -> bool:
    """Return whether two results hold the same numbers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, pd.DataFrame):
        return bool(a.equals(b))
    if is_dataclass(a) and not isinstance(a, type):
        return all(same_numbers(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_numbers, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_numbers(a[k], b[k]) for k in a)
    return a is b or bool(np.all(a == b))
