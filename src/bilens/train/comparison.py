"""What a comparison of architectures found: validation losses, and what reaching a target cost."""

from dataclasses import dataclass

import pandas as pd

__all__ = ["ARCHITECTURE", "COST", "Comparison"]

ARCHITECTURE = ["mlp", "attention", "d_hidden", "parameters"]
"""The columns that tell architectures apart."""
COST = ["steps", "tokens", "seconds"]
"""The columns that say what a training took until a row."""
SEED = [*ARCHITECTURE, "seed"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Architectures trained on the same texts in the same order.

    Attributes:
        data: what they were trained on.
        target: the validation loss to reach, in nats a token.
        validations: a row for each validation of each training, in order: the architecture (`mlp`,
            `attention`, `d_hidden`, `parameters`), the `seed`, the `steps` of the optimizer, the
            `tokens` trained on and the `seconds` that took without validations and checkpoints,
            and the `loss`. Ratios refer to the first architecture.
    """

    data: str
    target: float
    validations: pd.DataFrame

    def crossings(self) -> pd.DataFrame:
        """What each training took until its loss first reached the target; NaN where it did not.

        Read off the straight line between two validations; the first has none before it and is
        taken as it is.
        """

        def crossing(curve: pd.DataFrame) -> pd.Series:
            reached = (curve["loss"] <= self.target).to_numpy()
            after = int(reached.argmax()) if reached.any() else None
            if after is None:
                return pd.Series(float("nan"), COST)
            b = curve.iloc[after]
            a = curve.iloc[after - 1] if after else b
            share = (a["loss"] - self.target) / (a["loss"] - b["loss"]) if after else 0.0
            return a[COST] + share * (b[COST] - a[COST])

        columns = self.validations.groupby(SEED, sort=False)[[*COST, "loss"]]
        return columns.apply(crossing).astype(float).reset_index()

    def mean_curves(self) -> pd.DataFrame:
        """For each architecture the mean over seeds of each validation that all of them had."""
        number = self.validations.groupby(SEED, sort=False).cumcount().rename("number")
        groups = self.validations.groupby([*ARCHITECTURE, number], sort=False)
        mean, seeds = groups[[*COST, "loss"]].mean(), groups.size()
        complete = seeds == seeds.groupby(ARCHITECTURE, sort=False).transform("max")
        return mean[complete].sort_index(level="number", sort_remaining=False).reset_index()

    def summary(self) -> pd.DataFrame:
        """A row for each architecture, in order.

        The columns are those of the architecture; `seeds`, and how many of them `reached` the
        target; the mean `steps`, `tokens` and `seconds` that it took, the standard `deviation` of
        the steps, and `steps_ratio` and `seconds_ratio`, NaN unless every seed reached it, since
        those that did not would be missing from the mean; `seconds_per_step`; and `best`, the mean
        of the seeds' smallest losses.
        """
        crossings = self.crossings().groupby(ARCHITECTURE, sort=False)
        table = crossings[COST].agg(lambda values: values.mean(skipna=False))
        table["deviation"] = crossings["steps"].agg(lambda values: values.std(skipna=False))
        table["seeds"], table["reached"] = crossings.size(), crossings["steps"].count()
        table["steps_ratio"] = table["steps"] / table["steps"].iloc[0]
        table["seconds_ratio"] = table["seconds"] / table["seconds"].iloc[0]
        each = self.validations.groupby(SEED, sort=False)
        last = each.last()
        pace = last["seconds"] / last["steps"]
        table["seconds_per_step"] = pace.groupby(ARCHITECTURE, sort=False).mean()
        table["best"] = each["loss"].min().groupby(ARCHITECTURE, sort=False).mean()
        return table.reset_index()
