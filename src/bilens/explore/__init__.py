"""The explorer: a local web app on one model, which runs as a Hugging Face Space too."""

from bilens.explore.app import explorer

__all__ = ["explorer"]
