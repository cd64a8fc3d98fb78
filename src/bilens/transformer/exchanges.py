"""Parts of a pass that take their values of another pass: one part, or a share of each."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.transformer.changes import (
    EMBEDDING,
    Change,
    Function,
    Part,
    Site,
    adding,
    mixed_site,
    mlp_site,
    token_site,
)
from bilens.transformer.choices import taking
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


def exchanged(part: Part, other: Pass, scale: float = 1) -> list[Change]:
    """Return the changes of a part to its value of another pass, at its position or at all.

    `scale` is a factor of that value: with 0 the part is removed. Of a head with a source, only
    what it moves from there is exchanged, and what it moves from elsewhere stays as it runs; so do
    the other experts beside one.

    Raises:
        BilensError: the part cannot be exchanged, or a choice is scaled.
    """
    model, layer, columns, embeddings = other.model, part.layer or 0, slice(None), list[Change]()
    match part.kind:
        case "choice" if scale == 1:
            module = model.places.layers[layer].module
            return [(Site(module, "choice", layer), taking(other.choices(layer), len(other.ids)))]
        case "token":
            site, values = token_site(model), other.tokens[:, part.rows]
            for table in model.places.tables:
                rows = scale * model.places.rows(other.ids, table)[:, part.rows]
                embeddings.append((Site(table, "output", EMBEDDING), partial(_rows_in, part, rows)))
        case "position" if (positions := model.modules.positions) is not None:
            site = Site(positions.module, "output", EMBEDDING)
            places = torch.arange(other.ids.shape[1], device=model.device)[part.rows]
            values = positions.rows(places).expand(len(other.ids), -1, -1)
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
    given = scale * values

    def exchange(x: Tensor, term: Callable[[Part], Tensor] | None = None) -> Tensor:
        x, own = x.clone(), given.to(x)
        if term is not None:
            own = x[:, part.rows, columns] + own - term(part)
        x[:, part.rows, columns] = own
        return x

    return [(site, exchange), *embeddings]


def _rows_in(part: Part, rows: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, part.rows] = rows.to(x)
    return x


def mixture(
    other: Pass, keep: Float[Tensor, "layers parts"] | Float[Tensor, "layers time parts"]
) -> list[Change]:
    """Return the changes by which every part keeps a share, and takes the others of another pass.

    `keep` is the share of each head of a layer, and of its MLP as the last, at all positions or at
    each. 1 is the part as it is. A layer of which nothing is kept is not run, nor are its MLP or
    the maps of its heads, nor its MLP at positions of which nothing is kept; the shares 0 there
    have no gradient.
    """
    model, places, changes = other.model, other.model.places, list[Change]()
    for layer, shares in enumerate(keep):
        if places.layers[layer].adds and not shares.any():
            after = other.streams[layer + 1]
            step = after - other.streams[layer].to(after)
            changes.append((Site(places.layers[layer].module, "step", layer), adding(step)))
            continue
        heads, mlp, by_position = shares[..., :-1], places.layers[layer].mlp, other.by_position
        maps = [x for x in places.layers[layer].by_position if x is not mlp]
        if maps and not heads.any():
            changes += [_stepping(module, layer, other) for module in maps]
        elif places.layers[layer].heads is not None:
            values = exchanging(other.mixed[layer], heads)
            changes.append((mixed_site(model, layer), values))
        if mlp in by_position and not shares[..., -1].any():
            changes.append(_stepping(mlp, layer, other))
        elif mlp is not None:
            live = shares[..., -1] != 0
            if mlp in by_position and live.dim() and not live.all():
                changes.append((Site(mlp, "rows", layer), partial(torch.clone, live)))
            values = exchanging(other.outputs[layer], shares[..., -1:])
            changes.append((mlp_site(model, layer), values))
    return changes


def _stepping(module: nn.Module, layer: int, other: Pass) -> Change:
    """Return the change of a module that takes each position by itself to its output elsewhere."""
    return (Site(module, "step", layer), other.by_position[module].to)
