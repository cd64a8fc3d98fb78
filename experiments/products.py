"""Products of three maps, full tensors, autoencoders, polynomial norms: what comments ask for.

Comments on the post on tensor-transformer variants name what nobody tried there:

- three encoders, D (Ax * Bx * Cx), which would be better per step than two, and dearer. Here they
  read the pixels of MNIST, as wide as two, and with as many weights;
- a full tensor of d x d x d weights in place of factors, which are its CP decomposition. Here it is
  the layer of a classifier of MNIST with d = 32. Its rank is the number of singular directions of
  outputs that have 0.9 of its squares;
- a bilinear autoencoder, D (Lx * Rx), here of MNIST;
- an RMSNorm as a polynomial. Here the polynomial of the mean square s interpolates 1/sqrt(s)
  between the least and the largest s that each norm of the story model has on half of the texts,
  and the loss is that of the other half.

Maps have biases, and those of a product begin with outputs of mean square 1.

Small: 3 seeds of 2 epochs, 4 minutes on one core. Paper: 10 of 20.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from math import isfinite, prod
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from numpy.polynomial import Chebyshev
from torch import Tensor, nn
from torch.nn import functional

from bilens import load
from experiments.context import Outcome, RecipeContext
from experiments.results import Row
from experiments.story import held_out_stories

SEEDS = (3, 10)
"""Initialisations at either scale."""
BATCH, RATE, DECAY = 250, 1e-3, 0.1
HIDDEN, WIDTH, SHARE = 150, 32, 0.9
DEGREES = (2, 4, 8)
STORIES, TOKENS = 200, 128
Make = Callable[[], nn.Module]


class Encoders(nn.Module):
    """D (A_1 x * A_2 x * ... * A_k x), or D relu(A_1 x) with a single map.

    The mean |x|² is `square`, so that the outputs of the maps have the mean square 1.
    """

    def __init__(self, n_in: int, hidden: int, n_out: int, encoders: int, square: float) -> None:
        super().__init__()
        maps = [nn.Linear(n_in, hidden) for _ in range(encoders)]
        self.encoders, self.out = nn.ModuleList(maps), nn.Linear(hidden, n_out)
        for encoder in maps:
            nn.init.normal_(encoder.weight, std=square**-0.5)

    def forward(self, x: Float[Tensor, "batch n_in"]) -> Float[Tensor, "batch n_out"]:
        """Return the outputs."""
        encoded = [encoder(x) for encoder in self.encoders]
        y: Tensor = self.out(encoded[0].relu() if len(encoded) == 1 else prod(encoded))
        return y

    def tensor(self) -> Float[Tensor, "n_out n_in n_in"]:
        """Return the tensor of two maps without their biases, symmetric in its inputs."""
        left, right = (encoder.weight for encoder in self.encoders)
        return symmetric(torch.einsum("oh,hi,hj->oij", self.out.weight, left, right))


class Full(nn.Module):
    """sum_ij T_oij x_i x_j + (Lx + b)_o, with all the weights of the tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, width) / width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        """Return the outputs."""
        pairs = (x[:, :, None] * x[:, None]).flatten(1)
        y: Tensor = pairs @ self.weight.flatten(1).T + self.linear(x)
        return y

    def tensor(self) -> Float[Tensor, "width width width"]:
        """Return the tensor, symmetric in its inputs."""
        return symmetric(self.weight)


def symmetric(T: Float[Tensor, "n_out n_in n_in"]) -> Float[Tensor, "n_out n_in n_in"]:
    """Return the part that is the same with its inputs exchanged, which alone has an effect."""
    return (T + T.mT) / 2


def run(context: RecipeContext) -> Outcome:
    """Train layers of each kind, and replace norms by polynomials."""
    epochs = context.choose(2, 20)
    rows = [
        *encoder_rows(context, epochs),
        *tensor_rows(context, epochs),
        autoencoder_row(context, epochs),
        *norm_rows(context),
    ]
    settings = {
        **{"epochs": epochs, "batch": BATCH, "learning rate": RATE, "weight decay": DECAY},
        **{"hidden units of two encoders": HIDDEN, "width": WIDTH, "share of squares": SHARE},
        **{"degrees": DEGREES, "texts": STORIES, "tokens of a text": TOKENS},
        "low and high": "range over seeds, and over norms",
    }
    return Outcome({}, rows=rows, settings=settings)


def encoder_rows(context: RecipeContext, epochs: int) -> list[Row]:
    """Return the test accuracy of two and three encoders, beside a ReLU."""
    images, classes = context.mnist.train_images, context.mnist.n_classes
    n_in, square = images.shape[1], float(images.square().sum(1).mean())

    def right(hidden: int, encoders: int) -> list[float]:
        make = partial(Encoders, n_in, hidden, classes, encoders, square)
        return [accuracy(model, context) for model in classifiers(make, context, epochs)]

    beside = {"a ReLU of equal size": median(right(2 * HIDDEN, 1))}
    kinds = {
        "two encoders": right(HIDDEN, 2),
        "three encoders, as wide": right(HIDDEN, 3),
        "three encoders, as large": right(2 * HIDDEN // 3, 3),
    }
    return [
        Row.of_range(f"{name}: accuracy", found, unit="%", baselines=beside)
        for name, found in kinds.items()
    ]


def tensor_rows(context: RecipeContext, epochs: int) -> list[Row]:
    """Return accuracy and rank of a full tensor, of factors as large, and of as many as inputs."""
    n_in, classes = context.mnist.n_inputs, context.mnist.n_classes
    layers: dict[str, Make] = {
        "full tensor": partial(Full, WIDTH),
        "factors as large": partial(Encoders, WIDTH, WIDTH**2 // 3, WIDTH, 2, WIDTH),
        "factors as wide as the inputs": partial(Encoders, WIDTH, WIDTH, WIDTH, 2, WIDTH),
    }
    rows = []
    for name, layer in layers.items():

        def make(layer: Make = layer) -> nn.Module:
            return nn.Sequential(nn.Linear(n_in, WIDTH), layer(), nn.Linear(WIDTH, classes))

        models = classifiers(make, context, epochs)
        right = [accuracy(model, context) for model in models]
        ranks = [float(rank(model[1].tensor())) for model in models]  # type: ignore[index]
        rows.append(Row.of_range(f"{name}: accuracy", right, unit="%"))
        rows.append(Row.of_range(f"{name}: directions with {SHARE:g} of the squares", ranks))
    return rows


def rank(T: Float[Tensor, "n_out n_in n_in"]) -> int:
    """Return how many singular directions of the outputs have most of the squares."""
    squares = torch.linalg.svdvals(T.flatten(1)).square()
    return int((squares.cumsum(0) / squares.sum() < SHARE).sum()) + 1


def autoencoder_row(context: RecipeContext, epochs: int) -> Row:
    """Return the relative squared error of a bilinear autoencoder, beside others as narrow."""
    data = context.mnist
    mean = data.train_images.mean(0)
    x, test = data.train_images - mean, data.test_images - mean
    square = float(x.square().sum(1).mean())

    def error(encoders: int) -> list[float]:
        make = partial(Encoders, x.shape[1], WIDTH, x.shape[1], encoders, square)
        models = [fit(make, x, x, functional.mse_loss, epochs, seed) for seed in seeds]
        return [
            float((model(test) - test).square().sum() / test.square().sum()) for model in models
        ]

    seeds = context.seed_range(SEEDS)
    components = torch.linalg.eigh((x.T @ x).double()).eigenvectors[:, -WIDTH:].float()
    lost = float((test - test @ components @ components.T).square().sum() / test.square().sum())
    return Row.of_range(
        f"bilinear autoencoder of {WIDTH} latents: relative squared error",
        error(2),
        baselines={"a ReLU": median(error(1)), "principal components": lost},
    )


def norm_rows(context: RecipeContext) -> list[Row]:
    """Return the error of polynomials in place of the story model's norms, and the loss."""
    model: Any = load("story")
    stories = islice(held_out_stories(context), 3 * STORIES)
    ids = [model.tokenizer(text, return_tensors="pt")["input_ids"][0] for text in stories]
    ids = [of_text[:TOKENS] for of_text in ids if len(of_text) >= TOKENS]
    texts = torch.stack(ids[:STORIES])
    fitted_on, others = texts[::2], texts[1::2]
    norms = [module for module in model.model.modules() if isinstance(module, nn.RMSNorm)]
    seen: dict[nn.Module, Tensor] = {}

    def keep(norm: nn.Module, args: tuple[Tensor, ...], *_: Any) -> None:
        seen[norm] = args[0].double().square().mean(-1).flatten()

    with hooked(norms, keep):
        model.model(fitted_on)
    ends = [(float(seen[norm].min()), float(seen[norm].max())) for norm in norms]
    spread = [most / least for least, most in ends]
    rows = [Row.of_range("norms: largest mean square over the least", spread)]
    exact = loss(model, others)
    for degree in DEGREES:
        fits = [Chebyshev.interpolate(lambda s: s**-0.5, degree, of) for of in ends]
        errors = [
            float(abs(fit(seen[norm].numpy()) * seen[norm].numpy() ** 0.5 - 1).max())
            for fit, norm in zip(fits, norms, strict=True)
        ]
        claim = f"norms as polynomials of degree {degree}: "
        rows.append(Row.of_range(claim + "largest relative error", errors))
        by_norm = dict(zip(norms, fits, strict=True))

        def exchanged(norm: Any, args: tuple[Tensor, ...], *_: Any, of: Any = by_norm) -> Tensor:
            s = args[0].double().square().mean(-1, keepdim=True)
            return args[0] * torch.from_numpy(of[norm](s.numpy())).to(args[0]) * norm.weight

        with hooked(norms, exchanged):
            above = [a - b for a, b in zip(loss(model, others), exact, strict=True)]
        # Streams that leave the interval of a norm grow from layer to layer, beyond all numbers.
        is_finite = all(map(isfinite, above))
        claim += "loss above the model's"
        rows.append(
            Row.of(claim, above, unit="nats") if is_finite else Row(claim, None, n=len(above))
        )
    return rows


@contextmanager
def hooked(modules: list[nn.RMSNorm], hook: Callable[..., Tensor | None]) -> Iterator[None]:
    """Let a function see, or exchange, the outputs of modules in this block."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


@torch.no_grad()
def loss(model: Any, ids: Tensor) -> list[float]:
    """Return the loss of each text in nats a token."""
    logits = model.model(ids).logits[:, :-1]
    each = functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    return each.mean(1).tolist()


def classifiers(make: Make, context: RecipeContext, epochs: int) -> list[nn.Module]:
    """Return a classifier of MNIST for each seed."""
    x, labels = context.mnist.train_images, context.mnist.train_labels
    return [
        fit(make, x, labels, functional.cross_entropy, epochs, seed)
        for seed in context.seed_range(SEEDS)
    ]


def accuracy(model: nn.Module, context: RecipeContext) -> float:
    """Return the percentage of test images that are right."""
    data = context.mnist
    return 100 * float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def fit(
    make: Make,
    x: Tensor,
    y: Tensor,
    error: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    seed: int,
) -> nn.Module:
    """Return a model that AdamW trained, with a learning rate that falls to 0 along a line."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        batches = [batch for _ in range(epochs) for batch in torch.randperm(len(x)).split(BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / len(batches))
        optimizer.zero_grad()
        error(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.requires_grad_(False)
