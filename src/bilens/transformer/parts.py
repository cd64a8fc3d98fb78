"""Parts of a model, each with one address everywhere.

It is `mlp.8`, `head.26.0` or `expert.4.0`, and at one position `head.26.0@4`.
"""

import re
from typing import Any, Literal, NamedTuple

from bilens.errors import BilensError
from bilens.transformer.experts import expert_count
from bilens.transformer.model import ResidualModel


class Part(NamedTuple):
    """The address of a part of a model."""

    # An expert is a part of an mlp. In flows also token, choice, and direction of an MLP.
    kind: Literal["head", "mlp", "expert", "choice", "token", "direction"]
    layer: int | None = None  # number of its layer; None for tokens
    number: int | None = None  # of the head, expert or direction
    position: int | None = None  # the position that it is limited to; None for all
    source: int | None = None  # of a head at a position, from where it moves; None for everywhere

    def __str__(self) -> str:
        numbers = [self.kind, self.layer, self.number]
        at = "" if self.position is None else f"@{self.position}"
        return ".".join(str(x) for x in numbers if x is not None) + at

    @property
    def rows(self) -> slice:
        """Its position, or all of them."""
        return slice(None) if self.position is None else slice(self.position, self.position + 1)

    @classmethod
    def parse(cls, address: str, model: ResidualModel) -> "Part":
        """Return the head, MLP or expert of an address such as head.26.0@4."""
        match = re.fullmatch(r"(?:(head|expert)\.(\d+)\.(\d+)|(mlp)\.(\d+))(?:@(\d+))?", address)
        if match is None:
            raise BilensError(
                f"{address!r} is no address of a part; expected mlp.LAYER, head.LAYER.NUMBER, "
                "expert.LAYER.NUMBER, or one with a position, such as head.26.0@4"
            )
        kind: Any = match[1] or match[4]
        layer = int(match[2] or match[5])
        index, position = (None if x is None else int(x) for x in (match[3], match[6]))
        if layer >= model.n_layers or (kind == "head" and (index or 0) >= model.n_heads):
            raise BilensError(
                f"{address!r} is not in the model, which has {model.n_layers} layers of "
                f"{model.n_heads} heads"
            )
        experts = model.places.layers[layer].experts
        count = 0 if experts is None else expert_count(experts)
        if kind == "expert" and (index or 0) >= count:
            raise BilensError(f"{address!r} is not in the model, whose layer has {count} experts")
        return cls(kind, layer, index, position)
