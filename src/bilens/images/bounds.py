"""Bounds on the radius where it is not exact: pixels within their range, and several layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from bilens.checks import check_labels, detached
from bilens.images.chain import open_layer
from bilens.images.nearest import STEPS, Forms, forms_of, margins_of, nearest_changes
from bilens.tensor import BilinearTensor, TensorChain
from bilens.tensor.factors import fit_input

BLOCK = 256
"""Inputs whose Jacobians are in memory at once."""
ATTACK_STEPS = 50


@torch.no_grad()
def layered_radii(
    tensors: Sequence[BilinearTensor],
    x: Float[Tensor, "samples n_in"],
    classes: Int[Tensor, " samples"],
) -> tuple[Float64[Tensor, " samples"], Int[Tensor, " samples"]]:
    """Return a lower bound on the radius of each input of several layers, and its other class.

    A change of length r of a layer's input y moves its output by at most sigma r + tau r^2: sigma
    is the largest singular value of the Jacobian at y, and tau^2 the smaller of two bounds on
    sum_c (d'A_c d)^2 for |d| = 1, the largest eigenvalues of sum_c A_c^2 and of the matrix of
    <A_c, A_c'>. The last layer's radius is exact, and r is the largest that stays within it.
    """
    slopes, curvatures, y = [], [], x.double()
    for tensor in tensors[:-1]:
        forms = forms_of(tensor)
        squares = (forms.quadratic @ forms.quadratic).sum(0)
        flat = forms.quadratic.flatten(1)
        eigenvalues = [torch.linalg.eigvalsh(matrix)[-1] for matrix in (squares, flat @ flat.T)]
        curvatures.append(torch.minimum(*eigenvalues).sqrt())
        norms = []
        for rows in (y @ forms.basis).split(BLOCK):
            jacobian = 2 * torch.einsum("sn,cnm->scm", rows, forms.quadratic) + forms.linear
            norms.append(torch.linalg.matrix_norm(jacobian, ord=2))
        slopes.append(torch.cat(norms))
        y = forms.outputs(y)
    limit, other, _ = nearest_changes(forms_of(tensors[-1]), y, classes)
    low, high = torch.zeros_like(limit), torch.ones_like(limit)

    def reached(r: Float64[Tensor, " samples"]) -> Float64[Tensor, " samples"]:
        for slope, curvature in zip(slopes, curvatures, strict=True):
            r = slope * r + curvature * r**2
        return r

    limit = limit.clamp_max(1e12)  # that no change changes it is not said of several layers
    while bool((inside := reached(high) < limit).any()):
        high = torch.where(inside, 2 * high, high)
    for _ in range(STEPS):
        middle = (low + high) / 2
        inside = reached(middle) < limit
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return low, other


@dataclass(frozen=True)
class BoxBounds:
    """Bounds on the smallest change that keeps every pixel between 0 and 1.

    The lower bounds are proved, the upper ones are lengths of changes that an attack found,
    infinite where it found none.

    Attributes:
        euclidean: lower and upper bound on the length of the change; the lower is the radius
            without the range of pixels.
        largest: the same of its largest pixel, the l-infinity norm.
    """

    euclidean: tuple[Float64[Tensor, " samples"], Float64[Tensor, " samples"]]
    largest: tuple[Float64[Tensor, " samples"], Float64[Tensor, " samples"]]


@detached
def box_bounds(
    model: TensorChain, x: Float[Tensor, "samples n_pixels"], classes: Int[Tensor, " samples"]
) -> BoxBounds:
    """Bound the smallest change of pictures with pixels from 0 to 1 that changes their answer."""
    forms = forms_of(*open_layer(model))
    x = fit_input(x, forms.basis.T, constant=False)
    check_labels(classes, len(forms.constant))
    classes = classes.to(forms.basis.device)
    radius, _, change = nearest_changes(forms, x, classes)
    start = torch.where(change.isfinite(), change, 0) @ forms.basis.T
    lower = torch.maximum(radius / x.shape[1] ** 0.5, largest_lower_bound(forms, x, classes))
    low, high = torch.zeros_like(radius), torch.ones_like(radius)
    is_fooled = sign_attack(forms, x, classes, high)
    upper = torch.where(is_fooled, high, torch.inf)
    for _ in range(16):
        middle = (low + high) / 2
        is_fooled = sign_attack(forms, x, classes, middle)
        upper = torch.where(is_fooled, torch.minimum(upper, middle), upper)
        low, high = torch.where(is_fooled, low, middle), torch.where(is_fooled, middle, high)
    return BoxBounds((radius, euclidean_attack(forms, x, classes, start)), (lower, upper))


def margins_and_slopes(
    forms: Forms, x: Float64[Tensor, "samples n_pixels"], classes: Int[Tensor, " samples"]
) -> tuple[Float64[Tensor, " samples"], Float64[Tensor, "samples n_pixels"]]:
    """Return how far the class is ahead of all others, and the gradient by the pixels."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        outputs = forms.outputs(x)
        own = outputs.gather(1, classes[:, None])[:, 0]
        others = outputs.scatter(1, classes[:, None], -torch.inf).amax(1)
        margin = own - others
        (slope,) = torch.autograd.grad(margin.sum(), x)
    return margin.detach(), slope


def euclidean_attack(
    forms: Forms,
    x: Float64[Tensor, "samples n_pixels"],
    classes: Int[Tensor, " samples"],
    start: Float64[Tensor, "samples n_pixels"],
) -> Float64[Tensor, " samples"]:
    """Return the length of a change within the range of pixels that changes each answer."""
    target = (x + start).clamp(0, 1)
    for _ in range(ATTACK_STEPS):
        margin, slope = margins_and_slopes(forms, target, classes)
        # Pixels at the end of their range do not move further.
        free = torch.where(slope > 0, target > 0, target < 1)
        slope = slope * free
        size = (slope**2).sum(-1).clamp_min(torch.finfo(slope.dtype).tiny)
        step = 1.05 * margin.clamp_min(0) / size
        target = (target - step[:, None] * slope).clamp(0, 1)
    change = target - x
    is_fooled = margins_and_slopes(forms, target, classes)[0] <= 0
    low, high = torch.zeros(len(x)).to(x), torch.ones(len(x)).to(x)
    for _ in range(STEPS // 2):
        middle = (low + high) / 2
        ahead = margins_and_slopes(forms, x + middle[:, None] * change, classes)[0] > 0
        low, high = torch.where(ahead, middle, low), torch.where(ahead, high, middle)
    return torch.where(is_fooled, high * change.norm(dim=-1), torch.inf)


def sign_attack(
    forms: Forms,
    x: Float64[Tensor, "samples n_pixels"],
    classes: Int[Tensor, " samples"],
    size: Float64[Tensor, " samples"],
    steps: int = 5,
) -> Bool[Tensor, " samples"]:
    """Return which answers change when each pixel moves by at most `size`, against the margin."""
    target, is_fooled = x, torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for _ in range(steps):
        _, slope = margins_and_slopes(forms, target, classes)
        target = (x - size[:, None] * slope.sign()).clamp(0, 1)
        is_fooled |= margins_and_slopes(forms, target, classes)[0] <= 0
    return is_fooled


def largest_lower_bound(
    forms: Forms, x: Float64[Tensor, "samples n_pixels"], classes: Int[Tensor, " samples"]
) -> Float64[Tensor, " samples"]:
    """Return a lower bound on the largest pixel of a change of the answer.

    With every |d_i| <= e, the margin is at least m - e |g|_1 + e^2 n min(0, lambda_min).
    """
    bound = torch.full_like(x[:, 0], torch.inf)
    for rows, _, quadratic, gradient, margin in margins_of(forms, x, classes):
        lengths = (gradient @ forms.basis.T).abs().sum(-1)
        curvature = -x.shape[1] * float(torch.linalg.eigvalsh(quadratic)[0].clamp_max(0))
        root = 2 * margin / (lengths + (lengths**2 + 4 * curvature * margin).sqrt())
        bound[rows] = torch.minimum(bound[rows], root.nan_to_num(torch.inf))
    return bound
