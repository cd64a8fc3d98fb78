"""What the explorer shows of a classifier of one layer: functions from a state to figures."""

from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.data import ImageData
from bilens.explore.input_codec import unpack_input
from bilens.explore.readings import PanelView
from bilens.explore.state_checks import StateError, check_ranges
from bilens.read import explain, read_classifier, spectra
from bilens.read.chain import input_tensors, size_facts
from bilens.reading import shown
from bilens.report import (
    direction_figure,
    eigenvector_figure,
    explanation_figure,
    kept_figure,
    logits_figure,
    spectrum_figure,
)
from bilens.tensor import Spectrum, TensorChain

__all__ = ["BY", "ImageState", "ImageView"]

BY = ("class", "difference", "component")
"""How a direction is chosen: a class, one minus another, or a component of the SVD."""

SHOWN = 4


@dataclass(frozen=True)
class ImageState:
    """What the screen shows.

    Attributes:
        by: how the direction is chosen.
        output: number of the class.
        minus: number of the class that is taken away from it.
        component: number of the singular component, from 0.
        kept: eigenvectors kept of each class.
        input: the image that is explained.
    """

    by: str = "class"
    output: int = 0
    minus: int = 1
    component: int = 0
    kept: int = 10
    input: str = "test-0"


class ImageView(PanelView):
    """A classifier read once, and what each state shows of it.

    Args:
        model: of one layer, whose inputs are images.
        data: what it is measured on, and what its top inputs come from.

    Raises:
        NotBilinearError: the model is not one tensor.
        BilensError: its inputs have no image shape, or the data does not fit it.
    """

    def __init__(self, model: TensorChain, data: ImageData) -> None:
        self.model, self.data, self.shape = model, data, data.shape
        self.names = data.class_names
        self.reading = read_classifier(model, data)
        self.svd = input_tensors(model)[0].svd()
        self.start = ImageState(kept=min(10, self.reading.spectrum.k))

    @property
    def facts(self) -> list[tuple[str, str]]:
        """A name and a value each."""
        return [
            ("data", self.data.name),
            ("test accuracy", f"{self.reading.accuracy:.2%}"),
            *((name, shown(value)) for name, value in size_facts(self.model)),
            ("eigenvectors a class", str(self.reading.spectrum.k)),
        ]

    def checked(self, state: ImageState) -> ImageState:
        """The state, if the model has it.

        Raises:
            StateError: it has no such class, component, number of eigenvectors or input.
        """
        if state.by not in BY:
            raise StateError("by", f"{str(state.by)[:40]!r} is not one of {', '.join(BY)}")
        classes = (0, len(self.names) - 1)
        check_ranges(
            state,
            output=classes,
            minus=classes,
            component=(0, len(self.svd) - 1),
            kept=(1, self.reading.spectrum.k),
        )
        unpack_input(state.input, self.data)
        return state

    def direction(self, state: ImageState) -> tuple[Float[Tensor, " classes"], str]:
        """The chosen direction in the logits, and what to call it."""
        unit = torch.eye(len(self.names))
        if state.by == "component":
            return self.svd.outputs[state.component], f"component {state.component + 1}"
        name = self.names[state.output]
        if state.by == "difference":
            return unit[state.output] - unit[state.minus], f"{name} minus {self.names[state.minus]}"
        return unit[state.output], name

    def spectrum(self, state: ImageState) -> tuple[Spectrum, str]:
        """All eigenvectors of the direction, and what to call it."""
        direction, title = self.direction(state)
        return spectra(self.model, direction), title

    def direction_figures(self, state: ImageState) -> tuple[go.Figure, go.Figure]:
        """The spectrum, and the outermost eigenvectors with their top inputs."""
        spectrum, title = self.spectrum(state)
        x = self.data.test_images
        outermost = spectrum.outermost(SHOWN).oriented(x)
        return (
            spectrum_figure(spectrum, title="Spectrum"),
            eigenvector_figure(outermost, x, self.shape, title=f"Eigenvectors of {title}", k=SHOWN),
        )

    def weights_figure(self, state: ImageState) -> go.Figure | None:
        """How much of each logit the direction has; None where its name says it."""
        if state.by != "component":
            return None
        return direction_figure(self.direction(state)[0], self.names, title="Weights of the logits")

    def curve_figure(self, state: ImageState) -> go.Figure:
        """Accuracy against the number of eigenvectors, with a mark at the number kept."""
        return kept_figure(self.reading.curve, state.kept)

    def accuracy_text(self, state: ImageState) -> str:
        """What keeping that many does to the accuracy, in a sentence."""
        curve = self.reading.curve
        return (
            f"With {state.kept} of {len(curve.accuracy)} eigenvectors for each class the model "
            f"gets {curve.accuracy[state.kept - 1]:.2%} of the test images right, with all of them "
            f"{curve.full:.2%}."
        )

    def input_figures(self, state: ImageState) -> tuple[go.Figure, go.Figure]:
        """Logits of the input, and the eigenvectors that make the highest of them."""
        x = unpack_input(state.input, self.data)
        kept = self.reading.spectrum.truncate(state.kept)
        with torch.no_grad():
            whole = self.model(x)
        title = f"Logits: {state.kept} kept, and all"
        explanation = explain(kept, x)
        return (
            logits_figure(whole, explanation.logits, self.names, title=title),
            explanation_figure(
                explanation, self.shape, self.names, title="What makes the highest logits"
            ),
        )
