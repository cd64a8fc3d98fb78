"""One view of every transformer: the maps that read its residual stream or write to it.

Importing it takes as long as transformers does.
"""

from bilens.transformer.families import Family, register_family
from bilens.transformer.model import ResidualModel, in_chat
from bilens.transformer.passes import Pass
from bilens.transformer.running import counting_operations

__all__ = ["Family", "Pass", "ResidualModel", "counting_operations", "in_chat", "register_family"]
