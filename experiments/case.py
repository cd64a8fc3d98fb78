"""Shared parts of the recipes of the MNIST case study: its model, and pictures of eigenvectors.

Pearce & Dooms 2024 put one bilinear layer of d = 1000 units on the pixels, with weight decay 1 and
a linear readout. Ours has an embedding before the layer, which folds into it: `layer_tensor` is
their layer, from the pixels to the d outputs.
"""

from collections.abc import Sequence

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from bilens.data import ImageData
from bilens.nn import ImageClassifier
from bilens.tensor import BilinearTensor, Spectrum
from bilens.train import ClassifierTraining
from experiments.context import RecipeContext
from experiments.curves import picture_figure

ENDS = 3
"""Eigenvectors of either end that a picture shows."""


def case_models(context: RecipeContext, seeds: Sequence[int]) -> list[ImageClassifier]:
    """Train the case study's model from several seeds: weight decay 1, no input noise."""
    training = ClassifierTraining(epochs=context.choose(10, 20), weight_decay=1.0, input_noise=0.0)
    d_model = context.choose(300, 1000)
    return context.classifiers(context.mnist, training, seeds, d_model=d_model)


def layer_tensor(model: ImageClassifier) -> BilinearTensor:
    """Return the only layer as a tensor, from the pixels to its outputs before the readout."""
    model.require_single_layer()
    tensor: BilinearTensor = model.layers[0].tensor()  # type: ignore[operator]
    return tensor.change_basis(inputs=model.embed.weight)


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
) -> go.Figure:
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
