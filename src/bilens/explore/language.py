"""What the explorer shows of a language model: functions from a state to figures and tables."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Int
from torch import Tensor

from bilens.data import Corpus, clean, token_id
from bilens.errors import BilensError, NotBilinearError
from bilens.explore.layout import note_html
from bilens.explore.state_checks import StateError, check_ranges
from bilens.nn.language import LanguageModel
from bilens.read.language import (
    ContextIndex,
    FoundContext,
    LogitTerms,
    Output,
    contribution,
    example_outputs,
    following,
    interaction,
    output_direction,
    preceding,
    skip_trigrams,
    split_by_eigenvectors,
    split_logits,
    token_names,
)
from bilens.report import ContextList, contexts_html, spectrum_figure, summands_figure, table_html
from bilens.report.language import context_line, ngram_table
from bilens.report.page import Table
from bilens.tensor import Spectrum

__all__ = ["LanguageState", "LanguageView"]

PLACES = 40_000
"""Places of the validation texts that contexts are looked up in."""

FREQUENT = 500
"""Tokens that skip-trigrams are made of: all pairs of a large vocabulary take seconds."""

OUTERMOST, CONTEXTS, NGRAMS, NEXT, NAMED = 4, 8, 10, 8, 8
LONGEST_PROMPT = 2000


@dataclass(frozen=True)
class LanguageState:
    """What the screen shows.

    Attributes:
        token: what is predicted.
        minus: tokens whose mean is taken away.
        layer: number of the block.
        number: which of the outermost eigenvectors' contexts are shown.
        prompt: the text whose next token is split.
        chosen: the next token whose logit is split; empty for the most likely one.
    """

    token: str
    minus: tuple[str, ...] = ()
    layer: int = 0
    number: int = 0
    prompt: str = ""
    chosen: str = ""


class LanguageView:
    """A language model read once, and what each state shows of it.

    Args:
        model: with bilinear MLPs.
        corpus: texts in its tokens.

    Raises:
        NotBilinearError: an MLP is no tensor.
    """

    def __init__(self, model: LanguageModel, corpus: Corpus) -> None:
        self.model, self.corpus, self.tokenizer = model, corpus, corpus.tokenizer
        model.mlp(0).tensor("blocks[0].mlp")
        self.names = token_names(self.tokenizer, torch.arange(model.config.vocab_size))
        self.index(0)
        output = example_outputs(corpus)[0]
        first = self.tokenizer.decode(self._index_of[0].ids[0][:8], skip_special_tokens=True)
        self.start = LanguageState(output.token, output.minus, prompt=str(first))

    @property
    def facts(self) -> list[tuple[str, str]]:
        """A name and a value each."""
        config = self.model.config
        return [
            ("data", self.corpus.name),
            ("parameters", f"{sum(p.numel() for p in self.model.parameters()):,}"),
            ("blocks", str(config.n_layers)),
            ("width", str(config.d_model)),
            ("heads", str(config.n_heads)),
            ("vocabulary", f"{config.vocab_size:,}"),
        ]

    def checked(self, state: LanguageState) -> LanguageState:
        """The state, if the model has it.

        Raises:
            StateError: it has no such token, block or eigenvector, or the prompt is too long.
        """
        for field, names in (
            ("token", [state.token]),
            ("minus", state.minus),
            ("chosen", filter(None, [state.chosen])),
        ):
            for name in names:
                try:
                    token_id(self.tokenizer, name)
                except BilensError as error:
                    raise StateError(field, str(error).removeprefix("token: ")) from error
        config = self.model.config
        eigenvectors = min(2 * OUTERMOST, config.d_model)
        check_ranges(state, layer=(0, config.n_layers - 1), number=(0, eigenvectors - 1))
        if len(state.prompt) > LONGEST_PROMPT:
            raise StateError(
                "prompt",
                f"{len(state.prompt):,} letters are too many, up to {LONGEST_PROMPT:,} are read",
            )
        return state

    def index(self, layer: int) -> ContextIndex:
        """Texts with what the block's MLP reads, run once."""
        if layer not in self._index_of:
            n_ctx = self.model.config.n_ctx
            rows = (row["input_ids"] for row in self.corpus.validation)
            texts = islice(rows, max(1, PLACES // n_ctx))
            self._index_of[layer] = ContextIndex(self.model, texts, layer=layer)
        return self._index_of[layer]

    @cached_property
    def _index_of(self) -> dict[int, ContextIndex]:
        return {}

    @cached_property
    def frequent(self) -> list[int]:
        """The most frequent tokens of the texts, the most frequent first."""
        counts = torch.bincount(self.index(0).ids.flatten(), minlength=len(self.names))
        return counts.argsort(descending=True)[:FREQUENT].tolist()

    def spectrum(self, state: LanguageState) -> Spectrum:
        """All eigenvectors of the direction."""
        return self._spectrum(state.token, state.minus, state.layer)

    @lru_cache(maxsize=8)  # noqa: B019  a view lives as long as its app
    def _spectrum(self, token: str, minus: tuple[str, ...], layer: int) -> Spectrum:
        direction = self._direction(token, minus)
        return interaction(self.model, direction, layer).eigh()

    def _direction(self, token: str, minus: tuple[str, ...]) -> Tensor:
        numbers = [token_id(self.tokenizer, name) for name in minus]
        return output_direction(self.model, token_id(self.tokenizer, token), numbers)

    def title(self, state: LanguageState) -> str:
        """What the direction is called."""
        return str(Output(state.token, state.minus))

    def spectrum_picture(self, state: LanguageState) -> go.Figure:
        """The eigenvalues of the direction."""
        return spectrum_figure(self.spectrum(state), title=f"Spectrum of {self.title(state)}")

    def eigenvectors(self, state: LanguageState) -> list[str]:
        """What the outermost eigenvectors are called."""
        values = self.spectrum(state).outermost(OUTERMOST).values.tolist()
        signs = ["P" if value > 0 else "N" for value in values]
        return [
            f"{sign}{signs[: i + 1].count(sign)}  λ = {value:+.3g}"
            for i, (sign, value) in enumerate(zip(signs, values, strict=True))
        ]

    def contexts_page(self, state: LanguageState) -> str:
        """The texts in which the chosen eigenvector is most active, coloured by contribution."""
        spectrum = self.spectrum(state).outermost(OUTERMOST)
        one = Spectrum(
            spectrum.values[state.number, None],
            spectrum.vectors[state.number, None],
            spectrum.residuals[state.number, None],
            spectrum.constant,
        )
        (found,) = self.index(state.layer).top_contexts(one, CONTEXTS)
        lines = [
            context_line(
                self.tokenizer,
                FoundContext(c, contribution(self.model, one, 0, c, state.layer)),
            )
            for c in found
        ]
        return contexts_html(ContextList(self.eigenvectors(state)[state.number], lines))

    def ngram_page(self, state: LanguageState) -> str:
        """What precedes and follows the token, and skip-trigrams; or why there is none."""
        token = token_id(self.tokenizer, state.token)
        try:
            frames = {
                f"before {state.token}": preceding(self.model, self.tokenizer, token, k=NGRAMS),
                f"after {state.token}": following(self.model, self.tokenizer, token, k=NGRAMS),
            }
            direction = self._direction(state.token, state.minus)
            for head in range(self.model.config.n_heads):
                frames[f"A … B → {self.title(state)}, head {head}"] = skip_trigrams(
                    self.model, self.tokenizer, direction, head, k=NGRAMS, among=self.frequent
                )
        except NotBilinearError as error:
            return note_html(str(error))
        tables = [
            table_html(ngram_table(frame, caption), frame, f"n-grams-{number}")
            for number, (caption, frame) in enumerate(frames.items())
        ]
        return f'<div class="tables">{"".join(tables)}</div>'

    def ids(self, state: LanguageState) -> Int[Tensor, " time"]:
        """The tokens of the prompt, the last ones where there are too many.

        Raises:
            BilensError: there are none.
        """
        config = self.model.config
        ids = self.tokenizer(clean(state.prompt), add_special_tokens=False)["input_ids"]
        start = [] if config.bos_token_id is None else [config.bos_token_id]
        whole = [*start, *ids][-config.n_ctx :]
        if not whole:
            raise BilensError("prompt is empty; expected some text")
        return torch.tensor(whole, device=self.model.device)

    def prediction(self, state: LanguageState) -> tuple[str, list[str], go.Figure | None]:
        """The most likely next tokens by path, their names, and one of them by eigenvectors."""
        ids = self.ids(state)
        try:
            terms = split_logits(self.model, ids)
        except NotBilinearError as error:
            return note_html(str(error)), [], None
        logits = terms.total()
        best = logits.topk(min(NEXT, len(logits))).indices
        frame = self._by_path(terms, logits, best)
        likely = token_names(self.tokenizer, best)
        chosen = state.chosen or likely[0]
        parts = split_by_eigenvectors(
            self.model, ids, terms, token_id(self.tokenizer, chosen), NAMED
        )
        summands = [
            *zip(parts.sources, parts.residual.tolist(), strict=True),
            *(
                (f"MLP, {number}. of λ = {value:+.2g}", active)
                for number, (value, active) in enumerate(
                    zip(parts.eigenvalues.tolist(), parts.activations.tolist(), strict=True), 1
                )
            ),
            ("MLP, all others", parts.rest),
        ]
        names, values = zip(*summands, strict=True)
        return (
            table_html(_path_table(frame), frame, "next-token"),
            likely,
            summands_figure(names, values, title=f"The logit of {chosen}"),
        )

    def _by_path(self, terms: LogitTerms, logits: Tensor, best: Int[Tensor, " n"]) -> pd.DataFrame:
        paths = {name: terms.residual[row, best].tolist() for row, name in enumerate(terms.sources)}
        return pd.DataFrame(
            {
                "token": token_names(self.tokenizer, best),
                "probability": logits.softmax(0)[best].tolist(),
                "logit": logits[best].tolist(),
                **paths,
                "MLP": terms.pairs.sum((0, 1))[best].tolist(),
            }
        )


def _path_table(frame: pd.DataFrame) -> Table:
    rows = [
        (token, f"{probability:.1%}", *(f"{value:+.2f}" for value in values))
        for token, probability, *values in frame.itertuples(index=False)
    ]
    return Table(tuple(frame.columns), rows, "The most likely next tokens, by path", words=1)
