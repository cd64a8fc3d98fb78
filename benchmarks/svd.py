"""The SVD of a layer's unfolding from its factors, against building the unfolding."""

import time

import torch

from benchmarks.clock import machine, seconds
from bilens.tensor import BilinearTensor

N_OUT, N_IN = 300, 784


def main() -> None:
    """Print both times, their ratio, and how far the values are apart."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(N_OUT, N_IN, generator=generator).double() / 28 for _ in range(2))
    tensor = BilinearTensor(left, right, torch.eye(N_OUT).double())
    start = time.perf_counter()
    built = torch.linalg.svdvals(tensor.dense().flatten(1))
    reference = time.perf_counter() - start
    custom = seconds(tensor.svd, 20)
    difference = (built - tensor.svd().values).abs().max() / built.max()
    print(machine())
    print(f"random layer in float64, unfolding {N_OUT} x {N_IN}^2")
    print(f"dense build and svdvals, once     {reference:10.4f} s")
    print(f"svd() with its output directions  {custom:10.4f} s")
    print(f"ratio                             {reference / custom:10.0f} x")
    print(f"largest difference / largest value {difference:9.1e}")


if __name__ == "__main__":
    main()
