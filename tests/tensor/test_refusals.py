"""What `bilens.tensor` refuses."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from safetensors.torch import save
from torch import nn

from bilens.errors import CheckpointError, NotBilinearError
from bilens.nn import Bilinear
from bilens.tensor import BilinearTensor, FactoredMatrix, Spectrum, decompile
from bilens.tensor.chain import TensorStack
from bilens.tensor.chain_bonds import bonds
from bilens.tensor.factored import top_entries
from bilens.tensor.features import Dictionary, cluster
from bilens.tensor.jacobian_bonds import function_bonds
from bilens.tensor.quadratic import QuadraticForm
from tests.refusals import refused
from tests.tensor.deep import random_chain
from tests.tensor.factors import eye, normal, random_matrix, random_tensor

U, SINGLE = eye(2), eye(3)
BROKEN = torch.where(SINGLE * torch.tensor([1, 0, 0]) > 0, torch.nan, SINGLE)
X = normal(23, 3)
WIDE = random_tensor(5, 5, 3, 0)


def broken(chain: list[BilinearTensor], factor: str) -> list[BilinearTensor]:
    numbers = getattr(chain[1], factor).clone()
    numbers[0, 0] = torch.nan
    return [chain[0], replace(chain[1], **{factor: numbers})]


TENSORS = {
    r"left is .*torch.int64, expected a tensor of real numbers of shape \(rank, n_in": lambda t: (
        BilinearTensor(t.left.long(), t.right, t.out)
    ),
    r"weights is .*\(3, 2\).*beside left": lambda t: QuadraticForm(t.left, t.right, t.out[:, :2]),
    r"y has shape \(3,\).*length 4": lambda t: t(normal(4), normal(3)),
    r"x has shape \(3,\).*length 4": lambda t: t.contract(normal(3)),
    "other has 3 outputs and 5 inputs": [lambda t: t + WIDE, lambda t: t.inner(WIDE)],
    r"inputs \(constant: True\); expected 3 and 4 \(constant: False": lambda t: t - t.with_bias(),
    r"direction=3, expected a tensor of real numbers of shape \(\*ba": lambda t: t.interaction(3),
    "output='3', expected 0 to 2, the number of an output": lambda t: t.interaction(output="3"),
    r"output=\[0.5\], expected text or a whole number or": lambda t: t.interaction(output=[0.5]),
    "k=5, expected a whole number, 1 to 4": lambda t: t.interaction(output=0).eigh(5),
    r"right is .* beside left \(5, 4\)": lambda t: BilinearTensor(t.left, t.right[:-1], t.out),
    "torch.float32": lambda t: BilinearTensor(t.left, t.right, t.out.float()),
    "empty": lambda t: BilinearTensor(t.left[:, :0], t.right[:, :0], t.out),
    "out=None, expected a tensor of real": lambda t: BilinearTensor(t.left, t.right, None),
    r"length 4 \(or 5": lambda t: t.with_bias()(torch.zeros(3, dtype=torch.float64)),
    "either a direction or output": lambda t: t.interaction(),
    "exactly one": lambda t: t.interaction(normal(3), output=1),
    r"direction has shape \(2,\).*length 3": lambda t: t.interaction(normal(2)),
    "output=-1": lambda t: t.interaction(output=[0, -1]),
    "output is empty, expected at least one output": lambda t: t.interaction(output=[]),
    "minus is empty, expected at least one": lambda t: t.interaction(output=0, minus=[]),
    "names has 4 entries, expected 3, one for each": lambda t: replace(t, names=("a",) * 4),
    "left is .* torch.float8_e5m2.*expected a dense one of": lambda t: t.to(torch.float8_e5m2),
    "out is .* torch.sparse_coo.*; expected a": lambda t: replace(t, out=t.out.to_sparse()),
    "without a batch to index": lambda t: t.interaction(output=0)[0],
    r"inputs has shape \(3, 4\); expected \(4, k\)": lambda t: t.change_basis(inputs=normal(3, 4)),
    r"outputs has shape.*\(m, 3\)": lambda t: t.change_basis(outputs=normal(2, 4)),
    r"left has shape \(4,\), expected \(5,\)": lambda t: t.with_bias(normal(4)),
    r"out has shape \(4,\), expected \(3,\)": lambda t: t.with_bias(out=normal(4)),
    r"vectors has shape \(2, 3\)": lambda t: t.interaction(output=0).apply(normal(2, 3)),
    "4 inputs and 3 outputs": lambda t: t.with_residual(),
    r"\(3, 4, 4\) and 384 bytes; the limit is max_bytes=100": lambda t: t.dense(max_bytes=100),
    "128 bytes": lambda t: t.interaction(output=0).dense(max_bytes=100),
    "k=4, expected a whole number, 1 to 3": lambda t: t.svd(4),
    "k=3, expected a whole number, 1 to 2": lambda t: t.svd(2).truncate(3),
}
MATRICES = {
    r"right is .* \(1, 5\).*beside left \(4, 2\)": lambda m: FactoredMatrix(m.left, m.right[:1]),
    r"left is a tensor of shape \(2,\)": lambda m: FactoredMatrix(m.left[0], m.right[0]),
    r"is empty: left \(0, 2\), right \(2, 5\)": lambda m: FactoredMatrix(m.left[:0], m.right),
    "left torch.float64 on cpu, right torch.f": lambda m: FactoredMatrix(m.left, m.right.float()),
    r"x has shape \(2, 4\); its last axis .* length 5": lambda m: m.apply(normal(2, 4)),
    "without a batch to index": lambda m: m[0],
    "A matrix of 5 columns cannot be multiplied with one of 4 rows": lambda m: m @ m,
    r"shapes \(4, 5\) and \(5, 4\) have no product entry by entry": lambda m: m * m.T,
    r"shapes \(2,\) and \(3,\) do not broadcast": lambda m: (
        random_matrix(4, 5, 2, (2,)) @ random_matrix(5, 4, 2, (3,))
    ),
    "k=3, expected a whole number, 1 to 2": lambda m: m.svd(3),
    "this matrix has 4 and 5": lambda m: m.eigenvalues(),
    "160 bytes; the limit is max_bytes=100": lambda m: m.dense(max_bytes=100),
    "k=0, expected a whole number, at least 1": lambda m: m.top_entries(0),
    "batch_size=0, expected a whole number": lambda m: m.top_entries(1, batch_size=0),
    r"shapes \(4, 5\) and \(5, 4\)": lambda m: m.top_entries(1, times=[m.T]),
    "blocks is empty": lambda m: top_entries([], 1),
    "blocks holds NaN": lambda m: top_entries([BROKEN], 1),
    "blocks holds NaN or": lambda m: top_entries([BROKEN], 1, largest=False),
}
SPECTRA = {
    r"indices=\[4\], expected numbers of eigenpairs, 0 to 3": lambda s: s.select([4]),
    "0 to 3": lambda s: s.select([-1]),
    "at least one": lambda s: s.select([]),
    r"indices has shape \(2, 1\), expected \(m,\)": lambda s: s.select(torch.tensor([[0], [1]])),
    "k=0, expected a whole number, at least 1": lambda s: s.outermost(0),
    "k=0, expected a whole number, at least 1 and": lambda s: s.oriented(normal(2, 4), k=0),
    "k=0, expected a whole number, 1 to 4": lambda s: s.truncate(0),
    "k=5, expected a whole number, 1 to 4": lambda s: s.truncate(5),
    r"scores has shape \(3,\); expected \(4,\)": lambda s: s.ordered_by(normal(3)),
    "at least one sample": lambda s: s.oriented(normal(0, 4)),
    r"x has shape \(2, 3\).*length 4": lambda s: s.activations(normal(2, 3)),
    r"weight has shape \(3, 2\); expected \(4, n_features\)": lambda s: s.pullback(normal(3, 2)),
    "no constant coordinate": lambda s: s.pullback(normal(4, 2), normal(4)),
    "without a batch to index": lambda s: s[0],
}
CLUSTER = {
    r"weights is .*\(2,\).*beside vectors \(3, 2\)": lambda v: cluster(v, torch.ones(2)),
    r"vectors is a tensor of shape \(2,\)": lambda v: cluster(v[0], torch.ones(3)),
    "at least one row": lambda v: cluster(v[:0], torch.ones(3)[:0]),
    "threshold=0.0, expected": lambda v: cluster(v, torch.ones(3), 0.0),
    "threshold=1.1, expected": lambda v: cluster(v, torch.ones(3), 1.1),
    "vectors holds NaN": lambda v: cluster(v * float("nan"), torch.ones(3)),
    "weights holds NaN or infinite": lambda v: cluster(v, torch.ones(3) * float("inf")),
    "weights holds negative": lambda v: cluster(v, -torch.ones(3)),
    r"vectors\[1\] is zero": lambda v: cluster(v * torch.tensor([[1], [0], [1]]), torch.ones(3)),
    "weights are all zero": lambda v: cluster(v, 0 * torch.ones(3)),
}
DICTIONARY = {
    r"features is .* \(3,\).*n_out, m": lambda d: Dictionary.of(torch.zeros(3)),
    r"features has shape \(3, 0\).*at least one": lambda d: Dictionary.of(torch.zeros(3, 0)),
    "features holds NaN": lambda d: Dictionary.of(normal(3, 4) / 0),
    "sae is a dict with W_dec a NoneType; expected": lambda d: Dictionary.from_saelens({}),
    r"SimpleNamespace with W_dec a Tensor of shape \(2, 3, 4\).*\(d_sae, d_in\)": lambda d: (
        Dictionary.from_saelens(SimpleNamespace(W_dec=torch.zeros(2, 3, 4)))
    ),
    r"y has shape \(4,\).*length 3.*each output": lambda d: d.activations(normal(4)),
    r"a has shape \(2, 3\).*length 4.*each feature": lambda d: d.reconstruct(normal(2, 3)),
    "tensor has 2 outputs.* 3 numbers": lambda d: d.features_tensor(random_tensor(4, 5, 2, 0)),
}
TREES = {
    "tensors is empty; expected one tensor for each layer": lambda c: decompile([], normal(4)),
    r"tensors\[0\] has 4 outputs, but tensors\[1\] .* 5": lambda c: decompile(c[::-1], normal(3)),
    r"tensors\[0\] has 5 outputs, but tensors\[1\] reads 3;": lambda c: decompile(
        [c[0].with_constant_output().with_constant_output(), c[1]], normal(4)
    ),
    r"has 2 outputs, but tensors\[1\] reads 3 or 4": lambda c: decompile(
        [random_tensor(5, 2, 2, 0), c[1].with_bias().with_bias()], normal(4)
    ),
    "torch.float32 on cpu, torch": lambda c: decompile([c[0], c[1].to(torch.float32)], normal(4)),
    r"directions has shape \(2, 3\).*length 4": lambda c: decompile(c, normal(2, 3)),
    r"directions is a tensor of shape \(\)": lambda c: decompile(c, normal(4)[0]),
    r"directions has shape \(0, 4\); expected at least one": lambda c: decompile(c, normal(0, 4)),
    "directions holds NaN or infinite": lambda c: decompile(c, normal(4) / 0),
    r"tensors\[1\].left holds NaN.*diverged": lambda c: decompile(broken(c, "left"), normal(4)),
    r"1,800 leaves, expected at most 1,799, .*`bilens bonds` describes such a model": lambda c: (
        decompile(c, normal(200, 4), max_leaves=1799)
    ),
    "k=0, expected a whole number, 1 to 9, the number of": lambda c: decompile(c, normal(4), 0),
    "k=1801, expected a whole number, 1 to 1800": lambda c: decompile(c, normal(200, 4), 1801),
    "k=0, expected a whole number, 1 to 9": lambda c: decompile(c, normal(4)).truncate(0),
    "k=10, expected a whole number, 1 to 9": lambda c: decompile(c, normal(4)).truncate(10),
    r"x has shape \(2, 4\).*length 5": lambda c: decompile(c, normal(4))(normal(2, 4)),
}
BONDS = {
    r"tensors\[0\] has 2 outputs, but tensors\[1\] reads 3": lambda c: bonds(c[::-1], U),
    "tensors is empty": [lambda c: bonds([], U), lambda c: function_bonds([], U, X)],
    r"directions has shape \(3, 3\); expected at least one": lambda c: bonds(c, torch.eye(3)),
    "directions holds NaN": lambda c: bonds(c, U * torch.nan),
    "zero along the directions": lambda c: bonds(c, U * 0),
    "metric holds NaN": lambda c: bonds(c, U, BROKEN),
    r"metric has shape \(2, 2\); expected \(3, 3\)": lambda c: bonds(c, U, U),
    "metric has the eigenvalue -1; expected none below 0": lambda c: bonds(c, U, -SINGLE),
    "metric is zero; expected a matrix such as x.T @ x": lambda c: bonds(c, U, SINGLE * 0),
    "metric is not symmetric": lambda c: bonds(c, U, SINGLE + SINGLE.roll(1, 0)),
    r"embedding has shape \(2, 3\); expected 3 rows": lambda c: bonds(c, U, None, SINGLE[:2]),
    "embedding holds NaN": lambda c: bonds(c, U, None, BROKEN),
    "ranks=0, expected a whole number, at least 1": lambda c: bonds(c, U).cut(0),
    "ranks has 1 numbers, expected 2, one for each bond": lambda c: bonds(c, U).cut([1]),
    r"ranks\[1\]=0, expected a whole number, 1 to": lambda c: bonds(c, U).cut([1, 0]),
    r"ranks\[1\]=99, expected a whole number, 1 to": lambda c: bonds(c, U).cut([1, 99]),
    "k=0, expected a whole number, 1 to": lambda c: bonds(c, U).bonds[0].projector(0),
    r"shapes \[\(2, 2\)\]; expected square": lambda c: bonds(c, U).cut(2).rotate([U]),
    r"rotations\[1\] is not orthogonal": lambda c: bonds(c, U).cut(2).rotate([U, 2 * U]),
    "k=99, expected a whole number, 1 to 12, the": lambda c: bonds(c, U).cut(2).keep_products(99),
    r"x has shape \(1, 3\), expected at least 2": lambda c: function_bonds(c, U, X[:1]),
    "x holds NaN or infinite": lambda c: function_bonds(c, U, X / 0),
    r"embedding .* expected 3 rows": lambda c: function_bonds(c, U, X, X[:, :2]),
    "mean square of 0 on x": lambda c: function_bonds(c, 0 * U, X),
}
test_misuse_of_a_tensor_is_said = refused(TENSORS, given=lambda: random_tensor(4, 5, 3, 0))
test_misuse_of_a_factored_matrix_is_said = refused(MATRICES, given=lambda: random_matrix(4, 5, 2))
test_misuse_of_a_spectrum_is_said = refused(
    SPECTRA, given=lambda: random_tensor(4, 5, 3, 0).interaction(output=0).eigh()
)
test_misuse_of_clusters_is_said = refused(CLUSTER, given=lambda: torch.arange(1.0, 7).reshape(3, 2))
test_misuse_of_a_dictionary_is_said = refused(DICTIONARY, given=lambda: Dictionary.of(normal(3, 4)))
test_misuse_of_a_tree_is_said = refused(TREES, given=lambda: random_chain(2, "plain"))
test_misuse_of_bonds_is_said = refused(
    BONDS, given=lambda: random_chain(2, "plain", n_in=3, n_out=2, seed=1)
)


NAN = BilinearTensor(torch.full((3, 2), torch.nan), torch.ones(3, 2), torch.ones(2, 3))
ONES = BilinearTensor(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 3))
SPOILT = Spectrum(torch.tensor([torch.nan, 1.0]), torch.eye(2), torch.zeros(2))
NOT_NUMBERS = {
    "holds NaN or infinite values, expected finite numbers": [
        lambda: NAN.inner(ONES),
        lambda: ONES.inner(NAN),
        NAN.norm,
        lambda: NAN.cosine(ONES),
        lambda: ONES.cosine(NAN),
        (NAN - ONES).norm,
        NAN.output_gram,
        NAN.input_gram,
        NAN.svd,
        NAN.interaction(output=0).norm,
        NAN.interaction(output=0).eigh,
        lambda: decompile([NAN], torch.ones(2), 1),
        lambda: cluster(NAN.left, torch.ones(3)),
        FactoredMatrix(NAN.left, ONES.left.T).svd,
        FactoredMatrix(NAN.left, ONES.left.T).norm,
        lambda: FactoredMatrix(NAN.left, ONES.left.T).top_entries(1),
        SPOILT.effective_rank,
    ]
}


def load(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    Spectrum.load(tmp_path / "a")


class Scores(nn.Linear):
    def forward(self, x):
        return super().forward(x) @ x.T


def trace(*modules):
    return BilinearTensor.of(nn.Sequential(*modules))


PRODUCT, SPOILT_PRODUCT = Bilinear(4, 4, 5, bias=True), Bilinear(4, 4, 5)
nn.init.constant_(SPOILT_PRODUCT.left.weight, torch.nan)
HALF = {"values": torch.ones(2)}
NO_SPECTRA = {
    "a could not be read: No such file": lambda tmp_path: Spectrum.load(tmp_path / "a"),
    "a could not be read": lambda tmp_path: load(tmp_path, b"nonsense"),
    "a does not hold a spectrum: expected values, vec": lambda tmp_path: load(tmp_path, save(HALF)),
}
UNTRACED = {
    "module=.*, expected Module": lambda: BilinearTensor.of(lambda x: x * x),
    "pass input_shape=": lambda: BilinearTensor.of(nn.ReLU()),
    r"input_shape=\(5,\) does not fit the module": lambda: BilinearTensor.of(PRODUCT, (5,)),
    r"left\.weight": lambda: BilinearTensor.of(SPOILT_PRODUCT),
}
NOT_BILINEAR = {
    r"relu in 1 is neither": lambda: trace(PRODUCT, nn.ReLU(), nn.Linear(4, 2)),
    r"tanh in 1 is neither": lambda: trace(PRODUCT, nn.Tanh()),
    r"rms_norm in 0 is neither": lambda: trace(nn.RMSNorm(4), PRODUCT),
    r"multiplies no two parts.*silu in 1": lambda: trace(nn.Linear(4, 4), nn.SiLU()),
    r"multiplies no two parts": lambda: BilinearTensor.of(nn.Linear(4, 4)),
    r"2 layers of products.*degree 4": lambda: trace(PRODUCT, Bilinear(4, 4, 5)),
    r"contracts two tensors that both depend": lambda: BilinearTensor.of(Scores(4, 4)),
    r"is (\S+) at a random input, and its tensor (\S+); expected the same number": lambda: (
        TensorStack(nn.Sequential(PRODUCT, nn.ReLU()))
    ),
}
test_what_is_not_a_number_is_an_error = refused(NOT_NUMBERS)
test_what_is_no_spectrum_is_not_loaded = refused(NO_SPECTRA, CheckpointError)
test_what_cannot_be_traced_is_said = refused(UNTRACED)
test_what_is_not_bilinear_is_named = refused(NOT_BILINEAR, NotBilinearError)
