"""Parts of a pass that take their values of another pass: a share of each, or single terms.

Each layer has two places: the mixed values of its heads, and the output of its MLP. A share of what
stands there is kept, and the rest is that of the other pass.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bilens.errors import BilensError
from bilens.hooks import hooked
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mix, Mixing
from bilens.transformer.parts import Part
from bilens.transformer.passes import Pass, embedded, first_change, last_streams
from bilens.transformer.running import first_input, first_output, wide_passes, with_input

Place = tuple[nn.Module, Literal["input", "output"]]
"""What a module reads or writes."""
Shares = Float[Tensor, "layers parts"] | Float[Tensor, "layers time parts"]
"""The share of each head of a layer, and of its MLP as the last, at all positions or at each."""
Mixtures = dict[Place, tuple[Float[Tensor, "texts time width"], Float[Tensor, "*sets time blocks"]]]
"""Values of another pass, and the share of each block of columns that does not take them."""
Start = tuple[int, int]
"""The moment, of four in each layer, and the position from which a set differs from a pass."""
Runs = tuple[Bool[Tensor, "sets time"], Bool[Tensor, "sets time"]]
"""Positions at which a module runs in each set, and those at which something of it is kept."""
Term = Callable[[Part, int], Float[Tensor, "texts time width"]]
"""The term of a part in a sum, given the number of texts; one position for what moves to it."""
Hook = tuple[nn.Module, Callable[..., Any]]
EMBEDDING = -1
"""Layer of the places before the first one."""


class Change(NamedTuple):
    """What stands at a place of a set, by a function of what does."""

    place: Place
    layer: int  # its layer, before which a pass is as it was
    value: Callable[..., Tensor]  # of (texts, time, width), and of the part's term if there is one
    part: Part | None = None  # a term of the place's sum: of a head from a source, or an expert
    position: int = 0  # before which it is as it was


def exchange(
    own: Pass, other: Pass, keep: Sequence[Shares], changes: Sequence[Sequence[Change]] = ()
) -> Float[Tensor, "sets texts time d_model"]:
    """Return the last streams of texts where parts keep a share, the rest is of another pass.

    Several sets of shares go side by side in batches, each with further changes if there are any.
    The other pass has as many texts and tokens. A share of 1 is the part as it is.

    Maps and MLPs do not run where nothing of them is kept, nor before a set differs from the pass;
    the shares 0 there have no gradient. Else the result has gradients by shares, and by all tensors
    that changes hold, under `torch.enable_grad`.
    """
    changes = changes or [()] * len(keep)
    shares = [x if x.dim() == 3 else x[:, None] for x in keep]
    first, starts = first_change((own, other)), dict[int, Start]()
    for i, of_set in enumerate(zip(shares, changes, strict=True)):
        if (start := _start(own, *of_set)) is not None:
            starts[i] = start[0], max(first, start[1])
    order = sorted(starts, key=starts.__getitem__)
    # The streams of a batch take about 2 MB; larger ones leave the cache of a processor.
    size = max(1, 2**19 // own.tokens.numel())
    results = [own.stream] * len(shares)
    for begin in range(0, len(order), size):
        batch = order[begin : begin + size]
        of_batch = torch.stack([shares[i].expand(-1, own.ids.shape[1], -1) for i in batch])
        of_sets = [changes[i] for i in batch], [starts[i] for i in batch]
        for i, stream in zip(batch, _run(own, other, of_batch, *of_sets), strict=True):
            results[i] = stream
    return torch.stack(results) if results else own.stream.new_empty(0, *own.stream.shape)


def exchange_parts(
    own: Pass, other: Pass, groups: Sequence[Sequence[Part]]
) -> Float[Tensor, "groups texts time d_model"]:
    """Return the last streams of texts where the parts of each group have their other values.

    Raises:
        BilensError: a part cannot be exchanged.
    """
    sets = [exchanged(parts, other) for parts in groups]
    return exchange(own, other, [keep for keep, _ in sets], [changes for _, changes in sets])


def exchanged(
    parts: Sequence[Part], other: Pass
) -> tuple[Bool[Tensor, "layers time parts"], list[Change]]:
    """Return the shares and changes by which parts have their values of another pass.

    Of a head with a source, only what it moves from there is exchanged, and what it moves from
    elsewhere stays as it runs; so do the other experts beside one.

    Raises:
        BilensError: a part cannot be exchanged.
    """
    exist, changes = other.model.places.exist, list[Change]()
    at_all = all(part.position is None for part in parts)
    keep = exist[:, None].repeat(1, 1 if at_all else other.ids.shape[1], 1)
    for part in parts:
        is_head = part.kind == "head" and part.source is None
        if not (is_head or part.kind == "mlp"):
            changes += _term_changes(part, other)
            continue
        layer, column = part.layer or 0, part.number or 0 if is_head else -1
        if not exist[layer, column]:
            raise BilensError(f"{part} is not in the model, expected a part that its layer has")
        keep[layer, part.rows, column] = False
    return keep, changes


def _term_changes(part: Part, other: Pass) -> list[Change]:
    """Return the changes by which a token or a term has its value of another pass."""
    model, start, rows = other.model, part.position or 0, part.rows
    if part.kind == "token":
        tables = {model.places.embed: other.tokens}
        for table in model.places.tables:  # which layers read beside the stream
            tables[table] = model.places.rows(other.ids, table)
        return [
            Change((module, "output"), EMBEDDING, partial(_with_rows, rows, values), position=start)
            for module, values in tables.items()
        ]
    layer, i, columns = part.layer or 0, part.number or 0, slice(None)
    places = model.places.layers[layer]
    place: Place
    if part.kind == "expert" and places.experts is not None:
        place, values = (places.experts, "output"), other.expert(layer, i)[:, rows]
    elif part.kind == "head" and places.heads is not None:
        place, values = (places.heads, "input"), _moved(part, other.mix(layer))
        columns = slice(i * values.shape[2], (i + 1) * values.shape[2])
    else:
        raise BilensError(f"{part} cannot be exchanged by its address; expected a head or an MLP")

    def with_term(x: Tensor, term: Tensor) -> Tensor:
        x = x.clone()
        x[:, rows, columns] += values.to(x) - term.expand(-1, x.shape[1], -1)[:, rows]
        return x

    return [Change(place, layer, with_term, part, start)]


def _with_rows(rows: slice, values: Tensor, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, rows] = values[:, rows].to(x)
    return x


def _moved(part: Part, mix: Mix) -> Float[Tensor, "texts 1 d_head"]:
    """Return what a head moves from its source to its position."""
    assert part.position is not None
    assert part.source is not None
    return mix.term(part.number or 0, part.position, part.source)[:, None]


def mixtures(other: Pass, keep: Float[Tensor, "*sets layers time parts"]) -> Mixtures:
    """Return what takes a share of its values from another pass."""
    result: Mixtures = {}
    shares = keep.unbind(-3)
    for place, heads_and_mlp in zip(other.model.places.layers, shares, strict=True):
        heads, mlp = heads_and_mlp[..., :-1], heads_and_mlp[..., -1:]
        if place.heads is not None and _differ(heads).any():
            result[place.heads, "input"] = other.values.inputs[place.heads], heads
        if place.mlp is not None and _differ(mlp).any():
            result[place.mlp, "output"] = other.values.outputs[place.mlp], mlp
    return result


def mixed(
    x: Float[Tensor, "*sets texts time width"],
    values: Float[Tensor, "texts time width"],
    share: Float[Tensor, "*sets time blocks"],
) -> Float[Tensor, "*sets texts time width"]:
    """Return values of which a share of each block of columns stays, and the rest are others."""
    blocks = share.shape[-1]
    own, theirs = (y.unflatten(-1, (blocks, -1)) for y in (x, values.to(x)))
    return theirs.lerp(own, share.to(x)[..., None, :, :, None]).flatten(-2)


def _differ(share: Tensor) -> Bool[Tensor, "*shape"]:
    """Return which shares change a pass, or its gradients."""
    return torch.ones_like(share, dtype=torch.bool) if share.requires_grad else share != 1


def _is_whole(share: Float[Tensor, "sets time blocks"]) -> bool:
    """Return whether all or nothing is kept at each position, without a gradient."""
    if not share.any():
        return True
    is_whole = share.shape[-1] == 1 and not share.requires_grad
    return is_whole and bool(((share == 0) | (share == 1)).all())


def _start(
    own: Pass, share: Float[Tensor, "layers time parts"], changes: Sequence[Change]
) -> Start | None:
    """Return when a set begins to differ from a pass; None if it does not."""
    differ = _differ(share).cpu() & own.model.places.exist[:, None]
    moments = [_moment(own, change) for change in changes]
    positions = [change.position for change in changes]
    for layer, part in differ.any(1).nonzero()[:1].tolist():
        moments.append(4 * layer + (3 if part == share.shape[2] - 1 else 1))
        positions.append(int(differ.any(2).any(0).int().argmax()))
    return (min(moments), min(positions)) if moments else None


def _moment(own: Pass, change: Change) -> int:
    """Return when a place is read in a pass: four moments of each layer, of `_runs` two."""
    if change.layer == EMBEDDING:
        return -1
    layer = own.model.places.layers[change.layer]
    return 4 * change.layer + {layer.module: 0, layer.mlp: 3}.get(change.place[0], 1)


def _run(
    own: Pass,
    other: Pass,
    keep: Float[Tensor, "sets layers time parts"],
    changes: Sequence[Sequence[Change]],
    starts: Sequence[Start],
) -> Float[Tensor, "sets texts time d_model"]:
    """Return the last streams of sets side by side."""
    model, sets, texts = own.model, len(keep), len(own.ids)
    of_place = _by_place(changes)
    tokens = [own.tokens] * sets
    for i, change in of_place.pop((model.places.embed, "output"), []):
        tokens[i] = change.value(tokens[i])
    mixing = Mixing()
    terms = {change.part.kind for of_set in changes for change in of_set if change.part}
    # Terms of experts are told by text and position, so that all positions run.
    runs = {} if "expert" in terms else _runs(own, keep.detach().cpu(), starts)
    of_shares = mixtures(other, keep)
    for place, (_, share) in [*of_shares.items()]:
        # Modules that do not run where nothing is kept have the other values there already.
        if place[0] in runs and _is_whole(share):
            del of_shares[place]

    def changed(place: Place, x: Tensor, term: Term) -> Tensor:
        # Some modules take the tokens of all texts as one list.
        rows = x.reshape(sets, texts, -1, x.shape[-1])
        if place in of_shares:
            rows = mixed(rows, *of_shares[place])
        if place in of_place:
            rows = _with_changes(rows, of_place[place], term)
        return rows.reshape(x.shape)

    # Inputs are changed before rows are left out, and outputs after they are put in again.
    cut, join = _skipping(own, other, runs)
    before, after = hooks_at({*of_shares, *of_place}, changed, mixing)
    ids, embeddings = own.ids.repeat(sets, 1), embedded(model, torch.cat(tokens))
    in_mode = mixing if "head" in terms else nullcontext()
    with wide_passes(model.model), embeddings, hooked([*before, *cut], [*join, *after]), in_mode:
        return last_streams(model, ids).unflatten(0, (sets, -1))


def _by_place(changes: Sequence[Sequence[Change]]) -> dict[Place, list[tuple[int, Change]]]:
    """Return the changes at each place, with the numbers of their sets."""
    of_place: dict[Place, list[tuple[int, Change]]] = defaultdict(list)
    for i, of_set in enumerate(changes):
        for change in of_set:
            of_place[change.place].append((i, change))
    return of_place


def _with_changes(
    rows: Float[Tensor, "sets texts time width"], changes: Sequence[tuple[int, Change]], term: Term
) -> Float[Tensor, "sets texts time width"]:
    """Return what stands at a place after changes, each in its own set."""
    sets_and_texts, each = rows.shape[:2], [*rows]
    for i, change in changes:
        if change.part is None:
            each[i] = change.value(each[i])
        else:
            of_sets = term(change.part, sets_and_texts.numel()).unflatten(0, sets_and_texts)
            each[i] = change.value(each[i], of_sets[i])
    return torch.stack(each)


def hooks_at(
    places: Iterable[Place], changed: Callable[[Place, Tensor, Term], Tensor], mixing: Mixing
) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks by which places have other values, inputs first and then outputs.

    They are functions of place, value and terms, of whose heads `mixing` is the mode of the pass.
    """

    def read(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = first_input(args, options)
        mix = cache(partial(mixing.read_by, x))

        def term(part: Part, _: int) -> Tensor:
            return _moved(part, mix(part.layer or 0))

        return with_input(changed((module, "input"), x, term), args, options)

    def write(module: nn.Module, args: tuple[Any, ...], options: Any, output: Any) -> Any:
        y = first_output(output)
        expert = cache(lambda n: ExpertCall.of(module, args, options).term(n))

        def term(part: Part, texts: int) -> Tensor:
            return expert(part.number or 0).reshape(texts, -1, y.shape[-1])

        z = changed((module, "output"), y, term)
        return (z, *output[1:]) if isinstance(output, tuple) else z

    before = [(module, read) for module, place in places if place == "input"]
    return before, [(module, write) for module, place in places if place == "output"]


def _runs(
    own: Pass, keep: Float[Tensor, "sets layers time parts"], starts: Sequence[Start]
) -> dict[nn.Module, Runs]:
    """Return where modules that take each position by itself run.

    Elsewhere they write what they do in the pass, from which a set does not differ yet, or in the
    other pass, if nothing of theirs is kept.
    """
    moments, positions = torch.tensor(starts).T[:, :, None]
    is_begun, runs = torch.arange(own.ids.shape[1]) >= positions, dict[nn.Module, Runs]()
    for layer, place in enumerate(own.model.places.layers):
        of_heads, of_mlp = keep[:, layer, :, :-1].any(-1), keep[:, layer, :, -1].bool()
        for module in place.by_position:
            is_last = module in (place.heads, place.mlp)
            # Later positions read keys and values.
            mask = of_mlp if module is place.mlp else of_heads
            mask = mask if is_last else mask.any(1, keepdim=True).expand_as(mask)
            runs[module] = is_begun & (4 * layer + 2 * is_last >= moments) & mask, mask
    return runs


def _skipping(
    own: Pass, other: Pass, runs: Mapping[nn.Module, Runs]
) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks by which modules run at some positions, all of them as one long text."""
    texts, rows = len(own.ids), dict[nn.Module, Tensor]()

    def cut(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        x, (here, _) = args[0], runs[module]
        rows[module] = here.repeat_interleave(texts, 0).flatten().nonzero().flatten().to(x.device)
        some = x.flatten(0, -2).index_select(0, rows[module])
        return (some[None] if x.dim() == 3 else some, *args[1:]), options

    def join(module: nn.Module, _: Any, __: Any, y: Tensor) -> Tensor:
        mask = runs[module][1][:, None, :, None].to(y.device)
        here, there = (of_pass.values.outputs[module].to(y) for of_pass in (own, other))
        whole = torch.where(mask, here, there).flatten(0, 1)
        output = whole.flatten(0, 1).index_copy_(0, rows.pop(module), y.flatten(0, -2))
        return output.reshape(whole.shape) if y.dim() == 3 else output

    some = [module for module, (here, _) in runs.items() if not here.all()]
    return [(module, cut) for module in some], [(module, join) for module in some]
