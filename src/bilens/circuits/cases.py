"""Questions on which masks of parts are measured: of whole parts, by position, or by role.

A mask m in [0, 1] keeps a share of each head and MLP in the run of the first text and takes the
other share from the run of the second. f(m) is the number of that run on a scale where the second
text has 0 and the first 1. Over several questions it is a share of the absolute change: each counts
by its own, whether the first text raises its number or lowers it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bilens.checks import check_finite, check_index
from bilens.circuits.case import Case, make_cases
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.processes import in_all_processes
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import exchange
from bilens.transformer.passes import Pass

Result = TypeVar("Result")
Axis = Literal["", "position", "role"]
"""What a mask tells apart beside layers and parts."""
ROLES = ("word", "word 2", "between", "end", "word and end", "word 2 and end")
"""Roles of positions: where texts differ, what predicts, both, and what lies between.

What differs after tokens that are the same again stands apart from the first word: it is word 2.
"""


class Cases:
    """Questions about a model, on which masks of parts are measured: (layers, heads + 1).

    By position, of questions of one length, masks are (layers, time, heads + 1); by role they are
    (layers, roles, heads + 1), with a share of each part at the positions of each of `ROLES`.
    """

    def __init__(self, model: ResidualModel, cases: Sequence[Case], axis: Axis = "") -> None:
        self.model, self.cases, self.axis = model, cases, axis
        self._scores: dict[bytes, Tensor] = {}  # by the mask of a circuit
        self._by: dict[Axis, Cases] = {}

    @classmethod
    def of(
        cls,
        model: ResidualModel,
        questions: Sequence[Question],
        *,
        any_length: bool = False,
        divided: bool = False,
    ) -> "Cases":
        """Run a model on both texts of each question; see `make_cases`."""
        return cls(model, make_cases(model, questions, any_length=any_length, divided=divided))

    def by(self, axis: Axis) -> "Cases":
        """Return the same cases, whose masks tell apart positions or roles."""
        # Kept, so that scores are computed once for all searches of which a template is a part.
        # Not this one itself: a cycle would hold the passes until Python collects it.
        if axis == self.axis:
            return self
        return self._by.setdefault(axis, Cases(self.model, self.cases, axis))

    def some(self, numbers: Iterable[int]) -> "Cases":
        """Return the cases with some numbers, which may repeat; their masks are as here."""
        cases = [self.cases[check_index("numbers", i, len(self))] for i in numbers]
        return Cases(self.model, cases, self.axis)

    @classmethod
    def joined(cls, several: Sequence["Cases"]) -> "Cases":
        """Return the cases of several as one."""
        if not several:
            raise BilensError("there are no cases, expected those of a template or more")
        cases = [case for of_one in several for case in of_one.cases]
        return cls(several[0].model, cases, several[0].axis)

    def asking(self, answer: tuple[str, str]) -> "Cases":
        """Return the cases of the same texts with another answer: a token and one to subtract."""
        token, minus = ((self.model.token(name),) for name in answer)
        neutral: dict[str, Any] = {"vector": None, "target": "logit"}
        cases = []
        for case in self.cases:
            question = replace(case.question, token=answer[0], minus=(answer[1],), **neutral)
            fitted = replace(
                case.fitted, question=question, tokens=token, minus=minus, spoken=(), **neutral
            )
            cases.append(Case.of(fitted, case.batch, case.row))
        return Cases(self.model, cases, self.axis)

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a mask."""
        return tuple(self.everything.shape)

    @property
    def changes(self) -> Float[Tensor, " cases"]:
        """The absolute change of each question's number."""
        return torch.tensor([abs(case.change) for case in self.cases], dtype=torch.float64)

    @cached_property
    def templates(self) -> dict[str, list[int]]:
        """Numbers of the questions of each template."""
        templates: dict[str, list[int]] = defaultdict(list)
        for i, case in enumerate(self.cases):
            templates[case.question.template].append(i)
        return templates

    def _check_masks(self, masks: Float[Tensor, "n *shape"]) -> None:
        """Raise unless masks are of this model, by their shape."""
        if masks.shape[1:] != self.shape:
            raise BilensError(
                f"a mask has shape {tuple(masks.shape[1:])}, expected {self.shape}, that of the "
                "parts of this model"
            )

    def rises(self, group: int, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n texts"]:
        """Return how far each number of a group rises from its second text, for each mask."""
        self._check_masks(masks)
        streams, numbers = self._streams(group, masks).unbind(1), self.groups[group]
        return torch.stack(
            [self.cases[i].rise(x) for i, x in zip(numbers, streams, strict=True)], 1
        )

    @torch.no_grad()
    def values(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n cases"]:
        """Return how far each question's number rises from its second text, for each mask."""

        def own() -> Tensor:
            values = torch.zeros(len(masks), len(self), dtype=torch.float64)
            for group, numbers in enumerate(self.groups):
                values[:, numbers] = self.rises(group, masks).cpu().double()
            return values

        values = summed(self, own)
        check_finite(metric=values)
        return values

    @torch.no_grad()
    def measured(
        self, masks: Float[Tensor, "n *shape"]
    ) -> tuple[Float[Tensor, "n cases"], list[bool | None]]:
        """Return the values of some masks, and whether each question is answered with the first."""
        self._check_masks(masks)

        def own() -> dict[int, tuple[Tensor, bool | None]]:
            of_cases = {}
            for group, numbers in enumerate(self.groups):
                streams = self._streams(group, masks).unbind(1)
                for i, of_masks in zip(numbers, streams, strict=True):
                    case = self.cases[i]
                    rises = case.rise(of_masks).cpu().double()
                    of_cases[i] = rises, case.score.is_answer(of_masks[0])
            return of_cases

        of_cases = {n: x for of_process in in_all(self, own) for n, x in of_process.items()}
        rises, answers = zip(*(of_cases[n] for n in range(len(self))), strict=True)
        values = torch.stack(rises, 1)
        check_finite(metric=values)
        return values, list(answers)

    @property
    def answers(self) -> list[bool | None]:
        """Whether the model itself answers each question; None for vectors."""
        return [case.answers[0] for case in self.cases]

    def faithfulness(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
        """Return f of each mask: the mean rise over the mean absolute change."""
        return self.values(masks).mean(1) / self.changes.mean()

    def shares(self, masks: Float[Tensor, "n *shape"]) -> Float[Tensor, "n templates"]:
        """Return f of each mask on the questions of each template."""
        values, changes = self.values(masks), self.changes
        columns = [values[:, x].mean(1) / changes[x].mean() for x in self.templates.values()]
        return torch.stack(columns, 1)

    def gradient(
        self, masks: Float[Tensor, "n *shape"], weights: Sequence[float]
    ) -> Float[Tensor, " *shape"]:
        """Return the weighted sum of the gradients of f at some masks."""

        def own() -> Tensor:
            total = torch.zeros(self.shape, dtype=torch.float64)
            like = self.cases[0].batch.ends[0]
            for group in range(len(self.groups)):
                for mask, weight in zip(masks, weights, strict=True):
                    with torch.enable_grad():
                        share = mask.to(like).requires_grad_()
                        rise = weight * self.rises(group, share[None]).sum()
                        (slope,) = torch.autograd.grad(rise, share)
                    total += slope.cpu().double()
            return total

        total = summed(self, own)
        check_finite(gradient=total)
        return total / self.changes.sum()

    def scores(self, mask: Bool[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        """Return the integrated gradients of f by the mask, on the way to the mask of a circuit.

        All parts of the circuit grow from 0 to 1 together, so that the integrated gradients add up
        to its f, up to the error of Gauss-Legendre quadrature with two points. The gradient at the
        circuit itself is near 0 for parts that saturate, such as the first MLP of many models,
        without which nothing is left.

        Source: Sundararajan et al. 2017 (arXiv 1703.01365), by the parts of a circuit.
        """
        key = mask.numpy().tobytes()
        if key not in self._scores:
            self._scores[key] = self._integrated(mask)
        return self._scores[key]

    def _integrated(self, mask: Bool[Tensor, " *shape"]) -> Float[Tensor, " *shape"]:
        points, weights = np.polynomial.legendre.leggauss(2)
        # From [-1, 1] to [0, 1].
        shares = torch.from_numpy((points + 1) / 2)
        masks = shares.reshape(-1, *[1] * mask.dim()) * mask
        return self.gradient(masks, (weights / 2).tolist())

    @property
    def everything(self) -> Bool[Tensor, " *shape"]:
        """The mask of all parts that the model has."""
        exist = self.model.places.exist
        if not self.axis:
            return exist.clone()
        time = len(self.cases[0].fitted.clean)
        return exist[:, None].repeat(1, len(ROLES) if self.axis == "role" else time, 1)

    @cached_property
    def roles(self) -> list[tuple[int, ...]]:
        """The numbers of the roles of each question's positions; -1 before its texts differ."""
        return [_roles(case) for case in self.cases]

    @cached_property
    def groups(self) -> list[list[int]]:
        """Numbers of questions that share passes, and by role these too; they run side by side.

        They are those of this process, where processes divide the questions.
        """
        of_passes: dict[tuple[object, ...], list[int]] = defaultdict(list)
        repeats: Counter[tuple[int, int]] = Counter()
        for row, case in enumerate(self.cases):
            if not case.batch.is_own:
                continue
            place = id(case.batch), case.row
            roles = self.roles[row] if self.axis == "role" else ()
            of_passes[place[0], repeats[place], roles].append(row)
            repeats[place] += 1
        return [sorted(group, key=lambda i: self.cases[i].row) for group in of_passes.values()]

    def passes(self, group: int) -> tuple[Pass, Pass]:
        """Return the passes of a group; the second has as many tokens as the first."""
        numbers = self.groups[group]
        of_group = self.cases[numbers[0]].batch
        first, second = of_group.passes([self.cases[i].row for i in numbers])
        return first, second.in_place_of(first)

    def _streams(
        self, group: int, masks: Float[Tensor, "n *shape"]
    ) -> Float[Tensor, "n texts time d_model"]:
        """Return the last streams of a group's texts, for each mask."""
        first, second = self.passes(group)
        if self.axis == "role":
            # Nothing is kept where both texts are equal so far: it is the same in both.
            nowhere = torch.zeros_like(masks[:, :, :1])
            masks = torch.cat([masks, nowhere], 2)[:, :, list(self.roles[self.groups[group][0]])]
        return exchange(first, second, [*masks])


def in_all(cases: Cases, own: Callable[[], Result]) -> list[Result]:
    """Return what each process computes of its own groups, or this one where all are."""
    return in_all_processes("this circuit", own, divided=cases.cases[0].batch.process is not None)


def summed(cases: Cases, own: Callable[[], Tensor]) -> Tensor:
    """Return the sum of what processes compute of their own groups."""
    return torch.stack(in_all(cases, own)).sum(0)


def _roles(case: Case) -> tuple[int, ...]:
    """Return the number of the role of each position of a question's first text, or -1.

    Tokens that are as far from the end stand against each other. Of texts of unlike length all
    positions up to the last one that differs are the word.
    """
    first, second = case.tokens
    time, common = len(first), min(len(first), len(second))
    differ = torch.zeros(time, dtype=torch.bool)
    differ[time - common :] = (first[time - common :] != second[len(second) - common :]).any(-1)
    if len(first) != len(second):
        differ[: max(differ.nonzero().flatten().tolist(), default=time - 2) + 1] = True
    start, roles = int(differ.int().argmax()), list[int]()
    for position, changes in enumerate(differ.tolist()):
        is_first = bool(differ[start : position + 1].all())
        role = ("word" if is_first else "word 2") if changes else ""
        if position >= time - case.score.length:
            role = f"{role} and end" if role else "end"
        roles.append(-1 if position < start else ROLES.index(role or "between"))
    return tuple(roles)


def have_roles(cases: Cases, numbers: Sequence[int]) -> bool:
    """Return whether a position of some question has one of these roles, by their numbers."""
    return any(role in numbers for roles in cases.roles for role in roles)
