"""Directions of a task: the vectors that they write and read, and what is measured about them."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from bilens.analysis import Reading
from bilens.sections import Columns, Fact, Percent, by_column


class MLPDirections(NamedTuple):
    """Directions of the output of an MLP: pairs of vectors with r_i . t_j = 1 if i = j, else 0."""

    written: Float[Tensor, "k d_model"]  # the vectors t
    # The vectors r that measure how much of t a change of the output has.
    read: Float[Tensor, "k d_model"]

    def flows(
        self, changes: Float[Tensor, "n d_model"], adjoints: Float[Tensor, "n d_model"]
    ) -> Float[Tensor, "n k"]:
        """Return the flow (w . t_i)(r_i . Dy) of each direction at some positions."""
        return (adjoints @ self.written.T) * (changes @ self.read.T)


@dataclass(frozen=True)
class TaskDirection:
    """One direction of a task.

    Attributes:
        number: its number there, from 1 in descending order of singular values.
        flow: its flow on the questions that measure, as a share of the mean |change|.
        effect: the measured change of the logit there, when it is exchanged between both texts.
        raises: tokens that become less probable without it, in the first texts of all questions.
        lowers: tokens that become more probable.
    """

    layer: int
    number: int
    flow: float
    effect: float
    raises: tuple[str, ...]
    lowers: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class TaskDirections(Reading):
    """The directions of a task, measured on questions that did not find them.

    Attributes:
        directions: written and read vectors of the MLP of each layer.
        values: their singular values.
        share: share of the flow through MLPs that the directions hold; see `share_held`.
        shares: the same for each layer.
        r2: R2 of measured exchanges by flows, over directions and questions; None if all exchanges
            are equal.
        strongest: the directions of the largest |flow| on the questions that found them.
        questions: number of questions that found them, and of those that measure.
        repeated: number of questions that were left out, since they repeat others.
        notes: warnings about the tokens.
    """

    directions: tuple[MLPDirections, ...]
    values: tuple[Float[Tensor, " k"], ...]
    share: float
    shares: Float[Tensor, " layers"]
    r2: float | None
    strongest: tuple[TaskDirection, ...]
    questions: tuple[int, int]
    repeated: int = 0
    notes: tuple[str, ...] = ()

    title: ClassVar[str] = "Directions of a task"
    formats: ClassVar[dict[str, str]] = {"flow": "+.1%", "measured effect": "+.1%"}
    explanation: ClassVar[str] = (
        "Directions of the outputs of MLPs that recur in the flows of a task. Flow and measured "
        "effect are shares of the change of the logit, on questions that did not find the "
        "directions. A direction is exchanged between the two texts, in both directions."
    )

    def facts(self) -> list[Fact]:
        """Return the numbers of questions, the share of the flow, and R2 of exchanges."""
        learning, measuring = self.questions
        facts: list[Fact] = [
            ("questions that find", learning),
            ("questions that measure", measuring),
            ("share of the flow through MLPs", Percent(self.share)),
        ]
        if self.repeated:
            facts.append(("repeated questions left out", self.repeated))
        if self.r2 is not None:
            facts.append(("R2 of exchanges by flows", self.r2))
        return facts + ([("note", " ".join(self.notes))] if self.notes else [])

    def columns(self) -> Columns:
        """Return a row for each of the strongest directions."""
        rows = [
            (x.layer, x.number, x.flow, x.effect, ", ".join(x.raises), ", ".join(x.lowers))
            for x in self.strongest
        ]
        return by_column(["layer", "number", "flow", "measured effect", "raises", "lowers"], rows)
