"""Changes of a forward pass: parts removed, scaled, added to, or exchanged.

A part has one address everywhere: `mlp.8`, `head.26.0`, `expert.4.0`; and at one position
`head.26.0@4`.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.transformer.experts import expert_count
from bilens.transformer.mixing import Mix
from bilens.transformer.model import ResidualModel

EMBEDDING = -1
"""Layer of the sites before the first layer."""

Function = Callable[[Float[Tensor, "texts time width"]], Tensor | None]
"""The value of a site in place of its own; None to look only."""


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

    def moved(self, mix: Mix) -> Float[Tensor, "texts 1 d_head"]:
        """Return what a head moves from its source to its position."""
        assert self.position is not None
        assert self.source is not None
        return mix.term(self.number or 0, self.position, self.source)[:, None]

    @classmethod
    def parse(cls, address: str, model: ResidualModel) -> "Part":
        """Return the head, MLP or expert of an address such as head.26.0@4."""
        found = re.fullmatch(r"(?:(head|expert)\.(\d+)\.(\d+)|(mlp)\.(\d+))(?:@(\d+))?", address)
        if found is None:
            raise BilensError(
                f"{address!r} is no address of a part; expected mlp.LAYER, head.LAYER.NUMBER, "
                "expert.LAYER.NUMBER, or one with a position, such as head.26.0@4"
            )
        kind: Any = found[1] or found[4]
        layer = int(found[2] or found[5])
        number, position = (None if x is None else int(x) for x in (found[3], found[6]))
        if layer >= model.n_layers or (kind == "head" and (number or 0) >= model.n_heads):
            raise BilensError(
                f"{address!r} is not in the model, which has {model.n_layers} layers of "
                f"{model.n_heads} heads"
            )
        experts = model.places.layers[layer].experts
        count = 0 if experts is None else expert_count(experts)
        if kind == "expert" and (number or 0) >= count:
            raise BilensError(f"{address!r} is not in the model, whose layer has {count} experts")
        return cls(kind, layer, number, position)


class Site(NamedTuple):
    """A place in a forward pass at which numbers can be changed."""

    module: nn.Module
    # What is changed: the module's input or output. With "mix" it is the module's input, and with
    # "experts" the output of experts: sums, of which functions get the term of any part. Of modules
    # that take each position by itself "step" is their whole output, a tensor, and "rows" a mask of
    # the positions at which they run: what they write elsewhere is not needed.
    place: Literal["input", "output", "step", "mix", "experts", "rows"]
    layer: int  # number of its layer, before which a pass is as it was


Change = tuple[Site, Any]
"""A place, and what it becomes in a changed pass: a function of its value, or a tensor."""


def token_site(model: ResidualModel) -> Site:
    """Return the place of the tokens' embeddings, as they are added to the stream."""
    return Site(model.places.embed, "output", EMBEDDING)


def mixed_site(model: ResidualModel, layer: int) -> Site:
    """Return the place of the heads' mixed values of a layer, all heads side by side."""
    module = model.places.layers[layer].heads
    if module is None:
        raise BilensError(f"layer {layer} has no map of mixed values, expected one with heads")
    return Site(module, "input", layer)


def mlp_site(model: ResidualModel, layer: int) -> Site:
    """Return the place of the output of an MLP, before a norm after it."""
    module = model.places.layers[layer].mlp
    if module is None:
        raise BilensError(f"layer {layer} has no MLP, expected one with an MLP")
    return Site(module, "output", layer)


def adding(rows: Float[Tensor, "*texts time width"]) -> Function:
    """Return the function that adds rows."""
    return lambda x: x + rows.to(x)
