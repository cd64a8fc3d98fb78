"""The picture of a set of images."""

from bilens.data import ImageData
from bilens.figures.canvas import Canvas
from bilens.figures.sheet import Figure
from bilens.pages.layout import plot_of


@plot_of.register
def images_plot(reading: ImageData, k: int = 10) -> Figure:
    """Plot the first k images of the test set, each below its class."""
    aspect, columns = reading.shape[0] / reading.shape[1], 10
    labels = reading.test_labels[:k].tolist()
    rise = aspect + 0.35
    height = rise * -(-len(labels) // columns)
    title = f"The first {len(labels)} test images of {reading.name}"
    canvas = Canvas(1.1 * columns, height, unit=70, title=title, scale=False)
    for i, label in enumerate(labels):
        row, column = divmod(i, columns)
        x, y = 1.1 * column, rise * row
        canvas.label(reading.class_names[label], x=x + 0.5, y=y)
        canvas.image(reading.test_images[i], reading.shape, x=x, y=y + 0.25)
    return canvas.figure()
