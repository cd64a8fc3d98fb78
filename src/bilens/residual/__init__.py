"""One view of every transformer: the maps that read its residual stream or write to it.

Importing it takes as long as transformers does.
"""

from bilens.residual.changes import token_site
from bilens.residual.families import Family, register_family
from bilens.residual.layers import Moment
from bilens.residual.model import ResidualModel
from bilens.residual.passes import Pass

__all__ = ["Family", "Moment", "Pass", "ResidualModel", "register_family", "token_site"]
