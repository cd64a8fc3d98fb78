"""Nodes of a flow that are exchanged or removed by own forward hooks, one layer after the other."""

from contextlib import ExitStack
from functools import partial

from tests.flows.flows import uncapped


def place_of(view, node):
    """Return the module that has a node's output, whether as its input, and the columns."""
    if node.kind == "token":
        return view.modules.embed.module, False, slice(None)
    layer = view.modules.layers[node.layer]
    if node.kind == "mlp":
        return layer.mlp.module, False, slice(None)
    width = layer.heads.d_head
    return layer.heads.out.module, True, slice(node.number * width, (node.number + 1) * width)


def run(view, ids, rows, watched=None, without=None):
    """Run a model to whose parts rows are added, and return its logits.

    `rows` are pairs of a node and a row. With `watched`, the output of this node at its position is
    returned. With `without`, the values of this layer and position are zero in that run.
    """
    seen = []

    def add(x, place, row):
        x = x.clone()
        x[place] += row.to(x)
        return x

    def watch(x, place, row):
        seen.append(x[place])
        return x

    with ExitStack() as hooks:
        for change, node, row in [*((add, *pair) for pair in rows), (watch, watched, None)]:
            if node is None:
                continue
            module, is_input, columns = place_of(view, node)
            changed = partial(change, place=(0, node.position, columns), row=row)
            if is_input:
                hook = module.register_forward_pre_hook(lambda _, args, f=changed: (f(args[0]),))
            else:
                hook = module.register_forward_hook(lambda _, __, y, f=changed: f(y))
            hooks.enter_context(hook)
        if without is not None:
            layer, source = without
            value = view.modules.layers[layer].heads.value

            def silence(_, __, y):
                y = y.clone()
                y[0, source, slice(None) if value.rows is None else value.rows] = 0
                return y

            hooks.enter_context(value.module.register_forward_hook(silence))
        # Written without bilens: `ResidualModel` does not read a model with other hooks.
        logits = view.model(ids[None]).logits[0, -1]
    return logits if watched is None else seen[0]


def output_of(view, ids, rows, node):
    """Return the output of a node in a run with added rows; of a head with a source, its share."""
    output = run(view, ids, rows, node)
    if node.kind == "head" and node.source is not None:
        output = output - run(view, ids, rows, node, (node.layer, node.source))
    return output


def rows_of(view, ids, nodes, given):
    """Return the rows that let each node have a given output, whatever those before it do to it."""
    order = sorted(nodes, key=lambda node: (-1 if node.layer is None else node.layer, node.kind))
    rows = []
    for node in order:
        # What nodes of one place add to each other is none of a node's own output.
        before = [(x, row) for x, row in rows if x.layer != node.layer or x.kind != node.kind]
        rows.append((node, given[node.place] - output_of(view, ids, before, node)))
    return rows


def number_with(view, ids, rows, number):
    """Return a number of the logits, before a soft cap, of a run with added rows."""
    return float(number(uncapped(view, run(view, ids, rows))))


def by_hand(view, nodes, texts, number):
    """Return the change of a number without some nodes.

    On one text they have none, and of two texts each has the output of the other text. The change
    is the mean of both directions.
    """
    values = [{x.place: output_of(view, ids, [], x) for x in nodes} for ids in texts]
    changes = []
    for i, ids in enumerate(texts):
        others = values[1 - i] if len(texts) > 1 else {x.place: 0 for x in nodes}
        given = {place: others[place] for place in values[i]}
        rows = rows_of(view, ids, nodes, given)
        before = number_with(view, ids, [], number)
        changes.append((-1) ** i * (number_with(view, ids, rows, number) - before))
    return sum(changes) / len(changes)
