"""An epoch of training on MNIST's shapes, against its matrix products alone."""

import statistics
from dataclasses import replace

import torch

from benchmarks.clock import machine, seconds
from bilens.data import ImageData
from bilens.nn import ClassifierConfig
from bilens.train import ClassifierTraining, train_classifier

IMAGES, PIXELS, CLASSES, WIDTH, BATCH = 60_000, 784, 10, 300, 100
PLAIN = ClassifierTraining(epochs=3, batch_size=BATCH, weight_decay=0.0, input_noise=0.0)
KINDS = {
    "no noise": PLAIN,
    "input noise": replace(PLAIN, input_noise=1.0),
    "latent noise": replace(PLAIN, latent_noise=0.33),
}


def products_of_an_epoch() -> None:
    """Every product of forward and backward, and nothing else, with outputs written in place."""
    x, wide, narrow = (
        torch.rand(BATCH, PIXELS),
        torch.rand(BATCH, WIDTH),
        torch.rand(BATCH, CLASSES),
    )
    E, L, U = torch.rand(WIDTH, PIXELS), torch.rand(WIDTH, WIDTH), torch.rand(CLASSES, WIDTH)
    to_wide, to_narrow = torch.empty(BATCH, WIDTH), torch.empty(BATCH, CLASSES)
    dE, dL, dU = torch.empty_like(E), torch.empty_like(L), torch.empty_like(U)
    for _ in range(IMAGES // BATCH):
        torch.mm(x, E.T, out=to_wide)
        torch.mm(wide.T, x, out=dE)
        for _ in ("left", "right"):
            torch.mm(wide, L.T, out=to_wide)
            torch.mm(wide, L, out=to_wide)
            torch.mm(wide.T, wide, out=dL)
        torch.mm(wide, U.T, out=to_narrow)
        torch.mm(narrow, U, out=to_wide)
        torch.mm(narrow.T, wide, out=dU)


def main() -> None:
    """Print the floor, then each kind of training as a multiple of it."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(IMAGES, PIXELS, generator=generator)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    names = tuple(str(number) for number in range(CLASSES))
    data = ImageData("noise", images, labels, images[:100], labels[:100], (28, 28), names)
    config = ClassifierConfig(PIXELS, CLASSES, WIDTH)
    print(machine())
    print(f"{IMAGES} images of {PIXELS} pixels, width {WIDTH}, batch {BATCH}; seconds an epoch")
    floor = seconds(products_of_an_epoch, 3)
    print(f"products alone  {floor:6.2f} s")
    for name, training in KINDS.items():
        _, history = train_classifier(config, data, training)
        epoch = statistics.median(record["train_seconds"] for record in history)
        print(f"{name:15} {epoch:6.2f} s   {epoch / floor:5.2f} x")
    print(f"products alone  {seconds(products_of_an_epoch, 3):6.2f} s, again")


if __name__ == "__main__":
    main()
