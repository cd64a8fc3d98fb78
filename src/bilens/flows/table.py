"""The flows of many questions: what carries each kind, and what the same parts answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import detached
from bilens.errors import BilensError
from bilens.files import file_errors, remove_unfinished
from bilens.flows.interval import Interval
from bilens.flows.rows import ASKED, NUMBERS, write_shards
from bilens.flows.sources import AnyModel, Questions, count_questions, opened, question_stream
from bilens.lazy_imports import lazy_import, parquet, pd
from bilens.processes import taking_turns
from bilens.progress import is_first_process
from bilens.sections import Columns, Fact, by_column
from bilens.settings import Count

cluster = lazy_import("sklearn.cluster", install=".[train]")

SHARD = 512
"""Questions of a file of rows."""
SHOWN = 5
"""Strongest parts of a kind or a cluster, and reasons that are shown."""
SAMPLE = 2048
"""Questions, drawn from all, of which clusters are found."""
MOST = 8
"""Most clusters."""
FEWEST = 40
"""Questions for each cluster, at least: fewer say too little of their number."""
GAIN = 0.9
"""A further cluster lowers the distance to at most so much of that in a normal distribution."""


@dataclass(frozen=True, eq=False)
class Kind:
    """The questions of a task and template.

    Attributes:
        name: the task and template.
        moments: of each part the sum of v v', where v is its flow, the change and 1. The change is
            positive, and flows are signed so.
    """

    name: str
    moments: Float[Tensor, "parts 3 3"]

    @property
    def n(self) -> int:
        """Number of questions."""
        return int(self.moments[0, 2, 2])

    def strongest(self) -> list[int]:
        """Return the parts with the largest shares."""
        sizes = self.moments[:, 0, 2].abs()
        return sizes.topk(min(SHOWN, len(sizes))).indices.tolist()

    def share(self, part: int) -> Interval:
        """Return the mean flow of a part over the mean change."""
        means = self.moments[part, :2, 2] / self.n
        around = self.moments[part, :2, :2] - self.n * means.outer(means)
        return Interval.of_moments(self.n, means, around)


@dataclass(frozen=True, eq=False, repr=False)
class FlowTable(Reading):
    """What the flows of many questions say; the rows themselves are in a folder.

    Attributes:
        folder: The folder, which pandas reads as one table of Parquet.
        parts: Address of each head and MLP, a column of the rows.
        questions: Number of questions.
        unread: Number of those that the model cannot read.
        reasons: Number of each of the first of them, with the reason.
        kinds: Tasks and templates, the most frequent first.
        clusters: A row for each cluster of questions that the same parts answer.
    """

    folder: Path
    parts: tuple[str, ...]
    questions: int
    unread: int
    reasons: Columns
    kinds: tuple[Kind, ...]
    clusters: Columns

    title: ClassVar[str] = "Flows of many questions"
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "share", "color": "kind"}
    formats: ClassVar[dict[str, str]] = dict.fromkeys(("share", "low", "high"), "z.1%")

    def facts(self) -> list[Fact]:
        counts = {"kinds": len(self.kinds), "clusters": len(self.clusters["cluster"])}
        return [("questions", self.questions), ("not read", self.unread), *counts.items()]

    def columns(self) -> Columns:
        """Return the strongest parts of each kind: shares of its change, with intervals of 95 %."""
        rows = []
        for kind in self.kinds:
            for part in kind.strongest():
                share = kind.share(part)
                ends = share.value, share.low, share.high
                rows.append((kind.name, kind.n, self.parts[part], *ends))
        return by_column(["kind", "questions", "part", "share", "low", "high"], rows)


@detached
def flow_table(
    model: AnyModel, questions: Questions, folder: str | Path, *, shard: Count = SHARD
) -> FlowTable:
    """Split the changes of many questions over a model's parts, a row of a file for each question.

    A row has the question, its number in both runs, and the flow of each head and MLP, the sum over
    positions. Questions are read when it is their turn, and those of one length run side by side.
    One that the model cannot read is a row with the reason. A file that exists is not made again,
    so a run that was stopped goes on. Processes of `torchrun` take turns, and each returns all.

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        questions: any number; see `bilens.flows.sources.question_stream`.
        folder: for files of rows, in Parquet.
        shard: questions of a file.

    Returns:
        Shares of parts for each task and template, and clusters of questions that the same parts
        answer. pandas reads the rows from the folder, as Parquet.

    Raises:
        BilensError: the folder has rows of another model or other questions, no question can be
            read, or the model has an operation without a rule.
    """
    model, folder = opened(model), Path(folder)
    total = count_questions(questions)
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # Rows do not say from which folder a file was named.
    stream = (
        BilensError(str(x).removeprefix(f"{questions}, ")) if isinstance(x, BilensError) else x
        for x in question_stream(questions)
    )
    with taking_turns("flow_table") as turn:
        paths = write_shards(model, stream, folder, size=shard, total=total, turn=turn)
    if is_first_process():
        remove_unfinished(folder)
    return read_shards(folder, paths)


def read_shards(folder: Path, paths: Sequence[Path]) -> FlowTable:
    """Return the table of files of rows, one of which is in memory at a time.

    Raises:
        BilensError: no question has a flow.
    """
    moments: dict[str, Tensor] = {}
    reasons, sample, draw = pd.DataFrame(), pd.DataFrame(), np.random.default_rng(0)
    total = unread = 0
    parts: list[str] = []
    for path in paths:
        frame = parquet.ParquetFile(path).read().to_pandas()
        parts = [*frame.columns[1 + len(ASKED) + len(NUMBERS) : -1]]
        is_read = frame["reason"] == ""
        total, unread = total + len(frame), unread + int((~is_read).sum())
        reasons = pd.concat([reasons, frame.loc[~is_read, ["number", "reason"]]]).head(SHOWN)
        valid = frame[is_read]
        names = (
            valid["task"].str.cat(valid["template"], sep=": ").str.strip(": ").replace("", "all")
        )
        flows, changes = _signed(valid, parts)
        of_rows = torch.stack(
            torch.broadcast_tensors(flows, changes[:, None], flows.new_ones(1)), 2
        )
        for name, rows in valid.groupby(names, sort=False).indices.items():
            of_kind = torch.einsum("npa,npb->pab", of_rows[rows], of_rows[rows])
            moments[name] = moments.get(name, 0) + of_kind
        candidates = valid.assign(kind=names, draw=draw.random(len(valid)))
        sample = pd.concat([sample, candidates]).nsmallest(SAMPLE, "draw")
    if not moments:
        first = "" if reasons.empty else f", {reasons['reason'].iloc[0]}"
        raise BilensError(f"questions has none that the model can read, of {total}{first}")
    return FlowTable(
        folder,
        tuple(parts),
        total,
        unread,
        reasons.to_dict("list"),
        tuple(sorted((Kind(*x) for x in moments.items()), key=lambda kind: -kind.n)),
        _clusters(sample, parts),
    )


def _signed(rows: Any, parts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the flows of parts, signed so that the change is positive, and the changes."""
    changes = torch.tensor((rows["clean"] - rows["corrupt"]).to_numpy(np.float64))
    flows = torch.tensor(rows[parts].to_numpy(np.float64))
    return flows * changes.sign()[:, None], changes.abs()


def _clusters(sample: Any, parts: Sequence[str]) -> Columns:
    """Return a row for each cluster: its kinds, its parts beside others, and a question."""
    flows, _ = _signed(sample, parts)
    # Shares of the flow of all parts, so that a question with a small change counts as much.
    shares = (flows / flows.abs().sum(1, keepdim=True).clamp(min=1e-30)).numpy()
    model, rows = clustered(shares), list[Any]()
    sample = sample.assign(cluster=model.predict(shares), distance=model.transform(shares).min(1))
    for label, size in sample["cluster"].value_counts().items():
        members = sample[sample["cluster"] == label].sort_values("distance")
        center = model.cluster_centers_[label]
        from_mean = abs(center - shares.mean(0) * (len(model.cluster_centers_) > 1))
        strongest = from_mean.argsort()[::-1][:SHOWN]
        of_parts = ", ".join(f"{parts[i]} {center[i]:+.0%}" for i in strongest)
        kinds = ", ".join(f"{kind} {n}" for kind, n in members["kind"].value_counts().items())
        x = members.iloc[0]
        nearest = f"“{x.text}”{x.token}, “{x.against}”"
        rows.append((len(rows) + 1, size, kinds, of_parts, nearest))
    names = ["cluster", "questions", "kinds", "shares of all flow", "nearest to the center"]
    return by_column(names, rows)


def clustered(rows: Any) -> Any:
    """Return k-means of rows of numbers, fitted: as many clusters as held-out rows ask for.

    There is one more while it lowers the squared distance of each half of the rows to the nearest
    center, found on the other half, to at most `GAIN` of what it does in a normal distribution of
    the same covariance, in which there are no clusters.
    """
    weights = np.random.default_rng(0).standard_normal((len(rows), len(rows)))
    normal = weights @ (rows - rows.mean(0)) / len(rows) ** 0.5
    different = min(len(np.unique(half, axis=0)) for half in (rows[::2], rows[1::2]))
    most = min(MOST, len(rows) // FEWEST, different)
    distances = ((_held_out(rows, k), _held_out(normal, k)) for k in range(1, most + 1))
    count = 1
    for before, after in pairwise(distances):
        # Products, since a distance may be 0.
        if after[0] * before[1] >= GAIN * before[0] * after[1]:
            break
        count += 1
    return _k_means(rows, count)


def _k_means(rows: Any, k: int) -> Any:
    return cluster.KMeans(k, n_init=4, random_state=0).fit(rows)


def _held_out(rows: Any, k: int) -> float:
    halves = rows[::2], rows[1::2]
    return -sum(float(_k_means(a, k).score(b)) for a, b in (halves, halves[::-1]))
