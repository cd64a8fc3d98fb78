"""Other people's models: opened, their weights processed, made bilinear, and read.

Importing it takes as long as transformers does.
"""

from bilens.convert.opening import open_model, open_tokenizer, save_model
from bilens.convert.process import (
    Processing,
    center_unembed,
    center_writing_weights,
    fold_norms,
    fold_value_biases,
    process,
)
from bilens.convert.swish import Swish, find_swish, give_swish, make_bilinear

__all__ = [
    "Processing",
    "Swish",
    "center_unembed",
    "center_writing_weights",
    "find_swish",
    "fold_norms",
    "fold_value_biases",
    "give_swish",
    "make_bilinear",
    "open_model",
    "open_tokenizer",
    "process",
    "save_model",
]
