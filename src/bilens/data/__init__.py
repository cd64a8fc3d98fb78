"""Data sets as tensors, from scikit-learn, local files or the Hugging Face hub."""

from bilens.data.images import ImageData, load_images

__all__ = ["ImageData", "load_images"]
