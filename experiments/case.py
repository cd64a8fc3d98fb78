"""Shared parts of the recipes of the MNIST case study: its model, and pictures of eigenvectors.

Pearce & Dooms 2024 put one bilinear layer of d = 1000 units on the pixels, with weight decay 1 and
a linear readout. Ours has an embedding before the layer, which folds into it: `layer_tensor` is
their layer, from the pixels to the d outputs.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilens.data import ImageData
from bilens.nn import ImageClassifier
from bilens.tensor import BilinearTensor, Spectrum
from bilens.train import ClassifierTraining
from experiments.context import RecipeContext
from experiments.curves import picture_figure

ENDS = 3
"""Eigenvectors of either end that a picture shows."""
WEIGHT_DECAY = 1.0


def case_models(context: RecipeContext, seeds: Sequence[int]) -> list[ImageClassifier]:
    """Train the case study's model from several seeds: weight decay 1, no input noise."""
    training = case_training(context)
    return context.classifiers(context.mnist, training, seeds, d_model=width(context))


def case_training(context: RecipeContext) -> ClassifierTraining:
    """Return the settings of the case study's training."""
    epochs = context.choose(10, 20)
    return ClassifierTraining(epochs=epochs, weight_decay=WEIGHT_DECAY, input_noise=0.0)


def width(context: RecipeContext) -> int:
    """Return d of the case study's model."""
    return context.choose(300, 1000)


def relu_accuracy(context: RecipeContext, seed: int) -> float:
    """Train a network with a ReLU in place of the product, and return its accuracy.

    It has as many weights as the bilinear model, an embedding and 2 d hidden units, apart from 10 d
    of the readout. Settings and the order of the images are alike.
    """
    data, training, d_model = context.mnist, case_training(context), width(context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Linear(data.n_inputs, d_model, bias=False),
            nn.Linear(d_model, 2 * d_model, bias=False),
            nn.ReLU(),
            nn.Linear(2 * d_model, data.n_classes, bias=False),
        ]
    model, generator = nn.Sequential(*layers), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY, fused=True)
    for epoch in range(training.epochs):
        optimizer.param_groups[0]["lr"] = training.learning_rate * training.decay**epoch
        order = torch.randperm(len(data.train_labels), generator=generator)
        for indices in order.split(training.batch_size):
            loss = cross_entropy(model(data.train_images[indices]), data.train_labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = model(data.test_images).argmax(-1) == data.test_labels
    return float(right.double().mean())


def layer_tensor(model: ImageClassifier) -> BilinearTensor:
    """Return the only layer as a tensor, from the pixels to its outputs before the readout."""
    return embedded_tensor(model).change_basis(inputs=model.embed.weight)


def embedded_tensor(model: ImageClassifier) -> BilinearTensor:
    """Return the only layer as a tensor, from the embedded images to its outputs."""
    model.require_single_layer()
    tensor: BilinearTensor = model.layers[0].tensor()  # type: ignore[operator]
    return tensor


def direction_names(
    directions: Float[Tensor, "k d_model"], model: ImageClassifier, data: ImageData
) -> list[str]:
    """Return names of directions: the number, and the digits that each raises and lowers most."""
    logits = directions @ model.unembed.weight.T
    ends = zip(logits.argmax(-1).tolist(), logits.argmin(-1).tolist(), strict=True)
    return [
        f"{number}: {data.class_names[up]} against {data.class_names[down]}"
        for number, (up, down) in enumerate(ends, start=1)
    ]


def eigenvector_figure(
    spectra: Spectrum, names: Sequence[str], data: ImageData, *, title: str
) -> Figure:
    """Draw a row of pictures for each form: its largest, then its most negative eigenvalues.

    The test images choose the signs.
    """
    ends = spectra.outermost(ENDS).oriented(data.test_images)
    rows = {
        name: [
            (vector, f"{value:+.2g}")
            for vector, value in zip(ends.vectors[form], ends.values[form].tolist(), strict=True)
        ]
        for form, name in enumerate(names)
    }
    return picture_figure(rows, data.shape, title=title)
