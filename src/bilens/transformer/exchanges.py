"""Parts of a pass that take their values of another pass: one part, or a share of each."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.transformer.changes import (
    EMBEDDING,
    Change,
    Function,
    Part,
    Site,
    mixed_site,
    mlp_site,
    token_site,
)
from bilens.transformer.passes import Pass


def exchanging(
    values: Float[Tensor, "texts time width"], keep: Float[Tensor, "*time blocks"]
) -> Function:
    """Return the function to the values of another pass, of which a share `keep` stays as it is.

    It is that of each of some blocks of equal width, such as heads, at all positions or at each.
    """

    def exchange(x: Tensor) -> Tensor:
        other = values.to(x)
        share = keep if keep.dim() == 2 else keep.expand(x.shape[1], -1)
        share = share.to(x).repeat_interleave(x.shape[2] // share.shape[1], 1)
        return other + share * (x - other)

    return exchange


def exchanged(part: Part, other: Pass) -> list[Change]:
    """Return the changes of a part to its value of another pass, at its position or at all.

    Of a head with a source, only what it moves from there is exchanged, and what it moves from
    elsewhere stays as it runs; so do the other experts beside one.

    Raises:
        BilensError: the part cannot be exchanged.
    """
    model, layer, columns = other.model, part.layer or 0, slice(None)
    match part.kind:
        case "token":
            given = {token_site(model): other.tokens}
            for table in model.places.tables:  # which layers read beside the stream
                given[Site(table, "output", EMBEDDING)] = model.places.rows(other.ids, table)
            return [(site, partial(_with_rows, part, values)) for site, values in given.items()]
        case "mlp":
            site, values = mlp_site(model, layer), other.outputs[layer][:, part.rows]
        case "expert" if (experts := model.places.layers[layer].experts) is not None:
            site = Site(experts, "experts", layer)
            values = other.expert(layer, part.number or 0)[:, part.rows]
        case "head":
            site = mixed_site(model, layer)
            width, number = other.mixed[layer].shape[2] // model.n_heads, part.number or 0
            columns = slice(number * width, (number + 1) * width)
            values = other.mixed[layer][:, part.rows, columns]
            if part.source is not None:
                site, values = site._replace(place="mix"), part.moved(other.mix(layer))
        case _:
            raise BilensError(
                f"{part} cannot be exchanged by its address; expected a head or an MLP"
            )

    def exchange(x: Tensor, term: Callable[[Part], Tensor] | None = None) -> Tensor:
        x, own = x.clone(), values.to(x)
        if term is not None:
            own = x[:, part.rows, columns] + own - term(part)
        x[:, part.rows, columns] = own
        return x

    return [(site, exchange)]


def _with_rows(part: Part, values: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, part.rows] = values[:, part.rows].to(x)
    return x


def mixture(
    other: Pass, keep: Float[Tensor, "layers parts"] | Float[Tensor, "layers time parts"]
) -> list[Change]:
    """Return the changes by which every part keeps a share, and takes the others of another pass.

    `keep` is the share of each head of a layer, and of its MLP as the last, at all positions or at
    each. 1 is the part as it is. Modules that take each position by itself do not run where nothing
    of theirs is kept, and the shares 0 there have no gradient.
    """
    model, changes = other.model, list[Change]()
    for layer, (place, shares) in enumerate(zip(model.places.layers, keep, strict=True)):
        heads, live = shares[..., :-1], shares[..., -1] != 0
        maps = [module for module in place.by_position if module is not place.mlp]
        if maps and not heads.any():
            changes += [_stepping(module, layer, other) for module in maps]
        elif place.heads is not None:
            changes.append((mixed_site(model, layer), exchanging(other.mixed[layer], heads)))
        if place.mlp in place.by_position and not live.any():
            changes.append(_stepping(place.mlp, layer, other))
        elif place.mlp is not None:
            if place.mlp in place.by_position and live.dim():
                changes.append((Site(place.mlp, "rows", layer), live))
            values = exchanging(other.outputs[layer], shares[..., -1:])
            changes.append((mlp_site(model, layer), values))
    return changes


def _stepping(module: nn.Module, layer: int, other: Pass) -> Change:
    """Return the change of a module that takes each position by itself to its output elsewhere."""
    return (Site(module, "step", layer), other.by_position[module])
