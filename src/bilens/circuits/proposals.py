"""Further questions like a first one, proposed by the model itself.

A circuit is found on many questions and measured on others. The model knows words that stand where
those of a first question stand: their embeddings are alike, or it finds them likely there, and the
same words follow. Each question that is proposed is run, and kept if the model answers it.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import detached
from bilens.circuits.words import Words, form
from bilens.data.texts import write_out
from bilens.errors import BilensError
from bilens.flows.question import Question
from bilens.settings import Count
from bilens.transformer import ResidualModel

OPENINGS = (
    "As far as I know, ",
    "Everyone agrees that ",
    "It is well known that ",
    "To be honest, ",
    "I have heard that ",
    "In this story, ",
    "She told me that ",
    "As you can see, ",
    "We all believe that ",
    "At the end of the day, ",
)
"""Words in front of a sentence, which make a second template of it."""
NUMBERS = 2**25
"""Most logits that are held at once: 130 MB."""
MARGIN = 8.0
"""How much less log-probable than the first question a sentence may be."""


@dataclass(frozen=True)
class Proposal:
    """A question that a model proposes.

    Attributes:
        question: with its second text, and the name of its template.
        ends: difference of the logits after the first text and after the second.
        likelihood: log-probability of its less probable text, less that of the first question's.
    """

    question: Question
    ends: tuple[float, float]
    likelihood: float


@detached
def propose_questions(
    model: ResidualModel, question: Question, count: Count = 48
) -> tuple[Proposal, ...]:
    """Return further questions like a first one, in two templates, the most probable first.

    Words are exchanged for others that are alike or likely at their place, and after which the
    model expects the same; a word that stands at several places at all of them, and in the answers.
    Where the texts differ in one word, words that move the number to one side are paired with the
    most alike of the other side. If the answer itself moves with that word, as from France to
    Paris, the answers are what the model itself says.

    A question is kept if its number is positive after the first text and negative after the second,
    and changes at least half as much as that of the first question; if its texts are about as
    probable; and if they are read back as the same tokens. In the second template a few words are
    in front. There are fewer than `count` where the model finds no more.

    Args:
        model: any, with its tokenizer.
        question: of two texts of as many tokens, with a token to subtract.
        count: most questions, half of each template.

    Raises:
        BilensError: the question has no second text or no token to subtract, texts that are no
            strings, or another target, position or vector; or the model does not answer it.
    """
    search = _Search(model, question)
    proposals: list[Proposal] = []
    for template, openings, wanted in (
        ("as given", ("",), (count + 1) // 2),
        ("words in front", [*search.openings], count // 2),
    ):
        found = search.proposals(openings, wanted) if openings else []
        for one in found:
            proposals.append(replace(one, question=replace(one.question, template=template)))
    return tuple(proposals)


class _Scores(NamedTuple):
    """Rows of tokens as the model finds them, with numbers about tokens t and u of each row."""

    likelihoods: Float[Tensor, " n"]
    numbers: Float[Tensor, " n"]  # logit of t minus the mean of u
    answered: Float[Tensor, " n"]  # the larger probability of t and u
    top: Int[Tensor, " n"]
    top_probabilities: Float[Tensor, " n"]
    ended: Float[Tensor, " n"]  # probability that the word at a place ends there
    # How alike the next tokens at a place are to those in the first question, from 0 to 1.
    alike: Float[Tensor, " n"]


class _Draw(NamedTuple):
    """Two rows of tokens, and their answers."""

    rows: Int[Tensor, "2 time"]
    token: int
    minus: tuple[int, ...]


def _after(opening: str, text: str, *, lowers: bool) -> str:
    return opening + (text[:1].lower() + text[1:] if lowers else text)


class _Search:
    """The search for questions like a first one, of one model."""

    def __init__(self, model: ResidualModel, question: Question) -> None:
        if not isinstance(question.text, str) or not isinstance(question.against, str):
            raise BilensError("expected a question of two texts as strings, got tokens or vectors")
        if not question.against or not question.minus:
            raise BilensError(
                "expected a question with a second text and a token to subtract; pass against and "
                "minus, as in --against TEXT --minus TOKEN"
            )
        if len(question.tokens) != 1:
            raise BilensError(f"token={question.token!r}, expected a single one")
        if question.target != "logit" or question.position != -1 or question.vector is not None:
            raise BilensError("expected a question about a logit after the whole text")
        self.model, self.question = model, question
        self.words = Words(model)
        ids, other, _ = question.both_texts(model)
        (token,), minus = question.token_numbers(model)
        self.first = _Draw(torch.stack([ids, other]).cpu(), token, tuple(minus))
        self.time = len(ids)
        self.differing = [i for i in range(self.time) if ids[i] != other[i]]
        self.random = random.Random(0)
        scores = self._run(self.first.rows, [self.first] * 2)
        self.ends = scores.numbers.tolist()
        if not self.ends[0] > 0 > self.ends[1]:
            before, after = (f"{number:.2g}" for number in self.ends)
            raise BilensError(
                f"the model does not answer the question itself: {question.number} is {before} "
                f"after {question.text!r} and {after} after {question.against!r}; expected a "
                "positive and a negative number"
            )
        self.change = self.ends[0] - self.ends[1]
        self.likelihood = float(scores.likelihoods.min())
        self.answered = float(scores.answered.min())
        # Words that are exchanged at several places count at each.
        self.margin = MARGIN * (1 + len(self.exchanged) / 4)

    # Words.

    @cached_property
    def places(self) -> dict[int, list[int]]:
        """The places of each word of content in both texts, of those where the texts agree."""
        first, second = self.first.rows.tolist()
        found: dict[int, list[int]] = {}
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            if one == other and self.words.is_content(one):
                found.setdefault(one, []).append(place)
        return found

    @cached_property
    def exchanged(self) -> list[int]:
        """The words that are exchanged at all places of both texts, and in the answers."""
        answers = {self.first.token, *self.first.minus}
        at_differing = set(self.first.rows[:, self.differing].flatten().tolist())
        return [word for word in self.places if word in answers or word in at_differing]

    @cached_property
    def options(self) -> dict[int, list[int]]:
        """Words that each word may be exchanged for; none if the answer moves with a word."""
        if self.moves:
            return {}
        fitting = {}
        for word, places in self.places.items():
            fitting[word] = self._fitting(self._candidates(places[0]), places[0]).tolist()
        return fitting

    @cached_property
    def moves(self) -> bool:
        """Whether the answer itself moves with the word in which the texts differ."""
        if self.exchanged or len(self.differing) != 1:
            return False
        _, scores = self._at_difference
        return bool(scores.answered[:40].median() < 0.1 * self.answered)

    @cached_property
    def _at_difference(self) -> tuple[Tensor, _Scores]:
        """Words that fit where the texts differ, the most alike first, in the second text."""
        (place,) = self.differing
        words = self._fitting(self._candidates(place), place)
        return words, self._with_each(words, place)

    @cached_property
    def pairs(self) -> list[_Draw]:
        """The first question with other words where the texts differ, and their answers."""
        if self.exchanged or len(self.differing) != 1:
            return []
        words, scores = self._at_difference
        if self.moves:
            return self._answered_pairs(words, scores)
        # The other side of a word is often among those that are most alike, as letter of letters.
        E, (place,) = self.words.embeddings, self.differing
        pool = self.words.like(int(words[0])) if len(words) else words
        pool = pool[~torch.isin(pool, torch.cat([words, self.first.rows[:, place]]))]
        near = pool[
            (E[words] @ E[pool].T).topk(min(2, len(pool)), dim=1).indices.flatten().unique()
        ]
        more = self._fitting(near, place)
        numbers = torch.cat([scores.numbers, self._with_each(more, place).numbers])
        words = torch.cat([words, more])
        low, high = self.ends[1], self.ends[0]
        upper = words[numbers > max(0.0, low + 0.6 * (high - low))]
        lower = words[numbers < min(0.0, low + 0.4 * (high - low))]
        one, other = self.first.rows[:, place].tolist()
        # keys to key is as letters to letter.
        alike = E[upper] @ E[lower].T + self._steps(upper, lower, one, other)
        pairs, uses = [self.first], Counter[int]()
        for number in alike.flatten().argsort(descending=True).tolist():
            words_of = int(upper[number // len(lower)]), int(lower[number % len(lower)])
            if not uses[words_of[0]] and uses[words_of[1]] < 3:
                uses.update(words_of)
                pairs.append(self._paired(words_of, self.first.token, self.first.minus))
        return pairs[: max(12, len(pairs) // 2)]

    def _paired(self, words: tuple[int, int], token: int, minus: tuple[int, ...]) -> _Draw:
        rows = self.first.rows.clone()
        rows[:, self.differing[0]] = torch.tensor(words)
        return _Draw(rows, token, minus)

    def _steps(self, upper: Tensor, lower: Tensor, one: int, other: int) -> Float[Tensor, "n m"]:
        """Return how alike the way from each lower word to each upper is to that of two words."""
        E = self.words.embeddings
        steps = E[upper][:, None] - E[lower][None]
        return torch.nn.functional.cosine_similarity(steps, (E[one] - E[other])[None, None], dim=-1)

    @cached_property
    def answers(self) -> list[tuple[int, tuple[int, ...]]]:
        """Answers in place of the first question's, if both are words of content.

        They are likely after the first text, and each stands against one of the words that are most
        alike, which the second text prefers.
        """
        token, minus = self.first.token, self.first.minus
        found = [(token, minus)]
        tied = bool(self.exchanged) or self.moves or len(minus) != 1
        if tied or not all(map(self.words.is_content, (token, *minus))):
            return found
        before, after = self.model.logits(self.first.rows).cpu().float()[:, -1]
        pool, others = self.words.like(token), self.words.like(minus[0])
        E = self.words.embeddings
        for answer in pool[before[pool].topk(min(100, len(pool))).indices].tolist():
            near = others[(E[others] @ E[answer]).topk(min(4, len(others))).indices]
            one, other = before[answer] - before[near], after[answer] - after[near]
            right = (one > 0) & (other < 0) & (one - other > self.change / 2)
            if answer != token and right.any():
                found.append((answer, (int(near[right][0]),)))
        return found

    def _answered_pairs(self, words: Tensor, scores: _Scores) -> list[_Draw]:
        """Return pairs of words after which the model itself has two answers, and is sure."""
        given = Counter(scores.top.tolist())
        forms = {form(self.words.texts[x]) for x in (self.first.token, *self.first.minus)}
        rows, sure = [], []
        for word, answer, probability in zip(
            words.tolist(), scores.top.tolist(), scores.top_probabilities.tolist(), strict=True
        ):
            known = self.words.is_content(answer) and form(self.words.texts[answer]) in forms
            # What is said of many words says nothing of any.
            if known and given[answer] <= 2 and probability > 0.15 and answer != word:
                row = self.first.rows[1].clone()
                row[self.differing[0]] = word
                rows.append(torch.cat([row, torch.tensor([answer])]))
                sure.append((word, answer))
        if not rows:
            return []
        ended = self._run(torch.stack(rows), [self.first] * len(rows), self.time).ended
        # San is no answer where Francisco follows.
        whole = [pair for pair, end in zip(sure, ended.tolist(), strict=True) if end > 0.7]
        pairs = []
        for word, answer in whole:
            for other, wrong in whole:
                if len({word, answer, other, wrong}) == 4:
                    pairs.append(self._paired((word, other), answer, (wrong,)))
        return pairs

    def _candidates(self, place: int) -> Int[Tensor, " n"]:
        """Return words for a place: the most alike of its words first, then likely ones."""
        here = self.first.rows[:, place]
        pool = self.words.like(int(here[0]))
        pool = pool[~torch.isin(pool, here)]
        E = self.words.embeddings
        alike = pool[(E[pool] @ E[here].T).max(1).values.topk(min(100, len(pool))).indices]
        if place == 0:
            return alike
        logs = self.model.logits(self.first.rows[:1, :place]).cpu()[0, -1]
        likely = pool[logs[pool].topk(min(50, len(pool))).indices]
        return torch.cat([alike, likely[~torch.isin(likely, alike)]])

    def _fitting(self, words: Int[Tensor, " n"], place: int) -> Int[Tensor, " fitting"]:
        """Return the words that fit a place of the second text.

        They are whole words, not much less likely there, and followed by what follows the first
        question's own words.
        """
        if not len(words):
            return words
        scores = self._with_each(words, place, until=place + 1)
        own = self._run(self.first.rows[:, : place + 1], [self.first] * 2)
        least = float(own.likelihoods.min()) - MARGIN
        fits = (scores.likelihoods > least) & (scores.ended > 0.9)
        if fits.any():
            # Words of another kind are followed by other words.
            fits &= scores.alike > 0.75 * scores.alike[fits].quantile(0.9)
        return words[fits]

    def _with_each(self, words: Int[Tensor, " n"], place: int, until: int | None = None) -> _Scores:
        """Return the scores of the second text, up to a place, with each of some words at one."""
        rows = self.first.rows[1].repeat(len(words), 1)
        rows = torch.where(rows == rows[:, place, None], words[:, None], rows)[:, :until]
        return self._run(rows, [self.first] * len(words), place if until else None)

    # Questions.

    def proposals(self, openings: Sequence[str], wanted: int) -> list[Proposal]:
        """Return the most probable of twice as many questions, behind some openings in turn."""
        found: list[Proposal] = []
        uses: Counter[tuple[int, ...]] = Counter()
        seen = {self.question.text}
        limit = max(3, 2 * wanted // max(1, len(self.pairs)))
        for batch in range(24):
            draws = [self._draw() for _ in range(16)]
            opening = openings[batch % len(openings)]
            for proposal, draw in self._kept(draws, opening):
                pair = tuple(draw.rows[:, self.differing].flatten().tolist())
                if proposal.question.text in seen or uses[pair] >= limit:
                    continue
                seen.add(proposal.question.text)
                uses[pair] += 1
                found.append(proposal)
            if len(found) >= 2 * wanted:
                break
        found.sort(key=lambda proposal: -proposal.likelihood)
        return found[:wanted]

    def _draw(self) -> _Draw:
        """Return the first question with other words."""
        start = self.random.choice(self.pairs) if self.pairs else self.first
        rows, token, minus = start.rows.clone(), start.token, start.minus
        if not self.moves:
            token, minus = self.random.choice(self.answers)
        # Of long sentences about two words are exchanged.
        chance = min(0.7, 2 / max(1, len(self.options) - len(self.exchanged)))
        new: dict[int, int] = {}
        for word, options in self.options.items():
            # Two words of a question are never exchanged for one.
            free = [option for option in options if option not in new.values()]
            if free and (word in self.exchanged or self.random.random() < chance):
                new[word] = self.random.choice(free)
        for word, option in new.items():
            if word in self.exchanged:
                rows[self.first.rows == word] = option
            else:
                rows[:, self.places[word]] = option
        answers = [new.get(x, x) if x in self.exchanged else x for x in (token, *minus)]
        return _Draw(rows, answers[0], tuple(answers[1:]))

    def _kept(self, draws: list[_Draw], opening: str) -> list[tuple[Proposal, _Draw]]:
        """Return the draws that are questions like the first, behind an opening."""
        base = self.openings[opening][0] if opening else self.likelihood
        asked: list[tuple[_Draw, _Draw, list[str]]] = []
        for draw in draws:
            texts = [self._behind(opening, row) for row in draw.rows]
            ids = [self.model.ids(text).cpu() for text in texts if text]
            if len(ids) == 2 and len(ids[0]) == len(ids[1]):
                asked.append((draw, draw._replace(rows=torch.stack(ids)), texts))
        kept = []
        # Rows of a batch are of one length.
        for length in sorted({long.rows.shape[1] for _, long, _ in asked}):
            of_length = [one for one in asked if one[1].rows.shape[1] == length]
            rows = torch.cat([long.rows for _, long, _ in of_length])
            scores = self._run(rows, [long for _, long, _ in of_length for _ in range(2)])
            numbers = scores.numbers.view(-1, 2).tolist()
            likelihoods = scores.likelihoods.view(-1, 2).min(1).values - base
            for (draw, _, texts), ends, likelihood in zip(
                of_length, numbers, likelihoods.tolist(), strict=True
            ):
                if likelihood < -self.margin or not ends[0] > 0 > ends[1]:
                    continue
                if ends[0] - ends[1] >= self.change / 2:
                    names = [self.words.texts[number] for number in (draw.token, *draw.minus)]
                    question = replace(
                        self.question,
                        text=texts[0],
                        token=names[0],
                        minus=tuple(names[1:]),
                        against=texts[1],
                    )
                    kept.append((Proposal(question, tuple(ends), likelihood), draw))
        return kept

    def _behind(self, opening: str, row: Tensor) -> str:
        """Return tokens as a text behind an opening, or nothing if they are not read back."""
        text = self._decoded(row)
        try:
            read = self.model.ids(text).cpu()
        except BilensError:  # nothing of it is read back
            return ""
        if not torch.equal(read, row):
            return ""
        return _after(opening, text, lowers=self.openings[opening][1]) if opening else text

    def _decoded(self, row: Tensor) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return write_out(self.model.tokenizer, row, **options)

    @cached_property
    def openings(self) -> dict[str, tuple[float, bool]]:
        """Openings behind which the model answers the first question, the most natural first.

        With how probable it is there, and whether with a small letter.
        """
        texts = [str(self.question.text), str(self.question.against)]
        found: dict[str, tuple[float, bool]] = {}
        for opening in OPENINGS:
            for lowers in (False, True):
                long = [_after(opening, text, lowers=lowers) for text in texts]
                ids = [self.model.ids(text).cpu() for text in long]
                # Not if a vocabulary has no such words.
                if len(ids[0]) != len(ids[1]) or [*map(self._decoded, ids)] != long:
                    continue
                draw = self.first._replace(rows=torch.stack(ids))
                scores = self._run(draw.rows, [draw] * 2)
                before, after = scores.numbers.tolist()
                likelihood = float(scores.likelihoods.min())
                is_better = opening not in found or likelihood > found[opening][0]
                if before > 0 > after and before - after >= self.change / 2 and is_better:
                    found[opening] = likelihood, lowers
        front = {
            name: self._run(self.model.ids(name.rstrip())[None].cpu(), [self.first])
            for name in found
        }
        order = sorted(found, key=lambda x: float(front[x].likelihoods[0]) - found[x][0])
        return {name: found[name] for name in order[:4]}

    def _run(self, rows: Tensor, draws: Sequence[_Draw], place: int | None = None) -> _Scores:
        """Return how the model finds rows of tokens, with numbers about the answers of draws."""
        if not len(rows):
            none = torch.zeros(0)
            return _Scores(none, none, none, none.long(), none, none, none)
        size = max(1, NUMBERS // (rows.shape[1] * self.model.vocab_size))
        parts = []
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            logits = self.model.logits(some).cpu().float()
            logs = logits.log_softmax(-1)
            numbers, answered = [], []
            for row, draw in enumerate(draws[start : start + size]):
                last = logits[row, -1]
                numbers.append(float(last[draw.token] - last[list(draw.minus)].mean()))
                answered.append(float(logs[row, -1, [draw.token, *draw.minus]].max().exp()))
            each = logs[:, :-1].gather(2, some[:, 1:, None])[..., 0]
            top = logs[:, -1].max(-1)
            ended = alike = torch.zeros(len(some))
            if place is not None:
                ends = self.words.ends_word if place < self.time else self.words.ends_name
                ended = logs[:, place].exp() @ ends
                # The larger Bhattacharyya coefficient with what follows in either first text.
                if place < self.time:
                    alike = ((logs[:, place] / 2).exp() @ self._following(place).T).max(1).values
            scores = (
                each.sum(1),
                torch.tensor(numbers),
                torch.tensor(answered),
                top.indices,
                top.values.exp(),
                ended,
                alike,
            )
            parts.append(scores)
        return _Scores(*map(torch.cat, zip(*parts, strict=True)))

    def _following(self, place: int) -> Float[Tensor, "2 vocab"]:
        """Return the roots of the probabilities of what follows a place of the first question."""
        logits = self.model.logits(self.first.rows[:, : place + 1]).cpu().float()
        return (logits[:, -1].log_softmax(-1) / 2).exp()
