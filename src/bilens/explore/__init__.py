"""The explorer: a local web app on one model, which runs as a Hugging Face Space too."""

from bilens.explore.app import Explorer, explore, explorer, write_space
from bilens.lazy_imports import make_callable

__all__ = ["Explorer", "explorer", "write_space"]

make_callable(__name__, explore)
