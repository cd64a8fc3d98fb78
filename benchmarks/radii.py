"""Radii of certified pictures, beside a solver that decomposes nothing.

    python -m benchmarks.radii --write

`bilens.certify` uses one eigendecomposition for each pair of classes. The reference solves a dense
system for each step of a bisection, picture by picture: d(l) = -(l/2) (I + l A)^-1 g, in float64,
with A from the model's dense interaction matrices and g from autograd. Models have the paper's
width, after one epoch on MNIST: as they are, and with a scalar norm, biases, and residuals.
"""

import sys
from functools import cache
from typing import Any

import torch
from experiments.results import Recording, Row
from jaxtyping import Float
from torch import Tensor

from bilens.data import load_images
from bilens.images import certify
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.train import ClassifierTraining, train_classifier

WIDTH, PICTURES, STEPS = 300, 100, 32
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "scalar norm": {"norm": "scalar"},
    "biases": {"bias": True},
    "biases and residual": {"bias": True, "residual": True},
}


def main() -> None:
    """Print, and with --write record, the largest relative difference of a radius."""
    recording = Recording() if "--write" in sys.argv else None
    data = load_images("mnist")
    rows = []
    for name, settings in KINDS.items():
        config = ClassifierConfig(
            n_inputs=data.n_inputs, n_classes=data.n_classes, d_model=WIDTH, **settings
        )
        model, *_ = train_classifier(config, data, ClassifierTraining(epochs=1))
        model = model.double()
        x, labels = data.test_images[:PICTURES].double(), data.test_labels[:PICTURES]
        reading = certify(model, x, labels)
        right = reading.right.tolist()
        expected = torch.tensor([nearest(model, x[i], int(labels[i])) for i in right])
        errors = (reading.radius[right] - expected).abs() / expected
        claim = f"{name}: largest relative difference of a radius"
        rows.append(Row(claim, float(errors.max()), n=len(right)))
        print(rows[-1].claim, rows[-1].value, flush=True)
    if recording is not None:
        recording.write(
            "radii",
            title="Certified radii beside a dense solver",
            command="python -m benchmarks.radii --write",
            rows=rows,
            settings={"width": WIDTH, "pictures": PICTURES, "steps of the bisection": STEPS},
        )


def nearest(model: ImageClassifier, x: Float[Tensor, " pixels"], label: int) -> float:
    """Return the length of the shortest change that gives any other answer."""
    basis, radii = basis_of(model), []
    for other in range(10):
        if other == label:
            continue

        def margin(d: Tensor, other: int = other) -> Tensor:
            logits = model(x + basis @ d)
            return logits[label] - logits[other]

        zero = torch.zeros(basis.shape[1], dtype=torch.float64)
        g = torch.autograd.functional.jacobian(margin, zero)
        radii.append(shortest(curvature(model, label, other), g, float(margin(zero))))
    return min(radii)


@cache
def basis_of(model: ImageClassifier) -> Float[Tensor, "pixels width"]:
    """Return an orthonormal basis of what the embedding reads: other changes change nothing."""
    return torch.linalg.qr(model.embed.weight.detach().T)[0]


@cache
def curvature(model: ImageClassifier, label: int, other: int) -> Float[Tensor, "width width"]:
    """Return the dense matrix of the quadratic part of a margin."""
    direction = torch.zeros(10, dtype=torch.float64)
    direction[label], direction[other] = 1, -1
    basis = basis_of(model)
    # The last coordinate may be the constant.
    matrix = model.tensor().interaction(direction).dense()[: len(basis), : len(basis)]
    return basis.T @ matrix @ basis


def shortest(A: Tensor, g: Tensor, m: float) -> float:
    """Return the length of the d with d'A d + g'd + m = 0 on the curve of the multiplier."""
    same = torch.eye(len(A), dtype=torch.float64)
    lowest = float(torch.linalg.eigvalsh(A)[0])

    def change(multiplier: float) -> Tensor:
        return -multiplier / 2 * torch.linalg.solve(same + multiplier * A, g)

    low, high = 0.0, -1 / lowest * (1 - 1e-12)
    for _ in range(STEPS):
        middle = (low + high) / 2
        d = change(middle)
        if float(d @ A @ d + g @ d) + m > 0:
            low = middle
        else:
            high = middle
    return float(change(high).norm())


if __name__ == "__main__":
    main()
