"""Data sets: images as tensors, stories as rows of tokens; from files, the hub, or synthetic."""

from bilens.data.corpus import Corpus, load_corpus, load_documents
from bilens.data.image_sets import load_images
from bilens.data.images import ImageData
from bilens.data.languages import DeepGrammar, Grammar
from bilens.data.pictures import fit_drawing
from bilens.data.texts import clean, read_texts

__all__ = [
    "Corpus",
    "DeepGrammar",
    "Grammar",
    "ImageData",
    "clean",
    "fit_drawing",
    "load_corpus",
    "load_documents",
    "load_images",
    "read_texts",
]
