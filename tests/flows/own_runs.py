"""Nodes of a flow that are exchanged or removed by own forward hooks, one layer after the other.

LRP is one backward pass of the model itself, written without bilens: scales of norms, patterns and
gate ratios are detached, and each factor of a product gets half of the gradient (AttnLRP, arXiv
2402.05602; RelP, arXiv 2508.21258).
"""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch.nn import functional

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


def by_hand(view, nodes, texts, number, scale=0.0):
    """Return the change of a number without some nodes, or with a share of their output.

    On one text they have none, and of two texts each has the output of the other text. The change
    is the mean of both directions.
    """
    values = [{x.place: output_of(view, ids, [], x) for x in nodes} for ids in texts]
    changes = []
    for i, ids in enumerate(texts):
        others = values[1 - i] if len(texts) > 1 else {x.place: 0 for x in nodes}
        given = {p: scale * own + (1 - scale) * others[p] for p, own in values[i].items()}
        rows = rows_of(view, ids, nodes, given)
        before = number_with(view, ids, [], number)
        changes.append((-1) ** i * (number_with(view, ids, rows, number) - before))
    return sum(changes) / len(changes)


@contextmanager
def frozen(model):
    """Let gradients of a Llama or a Gemma be those of LRP as long as this runs."""
    softmax = functional.softmax

    def norm(module, offset, x):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt().detach()
        return x * scale * (offset + module.weight)

    def mlp(module, x):
        up, gate = module.up_proj(x), module.gate_proj(x)
        acted = gate * (module.act_fn(gate) / gate).detach()
        return module.down_proj((up * acted.detach() + up.detach() * acted) / 2)

    with pytest.MonkeyPatch.context() as patch:
        for module in model.modules():
            name = type(module).__name__
            if name.endswith("RMSNorm"):
                offset = 1.0 if name.startswith("Gemma") else 0.0
                patch.setattr(module, "forward", lambda x, m=module, o=offset: norm(m, o, x))
            elif name.endswith("MLP"):
                patch.setattr(module, "forward", lambda x, m=module: mlp(m, x))
        detached = lambda *args, **kwargs: softmax(*args, **kwargs).detach()  # noqa: E731
        patch.setattr(functional, "softmax", detached)
        patch.setattr(model.config, "_attn_implementation", "eager")
        yield


def lrp(model, ids, token, minus):
    """Return relevance of each token, (time,), and of each head, (layers, heads)."""
    remaining = []

    def keep(x):
        remaining.append(x.requires_grad_() if x.is_leaf else x)
        x.retain_grad()

    with frozen(model), torch.enable_grad(), ExitStack() as hooks:
        # Written without bilens, the hooks are taken off before it reads the model again.
        embed = model.get_input_embeddings()
        hooks.enter_context(embed.register_forward_hook(lambda _, __, out: keep(out)))
        for layer in model.model.layers:
            out = layer.self_attn.o_proj
            hooks.enter_context(out.register_forward_pre_hook(lambda _, args: keep(args[0])))
        logits = model(ids[None], use_cache=False).logits[0, -1]
        (logits[token] - logits[minus]).backward()
    tokens, *heads = [(x * x.grad)[0].detach() for x in remaining]
    count = model.config.num_attention_heads
    return tokens.sum(-1), torch.stack([x.unflatten(-1, (count, -1)).sum((0, -1)) for x in heads])
