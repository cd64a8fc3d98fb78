"""Layers of a few inputs that are trained: XOR, Boolean functions, features at an angle.

Reproduces the right of figure 2 and a thought experiment of section 5.4 of Pearce et al. 2024,
and the Boolean functions of Pearce & Dooms 2024, on bilinear layers of one output. They are trained
with Adam on drawn inputs whose answer is known, so that their eigenvectors can be compared with it.

- XOR: among inputs of plus and minus 1 the output is the product of the first two. Its form has two
  eigenvectors, along their sum and their difference, with values of opposite signs. In the plane of
  the two inputs each quadrant has the sign of the output.
- Boolean functions: AND, OR and XOR of the first two of bits that are 0 or 1, with biases. Beside
  the layers are networks with a ReLU and as many weights.
- Features at an angle: the output is the sum of the squares along two features. Eigenvectors are
  orthogonal, so that they cannot be the features, and split them: the first is along their sum,
  whose cosine with each is that of half of the angle.

Small and paper: the same, a minute on one core.
"""

from collections.abc import Callable
from functools import partial
from math import cos, pi, sin
from statistics import median
from typing import Any, TypeVar

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from bilens.nn import Bilinear
from bilens.pages import add_legend, new_figure, styled
from bilens.tensor import Spectrum
from experiments.context import Outcome, RecipeContext
from experiments.curves import BLUE, RED
from experiments.results import Row, intervals

SEEDS = (5, 5)
"""Initialisations at either scale."""
WIDTH, HIDDEN, STEPS, BATCH, RATE, DECAY = 8, 16, 1500, 256, 1e-2, 1e-3
ANGLE = pi / 3
Layer = TypeVar("Layer", bound=nn.Module)
Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Function that draws inputs (batch, width) and outputs (batch, 1)."""

U, V = torch.eye(WIDTH)[:2]
TILTED = cos(ANGLE) * U + sin(ANGLE) * V


def run(context: RecipeContext) -> Outcome:
    """Train the layers, and compare their eigenvectors with the answers."""
    seeds = context.seed_range(SEEDS)
    measured: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        measured.setdefault(name, []).append(value)

    figures: dict[str, Figure] = {}
    for seed in seeds:
        layer = train(signs, seed)
        xor = spectrum(layer)
        if not figures:
            figures["quadrants"] = quadrants(layer, xor)
        largest, least = ends(xor)
        note("xor, share", share(xor, 2))
        note("xor, sum", along(largest, U + V))
        note("xor, difference", along(least, U - V))
        for name, function in BOOLEAN.items():
            x, y = bits(function, torch.Generator().manual_seed(seed + 1000))
            for key, make in (("bits", with_bias), ("bits of a ReLU", with_relu)):
                learned = fit(make, partial(bits, function), seed)
                note(f"{key}, {name}", float((learned(x) - y).abs().max()))
        angled = spectrum(train(partial(squares, torch.stack([U, TILTED])), seed))
        note("angle, first", along(ends(angled)[0], U + TILTED))
        note("angle, feature", max(along(vector, U) for vector in angled.vectors))
    rows = _rows(measured)
    samples = [
        dict(zip(measured, values, strict=True)) for values in zip(*measured.values(), strict=True)
    ]
    settings = {
        **{"width": WIDTH, "hidden": HIDDEN, "steps": STEPS, "batch": BATCH},
        **{"learning rate": RATE, "weight decay": DECAY},
    }
    return Outcome(intervals(samples), figures, rows=rows, settings=settings)


def _rows(measured: dict[str, list[float]]) -> list[Row]:
    chance = {"a random direction": random_match()}
    half = {"cosine of half of the angle": cos(ANGLE / 2)}
    cosines = (
        ("XOR of signs: first eigenvector with the sum of the inputs", "xor, sum", chance),
        ("XOR of signs: last eigenvector with their difference", "xor, difference", chance),
        ("features at an angle: first eigenvector with their sum", "angle, first", chance),
        ("a feature at an angle with its nearest eigenvector", "angle, feature", half | chance),
    )
    shares = measured["xor, share"]
    wrong, of_relu = (
        [
            max(errors)
            for errors in zip(*(measured[f"{key}, {name}"] for name in BOOLEAN), strict=True)
        ]
        for key in ("bits", "bits of a ReLU")
    )
    return [
        Row.of_shares("XOR of signs: share of the form in two eigenvectors", shares),
        *(
            Row.of_shares(f"{claim}, cosine", measured[key], baselines=of)
            for claim, key, of in cosines
        ),
        Row.of_range(
            "AND, OR and XOR of bits: largest error of an output",
            wrong,
            baselines={"a ReLU, equal size": median(of_relu)},
        ),
    ]


def with_bias() -> Bilinear:
    """Return a bilinear layer of one output with biases."""
    return Bilinear(WIDTH, 1, HIDDEN, bias=True)


def with_relu() -> nn.Sequential:
    """Return a network with a ReLU and as many weights as the layer with biases."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, 1))


def train(draw: Draw, seed: int) -> Bilinear:
    """Return a bilinear layer of one output, without biases, trained on drawn inputs."""
    return fit(lambda: Bilinear(WIDTH, 1, HIDDEN), draw, seed)


def fit(make: Callable[[], Layer], draw: Draw, seed: int) -> Layer:
    """Return a layer that was trained on drawn inputs by the square of its error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = make()
    optimizer = torch.optim.AdamW(layer.parameters(), RATE, weight_decay=DECAY)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        x, y = draw(generator)
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    return layer.requires_grad_(False)


def spectrum(layer: Bilinear) -> Spectrum:
    """Return all eigenvectors of the layer's form, the largest eigenvalue first."""
    return layer.tensor().interaction(torch.ones(1)).eigh()


def signs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs of plus and minus 1, and the product of the first two."""
    x = 2.0 * torch.randint(2, (BATCH, WIDTH), generator=generator) - 1
    return x, x[:, :1] * x[:, 1:2]


BOOLEAN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AND": lambda a, b: a * b,
    "OR": lambda a, b: a + b - a * b,
    "XOR": lambda a, b: a + b - 2 * a * b,
}


def bits(
    function: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw bits, and a Boolean function of the first two."""
    x = torch.randint(2, (BATCH, WIDTH), generator=generator).float()
    return x, function(x[:, :1], x[:, 1:2])


def squares(features: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw normal inputs, and the sum of their squares along features."""
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, (x @ features.T).square().sum(-1, keepdim=True)


def along(vector: Tensor, direction: Tensor) -> float:
    """Return the absolute cosine of a vector with a direction."""
    return float(cosine_similarity(vector.float(), direction, dim=0).abs())


def ends(found: Spectrum) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of the largest and of the least eigenvalue."""
    largest, least = found.outermost(1).vectors
    return largest, least


def share(found: Spectrum, count: int) -> float:
    """Return the share of the squared form in its strongest eigenvalues."""
    squared = found.values.double().square()
    return float(squared[:count].sum() / squared.sum())


def random_match(samples: int = 10_000) -> float:
    """Return the mean absolute cosine of two random directions."""
    first, second = torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(0))
    return float(cosine_similarity(first, second).abs().mean())


@styled
def quadrants(layer: Bilinear, found: Spectrum) -> Figure:
    """Draw the output over the plane of the first two inputs, with its two eigenvectors."""
    end = 1.5
    places = torch.linspace(-end, end, 61)
    grid = torch.zeros(len(places), len(places), WIDTH)
    grid[..., 0], grid[..., 1] = places[None], places[:, None]
    output = layer(grid)[..., 0]
    top = float(output.abs().max())
    title = "XOR: each quadrant has a sign, and two eigenvectors make it"
    figure, axes = new_figure(height=440, title=title)
    colors = LinearSegmentedColormap.from_list("signs", (RED, "white", BLUE))
    look: dict[str, Any] = {"cmap": colors, "vmin": -top, "vmax": top, "origin": "lower"}
    cells = axes.imshow(output.numpy(), extent=(-end, end, -end, end), **look)
    figure.colorbar(cells, ax=axes, label="output")
    for vector, color, name in zip(ends(found), (BLUE, RED), ("largest", "least"), strict=True):
        x, y = (1.4 * vector[:2]).tolist()
        axes.plot([-x, x], [-y, y], color=color, linewidth=3, label=f"{name} eigenvalue")
    axes.set_xlabel("first input")
    axes.set_ylabel("second input")
    add_legend(axes)
    return figure
