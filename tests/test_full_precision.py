"""Autocast, the default dtype and the default device change no computation."""

import inspect
import re
from contextlib import contextmanager
from dataclasses import replace

import pandas as pd
import pytest
import torch

import bilens.images
import bilens.tensor
from bilens.analysis import Reading
from bilens.circuits import circuit, eap_ig, edit_heads, patch, task_directions
from bilens.convert import process
from bilens.flows import flow
from bilens.images import attack, class_spectra, explain
from bilens.language import following, generate_text, top_contexts
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import BilinearTensor, Dictionary, FactoredMatrix
from bilens.transformer import Pass
from tests.models import digits, view_of

N = 300  # enough inputs for top eigenpairs to be iterated


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def layer(n_in: int = 6, rank: int = 8, n_out: int = 6, seed: int = 0) -> BilinearTensor:
    factors = normal(rank, n_in, seed=seed), normal(rank, n_in, seed=seed + 1)
    return BilinearTensor(*factors, normal(n_out, rank, seed=seed + 2) / rank**0.5)


@pytest.fixture(scope="module")
def model() -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(ClassifierConfig(64, 10, 12, bias=True, image_shape=(8, 8)))


T, X = layer(), normal(5, 6, seed=7)
U = normal(3, 6, seed=8)
FORM = T.interaction(U)
SPECTRUM = FORM.eigh()
MATRIX = FactoredMatrix(normal(9, 4), normal(4, 7, seed=1))
DICTIONARY = Dictionary.of(normal(6, 8, seed=3))
LABELS = torch.tensor([0, 1, 2, 0, 1])

TENSOR = {
    "evaluate": lambda: (T(X), T(X, X.flip(0)), T.contract(X).dense()),
    "add": lambda: (T + layer(seed=5) - layer(seed=9))(X),
    "interaction": lambda: (FORM.weights, T.interaction(output=[1, 2]).weights),
    "change basis": lambda: T.change_basis(normal(6, 4), U)(X[:, :4]),
    "biases": lambda: T.with_bias(normal(8), normal(8), normal(6)).with_residual()(X),
    "constant output": lambda: T.with_constant_output()(X),
    "inner": lambda: (T.inner(layer(seed=5)), T.cosine(layer(seed=5)), T.norm()),
    "Gram matrices": lambda: (T.output_gram(), T.input_gram()),
    "svd": lambda: (T.svd(3)(X), T.svd(3).projector()),
    "dense": lambda: (T.dense(), FORM.dense()),
    "form": lambda: (FORM(X), FORM.apply(normal(3, 2, 6)), FORM.norm()),
    "eigenpairs": lambda: FORM.eigh().values,
    "top eigenpairs": lambda: layer(N, 400, 2).interaction(output=[0, 1]).eigh(1).values,
    "overlaps": lambda: (SPECTRUM.overlaps(X), SPECTRUM.activations(X)),
    "spectrum": lambda: (SPECTRUM(X), SPECTRUM.dense(), SPECTRUM.effective_rank()),
    "chosen": lambda: (SPECTRUM.select([1, 0]).values, SPECTRUM.truncate(2).values),
    "ends": lambda: SPECTRUM.outermost(2).oriented(X).vectors,
    "parts": lambda: (SPECTRUM.positive().values, SPECTRUM.negative()(X)),
    "pullback": lambda: SPECTRUM.pullback(normal(6, 4)).vectors,
    "matrix": lambda: (MATRIX.dense(), MATRIX.apply(normal(2, 7)), MATRIX.rows(slice(0, 2))),
    "entries": lambda: MATRIX.entries(LABELS, LABELS),
    "products": lambda: ((MATRIX @ MATRIX.T).dense(), (MATRIX * MATRIX).dense()),
    "top entries": lambda: MATRIX.top_entries(4, times=[MATRIX], batch_size=2).values,
    "matrix svd": lambda: (MATRIX.norm(), MATRIX.svd(2).dense()),
    "matrix eigenvalues": lambda: (MATRIX.T @ MATRIX).eigenvalues().abs(),
    "dictionary": lambda: DICTIONARY.reconstruct(DICTIONARY.activations(X)),
    "features": lambda: DICTIONARY.features_tensor(T)(X),
    "clusters": lambda: bilens.tensor.cluster(X, torch.ones(5, device="cpu")).vectors,
    "tree": lambda: bilens.tensor.decompile([T, T], U[0])(X),
    "top paths": lambda: bilens.tensor.decompile([T, T], U, 5).truncate(3)(X),
}

IMAGES, LABELS_OF_IMAGES = digits().test_images, digits().test_labels
READ = {
    "class spectra": lambda m: class_spectra(m).values,
    "logit spectra": lambda m: class_spectra(m, normal(10), "pixels").values,
    "reading": lambda m: bilens.images.read_classifier(m, digits()).spectrum(IMAGES),
    "deep reading": lambda m: bilens.images.read_deep(m, digits(), 20).paths.eigenvalues,
    "accuracy": lambda m: numbers(m.accuracy(IMAGES, LABELS_OF_IMAGES)),
    "explanation": lambda m: explain(class_spectra(m), IMAGES[0]).logits,
    "top inputs": lambda m: bilens.images.top_inputs(SPECTRUM, X, 2),
    "mask": lambda m: bilens.images.class_mask(class_spectra(m, basis="pixels")),
    "attack": lambda m: numbers(
        attack(m, IMAGES, LABELS_OF_IMAGES, normal(64), label=3, norm=2.0).fooled
    ),
    "shared": lambda m: numbers(bilens.images.shared_by_classes(class_spectra(m)).weight),
}

VIEW = view_of(n_layers=2)
FLOW = flow(VIEW, "t3 t4 t5", "t6", minus="t7", against="t3 t8 t5", labels=0)
TASK = [FLOW.question, replace(FLOW.question, text="t4 t4 t5", against="t4 t8 t5")]


def of_frame(result: Reading | pd.DataFrame) -> torch.Tensor:
    """Return the numbers of a table, or of a reading's main table."""
    frame = result if isinstance(result, pd.DataFrame) else result.frame()
    return numbers(*frame.select_dtypes("number").to_numpy(float, na_value=0).flatten())


def contexts():
    spectrum = VIEW.mlp(0).interaction(VIEW.direction("t3")).eigh(1)
    return top_contexts(VIEW, spectrum, ["t3 t4"], layer=0)


LANGUAGE = {
    "flow": lambda: (of_frame(FLOW.top(9)), FLOW.top(9).edges),
    "measured flow": lambda: of_frame(flow(VIEW, "t3 t4 t5", "t6", minus="t7")),
    "patch": lambda: patch(VIEW, "t3 t4 t5", "t6", minus="t7", against="t3 t8 t5").heads,
    "circuit": lambda: of_frame(circuit(VIEW, [FLOW.question], controls=True)),
    "directions of a task": lambda: of_frame(task_directions(VIEW, TASK, k=2)),
    "EAP-IG": lambda: eap_ig(VIEW, TASK).of_questions,
    "n-grams": lambda: of_frame(following(VIEW, "t3", layer=0, k=4)),
    "text": lambda: VIEW.ids(generate_text(VIEW, "t3 t4", tokens=5)),
    "heads": lambda: (VIEW.qk(0, 2)[0].dense(), VIEW.ov(0).dense()),
    "edit": lambda: edit_heads(VIEW, 0, [1]).model.state_dict()["blocks.0.attn.out.weight"],
    "patterns": lambda: Pass.of(VIEW, "t3 t4").pattern(0),
    "contexts": lambda: numbers(contexts()[0][0].activation),
    "processed": lambda: process(VIEW.model)[0].state_dict()["embed.weight"],
}


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    # Whatever is made without a device lands where nothing can be computed.
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", [*TENSOR, *READ, *LANGUAGE])
def test_surroundings_change_nothing(name, around, model):
    compute = (TENSOR | LANGUAGE).get(name) or (lambda: READ[name](model))
    expected = compute()
    with SURROUNDINGS[around]():
        result = compute()
    parts = (part if isinstance(part, tuple) else (part,) for part in (result, expected))
    for single, other in zip(*parts, strict=True):
        assert (single.dtype, single.device) == (other.dtype, other.device)
        assert torch.allclose(single, other, rtol=1e-5, atol=1e-6)


WITHOUT_COMPUTATION = {"with_constant", "top_entries", "Features", "FactoredSVD"}
WITHOUT_COMPUTATION |= {"TensorChain", "TopEntries", "TensorStack"}


@pytest.mark.parametrize("name", sorted({*bilens.tensor.__all__} - WITHOUT_COMPUTATION))
def test_every_public_computation_is_exact(name):
    module = inspect.getmodule(inspect.unwrap(getattr(bilens.tensor, name)))
    # From Python 3.13 on the source of a class is without its decorators.
    decorated = rf"^@(?:checked|detached)\n(?:[@ )].*\n)*(?:class|def) {name}\b"
    assert re.search(decorated, inspect.getsource(module), re.MULTILINE)
