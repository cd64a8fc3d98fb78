"""The fidelity of a smaller model: accuracy by rank, and sparsity and loss of a reconstruction."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.checks import check_count, check_finite, check_labels, checked, detached, full_precision
from bilens.errors import BilensError
from bilens.lazy_imports import go, pd
from bilens.progress import progress_bar
from bilens.read.chain import accuracy_frame
from bilens.read.figures.plots import accuracy_curve, mark_kept
from bilens.read.figures.style import dress
from bilens.read.shared import check_classes
from bilens.tensor import Spectrum

STEPS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Numbers of eigenvectors in tables."""
TICKS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
BLOCK = 512
"""Samples in memory together, each with a number for every class and rank."""


@dataclass(frozen=True)
class TruncationCurve:
    """Accuracy with the first k eigenvectors of each class, or components of a layer, for every k.

    Attributes:
        accuracy: from 0 to 1, for k = 1, 2, ...
        full: accuracy with all of them, which is the model's.
    """

    accuracy: tuple[float, ...]
    full: float

    def frame(self) -> "pd.DataFrame":
        """Return a row for some k up to all of them; see `accuracy_frame`."""
        total = len(self.accuracy)
        steps = [k for k in STEPS if k < total] + [total]
        rows = [(k, self.accuracy[k - 1]) for k in steps]
        return accuracy_frame("eigenvectors per class", rows, self.full)

    def drop(self, k: int) -> float:
        """Return the accuracy lost by truncating to the first k."""
        check_count("k", k, len(self.accuracy))
        return self.full - self.accuracy[k - 1]

    def needed(self, drop: float) -> int:
        """Return the smallest k from which on the loss is at most `drop`."""
        # Accuracy is not monotonic in k, so the last k that is not enough decides.
        insufficient = [k for k in range(1, len(self.accuracy) + 1) if self.drop(k) > drop]
        return insufficient[-1] + 1 if insufficient else 1


@full_precision
def truncation_curve(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], labels: Int[Tensor, " samples"]
) -> TruncationCurve:
    """Compute the accuracy with the first 1, 2, ... eigenvectors of each class.

    Eigenvectors count in the order of the spectrum.

    Source:
        Pearce et al. 2024, figure 3.
    """
    check_classes(spectrum)
    # Activations add up, so one cumulative sum has the logits of every truncation.
    return accuracy_by_rank(lambda rows: spectrum.activations(rows).cumsum(-1).mT, x, labels)


@full_precision
def accuracy_by_rank(
    logits_by_rank: Callable[[Tensor], Float[Tensor, "block ranks classes"]],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Compute the accuracy at each rank, block by block.

    Args:
        logits_by_rank: function from a block of samples to their logits at each rank.
        x: the samples.
        labels: their classes.
    """
    counts = []
    with progress_bar() as bar:
        task = bar.add_task("accuracy by rank", total=len(x), note="")
        for rows, row_labels in zip(x.split(BLOCK), labels.split(BLOCK), strict=True):
            logits = logits_by_rank(rows)
            check_finite(logits=logits)
            check_labels(row_labels, logits.shape[-1])
            # Counts and not shares, since the last block is smaller.
            counts.append((logits.argmax(-1) == row_labels.to(logits.device)[:, None]).sum(0))
            bar.advance(task, len(rows))
    shares = (torch.stack(counts).sum(0).double() / len(x)).tolist()
    return TruncationCurve(tuple(shares), shares[-1])


@checked
def truncation_figure(curve: TruncationCurve) -> "go.Figure":
    """Plot the test accuracy of the model cut to the first k eigenvectors of each class."""
    counts = range(1, len(curve.accuracy) + 1)
    figure = accuracy_curve(
        counts, curve.accuracy, curve.full, label="all of them", beside="bottom right"
    )
    figure.update_traces(
        marker={"size": 4}, hovertemplate="%{x} eigenvectors: %{y:.2f} %<extra></extra>"
    )
    # Few eigenvectors matter most, so the axis is logarithmic.
    figure.update_xaxes(
        title="eigenvectors kept for each class",
        type="log",
        tickvals=[k for k in TICKS if k <= len(curve.accuracy)],
        ticks="outside",
    )
    alt = "Test accuracy against the eigenvectors kept for each class"
    return dress(figure, height=340, alt=alt)


@checked
def kept_figure(curve: TruncationCurve, k: int) -> "go.Figure":
    """Draw the curve of `truncation_figure` with a mark at k eigenvectors of each class."""
    return mark_kept(truncation_figure(curve), k, curve.drop(k), curve.accuracy[k - 1])


@dataclass(frozen=True)
class SparsityReport:
    """Sparsity and relative error of a dictionary's activations.

    Attributes:
        l0: active features of an input, on average.
        relative_error: mean |y - y'|^2 over mean |y|^2, the case study's MSE/L2^2.
        active: number of features that are active for at least one input.
        dead: number of all other features.
    """

    l0: float
    relative_error: float
    active: int
    dead: int


@detached
def sparsity(
    activations: Float[Tensor, "samples n_features"],
    y: Float[Tensor, "samples d"],
    rebuilt: Float[Tensor, "samples d"],
) -> SparsityReport:
    """Measure sparsity and relative error over one set of samples.

    Source:
        Pearce & Dooms 2024, appendix "SAE training".
    """
    check_finite(activations=activations, y=y, rebuilt=rebuilt)
    if not y.any():
        raise BilensError("y has no sample, or is all zero, so no error is relative to it")
    on = activations != 0
    active = int(on.any(0).sum())
    # Of all samples together: single samples may be close to zero.
    error = (y - rebuilt).pow(2).sum() / y.pow(2).sum()
    return SparsityReport(
        l0=float(on.double().sum(-1).mean()),
        relative_error=float(error),
        active=active,
        dead=activations.shape[-1] - active,
    )


@detached
def loss_recovered(
    logits: Float[Tensor, "samples classes"],
    rebuilt_logits: Float[Tensor, "samples classes"],
    labels: Int[Tensor, " samples"],
) -> float:
    """Share of the model's advantage over random guessing that is left after a replacement.

    (L_guess - L_rebuilt) / (L_guess - L_model), with L_guess = log(classes).

    Raises:
        BilensError: the model itself is no better than guessing.

    Source:
        Pearce & Dooms 2024, "SAE features using the pseudoinverse trick".
    """
    check_finite(logits=logits, rebuilt_logits=rebuilt_logits)
    check_labels(labels, logits.shape[-1])
    # A uniform guess has the loss log(classes).
    guess = math.log(logits.shape[-1])
    model, rebuilt = (
        float(functional.cross_entropy(x, labels.long())) for x in (logits, rebuilt_logits)
    )
    if model >= guess:
        raise BilensError(
            f"The model's loss {model:.3f} is no better than guessing ({guess:.3f}), so there is "
            "nothing to recover"
        )
    return (guess - rebuilt) / (guess - model)
