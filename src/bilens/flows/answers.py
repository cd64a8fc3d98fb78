"""The flow of each token of an answer: from which tokens before it each one comes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import ROUNDING, detached
from bilens.data.texts import write_out
from bilens.flows.fitted import Fitted
from bilens.flows.question import Against, Question
from bilens.flows.sources import AnyModel, opened
from bilens.flows.split import OneText, fitted_pair, flows
from bilens.language.contexts import continued
from bilens.language.names import shown_tokens
from bilens.options import Target
from bilens.progress import progress_bar
from bilens.sections import Columns, Fact, distinct
from bilens.settings import Count, Said
from bilens.transformer import ResidualModel

WRITTEN = 20
"""Tokens that a model writes by itself, at most."""
NEUTRAL_TEXT = "the neutral text"
"""Name of the second run without a second text."""

Words = Annotated[
    str | Int[Tensor, " tokens"], Said("the text of an answer, or its tokens' numbers")
]
"""An answer of any number of tokens."""


@dataclass(frozen=True, eq=False, repr=False)
class AnswerFlows(Reading):
    """From which tokens of the text, and of the answer, each token of the answer comes.

    Attributes:
        tokens: those of the text, and of the answer without its last.
        spoken: those of the answer.
        words: the answer as it is written.
        values: the number of each token of the answer in each run.
        flows: the flow of each token (column) to each token of the answer (row).
        choices: the flow of what the layers chose, such as experts, to each token of the answer.
        target: what the number is.
        second: name of the second run.
    """

    tokens: tuple[str, ...]
    spoken: tuple[str, ...]
    words: str
    values: Float[Tensor, "answer 2"]
    flows: Float[Tensor, "answer tokens"]
    choices: Float[Tensor, " answer"]
    target: str
    second: str

    has_plain_fields: ClassVar[bool] = True
    is_picture: ClassVar[bool] = True
    axes: ClassVar[dict[str, str]] = {"x": "answer", "y": "change"}

    @property
    def title(self) -> str:
        return f"Where does each token of “{self.words.strip()}” come from?"

    @property
    def changes(self) -> Float[Tensor, " answer"]:
        """The change of each token's number between the runs, which its row adds up to."""
        return self.values[:, 0] - self.values[:, 1]

    @property
    def is_neutral(self) -> bool:
        """Whether the second run is the neutral text."""
        return self.second == NEUTRAL_TEXT

    @property
    def is_before(self) -> Bool[Tensor, "answer tokens"]:
        """Whether each token (column) is before each token of the answer (row)."""
        return torch.ones_like(self.flows).tril(self.flows.shape[1] - len(self.spoken)) > 0

    def facts(self) -> list[Fact]:
        sums = self.flows.sum(1) + self.choices
        error = float((sums - self.changes).abs().max() / self.changes.abs().max().clamp(min=1e-30))
        return [
            (f"sum of the changes of the {self.target}", float(self.changes.sum())),
            ("largest error of a row's sum", f"{error:.1e}"),
        ]

    def strongest(self, row: int, count: int = 3) -> dict[str, float]:
        """Return the tokens with the largest flows to a token of the answer, by their names."""
        names, flows = distinct(self.tokens), self.flows[row]
        order = flows.abs().argsort(descending=True, stable=True)[:count].tolist()
        return {names[i]: float(flows[i]) for i in order if flows[i]}

    def columns(self) -> Columns:
        """Return a row for each token of the answer, and a column for each token before it."""
        flows = torch.where(self.is_before, self.flows, torch.nan)
        columns = [self.spoken, self.changes.tolist(), *flows.T.tolist()]
        names = distinct(["answer", "change", *self.tokens, "choices"])
        if float(self.choices.abs().max()) > ROUNDING * float(self.flows.abs().sum()):
            columns.append(self.choices.tolist())
        return dict(zip(names, columns, strict=False))


@detached
def answer_flows(
    model: AnyModel,
    text: OneText,
    answer: Words | None = None,
    *,
    against: Against | None = None,
    generate: Count = WRITTEN,
    target: Literal["log-probability", "probability"] = "log-probability",
) -> AnswerFlows:
    """Split each token of an answer exactly over the tokens before it.

    Each token of the answer follows the text and the tokens before it. Its flow is that of its
    number between this and a second run, see `bilens.flow`. After a second text stand the same
    tokens of the answer, which have no flow. Without one the run is the neutral one: all tokens but
    the first, of the answer too, have the mean embedding of the vocabulary.

        bilens.flows.answer_flows(model, "The keys to the cabinet", " are on the table").frame()

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        text: the text, or its tokens' numbers.
        answer: the text that follows, or its tokens' numbers; by default what the model writes,
            the likeliest token each time.
        against: the second run of the text; see `bilens.flow`.
        generate: number of tokens that the model writes, at most; of no effect beside an answer.
        target: the log-probability or the probability of each token.

    Returns:
        A row for each token of the answer, and a column for each token before it.

    Raises:
        BilensError: the text or the answer does not fit the model, or as `bilens.flow`.
    """
    model = opened(model)
    ids = model.ids(text)
    if answer is None:
        ids_of_answer = continued(model, ids, generate, temperature=0.0)[len(ids) :]
    else:
        tokens = model.answer(answer) if isinstance(answer, str) else model.ids(answer)
        ids_of_answer = torch.as_tensor(tokens, device=ids.device)
    rows = list[tuple[tuple[float, float], Tensor, float]]()
    first = fitted_pair(model, Question(ids, int(ids_of_answer[0]), (), against))
    questions = _questions(model, first, ids_of_answer, target)
    for question in progress_bar("tokens of the answer", questions, total=len(ids_of_answer)):
        (through,) = flows(model, [question])
        # There is no room for the graph of this pass beside that of the next.
        through.origin.release()
        starts = through.embeddings.cpu().double(), float(through.choices.cpu().double().sum())
        rows.append((through.values, *starts))
    width = len(rows[-1][1])
    return AnswerFlows(
        tokens=through.tokens,
        spoken=(names := tuple(shown_tokens(model, ids_of_answer))),
        words=write_out(model.tokenizer, ids_of_answer) if model.tokenizer else " ".join(names),
        values=torch.tensor([values for values, _, _ in rows], dtype=torch.float64),
        flows=torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for _, x, _ in rows]),
        choices=torch.tensor([choices for _, _, choices in rows], dtype=torch.float64),
        target=target,
        second=_name(first.question),
    )


def _name(question: Question) -> str:
    if question.is_neutral:
        return NEUTRAL_TEXT
    return f"“{question.against}”" if isinstance(question.against, str) else "the second run"


def _questions(
    model: ResidualModel, first: Fitted, answer: Tensor, target: Target
) -> Iterator[Question]:
    """Yield a question for each token of an answer, which follows the text and earlier tokens.

    `first` is that of the first one.
    """
    second = first.question.against
    # What has the same embedding everywhere has it at the answer too.
    is_text_long = first.embeddings is None or not (
        first.question.is_neutral or (isinstance(second, Tensor) and second.dim() == 1)
    )
    for n, token in enumerate(answer.tolist()):
        before, against = answer[:n], second
        if is_text_long:
            rows = first.corrupt if first.embeddings is None else first.embeddings
            assert rows is not None
            further = before if first.embeddings is None else model.places.rows(before)
            against = torch.cat([rows, further])
        yield Question(torch.cat([first.clean, before]), token, (), against, target=target)
