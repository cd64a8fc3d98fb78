"""One view of every transformer: what reads its residual stream and what writes to it.

Importing it takes as long as transformers does.
"""

from bilens.residual.families import Family, known_families, register_family
from bilens.residual.layers import Parts
from bilens.residual.model import HeadWeights, ResidualModel, ValueSource
from bilens.residual.moments import Moment
from bilens.residual.trace import LayerTrace, Trace

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
    "register_family",
]
