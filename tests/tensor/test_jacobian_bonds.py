"""The bonds of the function against Jacobians by automatic differentiation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from bilens.errors import BilensError
from bilens.tensor import BilinearTensor, function_bonds, with_constant
from bilens.tensor.factors import affine
from bilens.tensor.jacobian_bonds import Measure, gaussian_samples
from tests.tensor.deep import chains, dense_chain, forward, random_chain
from tests.tensor.factors import close, eye, normal

N_IN, N_OUT, SAMPLES = 4, 3, 23

measures = st.sampled_from(["outputs", "relative", "probabilities"])


def case(chain: dict) -> tuple[list[BilinearTensor], Tensor, Tensor]:
    """Return a chain, output directions and samples with the constant."""
    tensors = random_chain(**chain, n_in=N_IN, n_out=N_OUT)
    x = normal(SAMPLES, tensors[0].n_in, seed=chain["seed"] + 3)
    if tensors[0].constant:
        x[:, -1] = 1
    W = normal(2, N_OUT, seed=chain["seed"])
    # Large outputs have probabilities of 0 and 1, and differences of these are rounding.
    return tensors, W / (forward(tensors, x) @ W.T).abs().amax(), x


def moments_by_hand(
    arrays: list[Tensor], W: Tensor, x: Tensor, measure: Measure
) -> list[tuple[Tensor, Tensor]]:
    """P and U of each bond, from the dense layers and automatic differentiation."""

    def above(number: int):
        def outputs(h: Tensor) -> Tensor:
            for array in arrays[number:]:
                h = torch.einsum("oij,i,j->o", array, h, h)
            return W @ h

        return outputs

    o = torch.stack([above(0)(row) for row in x])
    identity = eye(len(W)).expand(len(x), -1, -1)
    squares = {
        "outputs": identity,
        "relative": identity / (o**2).sum(-1)[:, None, None],
        "probabilities": torch.stack([hessian(lambda v: torch.logsumexp(v, 0), row) for row in o]),
    }[measure]
    moments, h = [], x
    for number, array in enumerate(arrays):
        J = torch.stack([jacobian(above(number), row) for row in h])
        moments.append((h.T @ h / len(h), (J.mT @ squares @ J).mean(0)))
        h = torch.einsum("oij,ni,nj->no", array, h, h)
    return moments


@given(chains, measures)
def test_shares_and_coordinates_are_those_of_the_jacobians(chain: dict, measure: Measure) -> None:
    tensors, W, x = case(chain)
    bonds = function_bonds(tensors, W, x, measure=measure)
    expected = moments_by_hand(dense_chain(tensors), W, x, measure)
    for bond, total, (P, U) in zip(bonds.bonds, bonds.totals, expected, strict=True):
        values = torch.linalg.eigvals(P @ U).real.sort(descending=True).values.clamp_min(0)
        size, scale = min(bond.k, len(values)), values.sum()
        assert close(bond.shares[:size], values[:size] / scale, 1e-7)
        assert total * bonds.norm**2 == pytest.approx(float(scale), rel=1e-9)
        assert close(bond.read @ bond.write, eye(bond.k), 1e-7)
        assert close(bond.read @ P @ bond.read.T, eye(bond.k), 1e-7)
        assert close(bond.write.T @ U @ bond.write, scale * bond.shares.diag(), 1e-7)


@given(chains, measures)
def test_all_directions_are_the_model_on_the_samples(chain: dict, measure: Measure) -> None:
    tensors, W, x = case(chain)
    bonds = function_bonds(tensors, W, x, measure=measure)
    assert close(bonds.cut(max(bond.k for bond in bonds.bonds))(x), forward(tensors, x), 1e-6)
    assert bonds.certificate(1) is None
    assert bonds.cut(1).certificate is None
    with pytest.raises(BilensError, match="of a function on samples, .* expected bonds from"):
        bonds.error(1)


def test_the_costs_are_those_of_gradients_paired_with_all_vectors() -> None:
    tensors = random_chain(2, "plain", width=4, n_in=4, n_out=3, seed=1)
    x = normal(20, 4, seed=2)
    bonds, h = function_bonds(tensors, eye(3), x), tensors[0](x)
    J = torch.stack([jacobian(tensors[1], row) for row in h])
    for k in (1, 2, 3):
        lost = h - h @ bonds.bonds[1].projector(k).T
        pairs = torch.einsum("aoi,bi->abo", J, lost).square().sum(-1).mean()
        assert float(bonds.costs()[1][k:].sum()) == pytest.approx(float(pairs) / bonds.norm**2)


def test_an_embedding_and_the_constant_may_be_left_out() -> None:
    tensors = random_chain(2, "bias", width=3, n_in=3, n_out=N_OUT)
    E, b, x = normal(tensors[0].n_in - 1, 5, seed=4), normal(tensors[0].n_in - 1), normal(20, 5)
    apart = function_bonds(tensors, eye(N_OUT), x, affine(E, b))
    folded = [tensors[0].change_basis(inputs=affine(E, b)), *tensors[1:]]
    together = function_bonds(folded, eye(N_OUT), with_constant(x))
    assert close(apart.bonds[1].shares, together.bonds[1].shares, 1e-9)
    assert close(*(bonds.cut([bonds.bonds[0].k, 2])(x) for bonds in (apart, together)), 1e-6)


def test_the_standard_error_is_that_of_repeated_samples() -> None:
    tensors = random_chain(2, "plain", width=4, n_in=4, n_out=3)
    runs = [function_bonds(tensors, eye(3), normal(1000, 4, seed=seed)) for seed in range(30)]
    spread = torch.stack([run.bonds[1].shares for run in runs]).std(0)
    told = torch.stack([run.errors[1] for run in runs]).mean(0)
    assert bool((told > spread / 2).all() and (told < 2 * spread).all())
    assert runs[0].frame()["standard_error"].tolist() == torch.cat(list(runs[0].errors)).tolist()


def test_gaussian_samples_have_the_moments() -> None:
    A, mean = normal(3, 3), normal(3, seed=1)
    x = gaussian_samples(200_000, mean, A @ A.T)
    assert close(x.mean(0), mean, 0.02)
    assert close((x - mean).T @ (x - mean) / len(x), A @ A.T, 0.02)
    assert torch.equal(x, gaussian_samples(200_000, mean, A @ A.T))
