"""Cuts: where the change of an answer stands in the stream, and how many directions it needs.

A cut is a layer before which only some of the stream passes from the run of the first text, that at
the places of a role or some directions of it; all else has its values of the second text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.circuits.cases import ROLES, Cases, have_roles, in_all, summed
from bilens.circuits.directions import MLPDirections, balance
from bilens.circuits.measures import Split
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import Change, exchange
from bilens.transformer.passes import Pass

GOOD = (0.9, 1.15)
"""Bounds of f of the stream at one role, and of directions."""
WIDTHS = (1, 2, 4, 8, 16)
"""Numbers of directions that are tried."""
SHRINK = 0.1

Place = Literal["word", "end"]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where the change stands, and the directions of the stream that carry it.

    Attributes:
        apart: whether the word and the end are different places on some template; else nothing has
            to move between them.
        until: the last layer before which the stream at the word alone carries the change.
        since: the first layer before which that at the end does; None if none does.
        at: f on questions that measure, of the word's stream before `until`, and of the end's
            before `since`.
        curves: f of either on the questions that decide, of each template, by the layers tried.
        layers: before which directions are cut, by the place; the end alone where the word is it.
        directions: of the stream there, by the place; the least number of those tried that
            restores 0.9 to 1.15 through both cuts together, or the largest number.
        width: their number; None where the largest does not restore as much.
        through: f of each number of directions through both cuts, on questions that measure.
    """

    apart: bool
    until: int
    since: int | None
    at: tuple[float, float | None]
    curves: Mapping[Place, Mapping[int, tuple[float, ...]]]
    layers: Mapping[Place, int]
    directions: Mapping[Place, MLPDirections] = field(repr=False)
    width: int | None
    through: Mapping[int, float]


Passing = Mapping[tuple[int, Place], MLPDirections | None]
"""What passes before some layers: at a place, all of the stream or some directions."""


def find_cuts(splits: Sequence[Split], measuring: Cases | None = None) -> Cuts:
    """Return the cuts of a task, by bisection, and the width of the change there.

    They are found on the questions that decide, and directions on all that find. Both are measured
    on other questions, by default those of the templates that measure.
    """
    deciding = Cases.joined([split.deciding for split in splits]).by("role")
    finding = Cases.joined([x for s in splits for x in (s.ordering, s.deciding)]).by("role")
    if measuring is None:
        measuring = Cases.joined([split.measuring for split in splits])
    measuring = measuring.by("role")
    n_layers = deciding.model.n_layers
    curves: dict[Place, dict[int, tuple[float, ...]]] = {"word": {}, "end": {}}

    def carries(place: Place, layer: int) -> bool:
        shares = _by_template(deciding, {(layer, place): None})
        curves[place][layer] = tuple(shares)
        return _are_good(shares)

    apart = have_roles(deciding, [ROLES.index("word"), ROLES.index("word 2")])
    until = n_layers // 2
    since: int | None = 0
    layers: dict[Place, int] = {"end": until}
    if apart:
        # The word carries it before the first layer, and the end after the last.
        until = last_true(partial(carries, "word"), n_layers)
        since = n_layers - 1 - last_true(lambda i: carries("end", n_layers - 1 - i), n_layers, -1)
        since = None if since == n_layers else since
        layers = {"word": until, "end": min(until + 1, n_layers - 1) if since is None else since}
    directions, width, through = _fewest_directions(finding, deciding, measuring, layers)
    at = passed(measuring, {(until, "word"): None})
    at_end = None if since is None else passed(measuring, {(since, "end"): None})
    return Cuts(apart, until, since, (at, at_end), curves, layers, directions, width, through)


def _fewest_directions(
    finding: Cases, deciding: Cases, measuring: Cases, layers: Mapping[Place, int]
) -> tuple[dict[Place, MLPDirections], int | None, dict[int, float]]:
    """Return `directions`, `width` and `through` of `Cuts`."""
    snapshots = {place: _snapshots(finding, layer, place) for place, layer in layers.items()}
    directions: dict[Place, MLPDirections] = {}
    through: dict[int, float] = {}
    for count in WIDTHS:
        directions = {place: balance(*x, count, SHRINK)[0] for place, x in snapshots.items()}
        passing: Passing = {(layers[place], place): x for place, x in directions.items()}
        through[count] = passed(measuring, passing)
        if _are_good(_by_template(deciding, passing)):
            return directions, count, through
    return directions, None, through


def _are_good(shares: Sequence[float]) -> bool:
    return GOOD[0] <= min(shares) and max(shares) <= GOOD[1]


def last_true(holds: Callable[[int], bool], count: int, first: int = 0) -> int:
    """Return the last of the numbers from `first`, at which it holds, below `count`, by bisection.

    It holds up to that number, and not beyond.
    """
    low, high = first, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def passed(cases: Cases, passing: Passing) -> float:
    """Return f of the runs in which only some of the stream passes before some layers."""
    return float(_values(cases, passing).mean() / cases.changes.mean())


def _by_template(cases: Cases, passing: Passing) -> list[float]:
    values, changes = _values(cases, passing), cases.changes
    return [float(values[x].mean() / changes[x].mean()) for x in cases.templates.values()]


@torch.no_grad()
def _values(cases: Cases, passing: Passing) -> Float[Tensor, " cases"]:
    def own() -> Tensor:
        values = torch.zeros(len(cases), dtype=torch.float64)
        for group, numbers in enumerate(cases.groups):
            first, second = cases.passes(group)
            changes = _changes(cases, cases.roles[numbers[0]], second, passing)
            streams = exchange(first, second, [cases.model.places.exist], [changes])[0]
            values[numbers] = _rises(cases, numbers, streams).cpu().double()
        return values

    return summed(cases, own)


def _rises(
    cases: Cases, numbers: Sequence[int], streams: Float[Tensor, "texts time d_model"]
) -> Float[Tensor, " texts"]:
    rows = [cases.cases[i].rise(x[None])[0] for i, x in zip(numbers, streams, strict=True)]
    return torch.stack(rows)


def _changes(cases: Cases, of_group: Sequence[int], second: Pass, passing: Passing) -> list[Change]:
    """Return the changes by which only some of the stream passes before some layers."""
    roles = torch.tensor(of_group, device=cases.model.device)
    changes = list[Change]()
    for layer in {layer for layer, _ in passing}:

        def cut(x: Tensor, layer: int = layer) -> Tensor:
            other = second.streams[layer].to(x)
            change, y = x - other, other
            for (at, place), directions in passing.items():
                if at == layer:
                    here = change * is_at(roles, place)[:, None]
                    if directions is not None:
                        writer, reader = (rows.to(x) for rows in directions)
                        here = (here @ reader.T) @ writer
                    y = y + here
            return y

        changes.append(Change((cases.model.places.layers[layer].module, "input"), layer, cut))
    return changes


def is_at(roles: Tensor, place: Place) -> Tensor:
    """Return which roles, by their numbers, are those of a place; of words it is any of them."""
    numbers = [i for i, role in enumerate(ROLES) if place in role]
    return torch.isin(roles, torch.tensor(numbers, device=roles.device))


def _snapshots(
    cases: Cases, layer: int, place: Place
) -> tuple[Float[Tensor, "n d_model"], Float[Tensor, "n d_model"]]:
    """Return changes of the stream before a layer at a place, and mean gradients of the number.

    Gradients are at two points between the streams of both texts. Both are scaled to a change of 1.
    """
    of_processes = in_all(cases, partial(_own_snapshots, cases, layer, place))
    changes, gradients = zip(*chain.from_iterable(of_processes), strict=True)
    return torch.cat(changes), torch.cat(gradients)


def _own_snapshots(cases: Cases, layer: int, place: Place) -> list[tuple[Tensor, Tensor]]:
    """Return the changes and gradients of each group of this process."""
    module = cases.model.places.layers[layer].module
    points = [0.5 - 3**-0.5 / 2, 0.5 + 3**-0.5 / 2]
    snapshots = list[tuple[Tensor, Tensor]]()
    for group, numbers in enumerate(cases.groups):
        first, second = cases.passes(group)
        difference = first.streams[layer] - second.streams[layer]
        total = torch.zeros_like(difference)
        for share in points:
            zeros = torch.zeros_like(difference, requires_grad=True)
            between = second.streams[layer] + share * difference

            def at_point(_: Tensor, zeros: Tensor = zeros, between: Tensor = between) -> Tensor:
                return between + zeros

            with torch.enable_grad():
                change = Change((module, "input"), layer, at_point)
                (streams,) = exchange(first, second, [cases.model.places.exist], [[change]])
                (slope,) = torch.autograd.grad(_rises(cases, numbers, streams).sum(), zeros)
            total += slope / len(points)
        roles = torch.tensor(cases.roles[numbers[0]], device=difference.device)
        here = is_at(roles, place)
        scale = cases.changes[numbers].to(difference)[:, None, None] ** -0.5
        rows = [(scale * x)[:, here].flatten(0, 1).cpu().double() for x in (difference, total)]
        snapshots.append((rows[0], rows[1]))
    return snapshots


def direction_tokens(
    model: ResidualModel, written: Float[Tensor, " d_model"], count: int = 3
) -> tuple[list[int], list[int]]:
    """Return the tokens whose logits a direction of the stream raises most, and lowers most.

    It is read by the last norm and the unembedding, as if no layer came after it.
    """
    W, _ = model.modules.logit_weights()
    scores = written.to(W) @ W
    return scores.topk(count).indices.tolist(), (-scores).topk(count).indices.tolist()
