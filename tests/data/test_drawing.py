"""Drawings are framed as the data set's own images are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tests.models import digit_model, digits

from bilens.data import fit_drawing
from bilens.data.pictures import ink_of, read_picture
from bilens.errors import DataError


def stroke(paper: str = "white", pen: str = "black") -> Image.Image:
    picture = Image.new("RGBA", (200, 160), paper)
    ImageDraw.Draw(picture).line((30, 20, 30, 90), fill=pen, width=12)
    return picture


def test_ink_is_what_differs_from_the_paper():
    dark = ink_of(stroke())
    assert (dark[50, 30], dark[0, 0]) == (1, 0)
    assert np.allclose(ink_of(stroke("black", "white")), dark)
    assert np.allclose(ink_of(stroke("#ffffff00")), dark)


def test_a_drawing_is_as_large_as_a_digit_and_where_one_is():
    x = fit_drawing(ink_of(stroke()), digits()).reshape(8, 8)
    assert x.max() == 1
    rows, columns = torch.where(x > 0.25)
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (8, 1)
    assert set(columns.tolist()) <= {3, 4}


def test_a_digit_stays_what_it_is_however_large_it_is_drawn():
    """The model recognises the digit of a magnified test image at any place."""
    model, same = digit_model(), 0
    for image in digits().test_images[:20]:
        paper = np.zeros((300, 260))
        paper[40:200, 70:230] = image.reshape(8, 8).numpy().repeat(20, 0).repeat(20, 1)
        same += int(model(fit_drawing(paper, digits())).argmax() == model(image).argmax())
    assert same >= 18


def test_mnist_is_framed_by_its_own_rule():
    """20 of 28 pixels, the centre of mass in the middle."""
    images = torch.zeros(5, 28, 28)
    images[:, 4:24, 10:18] = 1
    pixels, labels = images.flatten(1), torch.zeros(5).long()
    same = {"train_images": pixels, "test_images": pixels, "train_labels": labels}
    data = replace(digits(), test_labels=labels, shape=(28, 28), **same)
    rows, columns = torch.where(fit_drawing(ink_of(stroke()), data).reshape(28, 28) > 0.25)
    assert rows.max() - rows.min() + 1 == 20
    assert all(abs(float(places.double().mean()) - 13.5) <= 1 for places in (rows, columns))


def test_a_picture_of_a_file_is_an_input(tmp_path):
    """As it is if it has the size of the data's, and as a drawing otherwise."""
    data = digits()
    small = Image.fromarray((255 * data.test_images[3].reshape(8, 8).numpy()).astype(np.uint8))
    for name, picture in (("small.png", small), ("drawing.png", stroke())):
        picture.save(tmp_path / name)
    x = read_picture(tmp_path / "small.png", data)
    assert torch.allclose(x, data.test_images[3], atol=1 / 255)
    drawn = read_picture(tmp_path / "drawing.png", data)
    assert torch.equal(drawn, fit_drawing(ink_of(stroke()), data))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as a picture"),
        (b"no picture", "cannot be read as a picture"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (None, "does not exist"),
    ],
)
def test_a_file_without_a_picture_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "picture.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as raised:
        read_picture(path, digits())
    assert "picture.png" in str(raised.value)
