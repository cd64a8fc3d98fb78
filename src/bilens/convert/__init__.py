"""Other people's models: opened, their weights processed, made bilinear.

Importing it takes as long as transformers does.
"""

from bilens.convert.gates import Swish, give_swish, make_bilinear
from bilens.convert.loading import open_model, open_tokenizer, save_model
from bilens.convert.processing import process

__all__ = [
    "Swish",
    "give_swish",
    "make_bilinear",
    "open_model",
    "open_tokenizer",
    "process",
    "save_model",
]
