"""Measured effects of heads and MLPs between two texts."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import Cache

from bilens.analysis import Reading
from bilens.checks import checked, detached
from bilens.circuits.case import make_cases
from bilens.errors import BilensError
from bilens.flows.fitted import second_ids, token_hints
from bilens.flows.question import Against, Answer, Question, Tokens
from bilens.flows.sources import AnyModel, as_questions, opened
from bilens.hooks import hooked
from bilens.language.names import TokenDirection
from bilens.options import Target, replaced
from bilens.sections import Columns, Fact, by_column, signed
from bilens.transformer import ResidualModel
from bilens.transformer.exchange import (
    Place,
    Term,
    exchange_parts,
    exchanged,
    hooks_at,
    mixed,
    mixtures,
)
from bilens.transformer.mixing import Mixing
from bilens.transformer.parts import Part
from bilens.transformer.passes import Metric, Pass
from bilens.transformer.running import first_input


def parts_in(mask: Bool[Tensor, " *shape"]) -> list[Part]:
    """Return the parts of a mask (layers, heads + 1) or (layers, time, heads + 1), by layer."""
    parts = []
    for layer, *at, column in mask.nonzero().tolist():
        position = at[0] if at else None
        is_head = column < mask.shape[-1] - 1
        part = Part("head", layer, column) if is_head else Part("mlp", layer)
        parts.append(part._replace(position=position))
    return parts


def all_parts(model: ResidualModel) -> list[Part]:
    """Return the heads and the MLP of every layer that has them, in the order of the layers."""
    return parts_in(model.places.exist)


@dataclass(frozen=True, eq=False, repr=False)
class Effects(Reading):
    """Effects of every head and MLP, at all positions, on the change of a number.

    The last part of a layer is its MLP.

    Attributes:
        change: the change of the number between the texts.
        noising: fall of the number of the first text when the part comes from the second.
        denoising: rise of the number of the second text when the part comes from the first.
        notes: warnings about the answers.
    """

    change: float
    noising: Float[Tensor, "layers parts"]
    denoising: Float[Tensor, "layers parts"]
    notes: tuple[str, ...] = ()

    title: ClassVar[str] = "Effects between two texts"
    axes: ClassVar[dict[str, str]] = {"x": "part", "y": "effect"}

    @property
    def heads(self) -> Float[Tensor, "layers heads"]:
        """Effect of each head, the mean of both directions."""
        return (self.noising + self.denoising)[:, :-1] / 2

    @property
    def mlps(self) -> Float[Tensor, " layers"]:
        """Effect of each MLP, the mean of both directions."""
        return (self.noising + self.denoising)[:, -1] / 2

    def facts(self) -> list[Fact]:
        layer, head = divmod(int(self.heads.abs().argmax()), self.heads.shape[1])
        mlp = int(self.mlps.abs().argmax())
        return [
            ("change", self.change),
            (f"head.{layer}.{head}", signed(float(self.heads[layer, head]))),
            (f"mlp.{mlp}", signed(float(self.mlps[mlp]))),
            *(("note", note) for note in self.notes),
        ]

    def columns(self) -> Columns:
        """Return a row for each head and MLP, the largest |effect| first."""
        parts = parts_in(torch.ones_like(self.noising, dtype=torch.bool))
        fall, rise = self.noising.flatten().tolist(), self.denoising.flatten().tolist()
        rows = []
        for part, a, b in zip(parts, fall, rise, strict=True):
            rows.append((str(part), part.layer, a, b, (a + b) / 2))
        rows.sort(key=lambda row: -abs(row[-1]))
        return by_column(["part", "layer", "noising", "denoising", "effect"], rows)


@detached
def patch(
    model: AnyModel,
    text: Any,
    token: Answer = (),
    position: int = -1,
    *,
    minus: Tokens = (),
    against: Against | None = None,
    replace: Mapping[str, str] | None = None,
    target: Target = "logit",
) -> Effects:
    """Measure the effect of every head and MLP by activation patching, in both directions.

    One part at a time takes its output of the other text at all positions, in the run of the text
    (noising) and in that of the other (denoising). All runs of a layer start there, in batches.

    The number is the `target`, or its difference from those of other tokens. If an answer has
    several tokens, such as " New York", it is the sum of the log-probabilities of its tokens after
    the text, and of each answer to subtract in a run of its own.

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        text: the first text, or its tokens' numbers; or, with nothing else, questions in any form,
            see `bilens.flows.as_questions`, over which the mean is taken.
        token: the answer, by name or number, or several, whose mean is taken; or a direction of the
            last normalised stream.
        position: whose next token is predicted, counted from the end if negative.
        minus: answers whose mean is subtracted.
        against: the second run; see `flow`. Of a text with other numbers of tokens, tokens that are
            as far from the end stand against each other; earlier ones stay as they are.
        replace: words of the text and their replacements in the second run.
        target: the logit before a soft cap, the log-probability or the probability of the token.

    Raises:
        BilensError: the texts or tokens do not fit the model or each other, the number is the same
            after both texts, or `target` is given for an answer of several tokens.

    Source: Zhang and Nanda 2023, "Towards best practices of activation patching".
    """
    model = opened(model)
    is_answer = isinstance(token, TokenDirection | Tensor | int) or bool(token)
    if is_answer or against is not None or replace is not None:
        if (against is None) == (replace is None):
            raise BilensError("against and replace name the second run, expected one of them")
        second = replaced(text, replace or {}) if against is None else against
        questions = [Question(text, token, minus, second, position=position, target=target)]
    else:
        questions = as_questions(text)
    # Each run with its weight in the mean.
    runs_of_all, shares = list[Question](), list[float]()
    for question in questions:
        runs = _answers_apart(model, question)
        runs_of_all += [run for run, _ in runs]
        shares += [share / len(questions) for _, share in runs]
    change, effects = 0.0, torch.zeros(2, model.n_layers, model.n_heads + 1, dtype=torch.float64)
    for share, case in zip(shares, make_cases(model, runs_of_all, any_length=True), strict=True):
        of_answer = patched_effects(case.alone, case.score)
        change += share * of_answer.change
        effects += share * torch.stack([of_answer.noising, of_answer.denoising])
    return Effects(change, effects[0], effects[1], token_hints(model, questions))


def _answers_apart(model: ResidualModel, question: Question) -> list[tuple[Question, float]]:
    """Return a question, or one for each of several answers of several tokens, with its weight.

    Each answer of several tokens follows both texts, in a run of its own.
    """
    names = (*question.tokens, *question.minus)
    if len(names) < 2 or all(len(model.answer(name)) == 1 for name in names):
        return [(question, 1.0)]
    if question.target != "logit":
        raise BilensError(
            f"target={question.target!r} with an answer of several tokens, whose number is its "
            "log-probability; leave target out, or take answers of one token"
        )
    alone = dataclasses.replace(question, minus=(), target="log-probability")
    shares = [1 / len(question.tokens) for _ in question.tokens]
    shares += [-1 / len(question.minus) for _ in question.minus]
    runs = []
    for name, share in zip(names, shares, strict=True):
        runs.append((dataclasses.replace(alone, token=name), share))
    return runs


@checked
@contextmanager
def patched(model: ResidualModel, parts: Sequence[str], against: str | Tensor) -> Iterator[None]:
    """Let parts have their values of another text in every pass of this block.

        with patched(model, ["head.26.0@4"], "The key to the cabinet"):
            generate_text(model, "The keys to the cabinet")

    They have them at their position, or at all positions of the other text, counted from the first
    token that the attention mask of a pass shows. Tokens that a model writes after the text have
    values of their own.

    Args:
        model: any.
        parts: addresses of heads, MLPs and experts, with or without a position.
        against: the other text, or its token ids; the first text has at least as many tokens, and
            a shorter one stays as it is.

    Raises:
        BilensError: an address is not one of the model, or its position is not in the other text.
    """
    other = Pass.of(model, second_ids(model, against)[None])
    time, texts = other.ids.shape[1], 1
    is_start = True  # whether a pass has the start of the text, and no token after a cache of it
    starts: list[int] = []  # of each text of a pass with a mask, the first position that is shown

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal is_start, starts
        is_start = not any(map(_has_tokens, (*args, *kwargs.values())))
        starts = _first_shown(kwargs.get("attention_mask"))

    def end(*_: Any) -> None:
        nonlocal is_start, starts
        is_start, starts = True, []  # layers that run by themselves have the whole text

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal texts
        texts = len(first_input(args, kwargs))

    values = [_part_within(address, model, time) for address in parts]
    keep, changes = exchanged(values, other)
    of_shares = mixtures(other, keep.expand(-1, time, -1))

    def changed(place: Place, x: Tensor, term: Term) -> Tensor:
        # Readings run a single token for its unembedding, also inside of the block.
        if not is_start:
            return x
        # Some models take the tokens of all texts as one list.
        rows = x.reshape(texts, -1, x.shape[-1]).clone()
        for text, start in enumerate(starts or [0] * len(rows)):
            at = slice(text, text + 1), slice(start, start + time)
            if rows[at].shape[1] < time:
                continue
            if place in of_shares:
                rows[at] = mixed(rows[at], *of_shares[place])
            for change in changes:
                if change.place == place and change.part is not None:
                    rows[at] = change.value(rows[at], term(change.part, len(rows))[at])
        return rows.reshape(x.shape)

    places = {*of_shares, *(change.place for change in changes)}
    before, after = hooks_at(places, changed, Mixing())
    counts = [(layer.module, count) for layer in model.places.layers]
    with hooked([(model.model, begin), *counts, *before], [*after, (model.model, end)]):
        yield


def _has_tokens(x: Any) -> bool:
    """Return whether something that a model is given is a cache with tokens of a text."""
    return isinstance(x, Cache) and bool(x.get_seq_length())


def _first_shown(mask: Any) -> list[int]:
    """Return the first position of each text that a mask for padding shows; nothing of others."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.logical_not().long().cumprod(1).sum(1).tolist()
    return []


def exchanged_each(
    of_text: Pass, other: Pass, parts: Sequence[Part]
) -> Float[Tensor, "parts time d_model"]:
    """Return the last streams of a text where each part, alone, has its value of another text."""
    return exchange_parts(of_text, other.in_place_of(of_text), [[part] for part in parts])[:, 0]


def _part_within(address: str, model: ResidualModel, time: int) -> Part:
    """Return the part of an address, whose position is one of `time` tokens."""
    part = Part.parse(address, model)
    if part.position is not None and part.position >= time:
        raise BilensError(
            f"parts: {address} has the position {part.position}, expected one of the {time} "
            "tokens of against, counted from 0"
        )
    return part


def patched_effects(passes: tuple[Pass, Pass], metric: Metric) -> Effects:
    """Return the effects of all heads and MLPs on a number of a text, in both directions."""
    model, effects = passes[0].model, []
    ends = [float(metric(of_text.stream)[0]) for of_text in passes]
    for of_text, other, end, sign in ((*passes, ends[0], 1), (*passes[::-1], ends[1], -1)):
        scores = exchanged_each(of_text, other, all_parts(model))
        change = end - metric(scores).cpu().double()
        of_parts = torch.zeros(model.places.exist.shape, dtype=torch.float64)
        of_parts[model.places.exist] = sign * change
        effects.append(of_parts)
    noising, denoising = effects
    return Effects(ends[0] - ends[1], noising, denoising)
