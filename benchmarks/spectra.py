"""Top eigenpairs of many directions at once, against one whole decomposition after another.

`python -m benchmarks.spectra 4096` takes a whole vocabulary of directions; of the reference, whose
time is proportional to their number, only the first 64 are done then. On a GPU, where there is one,
the layer is as large as one of a model of 1.1 billion parameters.
"""

import sys

import torch

from benchmarks.clock import machine, seconds
from bilens.tensor import BilinearTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL, D_HIDDEN = (2048, 5632) if DEVICE == "cuda" else (1024, 3072)
SAMPLE, K, TOLERANCE = 64, 8, 1e-4


def main(directions: int = SAMPLE) -> None:
    """Print both times and their ratio."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(DEVICE)

    tensor = BilinearTensor(
        normal(D_HIDDEN, D_MODEL), normal(D_HIDDEN, D_MODEL), normal(D_MODEL, D_HIDDEN)
    )
    form = tensor.interaction(normal(directions, D_MODEL))

    def one_after_another() -> torch.Tensor:
        tops = []
        for number in range(SAMPLE):
            values = torch.linalg.eigh(form[number].dense()).eigenvalues
            tops.append(values[values.abs().argsort(descending=True)[:K]])
        return torch.stack(tops)

    found: list[torch.Tensor] = []

    def at_once() -> None:
        spectrum = form.eigh(K, tolerance=TOLERANCE)
        assert spectrum.residuals.max() <= TOLERANCE
        found[:] = [spectrum.values]

    print(machine())
    print(f"random layer, d_model {D_MODEL}, hidden {D_HIDDEN}, {directions} directions, top {K}")
    few = directions == SAMPLE
    reference = seconds(one_after_another, 3) * directions / SAMPLE
    mine = seconds(at_once, 3 if few else 1, warm=few)
    difference = (one_after_another().abs() - found[0][:SAMPLE].abs()).abs().max()
    print(f"dense build and eigh, one after another  {reference:8.2f} s")
    print(f"eigh(k={K}), residuals at most {TOLERANCE}      {mine:8.2f} s")
    print(f"ratio                                    {reference / mine:8.1f} x")
    print(f"largest difference of an eigenvalue      {difference:8.1e}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
