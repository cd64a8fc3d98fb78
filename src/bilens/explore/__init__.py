"""The explorer: a local web app on one model, which runs as a Hugging Face Space too."""

from bilens.explore.app import Explorer, explorer, write_space

__all__ = ["Explorer", "explorer", "write_space"]
