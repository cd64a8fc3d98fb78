"""The question that a flow answers, the answer in a sentence, and its strongest parts as bars."""

from collections import defaultdict
from collections.abc import Mapping

from bilens.figures.canvas import BLUE, RED, dress
from bilens.lazy_imports import go
from bilens.read.flow.graph import Flow
from bilens.read.flow.nodes import Node
from bilens.read.language.names import TokenDirection, in_words
from bilens.sections import plotly_text, signed

BARS, NAMED = 8, 3
"""Parts that are drawn, and parts that the sentence names."""


def question(prompt: str, direction: TokenDirection, other: str = "") -> str:
    """Return the question why a token follows a text, and not others, or not in a second text."""
    asked = f"Why does the model predict {_quoted(direction.token)} after “{prompt}”"
    if direction.minus:
        asked += f" and not {' or '.join(map(_quoted, direction.minus))}"
    return f"{asked}, unlike after “{other}”?" if other else f"{asked}?"


def answer(flow: Flow, direction: TokenDirection) -> str:
    """Return a sentence with the value, and the parts that most of it passes through."""
    lead = "lead" if direction.minus else "logit"
    name = f"change of its {lead}" if flow.before else lead
    parts = [
        f"{part} ({signed(through / flow.value, '.0%').removeprefix('+')})"
        for part, through in list(flow_by_part(flow).items())[:NAMED]
    ]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"The {name}, {signed(flow.value)}, passes mostly through {listed}."


def flow_by_part(flow: Flow) -> dict[str, float]:
    """Return the flow through each head and MLP at each position, the largest |flow| first.

    Directions of an MLP at a position are side by side, and so are a head's values, queries and
    keys: their flows add up to that of the whole. Parts one after the other share flow.
    """
    sums: dict[str, float] = defaultdict(float)
    for node in flow.nodes:
        name = _part_name(node, flow)
        if name:
            sums[name] += node.flow
    return dict(sorted(sums.items(), key=lambda part: -abs(part[1])))


def _part_name(node: Node, flow: Flow) -> str:
    """Return the name of the head or MLP that a node belongs to; empty if it belongs to none."""
    if node.position is None or node.kind not in ("head", "direction", "rest"):
        return ""
    at = _token(flow, node.position)
    if node.kind == "head" and node.source is not None:
        source = _token(flow, node.source)
        way = f"at {at}" if node.source == node.position else f"from {source} to {at}"
        return f"head {node.layer}.{node.number} {way}"
    return f"MLP {node.layer} at {at}" if node.part == "mlp" else ""


def _token(flow: Flow, position: int) -> str:
    """Return a token in quotes; one that occurs twice has its position."""
    name = flow.tokens[position]
    return _quoted(name) + f" ({position})" * (flow.tokens.count(name) > 1)


def _quoted(name: str) -> str:
    """Return a token as it is read in a sentence, without the space that it may begin with."""
    words = in_words(name).strip('" ')
    return f"“{words}”"


def parts_figure(parts: Mapping[str, float], value: float) -> "go.Figure":
    """Draw the flow through the strongest parts as bars, each below its name and share.

    Args:
        parts: Flow by the name of the part, the strongest first.
        value: The logit that is split.
    """
    largest = max(map(abs, parts.values()))
    strongest = [part for part in parts.items() if abs(part[1]) >= 0.01 * largest][:BARS]
    figure = go.Figure()
    for color, sign in ((BLUE, 1), (RED, -1)):
        rows = [row for row, (_, through) in enumerate(strongest) if sign * through > 0]
        figure.add_bar(
            x=[strongest[row][1] for row in rows],
            y=rows,
            orientation="h",
            width=0.38,
            marker={"color": color},
            hovertemplate="%{x:+.3g}<extra></extra>",
        )
    dress(figure, height=60 + 44 * len(strongest), alt="Flow through the strongest parts as bars")
    for row, (name, through) in enumerate(strongest):
        share = signed(through / value, ".0%").removeprefix("+")
        figure.add_annotation(
            text=f"{plotly_text(name)}: {signed(through)} ({share})",
            # Above its bar: names are too long to stand beside it on a phone.
            **{"x": 0, "xref": "paper", "xanchor": "left", "y": row - 0.42, "yanchor": "middle"},
            showarrow=False,
        )
    figure.update_yaxes(visible=False, range=[len(strongest) - 0.5, -0.8])
    figure.update_xaxes(title="flow into the logit", zeroline=False)
    return figure.update_layout(barmode="overlay", margin={"l": 12, "t": 4}, showlegend=False)
