"""The explorer: a local web app on one model, which runs as a Hugging Face Space too."""

from bilens.explore.app import Explorer, explore, explorer, write_space

__all__ = ["Explorer", "explore", "explorer", "write_space"]
