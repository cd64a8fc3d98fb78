"""One view of every transformer: the maps that read its residual stream or write to it.

Importing it takes as long as transformers does.
"""

from bilens.residual.families import Family, known_families, register_family
from bilens.residual.layers import HeadWeights, Moment, Parts, ValueSource
from bilens.residual.model import ResidualModel
from bilens.residual.trace import LayerTrace, Trace, queries_keys

__all__ = [
    "Family",
    "HeadWeights",
    "LayerTrace",
    "Moment",
    "Parts",
    "ResidualModel",
    "Trace",
    "ValueSource",
    "known_families",
    "queries_keys",
    "register_family",
]
