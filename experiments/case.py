"""What the recipes of the MNIST case study share: its model, and pictures of eigenvectors.

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

__all__ = ["case_models", "direction_names", "eigenvector_figure", "layer_tensor", "outermost"]

SHOWN = 3


def case_models(context: RecipeContext, seeds: int) -> list[ImageClassifier]:
    """The case study's model from several initialisations: weight decay 1, no input noise."""
    training = ClassifierTraining(epochs=context.choose(10, 20), weight_decay=1.0, input_noise=0.0)
    d_model = context.choose(300, 1000)
    return context.classifiers(context.mnist, training, seeds, d_model=d_model)


def layer_tensor(model: ImageClassifier) -> BilinearTensor:
    """The only layer as a tensor, from the pixels to its outputs before the readout."""
    model.require_single_layer()
    tensor: BilinearTensor = model.layers[0].tensor()  # type: ignore[operator]
    return tensor.change_basis(inputs=model.embed.weight)


def direction_names(
    directions: Float[Tensor, "k d_model"], model: ImageClassifier, data: ImageData
) -> list[str]:
    """Their numbers, with the digits that each raises and lowers most through the readout."""
    logits = directions @ model.unembed.weight.T
    ends = zip(logits.argmax(-1).tolist(), logits.argmin(-1).tolist(), strict=True)
    return [
        f"{number}: {data.class_names[up]} against {data.class_names[down]}"
        for number, (up, down) in enumerate(ends, start=1)
    ]


def outermost(
    spectra: Spectrum, x: Float[Tensor, "samples n_in"], k: int = SHOWN
) -> tuple[Spectrum, Spectrum]:
    """The pairs of the k largest and of the k most negative eigenvalues, turned like the inputs."""
    largest, smallest = (
        spectra.ordered_by(sign * spectra.values).truncate(k).oriented(x) for sign in (1, -1)
    )
    return largest, smallest


def eigenvector_figure(
    ends: tuple[Spectrum, Spectrum], names: Sequence[str], shape: tuple[int, int], *, title: str
) -> go.Figure:
    """A row of pictures for each form, its largest eigenvalues first, then its most negative ones.

    Args:
        ends: as `outermost` gives them, batched over the forms.
        names: of the forms.
        shape: height and width of an input as an image.
        title: above the figure.
    """
    rows = {
        name: [
            (vector, f"{value:+.2g}")
            for end in ends
            for vector, value in zip(end.vectors[form], end.values[form].tolist(), strict=True)
        ]
        for form, name in enumerate(names)
    }
    return picture_figure(rows, shape, title=title)
