"""The fidelity of a smaller model: its accuracy by rank, its error, and the ranks that it needs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.checks import check_count, check_finite, check_labels, checked
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.images.chain import accuracy_columns, share_right
from bilens.images.explanation import check_classes
from bilens.progress import logger, progress_bar
from bilens.sections import Columns
from bilens.settings import Count, Index, Share
from bilens.tensor import Bonds, Cut, Spectrum

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

    def columns(self) -> Columns:
        """Return a row for some k up to all of them; see `accuracy_columns`."""
        total = len(self.accuracy)
        steps = [k for k in (1, 2, 3, 5, 10, 20, 50, 100) if k < total] + [total]
        rows = [(k, self.accuracy[k - 1]) for k in steps]
        return accuracy_columns("eigenvectors per class", rows, self.full)

    def drop(self, k: int) -> float:
        """Return the accuracy lost by truncating to the first k."""
        check_count("k", k, len(self.accuracy))
        return self.full - self.accuracy[k - 1]

    def needed(self, drop: float) -> int:
        """Return the smallest k from which on the loss is at most `drop`."""
        # Accuracy is not monotonic in k, so the last k that is not enough decides.
        insufficient = [k for k in range(1, len(self.accuracy) + 1) if self.drop(k) > drop]
        return insufficient[-1] + 1 if insufficient else 1


@checked
def truncation_curve(
    spectrum: Spectrum, x: Float[Tensor, "samples n_in"], labels: Int[Tensor, " samples"]
) -> TruncationCurve:
    """Compute the accuracy with the first 1, 2, ... eigenvectors of each class.

    Eigenvectors count in the order of the spectrum.

    Source: Pearce et al. 2024, figure 3.
    """
    check_classes(spectrum)
    # Activations add up, so one cumulative sum has the logits of every truncation.
    return accuracy_by_rank(lambda rows: spectrum.activations(rows).cumsum(-1).mT, x, labels)


@checked
def accuracy_by_rank(
    logits_by_rank: Callable[[Tensor], Float[Tensor, "block ranks classes"]],
    x: Float[Tensor, "samples n_in"],
    labels: Int[Tensor, " samples"],
) -> TruncationCurve:
    """Compute the accuracy at each rank, given the logits of a block of samples at each rank."""
    counts = []
    with progress_bar("accuracy by rank", total=len(x)) as bar:
        for rows, row_labels in zip(x.split(BLOCK), labels.split(BLOCK), strict=True):
            logits = logits_by_rank(rows)
            check_finite(logits=logits)
            check_labels(row_labels, logits.shape[-1])
            # Counts and not shares, since the last block is smaller.
            counts.append((logits.argmax(-1) == row_labels.to(logits.device)[:, None]).sum(0))
            bar.update(len(rows))
    shares = (torch.stack(counts).sum(0).double() / len(x)).tolist()
    return TruncationCurve(tuple(shares), shares[-1])


@dataclass(frozen=True)
class HeldOut:
    """The error of a smaller model on held-out images."""

    n_images: int
    accuracy: float  # share of images that it classifies as labelled
    # Clopper-Pearson interval of the accuracy, at a confidence of 95 %.
    interval: tuple[float, float]
    changed: float  # share of images with another prediction than the model's
    error: float  # RMS change of the logits over their RMS, both after subtraction of their mean
    # Upper bound on the error for as many other images of the same kind, 6 standard errors above
    # its mean square.
    error_bound: float


@checked
def held_out(
    logits: Float[Tensor, "images classes"],
    smaller: Float[Tensor, "images classes"],
    labels: Int[Tensor, " images"],
) -> HeldOut:
    """Compare the logits of a smaller model with those of the model, on held-out images."""
    n_images = len(labels)
    if n_images < 2:
        raise BilensError(f"labels has {n_images} entries, expected at least 2 images")
    check_finite(logits=logits, smaller=smaller)
    check_labels(labels, logits.shape[1])
    parts = (logits.double(), smaller.double())
    # A number added to all logits is no change of the function.
    centred, other = (part - part.mean(-1, keepdim=True) for part in parts)
    change, size = ((part**2).sum(-1) for part in (centred - other, centred))
    if not size.mean() > 0:
        raise BilensError("logits are equal for all classes, expected those of a model")
    ratio = float(change.mean() / size.mean())
    # Delta method: the variance of a ratio of means is that of the residuals.
    residuals = (change - ratio * size) / size.mean()
    deviation = float(residuals.std()) / n_images**0.5
    right = int((smaller.argmax(-1) == labels.to(smaller.device)).sum())
    changed = (smaller.argmax(-1) != logits.to(smaller.device).argmax(-1)).double().mean()
    # 6 standard errors are 4.2 of the difference between the estimates from two sets of as many
    # images. By Cantelli's inequality the second exceeds the bound with a chance of at most 1 / 19,
    # for any distribution of this variance.
    return HeldOut(
        n_images=n_images,
        accuracy=right / n_images,
        interval=clopper_pearson(right, n_images),
        changed=float(changed),
        error=math.sqrt(ratio),
        error_bound=math.sqrt(ratio + 6 * deviation),
    )


def clopper_pearson(successes: int, n: int, tail: float = 0.025) -> tuple[float, float]:
    """Return the exact interval of the probability of a success, from successes in n trials.

    Each end is beyond the true probability with a chance of at most `tail`; by default the interval
    is that of 95 %.

    Source: Clopper & Pearson 1934.
    """
    low = 0.0 if successes == 0 else _solve(successes, n, tail)
    # The upper end for k successes is the lower end for n - k failures.
    high = 1.0 if successes == n else 1 - _solve(n - successes, n, tail)
    return low, high


@lru_cache(maxsize=4096)
def _solve(k: int, n: int, tail: float) -> float:
    """Return the p at which the chance of k or more successes of n is `tail`."""
    # Logarithms, since single probabilities of thousands of trials underflow.
    counts = torch.arange(k, n + 1, dtype=torch.float64, device="cpu")
    ways = math.lgamma(n + 1) - torch.lgamma(counts + 1) - torch.lgamma(n - counts + 1)
    # The chance grows with p, so bisection finds the only solution.
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        logs = ways + counts * math.log(p) + (n - counts) * math.log1p(-p)
        low, high = (p, high) if float(logs.logsumexp(0)) < math.log(tail) else (low, p)
    return (low + high) / 2


DOUBT = 0.001
"""Greatest chance that a cut loses more accuracy than is promised."""
SEARCHES = 2
"""Kinds of bonds that are searched, of which the smaller cut is taken."""


@checked
def loss_bound(lost: Index, gained: Index, n_images: Count) -> float:
    """Return the accuracy that a cut loses at most, from images that it was not chosen on.

    The bound is exact at every number of images: the chance that the real loss is above it is at
    most `DOUBT` over `SEARCHES`. Nine tenths of that are for the share of images that only the
    model classifies as labelled, `lost`, a tenth for those that only the cut does, `gained`.

    Raises:
        BilensError: more images are lost and gained than there are.
    """
    if lost + gained > n_images:
        raise BilensError(f"lost={lost}, gained={gained}: expected at most n_images={n_images}")
    doubt = DOUBT / SEARCHES
    high = clopper_pearson(lost, n_images, 0.9 * doubt)[1]
    return high - clopper_pearson(gained, n_images, 0.1 * doubt)[0]


def promised(
    cuts: Sequence[tuple[int, ...]], bound: Callable[[tuple[int, ...]], float], drop: float
) -> tuple[int, ...] | None:
    """Return the last of some cuts, the largest first, before one whose bound is above `drop`.

    The order is fixed before the images are seen, and the first miss ends it. So a wrong cut is
    returned only if the first wrong one passes: looking several times costs no confidence.

    Source: Maurer, Hothorn and Lehmacher 1995, on tests in an order that is fixed before.
    """
    last = None
    for ranks in cuts:
        if bound(ranks) > drop:
            break
        last = ranks
    return last


def can_promise(data: ImageData, drop: float) -> bool:
    """Return whether images are enough to promise a loss of any cut; a warning says if not."""
    n = len(data.train_images[_spaced(data)])
    if n < 4:
        raise BilensError(
            f"data has {n} training images, expected at least 4: one for the search of "
            "directions, and three for the check"
        )
    checks = n - math.ceil(n / 4)
    if (least := loss_bound(0, 0, checks)) > drop:
        logger.warning(
            "all directions are kept, since %d images can promise no loss below %.3g, and %g is "
            "asked for; name a larger drop, or take more images",
            checks,
            least,
            drop,
        )
    return least <= drop


def _spaced(data: ImageData) -> slice:
    """Return some 30,000 training images, evenly spaced, since they may be sorted by class."""
    return slice(None, None, max(1, len(data.train_images) // 30_000))


@checked
def accurate_ranks(model_bonds: Bonds, data: ImageData, drop: Share = 0.01) -> tuple[int, ...]:
    """Find few directions that lose at most `drop` of the model's accuracy.

    They are searched on a quarter of 30,000 training images and checked on the others: from all
    directions down to those that were found, until the first cut that may lose more. So the real
    loss, on images of the same kind, is within `drop` with a confidence of 99.9 %, also for the
    smaller of two kinds of bonds. Bounds are exact, see `loss_bound`. If there are too few images
    to promise that loss of any cut, all directions are returned, and a warning says so.
    """
    full = tuple(bond.k for bond in model_bonds.bonds)
    if not can_promise(data, drop):
        return full
    x, labels = data.train_images[_spaced(data)], data.train_labels[_spaced(data)]
    is_search = torch.arange(len(x)) % 4 == 0
    checks = int((~is_search).sum())
    # The input coordinates of every cut are the first of these, so they are computed once. Single
    # precision decides the same images within rounding, in half the time.
    z = model_bonds.cut(full).coordinates(x)[0].float()

    def is_right(cut: Cut, images: Bool[Tensor, " images"]) -> Bool[Tensor, " _"]:
        outputs = z[images, : cut.ranks[0]]
        for core in cut.cores:
            outputs = core.to(torch.float32)(outputs)
        return outputs.argmax(-1) == labels[images]

    def bound(cut: Cut, images: Bool[Tensor, " images"]) -> float:
        """Return the loss that the check would promise if it lost as many as these images do."""
        before, after = reference[images], is_right(cut, images)
        scale = checks / len(before)
        losses, gains = (int(part.sum()) for part in (before & ~after, after & ~before))
        return loss_bound(math.ceil(losses * scale), int(gains * scale), checks)

    with progress_bar("choosing directions") as bar:
        # The loss of a cut is counted image by image against all directions.
        reference = is_right(model_bonds.cut(full), torch.ones_like(is_search))

        def score(cut: Cut) -> float:
            loss, ranks = bound(cut, is_search), " + ".join(map(str, cut.ranks))
            bar.set_postfix_str(f"{ranks} directions: {loss:.2%} lost", refresh=False)
            bar.update()
            return -loss

        few = model_bonds.ranks_scoring(score, -drop)
        # The search has seen its images many times, and may have been lucky on them. Larger cuts
        # differ less and less.
        more = [*range(5), *(round(6 * 1.5**step) for step in range(40))]
        cuts = [tuple(min(r + m, k) for r, k in zip(few, full, strict=True)) for m in more]
        order = [ranks for ranks in dict.fromkeys(reversed(cuts)) if ranks != full]
        result = promised(order, lambda r: bound(model_bonds.cut(r), ~is_search), drop)
        return result or full


@checked
def rank_accuracies(
    model_bonds: Bonds, data: ImageData, ranks: Sequence[int] = ()
) -> tuple[tuple[int, float, float], ...]:
    """Return (k, test accuracy, error of the logits) of the cut to k directions at each bond.

    The error is the RMS change of the centred logits on the test images, over their RMS. By default
    k runs from 1 to all directions in growing steps.
    """
    most = max(bond.k for bond in model_bonds.bonds)
    logits = full_cut(model_bonds)(data.test_images)
    rows = []
    steps = [*range(1, 6), *range(6, 30, 2), 30, 35, 40, 50, 60, 80, 100]
    for k in ranks or [*(rank for rank in steps if rank < most), most]:
        outputs = model_bonds.cut(k)(data.test_images)
        error = float((outputs - logits).norm() / logits.norm())
        rows.append((k, share_right(outputs, data.test_labels), error))
    return tuple(rows)


def full_cut(model_bonds: Bonds) -> Cut:
    """Return the model on all directions."""
    return model_bonds.cut(max(bond.k for bond in model_bonds.bonds))


@checked
def product_accuracies(cut: Cut, data: ImageData) -> tuple[tuple[int, float], ...]:
    """Return (k, test accuracy) with only the k products of largest share, for growing k."""
    most = len(cut.products())
    # Numbers of products, per factor of 10, at which accuracy is measured.
    per_decade = 10
    steps = range(per_decade, 1 + int(per_decade * math.log10(most)))
    counts = sorted({round(10 ** (step / per_decade)) for step in steps} | {most})
    x = data.test_images.to(cut.read)
    rows = []
    for k in counts:
        z = x
        for tensor in cut.keep_products(k):
            z = tensor(z)
        rows.append((k, share_right(z, data.test_labels)))
    return tuple(rows)
