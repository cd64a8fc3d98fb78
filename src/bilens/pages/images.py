"""The picture of a set of images."""

import plotly.express as px
import plotly.graph_objects as go

from bilens.data import ImageData
from bilens.pages.layout import plot_of
from bilens.sections import plotly_text


@plot_of.register
def images_plot(reading: ImageData, k: int = 10) -> go.Figure:
    """Plot the first k images of the test set, each below its class."""
    images = reading.test_images[:k].reshape(-1, *reading.shape).cpu()
    figure = px.imshow(images, facet_col=0, facet_col_wrap=10, binary_string=True)
    for note, label in zip(figure.layout.annotations, reading.test_labels.tolist(), strict=False):
        note.text = plotly_text(reading.class_names[label])
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)
