"""Shared parts of the recipes of the MNIST case study: its model, and pictures of eigenvectors.

Pearce & Dooms 2024 put one bilinear layer of d = 1000 units on the pixels, with biases, weight
decay 1 and a linear readout: `PixelModel`. Autoencoders are on a model of this package, which has
an embedding before the layer and no biases. The embedding folds into the layer: `layer_tensor` is
the layer from the pixels to the d outputs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilens.data import ImageData
from bilens.nn import Bilinear, ImageClassifier
from bilens.tensor import BilinearTensor, Spectrum
from bilens.train import ClassifierTraining
from experiments.autoencoder import save_whole
from experiments.context import RecipeContext
from experiments.curves import picture_figure

SEEDS = (3, 3)
"""Initialisations of models on the pixels at either scale."""
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


class PixelModel(nn.Module):
    """One layer on the pixels, with biases, and a linear readout.

    With a ReLU in place of the product the layer has 2 d hidden units, as many weights.
    """

    def __init__(self, n_inputs: int, d_model: int, n_classes: int, *, relu: bool = False) -> None:
        super().__init__()
        if relu:
            self.layer: nn.Module = nn.Sequential(nn.Linear(n_inputs, 2 * d_model), nn.ReLU())
        else:
            self.layer = Bilinear(n_inputs, d_model, bias=True)
        self.unembed = nn.Linear((1 + relu) * d_model, n_classes, bias=False)

    def forward(self, x: Float[Tensor, "*batch pixels"]) -> Float[Tensor, "*batch classes"]:
        """Return the logits."""
        logits: Tensor = self.unembed(self.layer(x))
        return logits

    def accuracy(self, data: ImageData) -> float:
        """Return the share of test images whose largest logit is the label's."""
        right = self(data.test_images).argmax(-1) == data.test_labels
        return float(right.double().mean())

    def class_spectra(self) -> Spectrum:
        """Return the eigenvectors of each logit; the last coordinate is the constant one."""
        layer: BilinearTensor = self.layer.tensor()  # type: ignore[operator]
        logits = layer.change_basis(outputs=self.unembed.weight)
        return logits.interaction(output=range(logits.n_out)).eigh()


def pixel_models(
    context: RecipeContext, d_model: int, *, relu: bool = False, eps: float = 1e-8
) -> list[PixelModel]:
    """Return models of several seeds, trained with weight decay 1, or from their files.

    Args:
        context: scale, data and folder of models.
        d_model: d, the width of the layer's output.
        relu: a ReLU in place of the product.
        eps: what AdamW adds to the size of a weight's gradients before it divides by it.
    """
    data, training, models = context.mnist, case_training(context), list[PixelModel]()
    for seed in context.seed_range(SEEDS):
        torch.manual_seed(seed)
        model = PixelModel(data.n_inputs, d_model, data.n_classes, relu=relu)
        name = f"pixels-{d_model}-relu={relu}-eps={eps}-epochs={training.epochs}-{seed}"
        path = context.models / f"{name}.safetensors"
        if not path.exists():
            train(model, data, replace(training, seed=seed), eps)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_whole(model.state_dict(), path)
        model.load_state_dict(load_file(path))
        models.append(model.requires_grad_(False))
    return models


def train(model: nn.Module, data: ImageData, training: ClassifierTraining, eps: float) -> None:
    """Train a model as this package trains classifiers, without noise."""
    generator = torch.Generator().manual_seed(training.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=training.weight_decay, eps=eps, fused=True
    )
    for epoch in range(training.epochs):
        optimizer.param_groups[0]["lr"] = training.learning_rate * training.decay**epoch
        order = torch.randperm(len(data.train_labels), generator=generator)
        for indices in order.split(training.batch_size):
            loss = cross_entropy(model(data.train_images[indices]), data.train_labels[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def layer_tensor(model: ImageClassifier) -> BilinearTensor:
    """Return the only layer as a tensor, from the pixels to its outputs before the readout."""
    return embedded_tensor(model).change_basis(inputs=model.embed.weight)


def embedded_tensor(model: ImageClassifier) -> BilinearTensor:
    """Return the only layer as a tensor, from the embedded images to its outputs."""
    model.require_single_layer()
    tensor: BilinearTensor = model.layers[0].tensor()  # type: ignore[operator]
    return tensor


def direction_names(
    directions: Float[Tensor, "k d_model"], model: ImageClassifier | PixelModel, data: ImageData
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

    The test images choose the signs. A constant coordinate is left out.
    """
    ends = spectra.outermost(ENDS).oriented(data.test_images)
    rows = {
        name: [
            (vector[: data.n_inputs], f"{value:+.2g}")
            for vector, value in zip(ends.vectors[form], ends.values[form].tolist(), strict=True)
        ]
        for form, name in enumerate(names)
    }
    return picture_figure(rows, data.shape, title=title)
