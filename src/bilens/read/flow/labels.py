"""Words for the nodes of a flow: tokens and contexts that it reads, and tokens that it raises."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import full_precision
from bilens.data import Corpus
from bilens.read.flow.graph import Flow
from bilens.read.language.names import shown_tokens
from bilens.residual import ResidualModel
from bilens.residual.trace import mlp_inputs

TOP, ENDS, ENDING = 4, 3, 4
"""Tokens of a label; texts of a label, and tokens that each of them shows."""
SEARCHED = 4096
"""Tokens of texts that are searched for contexts of directions."""


@torch.no_grad()
@full_precision
def described(
    model: ResidualModel, flow: Flow, k: int, texts: Iterable[Int[Tensor, " time"]] = ()
) -> Flow:
    """Return a flow whose k strongest nodes have the tokens that they read and write.

    A direction v reads the tokens with the largest v . W_U, in the sign that it has on this text. A
    direction or a head writes the tokens whose logits its output o raises most, by o . W_U.
    This is the logit lens, which counts no later layer. In early layers tokens say little. Given
    texts, a direction is also described by the ends of those after which v . n is largest, n the
    normalised input of its MLP.

    Args:
        model: the model of the flow.
        flow: the flow.
        k: number of nodes.
        texts: token ids of texts that are searched; the model runs on each.
    """
    strongest = sorted(range(len(flow.nodes)), key=lambda i: -abs(flow.nodes[i].flow))[:k]
    directions = [i for i in strongest if flow.nodes[i].kind == "direction"]
    writers = [i for i in strongest if flow.nodes[i].kind in ("direction", "mlp", "head")]
    place = {number: row for row, number in enumerate(flow.direction_numbers)}
    vectors = flow.vectors[[place[i] for i in directions], :-1]
    reads, _ = lens(model, vectors)
    layers = [flow.nodes[i].layer or 0 for i in directions]
    ends = dict(zip(directions, strongest_ends(model, layers, vectors, texts), strict=True))
    writes, lowers = lens(model, node_outputs(flow, writers))
    read = dict(zip(directions, reads, strict=True))
    written = dict(zip(writers, zip(writes, lowers, strict=True), strict=True))
    nodes = []
    for i, node in enumerate(flow.nodes):
        raises, lowered = written.get(i, (node.writes, node.lowers))
        reads_now = read.get(i, node.reads)
        after = ends.get(i) or node.after
        nodes.append(replace(node, after=after, reads=reads_now, writes=raises, lowers=lowered))
    return replace(flow, nodes=tuple(nodes))


def strongest_ends(
    model: ResidualModel,
    layers: Sequence[int],
    vectors: Float[Tensor, "n d_model"],
    texts: Iterable[Int[Tensor, " time"]],
) -> list[tuple[str, ...]]:
    """Return the ends of the texts after which directions of MLPs' inputs are most active.

    Args:
        model: the model.
        layers: the layer of each direction.
        vectors: the directions, in the normalised stream.
        texts: token ids. A text counts once for each direction, at its strongest position.
    """
    best: list[list[tuple[float, str]]] = [[] for _ in layers]
    for ids in texts if layers else ():
        batch = model.ids(ids)[None]
        inputs = [n[0] for n in mlp_inputs(model.model, [x.mlp for x in model.parts.layers], batch)]
        for number, (layer, vector) in enumerate(zip(layers, vectors, strict=True)):
            active, position = (inputs[layer] @ vector).max(0)
            first = max(0, int(position) + 1 - ENDING)
            end = "".join(shown_tokens(model, ids[first : int(position) + 1]))
            best[number].append((float(active), end))
    ranked = [dict.fromkeys(end for _, end in sorted(ends, reverse=True)) for ends in best]
    return [tuple(islice(ends, ENDS)) for ends in ranked]


def first_texts(corpus: Corpus, n_tokens: int = SEARCHED) -> Iterator[Int[Tensor, " time"]]:
    """Yield the token ids of validation texts, up to a number of tokens."""
    for row in corpus.validation:
        if n_tokens <= 0:
            return
        yield row["input_ids"]
        n_tokens -= len(row["input_ids"])


def node_outputs(flow: Flow, numbers: list[int]) -> Float[Tensor, "n d_model"]:
    """Return the outputs of some nodes, added up over positions."""
    place = torch.full((len(flow.nodes),), -1, device=flow.constants.device)
    place[numbers] = torch.arange(len(numbers), device=place.device)
    row = place[flow.writes.node]
    outputs = flow.writes.vector.new_zeros(len(numbers), len(flow.direction))
    return outputs.index_add(0, row[row >= 0], flow.writes.vector[row >= 0])


def lens(
    model: ResidualModel, rows: Float[Tensor, "n d_model"]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the tokens whose logits each row raises most, and those that it lowers most."""
    if not len(rows):
        return [], []
    norm, unembed = model.parts.norm, model.parts.unembed
    # The gain is folded into the few rows, as a copy of all columns of W_U takes longer.
    if norm is not None:
        rows = norm.centred(rows) * norm.gain()
    logits, k = rows @ unembed.weight().T, min(TOP, model.vocab_size)
    high, low = (
        [tuple(shown_tokens(model, ids)) for ids in logits.topk(k, largest=largest).indices]
        for largest in (True, False)
    )
    return high, low
