"""A user's own stack of bilinear layers is read as bilens's classifier is."""

from itertools import product

import pytest
import torch
from torch import nn

from bilens.analyses import built_in
from bilens.errors import BilensError, NotBilinearError
from bilens.images import attack, class_mask, class_spectra, read_bonds, read_classifier, read_deep
from bilens.nn import Bilinear
from bilens.pages import write_report
from bilens.tensor import TensorChain
from bilens.tensor.factors import affine
from tests.models import digits, small_model
from tests.nightly import nightly


class Stack(nn.Module):
    """Layers with the weights of a classifier of bilens, put together by hand."""

    def __init__(self, n_layers: int, bias: bool, embedded: bool, wrong: float = 0.0) -> None:
        super().__init__()
        of = small_model(n_layers, bias)
        self.embed = of.embed if embedded else nn.Identity()
        sizes = [6 if embedded or i else 64 for i in range(n_layers)]
        self.layers = nn.ModuleList(Bilinear(size, 6, bias=bias) for size in sizes)
        if embedded:
            self.layers.load_state_dict(of.layers.state_dict())
        self.head, self.embedded, self.bias, self.wrong = of.unembed, embedded, bias, wrong

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits + self.wrong * logits.square()

    def layer_tensors(self):
        *lower, last = (layer.tensor() for layer in self.layers)
        last = last.change_basis(outputs=self.head.weight)
        return [*lower, last.with_bias(out=self.head.bias) if self.bias else last]

    def embedding(self):
        if not self.embedded:
            return None
        return affine(self.embed.weight, self.embed.bias) if self.bias else self.embed.weight


@pytest.mark.parametrize("bias", nightly([False, True], [False]))
def test_a_stack_is_read_as_a_classifier_is(bias, tmp_path):
    stack, data = Stack(2, bias, embedded=True).requires_grad_(False), digits()
    assert isinstance(stack, TensorChain)
    expected = read_bonds(small_model(2, bias), data, drop=0.02)
    bonds = read_bonds(stack, data, drop=0.02)
    assert bonds.cut.ranks == expected.cut.ranks
    assert bonds.record() == expected.record()
    deep = read_deep(stack, data, k=30)
    assert deep.record() == read_deep(small_model(2, bias), data, k=30).record()
    assert write_report(tmp_path / "page.html", [bonds, deep], title="mine")
    assert "test accuracy" in (tmp_path / "page.html").read_text()
    x = data.test_images[:50]
    error = bonds.cut_model().requires_grad_(False)(x) - bonds.cut(x)
    assert float(error.norm() / bonds.cut(x).norm()) < 1e-4


@pytest.mark.parametrize(
    ("basis", "embedded", "bias"),
    nightly(product(["model", "pixels"], [False, True], [False, True]), [("pixels", False, True)]),
)
def test_a_single_layer_of_ones_own(basis, embedded, bias, tmp_path):
    stack, data = Stack(1, bias, embedded).requires_grad_(False), digits()
    reading = read_classifier(stack, data, basis)
    logits = reading.spectrum.activations(data.test_images).sum(-1)
    torch.testing.assert_close(logits, stack(data.test_images), rtol=1e-3, atol=1e-3)
    assert write_report(tmp_path / "page.html", [reading], title="mine")
    mask = class_mask(class_spectra(stack, basis="pixels")[3])
    result = attack(stack, data.test_images, data.test_labels, mask, label=3, norm=2.0)
    assert 0 <= result.targeted <= result.fooled <= 1


ANALYSES = [entry for entry in built_in().values() if entry.on is TensorChain]
LAYERS = {"explain": 1, "eigenvectors": 1, "certify": 1, "paths": 2, "bonds": 2}


@pytest.mark.parametrize("entry", ANALYSES, ids=lambda entry: entry.name)
def test_no_analysis_reads_tensors_that_are_not_the_model(entry):
    message = r"model\(x\) and its layer_tensors\(\) differ, expected the same"
    with pytest.raises(BilensError, match=message):
        entry.read(Stack(LAYERS[entry.name], False, embedded=True, wrong=1.0), digits())


def test_what_does_not_fit_is_named():
    def check(words, **methods):
        stack = Stack(2, False, embedded=True)
        vars(stack).update(methods)
        with pytest.raises(BilensError, match=words):
            read_bonds(stack, digits())

    check(r"embedding\(\) has shape \(5, 64\), expected 6 rows", embedding=lambda: torch.eye(5, 64))
    check(r"layer_tensors\(\) is empty", layer_tensors=list)
    narrow = [Bilinear(6, 5).tensor()] * 2
    check(r"\[0\] has 5 outputs, but .*\[1\] reads 6", layer_tensors=lambda: narrow)
    with pytest.raises(NotBilinearError, match="2 layers, so its logits are of degree 4"):
        class_spectra(Stack(2, False, embedded=True))
