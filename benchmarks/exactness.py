"""Error of logits that are rebuilt from all eigenvectors: `... exactness RUN`."""

import sys
from typing import get_args

from bilens.data import load_images
from bilens.nn import ImageClassifier
from bilens.read import Basis, spectra


def main(run: str, data: str = "mnist") -> None:
    """Print the largest difference on the test set, relative to the largest logit."""
    images = load_images(data).test_images
    for x, name in ((images.double(), "float64"), (images, "float32")):
        model = ImageClassifier.from_pretrained(run).to(x.dtype).requires_grad_(False)
        logits = model(x)
        for basis in get_args(Basis):
            rebuilt = spectra(model, basis=basis)(x[:2000])
            error = (rebuilt - logits[:2000]).abs().max() / logits.abs().max()
            print(f"{name}, eigenvectors orthonormal in the {basis:6}  {error:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
