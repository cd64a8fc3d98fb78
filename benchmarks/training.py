"""An epoch of training on MNIST's shapes against its products only.

`python -m benchmarks.training` writes `results/epoch.json`.
"""

import statistics
from dataclasses import replace
from functools import partial

import torch
from experiments.results import Recording, Row

from benchmarks.clock import machine, seconds
from bilens.data import ImageData
from bilens.nn import ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier

IMAGES, PIXELS, CLASSES, WIDTH, BATCH = 60_000, 784, 10, 300, 100
ROUNDS = 5
PLAIN = ClassifierTraining(epochs=1, batch_size=BATCH, weight_decay=0.0, input_noise=0.0)
KINDS = {
    "no noise": PLAIN,
    "input noise": replace(PLAIN, input_noise=1.0),
    "latent noise": replace(PLAIN, latent_noise=0.33),
}


def products_of_an_epoch(images: torch.Tensor) -> None:
    """Every product of forward and backward on every batch, each with its own operands."""
    E, U = torch.rand(WIDTH, PIXELS), torch.rand(CLASSES, WIDTH)
    L, R = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)
    d_logits = torch.rand(BATCH, CLASSES)
    for x in torch.split(images, BATCH):
        hidden = x @ E.T
        left, right = hidden @ L.T, hidden @ R.T
        left @ U.T
        d_product, d_U = d_logits @ U, d_logits.T @ left
        d_L, d_R = left.T @ hidden, right.T @ hidden
        d_hidden = d_product @ L, d_product @ R
        d_E = hidden.T @ x
        del d_U, d_L, d_R, d_hidden, d_E


def main() -> None:
    """Print and write each kind of training as a multiple of the products timed beside it."""
    recording, rows = Recording(), []
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, PIXELS, generator=generator)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    names = tuple(str(number) for number in range(CLASSES))
    data = ImageData("noise", images, labels, images[:100], labels[:100], (28, 28), names)
    config = ClassifierConfig(PIXELS, CLASSES, WIDTH)
    print(machine())
    print(f"{IMAGES} images of {PIXELS} pixels, width {WIDTH}, batch {BATCH}; seconds an epoch")
    for name, kind in KINDS.items():
        products = partial(products_of_an_epoch, images)

        def training(kind: ClassifierTraining = kind) -> float:
            _, history = train_classifier(config, data, kind)
            return float(history[0]["train_seconds"])

        products(), training()
        turns = [(seconds(products, 1, warm=False), training()) for _ in range(ROUNDS)]
        ratios = sorted(taken / floor for floor, taken in turns)
        rows.append(Row.of_range(f"{name}: time over that of the matrix products", ratios))
        floor, taken = map(statistics.median, zip(*turns, strict=True))
        print(
            f"{name:13} {taken:7.2f}   products alone {floor:6.2f}   "
            f"{statistics.median(ratios):5.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
    recording.write(
        "epoch",
        title="An epoch of training",
        command="python -m benchmarks.training",
        rows=rows,
        settings={
            **{"images": IMAGES, "pixels": PIXELS, "d_model": WIDTH, "batch": BATCH},
            **{"turns": ROUNDS, "low and high": "least and most of the turns"},
        },
    )


if __name__ == "__main__":
    main()
