"""Logits of one input split by eigenvectors, and features that several classes share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import check_finite, checked, detached
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.figures.canvas import BLUE, GREY, RED, Canvas
from bilens.lazy_imports import go, pd
from bilens.read.chain import predict
from bilens.sections import Fact, Percent, Picture, Section, plotly_text, signed
from bilens.settings import Count
from bilens.tensor import Paths, Spectrum, TensorChain, cluster

SHOWN = 12


@dataclass(frozen=True)
class Use:
    """Use of a feature by one class."""

    label: int  # number of the class
    # Numbers of the eigenvectors that lead to it, from the last layer down; 0 has the largest
    # |eigenvalue|.
    place: tuple[int, ...]
    # True if its branch raises the logit: the sign of the eigenvalue in the last layer.
    raises: bool
    weight: float  # its share of all weight


@dataclass(frozen=True, eq=False)
class SharedFeature:
    """Input direction that represents eigenvectors of several classes."""

    # The direction, of unit length, with the sign of the heaviest of them.
    vector: Float[Tensor, " n_in"]
    uses: tuple[Use, ...]  # all uses, the heaviest first
    agreement: float  # smallest |cosine| between the direction and one of its eigenvectors

    @property
    def weight(self) -> float:
        """Share of all weight that its uses have."""
        return sum(use.weight for use in self.uses)

    def labels(self, *, raises: bool) -> list[int]:
        """Return the classes that it raises, or lowers, each once by its heaviest use."""
        return list(dict.fromkeys(use.label for use in self.uses if use.raises == raises))


@dataclass(frozen=True, eq=False, repr=False)
class SharedFeatures(Reading):
    """Features used by several classes, those of largest weight first.

    The number of eigenvectors `compared` form `groups`, those of a single class included.
    """

    features: tuple[SharedFeature, ...]
    compared: int
    groups: int

    title: ClassVar[str] = "Features shared by classes"
    axes: ClassVar[dict[str, str]] = {"x": "feature", "y": "weight"}

    @property
    def weight(self) -> float:
        """Share of all weight that shared features have."""
        return sum(feature.weight for feature in self.features)

    def facts(self) -> list[Fact]:
        return [
            ("shared features", len(self.features)),
            ("share of all weight", Percent(self.weight)),
            ("eigenvectors compared", self.compared),
            ("groups", self.groups),
        ]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each feature: its weight, agreement, and the classes of either sign."""
        rows = []
        for number, feature in enumerate(self.features):
            sides = (map(str, feature.labels(raises=raises)) for raises in (True, False))
            rows.append((number, feature.weight, feature.agreement, *map(", ".join, sides)))
        return pd.DataFrame(rows, columns=["feature", "weight", "agreement", "raises", "lowers"])


def check_classes(spectrum: Spectrum) -> None:
    """Raise BilensError unless a spectrum is batched over the classes."""
    if len(spectrum.batch_shape) != 1:
        raise BilensError(
            f"spectrum has batch shape {tuple(spectrum.batch_shape)}, expected one axis, the "
            "classes: spectra(model)"
        )


@checked
def shared_by_classes(spectrum: Spectrum, k: Count = 20) -> SharedFeatures:
    """Find features shared between classes, among the first k eigenvectors of each.

    An eigenvector weighs |lambda| |v|^2, the largest activation at an input of unit length. The
    spectrum is ordered by |eigenvalue|.
    """
    check_classes(spectrum)
    check_finite(spectrum=spectrum.values)
    first = spectrum.truncate(min(k, spectrum.k))
    weights, device = first.values.abs() * first.vectors.square().sum(-1), first.values.device
    return _shared(
        vectors=first.vectors.flatten(0, 1),
        weights=weights.flatten(),
        signed=first.values.flatten(),
        labels=torch.arange(first.batch_shape[0], device=device).repeat_interleave(first.k),
        places=torch.arange(first.k, device=device).repeat(first.batch_shape[0])[:, None],
    )


@checked
def shared_by_paths(paths: Paths) -> SharedFeatures:
    """Find features shared between classes, among the ends of the strongest paths of a deep model.

    A path weighs |effective eigenvalue|. At most the strongest 1,000 are compared. The paths are of
    one direction for each class.
    """
    # Time grows with the square of the number of paths.
    first = paths.truncate(min(1000, len(paths)))
    return _shared(
        vectors=first.vectors,
        weights=first.effective.abs(),
        signed=first.eigenvalues[:, 0],
        labels=first.roots,
        places=first.indices,
    )


def _shared(
    vectors: Tensor, weights: Tensor, signed: Tensor, labels: Tensor, places: Tensor
) -> SharedFeatures:
    """Cluster the vectors that have weight, and return the groups of several classes."""
    # Vectors without weight are arbitrary, and would be groups of their own.
    heavy = (weights > 0).nonzero()[:, 0]
    if not len(heavy):
        return SharedFeatures((), compared=0, groups=0)
    # A group has the sign of its heaviest vector. Two eigenvectors count as one feature from a
    # |cosine| of 0.7 on. In an MNIST classifier hardly any of different classes reach 0.9. At 0.5
    # nearly all are in groups whose pictures have little in common.
    clusters = cluster(vectors[heavy], weights[heavy], 0.7)
    shares = (weights.double() / weights.double().sum()).tolist()
    features = []
    for number, agreement in enumerate(clusters.agreement.tolist()):
        rows, uses = heavy[clusters.members[number]], []
        for row in rows[weights[rows].argsort(descending=True, stable=True)].tolist():
            place, raises = tuple(places[row].tolist()), bool(signed[row] > 0)
            uses.append(Use(int(labels[row]), place, raises, shares[row]))
        # A class may use a feature twice, which is not sharing.
        if len({use.label for use in uses}) > 1:
            features.append(SharedFeature(clusters.vectors[number], tuple(uses), agreement))
    return SharedFeatures(tuple(features), compared=len(heavy), groups=len(clusters))


@checked
def shared_figure(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str]
) -> "go.Figure":
    """Draw the first few shared features; arrows below name the classes that a feature moves."""
    features = shared.features[:SHOWN]
    aspect = shape[0] / shape[1]
    below = [_below(feature, class_names) for feature in features]
    # All pictures have room for the longest text, so that rows are level.
    n_columns, line_height, step_width = 4, 0.18, 1.42
    rise = aspect + line_height * (max(map(len, below)) + 0.5)
    n_rows = -(-len(features) // n_columns)
    alt = f"{len(features)} pictures of features, each with the classes that it moves"
    canvas = Canvas(step_width * n_columns, rise * n_rows, unit=120, title="", alt=alt)
    for place, (feature, lines) in enumerate(zip(features, below, strict=True)):
        row, column = divmod(place, n_columns)
        left, top = step_width * column, rise * row
        canvas.eigenvector(feature.vector, shape, x=left + (step_width - 1) / 2, y=top)
        for number, (text, color, full) in enumerate(lines):
            y = top + aspect + 0.01 + line_height * number
            canvas.label(text, x=left + step_width / 2, y=y, color=color, hover=full)
    return canvas.figure()


def shared_section(
    shared: SharedFeatures, shape: tuple[int, int], class_names: Sequence[str], what: str
) -> Section:
    """Return the section of `shared_figure`; `what` names the vectors."""
    if not shared.features:
        text = f"None: no two of the {shared.compared:,} {what} compared are alike."
        return Section("Features shared between classes", text)
    shown = min(SHOWN, len(shared.features))
    text = (
        f"The {shared.compared:,} strongest {what} of all classes, grouped where they are alike up "
        f"to sign, make {shared.groups:,} features. {len(shared.features):,} of them serve more "
        f"than one class and hold {shared.weight:.0%} of the weight. "
        f"{'These are' if shown == len(shared.features) else f'The first {shown} are'} shown, each "
        "with its share of the weight and the classes it takes part in raising (▲) or lowering (▼)."
    )
    picture = Picture("shared", partial(shared_figure, shared, shape, class_names))
    return Section("Features shared between classes", text, [[picture]])


def _below(feature: SharedFeature, class_names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Lines under a picture: their text, safe for HTML, their colour, and all of it."""
    lines = [(f"{feature.weight:.1%}", GREY, "share of the weight")]
    for raises, sign, color in ((True, "▲", BLUE), (False, "▼", RED)):
        names = [plotly_text(class_names[label]) for label in feature.labels(raises=raises)]
        text = f"{'raises' if raises else 'lowers'} {', '.join(names)}"
        lines += [(f"{sign} {line}", color, text) for line in _wrapped(names)]
    return lines


def _wrapped(names: Sequence[str]) -> list[str]:
    """Return names in the lines that fit; the last line has the number of the others."""
    lines = [""]
    for number, name in enumerate(names):
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        if len(longer) <= 15 or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < 2:
            lines.append(name)
        else:
            lines[-1] += f" +{len(names) - number}"
            break
    return lines if names else []


@dataclass(frozen=True, eq=False)
class LogitExplanation:
    """One logit as a sum over eigenvectors: their activations lambda (v . x)^2 and a remainder."""

    label: int  # number of the class
    logit: float
    # Numbers of the strongest eigenvectors for this input, by |activation|.
    numbers: tuple[int, ...]
    activations: Float[Tensor, " k"]  # the contribution of each to the logit
    # The eigenvectors, each with a positive overlap with the input.
    vectors: Float[Tensor, "k n_in"]
    remainder: float  # sum of the activations of all other eigenvectors


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Reading):
    """One input with all its logits, and the highest logits split into activations.

    Attributes:
        x: the input.
        logits: all logits.
        parts: the highest logits, the highest first.
        shape: height and width of an image, as which the input is drawn.
        class_names: their names.
    """

    x: Float[Tensor, " n_in"]
    logits: Float[Tensor, " classes"]
    parts: tuple[LogitExplanation, ...]
    shape: tuple[int, int] | None = None
    class_names: Sequence[str] = ()

    title: ClassVar[str] = "The eigenvectors that make the highest logits"

    axes: ClassVar[dict[str, str]] = {"x": "term", "y": "activation", "color": "class"}
    explanation: ClassVar[str] = (
        "Each logit is the sum of the activations of its eigenvectors, which are numbered from the "
        "largest absolute eigenvalue."
    )

    def facts(self) -> list[Fact]:
        return [(f"logit of class {part.label}", part.logit) for part in self.parts]

    def frame(self) -> "pd.DataFrame":
        """Return a row for each eigenvector of each logit, and for the sum of all others."""
        rows: list[tuple[str, str, float]] = []
        for part in self.parts:
            label, activations = str(part.label), part.activations.tolist()
            for number, activation in zip(part.numbers, activations, strict=True):
                rows.append((label, str(number), activation))
            rows.append((label, "all others", part.remainder))
        return pd.DataFrame(rows, columns=["class", "term", "activation"])

    def plot(self) -> "go.Figure":
        """Draw an image, and the eigenvectors that move its highest logits most."""
        if self.shape is None:
            return super().plot()
        return explanation_figure(self, self.shape, self.class_names, title=self.title)

    def record(self) -> dict[str, Any]:
        """Return its numbers for JSON; classes and eigenvectors have theirs."""
        record = super().record()
        for row in record[self.title]:
            row["class"] = int(row["class"])
            row["term"] = int(row["term"]) if row["term"].isdigit() else row["term"]
        return record


@detached
def explain(
    spectrum: Spectrum, x: Float[Tensor, " n_in"], n_classes: Count = 3, k: Count = 5
) -> Explanation:
    """Split the highest logits of one input into the activations of k eigenvectors of each.

    The spectrum has all eigenvectors, batched over the classes.
    """
    check_classes(spectrum)
    check_finite(x=x)
    # The activation squares the overlap, so a vector may be turned towards the input.
    signs = torch.where(spectrum.overlaps(x) < 0, -1, 1).to(spectrum.vectors)
    activations = spectrum.activations(x)
    logits = activations.sum(-1)
    parts = []
    for label in logits.argsort(descending=True)[:n_classes].tolist():
        values = activations[label]
        strongest = values.abs().topk(min(k, len(values))).indices
        parts.append(
            LogitExplanation(
                label=label,
                logit=float(logits[label]),
                numbers=tuple(strongest.tolist()),
                activations=values[strongest],
                vectors=signs[label, strongest, None] * spectrum.vectors[label, strongest],
                # By difference, so that the parts add up to the logit.
                remainder=float(logits[label] - values[strongest].sum()),
            )
        )
    return Explanation(x, logits, tuple(parts))


@checked
def explanation_figure(
    explanation: Explanation, shape: tuple[int, int], class_names: Sequence[str], *, title: str
) -> "go.Figure":
    """Draw a row for each of the highest logits: the strongest eigenvectors for this input.

    Below each is its contribution to the logit; the last column has that of all others, so that
    a row sums to its logit.
    """
    n_columns = max(len(part.numbers) for part in explanation.parts)
    between = 0.12
    aspect, step = shape[0] / shape[1], 1 + between
    # In widths of a picture: room between pictures, and beside a row.
    verdict = 1.6
    rise, width = aspect + 0.34, 1 + between + n_columns * step + verdict
    canvas = Canvas(width, rise * len(explanation.parts), unit=90, title=title)
    # The input is beside the middle row, and each row ends with its logit.
    middle = rise * (len(explanation.parts) - 1) / 2
    canvas.image(explanation.x, shape, x=0, y=middle)
    canvas.label("input", x=0.5, y=middle + aspect + 0.02, color=GREY)
    for row, part in enumerate(explanation.parts):
        top = row * rise
        for column, activation in enumerate(part.activations.tolist()):
            left = 1 + 2 * between + column * step
            canvas.eigenvector(part.vectors[column], shape, x=left, y=top)
            color = BLUE if activation > 0 else RED
            text = signed(activation, ".2f")
            canvas.label(text, x=left + 0.5, y=top + aspect + 0.01, color=color)
        name, end = plotly_text(class_names[part.label]), width - verdict / 2
        canvas.label(f"<b>{name}</b>", x=end, y=top, size=13)
        canvas.label(f"logit {signed(part.logit, '.2f')}", x=end, y=top + 0.34 * aspect)
        remainder = f"rest {signed(part.remainder, '.2f')}"
        canvas.label(remainder, x=end, y=top + 0.64 * aspect, color=GREY)
    return canvas.figure()


def explanation_pictures(model: TensorChain, data: ImageData, spectrum: Spectrum) -> list[Picture]:
    """Return the explanations of a clear case, a close call and a mistake, if there are any."""
    pictures = []
    for kind, number in _telling_examples(model, data).items():
        label = data.class_names[int(data.test_labels[number])]
        title = f"{kind.capitalize()}: test image {number}, labelled {label}"

        def draw(number: int = number, title: str = title) -> "go.Figure":
            explanation = explain(spectrum, data.test_images[number])
            return explanation_figure(explanation, data.shape, data.class_names, title=title)

        pictures.append(Picture(f"explanation-{kind}", draw))
    return pictures


@torch.no_grad()
def _telling_examples(model: TensorChain, data: ImageData) -> dict[str, int]:
    logits = predict(model, data.test_images).to(data.test_labels.device)
    best = logits.topk(2, dim=-1)
    # The margin to the second logit, and not the logit, tells how sure the model is.
    margin = best.values[:, 0] - best.values[:, 1]
    right = best.indices[:, 0] == data.test_labels
    # A perfect model makes no mistake, and one that is always wrong has no close call.
    examples = {"clear": int(torch.where(right, margin, -torch.inf).argmax())}
    if right.any():
        examples["close"] = int(torch.where(right, margin, torch.inf).argmin())
    if (~right).any():
        examples["mistaken"] = int(torch.where(right, -torch.inf, margin).argmax())
    return examples
