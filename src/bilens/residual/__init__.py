"""One view of every transformer: what reads its residual stream and what writes to it.

Importing it takes as long as transformers does.
"""

from bilens.residual.families import Family, known_families, register_family
from bilens.residual.layers import Parts
from bilens.residual.model import HeadWeights, ResidualModel
from bilens.residual.trace import LayerTrace, Trace

__all__ = [
    "Family",
    "HeadWeights",
    "LayerTrace",
    "Parts",
    "ResidualModel",
    "Trace",
    "known_families",
    "register_family",
]
