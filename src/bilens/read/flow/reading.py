"""The flow of a logit on a text as a reading: its strongest nodes, and some of them removed."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch

from bilens.analysis import Reading, analysis
from bilens.checks import checked
from bilens.data import Corpus
from bilens.errors import BilensError
from bilens.figures.canvas import GREY, dress
from bilens.lazy_imports import go
from bilens.read.flow.ablation import Ablation, ablation_frame, is_measurable, measure
from bilens.read.flow.contrast import Target, second_run
from bilens.read.flow.graph import Flow, FlowGraph, first_texts
from bilens.read.flow.nodes import LEAVES, node_frame
from bilens.read.flow.split import flow
from bilens.read.language.names import TokenDirection
from bilens.residual import ResidualModel
from bilens.sections import Fact, FlowDrawing, Percent, Picture, Section, Table, plotly_text
from bilens.settings import Between, Count

SMALL = 1e-3
"""Edges below this share of the largest are left out of files."""
AT_FIRST, FEWEST = 0.5, 12
"""Share of the absolute flow, and nodes, that a page shows when it opens, if it has as many."""
PATHS, ROWS, LABELLED = 12, 20, 10
"""Paths and nodes in tables, and labels in figures."""
METRICS = {
    True: "Directions of an MLP at a position are orthogonal in the stream to which they write, so "
    "that no node holds a part of another's output.",
    False: "Directions of a gated MLP at a position are orthonormal in its normalised input before "
    "the norm's gain: this metric does not depend on how a checkpoint divides a map.",
}
"""The metric of directions, between two texts and on one."""


def flow_data(flow: Flow, *, direction: str, k: int) -> dict[str, Any]:
    """Return the k strongest nodes of a flow, their edges, and their share of it, for JSON.

    Nodes are ordered by |flow|, the logit first, so that the first n are the graph of the n - 1
    strongest. `shares` has a count of nodes, their share of the absolute flow, and the share of
    the logit on paths among them. `rest` has the flow that each node gets from remainders and sends
    to them. Weights of `paths` are those of `FlowGraph.paths`.

    Args:
        flow: the flow.
        direction: name of the logit.
        k: number of nodes.

    Raises:
        BilensError: k is not positive.
    """
    graph = flow.top(k)
    remainders = [i for i, node in enumerate(flow.nodes) if node.kind == "rest"]
    # The last row and column are those of all remainders together.
    edges = flow.edges_between([*([i] for i in graph.numbers), remainders])
    graph = dataclasses.replace(graph, edges=edges[:-1, :-1])
    order = sorted(range(1, len(graph.nodes)), key=lambda i: -abs(graph.nodes[i].flow))
    place = {number: rank for rank, number in enumerate([0, *order])}
    large = graph.edges.abs() >= SMALL * float(graph.edges.abs().max())
    large &= graph.edges != 0
    ends, flows = large.nonzero().tolist(), graph.edges[large].tolist()
    listed = [(place[a], place[b], through) for (a, b), through in zip(ends, flows, strict=True)]
    sinks = set(flow.sinks)
    nodes = [
        {
            **asdict(node),
            "index": graph.numbers[i],
            "name": node.name(flow.tokens),
            "label": label(node, flow.tokens),
            "short": f"MLP {node.layer} {written(node)}"
            if node.kind == "direction"
            else label(node, flow.tokens),
            "removable": node.is_part and (flow.before is not None or node.is_removable),
            "sink": node.kind != "output" and not sinks.isdisjoint({node.position, node.source}),
        }
        for i, node in ((i, graph.nodes[i]) for i in [0, *order])
    ]
    shares = [(n, *_shares(graph, order[:n])) for n in _counts(len(order))]
    paths = [(weight, [place[i] for i in path]) for weight, path in graph.paths(PATHS)]
    remainder_flows = [flow.nodes[i].flow for i in remainders]
    return {
        "direction": direction,
        "tokens": list(flow.tokens),
        "value": flow.value,
        "values": list(flow.values),
        "absolute": flow.absolute,
        "frozen": list(flow.frozen),
        "layers": len(flow.trace.layers),
        "n_nodes": len(flow.nodes) - 1,
        "n_rest": len(remainder_flows),
        "sum": sum(node.flow for node in flow.nodes[1:]) - sum(remainder_flows),
        "sum_rest": sum(remainder_flows),
        "sinks": sorted(sinks),
        "nodes": nodes,
        "edges": sorted(listed, key=lambda edge: -abs(edge[2])),
        "rest": [(float(edges[i, -1]), float(edges[-1, i])) for i in [0, *order]],
        "shares": shares,
        "paths": paths,
        "leaves": _leaves(flow),
        "start": next(
            (i for i, (n, held, _) in enumerate(shares) if n >= FEWEST and held >= AT_FIRST),
            len(shares) - 1,
        ),
    }


def _leaves(flow: Flow) -> list[tuple[str, float]]:
    """Return the flows of tokens, positions and biases, which add up to the logit."""
    together = {"position": "positions", "bias": "biases"}
    leaves: dict[str, float] = defaultdict(float)
    for node in flow.nodes:
        if node.kind in LEAVES:
            leaves[together.get(node.kind) or node.name(flow.tokens)] += node.flow
    return list(leaves.items())


def _shares(graph: FlowGraph, nodes_shown: Sequence[int]) -> tuple[float, float]:
    index = sorted([0, *nodes_shown])
    nodes = tuple(graph.nodes[i] for i in index)
    held = sum(abs(node.flow) for node in nodes[1:]) / (graph.flow.absolute or 1.0)
    subgraph = FlowGraph(graph.flow, (), nodes, graph.edges[index][:, index], held)
    return held, subgraph.share_of_logit


def _counts(most: int) -> list[int]:
    """Return counts that grow by 1.3 at each step, up to all."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(1.3 * counts[-1]))))
    return counts


def node_table(data: dict[str, Any]) -> pd.DataFrame:
    """Return the strongest nodes, and the sums of all others and of remainders.

    Args:
        data: see `flow_data`.
    """
    nodes = data["nodes"][1 : ROWS + 1]
    columns = {"node": "name", "flow": "flow", "measured effect": "measured"}
    frame = pd.DataFrame({name: [node[key] for node in nodes] for name, key in columns.items()})
    effects = [name for name in frame.columns[2:] if frame[name].isna().all()]
    frame = frame.drop(columns=effects)
    frame.insert(1, "reads → raises, ⊣ lowers", [_words(node) for node in nodes])
    n = data["n_nodes"] - data["n_rest"] - len(frame)
    sums = [(f"{n:,} other nodes", "", data["sum"] - frame["flow"].sum())] if n else []
    if data["n_rest"]:
        sums.append((f"{data['n_rest']:,} remainders, not split", "", data["sum_rest"]))
    others = pd.DataFrame(sums, columns=frame.columns[:3])
    return pd.concat([frame, others], ignore_index=True) if sums else frame


def _words(node: dict[str, Any]) -> str:
    changed = node["writes"] if node["flow"] > 0 else node["lowers"]
    mark = ("→" if node["flow"] > 0 else "⊣") if changed else ""
    return f"{quoted(node['reads'][:2])} {mark} {quoted(changed[:2])}".strip()


def path_table(data: dict[str, Any]) -> pd.DataFrame:
    """Return the strongest paths, and the sums of all others; the weights add up to the logit.

    Args:
        data: see `flow_data`.
    """
    nodes = data["nodes"]
    rows = [
        (" > ".join(nodes[i]["short"] for i in reversed(path[1:])), weight)
        for weight, path in data["paths"]
    ]
    inside = data["shares"][-1][2] * data["value"]
    listed = sum(weight for _, weight in rows)
    rows.append((f"other paths among the {len(nodes) - 1} shown nodes", inside - listed))
    rows.append(("paths through nodes that are not shown", data["value"] - inside))
    return pd.DataFrame(rows, columns=["path", "weight"])


def start_table(data: dict[str, Any]) -> pd.DataFrame:
    """Return the flow of each token, and of positions and biases, and their sum.

    Args:
        data: see `flow_data`.
    """
    rows = [*data["leaves"], ("sum: the logit", sum(value for _, value in data["leaves"]))]
    return pd.DataFrame(rows, columns=["starts at", "flow"])


@checked
def ablation_figure(ablations: Sequence[Ablation]) -> "go.Figure":
    """Plot predicted against actual change of the logit, for parts that were removed.

    The title has Pearson's correlation, and the largest changes have labels.
    """
    changes = torch.tensor(
        [[result.predicted, result.actual] for result in ablations], dtype=torch.float64
    )
    title = f"{len(ablations)} parts removed, one at a time"
    if len(ablations) > 2:
        title += f": correlation {float(changes.T.corrcoef()[0, 1]):.2f}"
    figure = dress(go.Figure(), height=420, title=title)
    largest = sorted(range(len(ablations)), key=lambda i: -float(changes[i].abs().max()))[:LABELLED]
    # Labels are on the side away from the diagonal, where they overlap least.
    above = [result.actual > result.predicted for result in ablations]
    for kind in dict.fromkeys(result.kind for result in ablations):
        members = [i for i, result in enumerate(ablations) if result.kind == kind]
        figure.add_scatter(
            x=[ablations[i].predicted for i in members],
            y=[ablations[i].actual for i in members],
            text=[plotly_text(ablations[i].part) if i in largest else "" for i in members],
            customdata=[plotly_text(ablations[i].part) for i in members],
            mode="markers+text",
            textposition=["middle left" if above[i] else "middle right" for i in members],
            textfont={"size": 9},
            name=kind,
            hovertemplate="%{customdata}<br>flow %{x:.3f}, measured %{y:.3f}<extra></extra>",
        )
    values = changes.flatten().tolist() or [0.0, 1.0]
    ends = [min(values), max(values)]
    figure.add_scatter(x=ends, y=ends, mode="lines", line_color=GREY, showlegend=False)
    figure.update_traces(marker={"size": 7}, selector={"mode": "markers+text"})
    # Blue and red mean the sign elsewhere, so that kinds have other colours.
    figure.update_layout(colorway=["#1b7837", "#762a83", "#bf812d", "#35978f", GREY])
    figure.update_xaxes(title="change of the logit that the flow predicts")
    figure.update_yaxes(title="measured change")
    return figure


def flow_sections(data: dict[str, Any], ablated: Sequence[Ablation]) -> list[Section]:
    """Return the sections on a flow: its graph, its account, and nodes removed.

    Args:
        data: See `flow_data`.
        ablated: See `ablation_figure`.
    """
    signs = {"flow": "+#.3g", "weight": "+#.3g", "predicted": "+#.3g", "actual": "+#.3g"}
    sinks = ""
    if any(node["sink"] for node in data["nodes"]):
        names = " and ".join(f'"{data["tokens"][p]}" ({p})' for p in data["sinks"])
        sinks = (
            f" {names}: attention sink, dashed. Heads with nothing to move attend there, so that "
            "flow through it says little about the text: compare it with the measured effect."
        )
    sections = [
        Section(
            "Graph",
            "Positions are across, layers upwards. A square is a head: its line comes from the "
            "token that it attends to. A circle is a direction of an MLP or a token. Area is "
            "|flow|; blue raises the logit, red lowers it. Curves are the edges with the largest "
            f"weight on paths to the logit. {METRICS[len(data['values']) > 1]} "
            "A direction reads the tokens that are nearest to it, and raises or lowers likely next "
            "tokens. "
            f"Select a node to see its own edges.{sinks}",
            [[FlowDrawing(data)]],
        ),
        Section(
            "The account",
            "Every path starts at a token, a position or a bias, and ends in the logit. Both lists "
            "add up to the logit. The weight of a path is its edge into the logit, times, at each "
            "node on the way, the share of the node's inflow that comes from the next result.",
            [[Table(start_table(data), "Starts", signs), Table(path_table(data), "Paths", signs)]],
        ),
    ]
    if ablated:
        text = (
            "Each node was removed from the running model, in which norms, patterns and gates "
            "then change; the flow of one text holds them fixed. Between two texts the node's "
            "change was exchanged instead, in both directions, and the mean is shown."
        )
        picture = Picture("interventions", lambda: ablation_figure(ablated))
        table = Table(ablation_frame(ablated), "", signs)
        sections.append(Section("Interventions", text, [[picture, table]]))
    return sections


@dataclass(frozen=True, eq=False, repr=False)
class FlowReading(Reading):
    """The flow of a logit on a text, and what became of it without single nodes.

    Attributes:
        flow: The flow.
        prompt: The text.
        direction: The token whose logit is split, and those that are subtracted.
        data: Its strongest nodes and the edges between them; see `flow_data`.
        probability: Of the token after the text.
        ablated: Effect of each node that was removed from the running model.
        notes: Warnings about the tokens.
        other: The second text; empty without one.
    """

    flow: Flow
    prompt: str
    direction: TokenDirection
    data: dict[str, Any]
    probability: float
    ablated: tuple[Ablation, ...] = ()
    notes: tuple[str, ...] = ()
    other: str = ""

    axes: ClassVar[dict[str, str]] = Flow.axes
    formats: ClassVar[dict[str, str]] = dict.fromkeys(
        ("flow", "measured effect", "weight", "predicted", "actual"), "+#.3g"
    )
    explanation: ClassVar[str] = (
        "Where this logit, or difference of logits, comes from: a graph of parts of the model. "
        "At every node as much flows in as flows out, and nothing is left over."
    )

    @property
    def title(self) -> str:
        """The text, and the token that follows it."""
        against = f" against “{self.other}”" if self.other else ""
        return f"{self.data['direction']} after “{self.prompt}”{against}"

    def facts(self) -> list[Fact]:
        """Return the value, the number of nodes, and the share that is shown."""
        data = self.data
        held, of_logit = data["shares"][-1][1:]
        values = ", ".join(f"{value:+.4g}" for value in data["values"])
        return [
            (data["direction"], data["value"]),
            ("probability of the token", Percent(self.probability)),
            ("nodes", data["n_nodes"]),
            ("shown", len(data["nodes"]) - 1),
            ("absolute flow through these", Percent(held)),
            ("logit on paths among these", Percent(of_logit)),
            *([("in the text, and in the second", values)] if len(data["values"]) > 1 else []),
            ("held fixed", ", ".join(data["frozen"]) or "nothing"),
            *(("note", note) for note in self.notes),
        ]

    def frame(self) -> pd.DataFrame:
        """Return the strongest nodes and their flow, the strongest first."""
        nodes = [self.flow.nodes[node["index"]] for node in self.data["nodes"][1:]]
        return node_frame(nodes, self.flow.tokens)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the strongest nodes and paths with the sums of all others, and removed nodes."""
        tables = {
            "nodes, by |flow|": node_table(self.data),
            "paths, by |weight|": path_table(self.data),
        }
        if self.ablated:
            tables["one node removed"] = ablation_frame(self.ablated)
        return tables

    def plot(self) -> "go.Figure":
        """Draw the graph of the strongest nodes over the tokens of the text."""
        return self.flow.plot()

    def figures(self) -> "dict[str, go.Figure]":
        """Draw the graph, and predicted against actual effects, if nodes were removed."""
        drawn = {"graph": self.plot()}
        if self.ablated:
            drawn["interventions"] = ablation_figure(self.ablated)
        return drawn

    def sections(self) -> list[Section]:
        """Return the graph, the strongest nodes, and the nodes that were removed."""
        return flow_sections(self.data, self.ablated)

    def record(self) -> dict[str, Any]:
        """Return the graph for JSON, with the nodes that were removed."""
        record = {"prompt": self.prompt, "against": self.other, **self.data}
        if self.ablated:
            record["ablated"] = [
                {"node": result.part, "predicted": result.predicted, "actual": result.actual}
                for result in self.ablated
            ]
        return record


@analysis("flow")
@checked
def read_flow(  # noqa: PLR0913  the options of `flow`, and those of what is shown
    model: ResidualModel,
    prompt: str,
    direction: TokenDirection,
    corpus: Corpus | None = None,
    *,
    against: str | None = None,
    mean: bool = False,
    replace: str = "",
    target: Target = "logit",
    m: Annotated[int, Between(0)] = 2,
    threshold: Annotated[float, Between(0, 1, below=True)] = 1e-4,
    through_patterns: bool = False,
    shown: Count = 200,
    ablate: Annotated[int, Between(0)] = 0,
) -> FlowReading:
    """Split a logit on a text, or its change between two, exactly over the parts of a model.

    With a second text nothing is frozen, and heads are split into values, queries and keys.

        bilens flow runs/grammar --prompt "then ben ate" --token rice --minus soup
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --ablate 5
        bilens flow model.gguf --prompt "The keys to the cabinet" --token " are" --replace keys=key

    Args:
        model: Any, with its tokenizer.
        prompt: The text; the logit that is split is of the token after it.
        direction: The token that is predicted, and those whose mean is subtracted.
        corpus: Texts that describe directions; without them, directions have tokens only.
        against: A second text of as many tokens; the change of the logit between both is split. Of
            several, separated by |, the mean embedding is taken.
        mean: The second run has the mean embedding at each position, of the texts or else of the
            vocabulary.
        replace: Words of the prompt and their replacements in a second text, as keys=key,was=is.
        target: The logit, or between two texts the log-probability or the probability.
        m: Directions of each MLP at each position, at least 2; 0 for all eigenvectors.
        threshold: Nodes that carry less than this share of the absolute flow are not split.
        through_patterns: Split patterns of bilinear and squared attention too.
        shown: Number of the strongest nodes that pages and JSON have.
        ablate: Remove this many of the strongest nodes, one at a time, from the running model,
            and compare. Between two texts their changes are exchanged, in both directions.

    Raises:
        BilensError: the model has no tokenizer, a text is empty, or a token is unknown.
    """
    texts = [] if corpus is None else list(first_texts(corpus))
    second, other = second_run(
        model, prompt, against=against, mean=mean, replace=replace, texts=texts
    )
    split = flow(
        model,
        prompt,
        direction,
        against=second,
        target=target,
        m=m or None,
        threshold=threshold,
        through_patterns=through_patterns,
    )
    order = sorted(range(len(split.nodes)), key=lambda i: -abs(split.nodes[i].flow))
    numbers = [i for i in order if is_measurable(split, split.nodes[i])][:ablate]
    ablated = measure(model, split, numbers)
    nodes = list(split.nodes)
    for number, effect in zip(numbers, ablated, strict=True):
        nodes[number] = dataclasses.replace(nodes[number], measured=-effect.actual)
    split = described(model, dataclasses.replace(split, nodes=tuple(nodes)), shown, texts)
    data = flow_data(split, direction=direction_in_words(direction, target), k=shown)
    probability = float(split.trace.logits[-1].softmax(-1)[model.token(direction.token)])
    notes = tuple(missing_spaces(model, direction))
    return FlowReading(split, prompt, direction, data, probability, tuple(ablated), notes, other)


def direction_in_words(direction: TokenDirection, target: Target) -> str:
    """Return the number that is split in words, with its tokens in quotes."""
    token, *minus = (f'"{name}"' for name in (direction.token, *direction.minus))
    name = f"{token} minus {', '.join(minus)}" if minus else token
    return name if target == "logit" else f"{target} of {name}"


def missing_spaces(model: ResidualModel, direction: TokenDirection) -> Iterator[str]:
    """Yield a note on each token that lacks the space with which the others begin."""
    names = [direction.token, *direction.minus]
    bare = [name for name in names if not name.startswith((" ", "Ġ", "▁"))]
    for name in bare if len(bare) < len(names) else ():
        with suppress(BilensError):
            if model.token(f" {name}") != model.token(name):
                yield f'"{name}" and " {name}" are two tokens, and the first is taken'
