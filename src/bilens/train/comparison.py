"""What a comparison of architectures found: validation losses, and what reaching a target cost."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Architecture", "Comparison", "Cost", "LossCurve", "Point", "Summary"]


@dataclass(frozen=True)
class Architecture:
    """One of those compared.

    Attributes:
        mlp: its MLP by name.
        attention: its attention by name.
        d_hidden: hidden units of each MLP.
        parameters: of the whole model.
    """

    mlp: str
    attention: str
    d_hidden: int
    parameters: int

    def __str__(self) -> str:
        return f"{self.mlp} MLP, {self.attention} attention"


@dataclass(frozen=True)
class Point:
    """Where a training stands.

    Attributes:
        steps: of the optimizer; between two of them where a crossing is.
        tokens: trained on.
        seconds: that the steps took, without validations and checkpoints.
        loss: of the validation, in nats a token.
    """

    steps: float
    tokens: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class LossCurve:
    """The validations of one training, in order.

    Attributes:
        architecture: what was trained.
        seed: of its weights and of the order of the texts.
        points: one for each validation.
    """

    architecture: Architecture
    seed: int
    points: tuple[Point, ...]

    def crossing(self, target: float) -> Point | None:
        """Where the loss first reaches `target`, on the straight line between two validations.

        The first validation has none before it and is taken as it is. None if the loss stays above.
        """
        after = next((n for n, point in enumerate(self.points) if point.loss <= target), None)
        if after is None or after == 0:
            return None if after is None else self.points[0]
        a, b = self.points[after - 1], self.points[after]
        share = (a.loss - target) / (a.loss - b.loss)

        def between(first: float, second: float) -> float:
            return first + share * (second - first)

        return Point(
            between(a.steps, b.steps),
            between(a.tokens, b.tokens),
            between(a.seconds, b.seconds),
            target,
        )

    @property
    def seconds_per_step(self) -> float:
        """Over the whole training."""
        return self.points[-1].seconds / self.points[-1].steps


@dataclass(frozen=True)
class Cost:
    """What it took to reach the target, the mean over seeds.

    Attributes:
        steps: of the optimizer.
        deviation: standard deviation of the steps over seeds; zero for a single one.
        tokens: trained on.
        seconds: as measured.
        steps_ratio: steps over those of the first architecture, which is the ratio of seconds if
            all took equally long a step; None where the first never reached the target.
        seconds_ratio: the same of the seconds as they were measured.
    """

    steps: float
    deviation: float
    tokens: float
    seconds: float
    steps_ratio: float | None
    seconds_ratio: float | None


@dataclass(frozen=True)
class Summary:
    """One architecture over all seeds.

    Attributes:
        architecture: which.
        seeds: how many.
        reached: how many of them reached the target.
        best: the smallest validation loss of each seed, their mean.
        seconds_per_step: the mean over seeds.
        cost: of the target; None unless every seed reached it, since those that did not would be
            missing from the mean.
    """

    architecture: Architecture
    seeds: int
    reached: int
    best: float
    seconds_per_step: float
    cost: Cost | None


@dataclass(frozen=True)
class Comparison:
    """Architectures trained on the same texts in the same order.

    Attributes:
        data: what they were trained on.
        target: the validation loss to reach, in nats a token.
        curves: one for each architecture and seed; the first architecture is what ratios refer to.
    """

    data: str
    target: float
    curves: tuple[LossCurve, ...]

    @cached_property
    def by_architecture(self) -> dict[Architecture, list[LossCurve]]:
        """The seeds of each architecture."""
        found: dict[Architecture, list[LossCurve]] = {}
        for curve in self.curves:
            found.setdefault(curve.architecture, []).append(curve)
        return found

    def mean(self, architecture: Architecture) -> list[Point]:
        """The mean over seeds of each validation that all of them had."""
        curves = self.by_architecture[architecture]
        return [_mean(points) for points in zip(*(c.points for c in curves), strict=False)]

    def summaries(self) -> list[Summary]:
        """One for each architecture, in order."""
        found: list[Summary] = []
        first: Point | None = None
        for architecture, curves in self.by_architecture.items():
            crossings = [p for p in (curve.crossing(self.target) for curve in curves) if p]
            whole = _mean(crossings) if len(crossings) == len(curves) else None
            first = first if found else whole
            found.append(
                Summary(
                    architecture,
                    seeds=len(curves),
                    reached=len(crossings),
                    best=statistics.fmean(min(p.loss for p in curve.points) for curve in curves),
                    seconds_per_step=statistics.fmean(curve.seconds_per_step for curve in curves),
                    cost=None
                    if whole is None
                    else _cost(whole, [p.steps for p in crossings], first),
                )
            )
        return found


def _mean(points: Sequence[Point]) -> Point:
    return Point(
        *(
            statistics.fmean(getattr(point, name) for point in points)
            for name in ("steps", "tokens", "seconds", "loss")
        )
    )


def _cost(whole: Point, steps: Sequence[float], first: Point | None) -> Cost:
    return Cost(
        whole.steps,
        statistics.stdev(steps) if len(steps) > 1 else 0.0,
        whole.tokens,
        whole.seconds,
        None if first is None else whole.steps / first.steps,
        None if first is None else whole.seconds / first.seconds,
    )
