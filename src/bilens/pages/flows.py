"""The pages of flows and of a model's summary: the answer, how well it holds, and the nodes."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite, log
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.checks import checked
from bilens.figures.sheet import BLUE, GREY, SERIES, Figure, add_legend, new_figure, styled
from bilens.flows.ablation import Ablation
from bilens.flows.graph import DRAWN, Flow, path_weights
from bilens.flows.nodes import node_columns, strongest_first
from bilens.flows.reading import FlowPage, FlowReading
from bilens.flows.saved import SavedGraph
from bilens.flows.summary import LanguageSummary
from bilens.flows.table import FlowTable
from bilens.pages import answers, diff, lens  # noqa: F401  they register their pages
from bilens.pages.graph import WIDE, graph_figure, graph_plot
from bilens.pages.layout import plot_of, sections_of
from bilens.sections import FlowDrawing, Picture, Section, Table, signed


@sections_of.register
def table_sections(table: FlowTable) -> list[Section]:
    """Return the parts of each kind of questions, the clusters, and what was not read."""
    text = "The strongest parts of each task and template: shares of its change, which overlap."
    of_clusters = (
        "Questions that the same parts answer, of a sample: the parts that tell a cluster from the "
        "others, by their shares of the flow of all parts."
    )
    of_kinds = [[Table(table.frame(), "", table.formats)]]
    sections = [
        Section("Parts of each kind", text, of_kinds, table.facts()),
        Section("Clusters of questions", of_clusters, [[Table(table.clusters)]]),
    ]
    if table.unread:
        title = f"{table.unread:,} questions without a flow: the first"
        sections.append(Section(title, "", [[Table(table.reasons)]], folded=True))
    return sections


@sections_of.register
def flow_sections(reading: FlowReading) -> list[Section]:
    """Return the answer with its graph, how well it holds, and the nodes."""
    drawing = FlowDrawing(asdict(reading.page))
    sections = [Section(reading.title, reading.answer(), [[drawing]])]
    if ablation := reading.ablated:
        method = (
            "Each node's change was exchanged between the texts, in both directions; the mean "
            "is shown."
        )
        # Only the paths are estimates, what is removed or exchanged is measured.
        text = (
            f"{method} With all {len(reading.strongest)} heads and MLPs of the picture at once, "
            f"heads with all of their sources, the change is {signed(reading.left)}."
        )
        picture = Picture("interventions", lambda: ablation_figure(ablation))
        sections.append(Section("How well it holds", text, [[picture]]))
    legend = (
        "Positions are across, layers upwards. A square is a head: its line comes from the "
        "token that it attends to. A circle is an MLP at a position, or a token. Area is "
        "|flow|; blue raises the logit, red lowers it. Curves are the edges with the largest "
        "weight on paths to the logit. At every node as much flows in as flows out. Select a node "
        "to see its own edges."
    )
    if any(node.effect for node in reading.page.nodes):
        legend += (
            " A node is named by the next tokens that its change makes more likely (raises) or "
            "less likely (lowers), carried forward exactly."
        )
    if any(node.sink for node in reading.page.nodes):
        names = " and ".join(f'"{reading.page.tokens[p]}" ({p})' for p in reading.page.sinks)
        legend += (
            f" {names}: attention sink, dashed. Heads with nothing to move attend there, so "
            "that flow through it says little about the text: compare it with the measured "
            "effect."
        )
    nodes = Table(node_table(reading.flow, reading.page), "", reading.formats)
    starts = Table(start_table(reading.page), "", reading.formats)
    return [
        *sections,
        Section("How to read the graph", legend, folded=True),
        Section("The strongest nodes", "", [[nodes]], reading.facts(), folded=True),
        Section("Where it starts", "", [[starts]], folded=True),
    ]


@sections_of.register
def saved_sections(reading: SavedGraph) -> list[Section]:
    """Return the graph of a file, and a picture and a table of the nodes that are pinned."""
    picture = Picture("pinned", reading.plot)
    table = Table(reading.frame(), "", reading.formats)
    return [
        Section(reading.title, "", [[FlowDrawing(asdict(reading.page))]], reading.facts()),
        Section(
            "Pinned nodes" if reading.pinned else "The strongest nodes", "", [[picture], [table]]
        ),
    ]


@plot_of.register
def saved_plot(reading: SavedGraph, *, width: int = WIDE) -> Figure:
    """Draw the nodes that are pinned, or else the strongest, over the tokens of the text."""
    nodes, page = [reading.nodes[i] for i in reading.shown], reading.page
    weights = path_weights(nodes, reading.edges)
    return graph_figure(nodes, page.tokens, weights, page.layers, reading.title, width)


@plot_of.register
def answer_plot(reading: FlowReading, *, width: int = WIDE, model: str = "") -> Figure:
    """Draw the strongest nodes over the tokens, under the question; see `graph_plot`."""
    caption = f"{reading.title} ({model})" if model else reading.title
    return graph_plot(reading.flow.top(DRAWN), caption, width=width)


def node_table(flow: Flow, page: FlowPage) -> pd.DataFrame:
    """Return the strongest nodes, and the sum of all others."""
    nodes = strongest_first(flow.nodes[: len(page.nodes) - 1])[:20]
    frame = pd.DataFrame(node_columns(nodes, flow.tokens, flow.second)).drop(
        columns=["kind", "layer"]
    )
    n = page.n_nodes - len(nodes)
    others = page.sum - sum(node.flow for node in nodes)
    sums = [{"node": f"{n:,} other nodes", "flow": others}] if n else []
    words = {name: "" for name in ("raises", "lowers", "from") if name in frame}
    return pd.concat([frame, pd.DataFrame([row | words for row in sums])], ignore_index=True)


def start_table(page: FlowPage) -> pd.DataFrame:
    """Return the flow of each token and of choices, and their sum."""
    # Most tokens may be the same in both texts, and nothing starts there.
    rows = [leaf for leaf in page.leaves if leaf[1]]
    rows.append(("sum", sum(value for _, value in page.leaves)))
    return pd.DataFrame(rows, columns=["starts at", "flow"])


@checked
@styled
def ablation_figure(ablations: Sequence[Ablation]) -> Figure:
    """Plot the measured effects of parts against their flows: what is lost without each.

    The title has Pearson's correlation. The largest changes have labels where there is room.
    """
    pairs = [[-result.predicted, -result.actual] for result in ablations]
    changes = torch.tensor(pairs, dtype=torch.float64)
    title = f"{len(ablations)} parts removed alone"
    if len(ablations) > 2:
        title = f"{len(ablations)} parts alone: correlation {float(changes.T.corrcoef()[0, 1]):.2f}"
    figure, axes = new_figure(height=400, title=title)
    values = changes.flatten().tolist() or [0.0, 1.0]
    ends = [min(values), max(values)]
    axes.plot(ends, ends, color=GREY, linewidth=1)
    # Blue and red mean the sign elsewhere, so that kinds have other colours.
    axes.set_prop_cycle(color=[*SERIES[2:], BLUE])
    for kind in dict.fromkeys(result.kind for result in ablations):
        members = [i for i, result in enumerate(ablations) if result.kind == kind]
        axes.plot(*changes[members].T.tolist(), "o", markersize=5, label=kind)
    axes.margins(0.1)  # room for labels
    for i, side in _label_sides(changes).items():
        up, across = side.split()
        x, y = changes[i].tolist()
        axes.annotate(
            ablations[i].part.split(" ")[0],  # the address alone: the tokens are in the table
            (x, y),
            xytext=(6 if across == "right" else -6, {"top": 6, "middle": 0, "bottom": -6}[up]),
            textcoords="offset points",
            ha="left" if across == "right" else "right",
            va={"top": "bottom", "middle": "center", "bottom": "top"}[up],
            annotation_clip=False,
        )
    axes.set_xlabel("flow")
    axes.set_ylabel("measured effect")
    add_legend(axes)
    return figure


def _label_sides(changes: Float[Tensor, "n 2"]) -> dict[int, str]:
    """Return the side of its point on which a label has room, for ten of the largest changes.

    Labels stay inside and lie on no other point or label; on the line only if nothing else is free.
    """
    if not len(changes):
        return {}
    low = changes.amin(0)
    size = (changes.amax(0) - low).clamp(min=1e-9)
    places = (changes - low) / size
    # A label is about a third of the width of the axes, and a twentieth of the height.
    width, height = box = places.new_tensor([0.3, 0.06])
    offsets = {}
    for side, across in (("right", width / 2), ("left", -width / 2)):
        for name, up in (("middle", 0 * height), ("bottom", -height), ("top", height)):
            offsets[f"{name} {side}"] = torch.stack([across, up])
    sides: dict[int, str] = {}
    centres: list[Tensor] = []
    for i in changes.abs().amax(1).argsort(descending=True, stable=True).tolist():
        free: list[tuple[bool, str, Tensor]] = []
        for side, offset in offsets.items():
            centre = places[i] + offset
            on_points = ((places - centre).abs() < box / 2).all(-1)
            on_points[i] = False
            on_labels = any(bool(((centre - x).abs() < box).all()) for x in centres)
            is_outside = bool((centre[0] - 0.5).abs() > 0.55 - width / 2)
            if is_outside or on_labels or on_points.any():
                continue
            ends = centre[0] + torch.stack([-width / 2, width / 2])
            line = (low[0] + size[0] * ends - low[1]) / size[1] - centre[1]
            is_crossed = bool((line[0] < height / 2) & (line[1] > -height / 2))
            free.append((is_crossed, side, centre))
        if free and len(sides) < 10:
            _, sides[i], centre = min(free, key=lambda place: place[0])
            centres.append(centre)
    return sides


@sections_of.register
def summary_sections(reading: LanguageSummary) -> list[Section]:
    """Return the flow, with the loss and the likeliest tokens beside how well it holds."""
    graph, *others = reading.flow.sections()
    open_sections = [section for section in others if not section.folded]
    closed_sections = [section for section in others if section.folded]
    chance, text = _loss_in_words(reading)
    pictures = [part for section in open_sections for part in section.parts]
    text = " ".join([text, *(section.text for section in open_sections)])
    table = Table(reading.next_tokens, "", reading.formats)
    return [
        Section(reading.title, chance + graph.text, graph.rows),
        Section("How well it holds", text, [[*pictures, table]]),
        *closed_sections,
    ]


@plot_of.register
def summary_plot(reading: LanguageSummary, **options: Any) -> Figure:
    """Draw the graph of its flow; see `graph_plot`."""
    return reading.flow.plot(**options)


def _loss_in_words(reading: LanguageSummary) -> tuple[str, str]:
    """Return a warning about a model at chance, or nothing, and the loss."""
    loss, even = reading.text_loss, log(reading.vocab_size)
    if loss is None:
        return "", "The loss was not measured, since no texts were named (--data FILE.txt)."
    has_error = isfinite(loss.error)
    at_chance = loss.loss > even - (2 * loss.error if has_error else 0)
    spread = f" ± {loss.error:.3f} (standard error over texts)" if has_error else ""
    return (
        "The model is no better than guessing evenly among all tokens. " * at_chance,
        f"On {loss.n_texts:,} held-out texts ({loss.n_tokens:,} tokens) the loss is "
        f"{loss.loss:.3f}{spread} nats a token, or {loss.bits(loss.n_characters):.3f} bits a "
        f"character; the frequencies of the same tokens have {loss.unigram:.2f}, guessing evenly "
        f"{even:.2f}. {loss.shortage}",
    )
