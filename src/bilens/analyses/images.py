"""Analyses of image classifiers: their options, and calls of what computes."""

from typing import TYPE_CHECKING

from bilens.analyses import refusals
from bilens.analysis import Reading, analysis
from bilens.lazy_imports import lazy_import
from bilens.options import Basis, Metric, Order
from bilens.settings import Count, Index, Share

if TYPE_CHECKING:
    from bilens import data as of_data
    from bilens import tensor
else:  # Types in quotes, which help does not wait for.
    of_data, tensor = lazy_import("bilens.data"), lazy_import("bilens.tensor")


@analysis("eigenvectors")
def eigenvectors(
    model: "tensor.TensorChain",
    data: "of_data.ImageData",
    *,
    basis: Basis = "model",
    order: Order = "eigenvalue",
) -> Reading:
    """Decompose each logit of a classifier of one layer into its eigenvectors.

        bilens eigenvectors runs/mnist --output page.html

    Args:
        model: the classifier.
        data: its images.
        basis: space in which eigenvectors are orthonormal: after the embedding, or pixels.
        order: order of the eigenvectors on a page.
    """
    from bilens.images import read_classifier

    return read_classifier(model, data, basis, order)


@analysis("explain", check=refusals.of_picture)
def explain(
    model: "tensor.TensorChain",
    data: "of_data.ImageData",
    *,
    image: Index | str = 0,
    n_classes: Count = 3,
    k: Count = 5,
) -> Reading:
    """Split the highest logits of an image into the activations of eigenvectors.

        bilens explain runs/mnist --image 7
        bilens explain runs/mnist --image drawing.png

    Args:
        model: a classifier of one layer.
        data: images that the model was trained on.
        image: number of a test image, or the file of a picture. One of another size than the data's
            is scaled and centred as a drawing.
        n_classes: number of logits, the highest first.
        k: number of eigenvectors of each.
    """
    from bilens.images.classifier import read_explanation

    return read_explanation(model, data, image, n_classes, k)


@analysis("certify", check=refusals.of_picture)
def certify(
    model: "tensor.TensorChain",
    data: "of_data.ImageData",
    *,
    images: Count = refusals.PICTURES,
    image: str | None = None,
) -> Reading:
    """Find the nearest picture of another answer for every test picture, exactly for one layer.

        bilens certify runs/mnist --output page.html
        bilens certify runs/mnist --image drawing.png

    Args:
        model: the classifier.
        data: its images.
        images: number of test images, from the first on.
        image: in their place the file of a picture, as in `explain`.
    """
    from bilens.images.radii import read_certificates

    return read_certificates(model, data, images, image)


@analysis("paths")
def paths(model: "tensor.TensorChain", data: "of_data.ImageData", *, k: Count = 1000) -> Reading:
    """Find the strongest paths through a classifier of several layers, and prune to them.

        bilens paths runs/two --k 100

    Args:
        model: the classifier.
        data: its images.
        k: number of paths.
    """
    from bilens.images import read_deep

    return read_deep(model, data, k)


@analysis("bonds")
def bonds(
    model: "tensor.TensorChain",
    data: "of_data.ImageData",
    *,
    drop: Share = 0.01,
    metric: Metric = "images",
) -> Reading:
    """Find the few directions between the layers of a classifier, and describe each of them.

    Computes the bonds of the tree and of the function, and cuts by the kind that needs fewer
    directions. These are chosen on training images, on which they may lose accuracy up to `drop`,
    and are measured on test images.

        bilens bonds runs/two --drop 0.02

    Args:
        model: the classifier.
        data: its images.
        drop: accuracy that the cut may lose, as a share of the images.
        metric: inputs of the bonds.
    """
    from bilens.images import read_bonds

    return read_bonds(model, data, drop=drop, metric=metric)
