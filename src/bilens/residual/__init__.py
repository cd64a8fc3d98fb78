"""One view of every transformer: the maps that read its residual stream or write to it.

Importing it takes as long as transformers does.
"""

from bilens.hooks import hooked
from bilens.residual.changes import Part, token_site
from bilens.residual.families import Family, register_family
from bilens.residual.layers import Moment
from bilens.residual.model import ResidualModel
from bilens.residual.passes import Pass
from bilens.residual.queries import queries_keys

__all__ = [
    "Family",
    "Moment",
    "Part",
    "Pass",
    "ResidualModel",
    "hooked",
    "queries_keys",
    "register_family",
    "token_site",
]
