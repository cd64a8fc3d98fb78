"""Summary of a language model: its size, its loss, and how it predicts one token of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
from torch.nn import functional

from bilens.analysis import Reading, analysis
from bilens.checks import detached
from bilens.data import Corpus
from bilens.errors import BilensError, NotBilinearError
from bilens.read.flow.reading import FlowReading, read_flow
from bilens.read.language.names import TokenDirection, in_words, token_names
from bilens.read.language.outputs import model_facts
from bilens.residual import ResidualModel
from bilens.sections import Fact, Section, Table
from bilens.settings import Count

EXAMPLE = ("The keys to the cabinet", " are", " is")
"""A prompt and two next tokens, which models of English text tell apart by the number of a noun."""
LIKELY, NODES, SHOWN = 6, 8, 80
PROMPT_TOKENS, LARGE_VOCABULARY = 8, 5000


@dataclass(frozen=True, eq=False, repr=False)
class LanguageSummary(Reading):
    """Summary of a language model, with the flow of one logit on a prompt.

    Attributes:
        about: names and values of its sizes.
        loss: mean negative log-likelihood of a token of the validation texts, in nats.
        n_tokens: number of tokens that the loss is measured on.
        next_tokens: most likely next tokens of the prompt, with their probabilities.
        flow: flow of the prompt's logit.
        left_out: the parts that the page leaves out, in sentences.
    """

    about: tuple[tuple[str, str], ...]
    loss: float
    n_tokens: int
    next_tokens: pd.DataFrame
    flow: FlowReading
    left_out: str

    title: ClassVar[str] = "Summary"
    formats: ClassVar[dict[str, str]] = {"probability": ".1%", "flow": "+.3g"}

    @property
    def is_example(self) -> bool:
        """True if the prompt is the example of models of English text."""
        return str(self.flow.question.text) == EXAMPLE[0]

    def facts(self) -> list[Fact]:
        """Return the model's sizes and its loss."""
        return [
            *self.about,
            (f"loss on {self.n_tokens:,} tokens, nats", round(self.loss, 3)),
            ("perplexity", round(float(torch.tensor(self.loss).exp()), 2)),
        ]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the next tokens, and the strongest heads and MLPs of the prompt's flow."""
        return {
            "next tokens": self.next_tokens,
            "strongest heads": self._strongest("head"),
            "strongest MLPs": self._strongest("mlp"),
        }

    def _strongest(self, *kinds: str) -> pd.DataFrame:
        """Return the nodes of these kinds with the largest absolute flow."""
        nodes = [node for node in self.flow.flow.nodes if node.kind in kinds]
        nodes = sorted(nodes, key=lambda node: -abs(node.flow))[:NODES]
        tokens = self.flow.page.tokens
        return pd.DataFrame(
            {"node": [node.name(tokens) for node in nodes], "flow": [node.flow for node in nodes]}
        )

    def sections(self) -> list[Section]:
        """Return the summary and the flow of the prompt."""
        tables = [Table(f, name, self.formats) for name, f in self.tables().items()]
        prompt, value = str(self.flow.question.text), self.flow.page.value
        text = (
            f"{self.left_out}After “{prompt}” the model predicts the tokens below. The flow splits "
            f"the logit of {self.flow.question.direction.words}, {value:+.3g}, over all parts of "
            "the model. Blue and plus raise it, red and minus lower it."
        )
        return [Section(self.title, text, [tables[:1], tables[1:]]), *self.flow.sections()]

    def record(self) -> dict[str, Any]:
        """Return the numbers for JSON, with the graph of the flow."""
        return {**super().record(), "flow": self.flow.record()}


@analysis("summary")
@detached
def read_summary(
    model: ResidualModel,
    corpus: Corpus,
    prompt: str = "",
    direction: TokenDirection | None = None,
    *,
    n_tokens: Count = 2048,
) -> LanguageSummary:
    """Measure a language model's loss, and split a logit of a prompt over its parts.

    Args:
        model: the model.
        corpus: texts in the model's tokens.
        prompt: a text; by default an example that suits the vocabulary.
        direction: the token whose logit is split; by default the most likely next token, minus
            the second.
        n_tokens: number of tokens of the validation texts that the loss is measured on.

    Raises:
        BilensError: a token is unknown.
    """
    # Without a prompt the page shows an example, whose tokens belong to it.
    likely_pair = direction
    if not prompt:
        prompt, likely_pair = example_prompt(model, corpus)
    logits = model.logits(model.ids(prompt)[None])[0, -1]
    best = logits.topk(min(LIKELY, len(logits))).indices
    names = token_names(model, best)
    frame = pd.DataFrame(
        {
            "token": [in_words(name) for name in names],
            "probability": logits.softmax(-1)[best].tolist(),
        }
    )
    split = likely_pair or TokenDirection(names[0], tuple(names[1:2]))
    loss, counted = text_loss(model, [row["input_ids"] for row in corpus.validation], n_tokens)
    return LanguageSummary(
        about=model_facts(model, corpus),
        loss=loss,
        n_tokens=counted,
        next_tokens=frame,
        flow=read_flow(model, prompt, split, shown=SHOWN),
        left_out=_left_out(model),
    )


def example_prompt(
    model: ResidualModel, corpus: Corpus | None
) -> tuple[str, TokenDirection | None]:
    """Return a prompt with the logit to split, or the start of a text of the corpus without one."""
    text, token, minus = EXAMPLE
    if corpus is None or model.vocab_size > LARGE_VOCABULARY:
        # Small vocabularies cut these words into pieces, and know no such sentence.
        try:
            for name in (token, minus):
                model.token(name)
            return text, TokenDirection(token, (minus,))
        except BilensError:
            pass
    if corpus is None:
        return "", None
    first = corpus.validation[0]["input_ids"][:PROMPT_TOKENS]
    return str(corpus.tokenizer.decode(first, True)).strip(), None


def text_loss(
    model: ResidualModel, texts: Sequence[torch.Tensor], n_tokens: int
) -> tuple[float, int]:
    """Return the mean loss of the first tokens of texts, in nats, and their number."""
    total, counted = 0.0, 0
    for ids in texts:
        if counted >= n_tokens:
            break
        logits = model.logits(ids[None].to(model.device))[0, :-1]
        # Weighed by length: texts are of different numbers of tokens.
        total += float(functional.cross_entropy(logits.float(), ids[1:].to(logits.device))) * (
            len(ids) - 1
        )
        counted += len(ids) - 1
    return total / max(counted, 1), counted


def is_bilinear(model: ResidualModel) -> bool:
    """Return True if the first layer's MLP is a tensor, whose eigenvectors can be read."""
    try:
        model.mlp(0)
    except NotBilinearError:
        return False
    return True


def _left_out(model: ResidualModel) -> str:
    """Return sentences on the parts of a page that are left out or approximate for this model."""
    if model.n_layers == 1 and not model.parts.has_norms:
        return ""
    reasons = ["other layers"] * (model.n_layers > 1) + ["norms"] * model.parts.has_norms
    return (
        f"Left out: sections about the weights of a layer, such as those of --layer 0, ignore "
        f"{' and '.join(reasons)}. They rank tokens, and their numbers are no logits. The flow is "
        "exact, with norms, patterns and gates held at their values on its text. "
    )
