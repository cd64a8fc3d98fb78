"""The report of a comparison of architectures: the cost of the target, and loss curves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import plotly.graph_objects as go

from bilens.analysis import Reading
from bilens.figures.canvas import BLUE, GREY, RED, dress
from bilens.lazy_imports import pd
from bilens.sections import Fact, Picture, Section, Table, plotly_text

if TYPE_CHECKING:  # pandas takes its time to import
    from bilens.train.language import Comparison

Axis = Literal["steps", "tokens", "seconds"]
"""Axes of validation losses."""

COLUMNS = {
    "mlp": "MLP",
    "attention": "attention",
    "parameters": "parameters",
    "steps": "steps",
    "deviation": "±",
    "steps_ratio": "ratio of steps",
    "tokens": "tokens",
    "seconds_per_step": "s/step",
    "seconds": "seconds",
    "seconds_ratio": "ratio of seconds",
    "best": "best",
    "missed": "seeds that missed",
}
"""Columns of the table, by those of `Comparison.summary`."""
COLORS = (BLUE, RED, "#1b7837", "#b35806")
"""One for each attention."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One for each MLP."""


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonReading(Reading):
    """The cost of the target for each architecture, and loss curves.

    Attributes:
        comparison: The trainings.
        settings: Of all trainings, by name.
    """

    comparison: "Comparison"
    settings: Mapping[str, Any] = field(default_factory=dict)

    title: ClassVar[str] = "Architectures compared"
    formats: ClassVar[dict[str, str]] = {
        "steps": ",.0f",
        "±": ".1f",
        "ratio of steps": ".3f",
        "tokens": ",.0f",
        "s/step": ".3g",
        "seconds": ",.1f",
        "ratio of seconds": ".3f",
        "best": ".3f",
    }
    explanation: ClassVar[str] = (
        "All were trained on the same texts in the same order, and ratios are to the first. Where "
        "the loss crosses the target is read off the straight line between two validations. The "
        "ratio of steps is the ratio of seconds if a step took all of them equally long, as with "
        "equally good kernels; the ratio of seconds is as measured here, without validations and "
        "checkpoints."
    )

    def facts(self) -> list[Fact]:
        """Return the data and the target."""
        return [("data", self.comparison.data), ("target", self.comparison.target)]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each architecture; costs are empty where a seed missed the target."""
        summary = self.comparison.summary()
        summary["missed"] = summary["seeds"] - summary["reached"]
        return summary[list(COLUMNS)].rename(columns=COLUMNS)

    def figures(self) -> dict[str, go.Figure]:
        """Return the loss curves by their axes."""
        return {axis: loss_figure(self.comparison, axis) for axis in get_args(Axis)}

    def record(self) -> dict[str, Any]:
        """Return every validation, and the summary."""
        frames = {"validations": self.comparison.validations, "summary": self.comparison.summary()}
        # Through pandas, which writes null where a cost is missing.
        rows = {name: json.loads(f.to_json(orient="records")) for name, f in frames.items()}
        return {**dict(self.facts()), **rows}

    def sections(self) -> list[Section]:
        """Return the table, the curves, and the settings."""
        pictures = [
            [Picture(name, partial(lambda x: x, figure))] for name, figure in self.figures().items()
        ]
        settings = pd.DataFrame(
            [(name, str(value)) for name, value in self.settings.items()],
            columns=["setting", "value"],
        )
        return [
            Section(self.title, self.explanation, [[Table(self.frame(), "", self.formats)]]),
            Section(
                "Validation loss", "Thin lines are single seeds, thick ones their means.", pictures
            ),
            Section("Settings of all trainings", rows=[[Table(settings)]], folded=True),
        ]


def loss_figure(comparison: "Comparison", axis: Axis) -> go.Figure:
    """Draw validation losses: a thin line for each seed, a thick line for their mean."""
    figure = go.Figure()
    several = comparison.validations["seed"].nunique() > 1
    mlps, attentions = (list(comparison.validations[n].unique()) for n in ("mlp", "attention"))
    thin: dict[str, Any] = {"line": {"width": 1}, "opacity": 0.4, "showlegend": False}
    kinds = [(comparison.validations, thin)] if several else []
    kinds += [(comparison.mean_curves().assign(seed=None), {"line": {"width": 2.5}})]
    for curves, look in kinds:
        parts = ["mlp", "attention", "d_hidden", "parameters", "seed"]
        for (mlp, attention, _, _, seed), curve in curves.groupby(parts, sort=False, dropna=False):
            name = plotly_text(f"{mlp} MLP, {attention} attention")
            line = {
                "color": COLORS[attentions.index(attention) % len(COLORS)],
                "dash": DASHES[mlps.index(mlp) % len(DASHES)],
            }
            figure.add_scatter(
                **{**look, "line": {**line, **look["line"]}},
                x=curve[axis],
                y=curve["loss"],
                mode="lines",
                hovertemplate="%{x:.4g}: %{y:.4f}",
                name=name if look is not thin else f"{name}, seed {seed}",
                legendgroup=name,
            )
    figure.add_hline(
        y=comparison.target,
        line={"dash": "dot", "color": GREY, "width": 1.5},
        opacity=1,
        annotation_text=f"target {comparison.target:g}",
        annotation_position="bottom left",
    )
    figure.update_xaxes(title=axis, rangemode="tozero")
    figure.update_yaxes(title="validation loss (nats a token)")
    dress(figure, height=420, alt=f"Validation losses against {axis}")
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    return figure.update_layout(legend=legend, margin={"t": 60})
