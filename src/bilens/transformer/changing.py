"""Hooks by which sites of a pass have other values, in passes side by side."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bilens.hooks import hooked
from bilens.transformer.changes import Change, Function, Part, Site
from bilens.transformer.experts import ExpertCall
from bilens.transformer.mixing import Mixing
from bilens.transformer.running import first_input, first_output, with_input

Hook = tuple[nn.Module, Callable[..., Any]]
OfSets = dict[int, list[Any]]
"""The functions of a site, by the number of their set."""
Known = tuple[Bool[Tensor, "sets time"], list[Float[Tensor, "texts time width"]]]
"""Positions at which a module runs in each set, and what it writes at all others."""


def by_site(sets: Sequence[Sequence[Change]]) -> dict[Site, OfSets]:
    """Return the functions of each site, by the number of their set."""
    sites: dict[Site, OfSets] = defaultdict(dict)
    for number, changes in enumerate(sets):
        for site, function in changes:
            sites[site].setdefault(number, []).append(function)
    return dict(sites)


def applied(functions: Sequence[Function], x: Tensor) -> Tensor:
    """Return a value after some functions; those that return None only look at it."""
    for function in functions:
        result = function(x)
        x = x if result is None else result
    return x


@contextmanager
def changing(
    sites: Mapping[Site, OfSets], known: Mapping[nn.Module, Known], sets: int, texts: int
) -> Iterator[None]:
    """Let sites have other values in some sets, each with its own rows of texts."""
    mixing = Mixing()

    def changed(site: Site, x: Tensor, term: Callable[[int, Part], Tensor] | None = None) -> Tensor:
        """Return x with the changes of each set; `term` is that of a part in a set."""
        # Some modules take the tokens of all texts as one list.
        each = []
        for number, rows in enumerate(x.reshape(sets, texts, -1, x.shape[-1])):
            functions = sites[site].get(number, ())
            if term is not None:
                functions = [partial(f, term=partial(term, number)) for f in functions]
            each.append(applied(functions, rows))
        return torch.cat(each).reshape(x.shape)

    def change_input(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        return with_input(changed(site, first_input(args, options)), args, options)

    def change_mix(site: Site, _: nn.Module, args: tuple[Any, ...], options: Any) -> Any:
        mix = mixing.read_by(args[0], site.layer)

        def term(number: int, part: Part) -> Tensor:
            return part.moved(mix)[number * texts : (number + 1) * texts]

        return (changed(site, args[0], term), *args[1:]), options

    def change_experts(
        site: Site, module: nn.Module, args: tuple[Any, ...], options: Any, output: Any
    ) -> Any:
        y, call = first_output(output), ExpertCall.of(module, args, options)
        terms = cache(lambda expert: call.term(expert).reshape(sets, texts, -1, y.shape[-1]))
        z = changed(site, y, lambda number, part: terms(part.number or 0)[number][:, part.rows])
        return (z, *output[1:]) if isinstance(output, tuple) else z

    def change_output(site: Site, *call: Any) -> Any:
        y = changed(site, first_output(call[-1]))
        return (y, *call[-1][1:]) if isinstance(call[-1], tuple) else y

    # Inputs are changed before rows are left out, and outputs after they are put in again.
    cut, join = _skipping(known, texts)
    reading = {"mix": change_mix, "input": change_input}
    writing = {"output": change_output, "experts": change_experts}
    before = [(x.module, partial(reading[x.place], x)) for x in sites if x.place in reading]
    after = [(x.module, partial(writing[x.place], x)) for x in sites if x.place in writing]
    is_mixing = any(site.place == "mix" for site in sites)
    with hooked([*before, *cut], [*join, *after]), mixing if is_mixing else nullcontext():
        yield


def _skipping(known: Mapping[nn.Module, Known], texts: int) -> tuple[list[Hook], list[Hook]]:
    """Return the hooks by which modules run where their output is not known, as one long text."""
    rows: dict[nn.Module, Tensor] = {}

    def cut(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
        x, (runs, _) = args[0], known[module]
        rows[module] = runs.repeat_interleave(texts, 0).flatten().nonzero().flatten().to(x.device)
        some = x.flatten(0, -2).index_select(0, rows[module])
        return (some[None] if x.dim() == 3 else some, *args[1:]), options

    def join(module: nn.Module, _: Any, __: Any, y: Tensor) -> Tensor:
        whole = torch.cat(known[module][1]).to(y)
        computed = y.flatten(0, -2)
        joined = whole.flatten(0, 1).index_copy(0, rows.pop(module), computed)
        return joined.reshape(whole.shape) if y.dim() == 3 else joined

    some = [module for module, (runs, _) in known.items() if not runs.all()]
    return [(module, cut) for module in some], [(module, join) for module in some]
