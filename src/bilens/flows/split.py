"""Flows of questions: one pass under rules, and the flow of every part of a model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bilens.checks import ROUNDING, check_sum, detached
from bilens.errors import BilensError
from bilens.flows.ablation import with_effects
from bilens.flows.adjoints import Adjoints, LayerGraph, lacked_flows, start_flows, token_flows
from bilens.flows.audit import TextPair, check_pass, check_rules
from bilens.flows.fitted import Fitted, Score, fit, likely_answer, rounded_size
from bilens.flows.graph import DRAWN, Flow, Pairs
from bilens.flows.origin import Origin
from bilens.flows.question import NEUTRAL, Against, Answer, Question, Tokens
from bilens.flows.rules import Rules, rule
from bilens.flows.sources import AnyModel, opened
from bilens.flows.token_lens import labelled
from bilens.language.names import TokenDirection, names_of, shown_tokens
from bilens.options import Target, replaced
from bilens.settings import Between
from bilens.transformer import ResidualModel

KEPT_BYTES = 1024**3
"""Graphs of all layers are kept in memory if they take no more than about this."""
KEPT_PAIRS = 2**16
"""Pairs of positions of a layer's heads whose flows are kept, the strongest."""

OneText = Annotated[
    str | Int[Tensor, " time"],
    "one of them; flow_table, circuit and task_directions take several questions",
]
"""A text, or its tokens' numbers."""


@detached
def flow(  # noqa: PLR0913  the fields of a question
    model: AnyModel,
    text: OneText,
    token: Answer = (),
    position: int = -1,
    *,
    minus: Tokens = (),
    against: Against | None = None,
    replace: Mapping[str, str] | None = None,
    target: Target = "logit",
    labels: Annotated[int, Between(0)] = DRAWN,
    ablate: Annotated[int, Between(0)] = 0,
) -> Flow:
    """Split the change of a logit between two texts over a model's parts.

    Nothing is frozen. Both texts run side by side, and in the backward pass every operation has its
    secant between them in place of its derivative. With D the difference of a quantity and a bar
    its mean:

        product      D(ab) = a_ Db + b_ Da
        function     D f(x) = [f(x1) - f(x0)] / (x1 - x0) Dx
        softmax      Dp_i = L_i (Dz_i - sum L Dz / sum L),   L: logarithmic means of both p

    The flow of a part is w . D of its output, w the adjoint there. The flows of the tokens add up
    to the change of the logit, exactly, whatever the model computes.

    Without a second text it is the neutral one, whose tokens but the first all have the mean
    embedding of the vocabulary.

        bilens.flow(model, "The keys", " are", minus=" is", against="The key").top(10)

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        text: the text, or its tokens' numbers.
        token: the token whose logit is split, by name or number, or several, whose mean is taken;
            also an answer of several tokens, whose log-probability is split; or a direction u of
            the last normalised stream, which has no bias. By default the likeliest
            token, minus its rival; see `likely_answer`.
        position: the position whose next token is predicted, counted from the end if negative.
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text, its numbers, embeddings at each position
            or one for all positions, or texts, whose mean embedding is taken; "neutral" for the
            mean embedding of the vocabulary at all tokens but the first.
        replace: words of the text and the words that the second run has instead.
        target: the logit before a soft cap, the log-probability or the probability of the token.
        labels: number of the strongest nodes that are named by the tokens that they raise and
            lower, see `lens`; none of a model whose layers read more than the stream.
        ablate: number of the strongest nodes whose effect is measured in the running model; none
            of a model that changes the stream between its layers.

    Returns:
        The flow of every head, MLP and token; `top(k)` is the graph of the strongest.

    Raises:
        BilensError: the flows do not add up to the model's logit, or the model has an operation
            without a rule.

    Source: Shrikumar et al. 2017 for secants.
    """
    model = opened(model)
    if replace is not None:
        if against is not None:
            raise BilensError("against and replace name the second run, expected one of them")
        against = replaced(text, replace)
    if not isinstance(token, TokenDirection | Tensor | int) and not token:
        likely = likely_answer(model, text, against, position)
        token, minus = likely.token, minus if names_of(minus) else likely.minus
    question = Question(text, token, minus, against, target=target, position=position)
    (through,) = flows(model, [question])
    result = with_effects(model, labelled(model, through, labels), ablate)
    through.origin.release()
    return result


@torch.no_grad()
def flows(model: ResidualModel, questions: Sequence[Question]) -> list[Flow]:
    """Return the flow of each question; those with texts of one length run side by side.

    Raises:
        BilensError: texts or tokens do not fit the model, or flows do not add up to its numbers.
    """
    fitted = [fitted_pair(model, question) for question in questions]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, of_question in enumerate(fitted):
        groups[tuple(map(len, of_question.rows))].append(i)
    results: list[Flow | None] = [None] * len(questions)
    for numbers in groups.values():
        of_group = flows_of_length(model, [fitted[i] for i in numbers])
        for i, through in zip(numbers, of_group, strict=True):
            results[i] = through
    return [through for through in results if through is not None]


def fitted_pair(model: ResidualModel, question: Question) -> Fitted:
    """Return a question in the numbers of a model; the second text is the neutral one by default.

    Raises:
        BilensError: texts or tokens do not fit the model.
    """
    pair = question if question.has_two_texts else replace_fields(question, against=NEUTRAL)
    return fit(model, pair, padded=True)


def flows_of_length(model: ResidualModel, questions: Sequence[Fitted]) -> list[Flow]:
    """Return the flow of each question, whose texts all have one length and run side by side.

    Raises:
        BilensError: flows do not add up to the numbers of the model.
    """
    return _flows(model, Origin(model.model, partial(_adjoints, model, questions)), questions)


def adjoints_of(model: ResidualModel, questions: Sequence[Question]) -> Adjoints:
    """Return the pass of questions whose texts all have one length.

    Raises:
        BilensError: the texts do not fit, or the pass under rules is not the model's own.
        UnknownOperationError: an operation has no rule.
    """
    return _adjoints(model, [fit(model, question) for question in questions])


def _adjoints(model: ResidualModel, questions: Sequence[Fitted]) -> Adjoints:
    scores = [Score(model, question) for question in questions]
    runs = _runs(model, questions, scores)
    with runs.reading(model):
        adjoints = Adjoints(
            model.places,
            runs.ids,
            runs.score,
            positions=runs.positions,
            keep=fits(model, runs.ids),
            at=runs.at,
            lacked=max(runs.starts),
        )
    check_pass(model, adjoints, runs)
    _check_logits(model, adjoints, scores)
    return adjoints


def _runs(model: ResidualModel, questions: Sequence[Fitted], scores: Sequence[Score]) -> TextPair:
    """Return the texts of questions, and their metrics as one."""
    # The first texts of all questions, and then the second ones. Before a shorter one stands what
    # the longer one has there, with the same streams, which it does not see.
    rows_of = [(question.rows, question.starts) for question in questions]
    ids = torch.stack(
        [
            torch.cat([texts[1 - i][: starts[i]], texts[i]])
            for i in range(2)
            for texts, starts in rows_of
        ]
    )
    embeddings = {
        row: question.embeddings
        for row, question in enumerate(questions, len(questions))
        if question.embeddings is not None
    }
    rows = model.places.rows(ids) if embeddings else None
    for row, of_second in embeddings.items():
        assert rows is not None
        rows[row] = of_second

    def score(x: Float[Tensor, "texts time d_model"]) -> Float[Tensor, " texts"]:
        # Both texts of a question side by side, as rules have them.
        of_texts = x.unflatten(0, (-1, len(questions)))
        numbers = [of_question(of_texts[:, i]) for i, of_question in enumerate(scores)]
        return torch.stack(numbers, 1).flatten()

    positions = max(of_question.length for of_question in scores)
    starts = questions[0].starts
    return TextPair(ids, rows, score, positions, starts, _positions(model, ids, starts))


def _positions(
    model: ResidualModel, ids: Int[Tensor, "texts time"], starts: Sequence[int]
) -> Int[Tensor, "texts time"] | None:
    """Return the position of each token, which jump at the start of a shorter text; else None."""
    if not any(starts):
        return None
    parts, start = model.places.modules, max(starts)
    row = torch.arange(ids.shape[1], device=ids.device)
    own = row.clone()
    if parts is None or parts.positions or parts.hidden_positions:
        own[start:] -= start
    else:
        # Rotation depends on distances alone, and is the same in both texts from the end.
        own[:start] += 1
    sides = [own if before else row for before in starts]
    return torch.stack(sides).repeat_interleave(len(ids) // 2, 0)


def fits(model: ResidualModel, ids: Tensor) -> bool:
    """Return whether the graphs of all layers fit into `KEPT_BYTES`, or have to be kept."""
    return model.places.crosses or ids.numel() * bytes_of_token(model) <= KEPT_BYTES


def bytes_of_token(model: ResidualModel) -> int:
    """Return about how many bytes the graphs of all layers take for each token."""
    # Some numbers for each output of each map.
    weights = [x for x in model.places.layers[0].module.parameters() if x.dim() > 1]
    numbers = 3 * sum(x[..., 0].numel() for x in weights)
    return model.n_layers * numbers * model.places.dtype.itemsize


def _check_logits(model: ResidualModel, adjoints: Adjoints, scores: Sequence[Score]) -> None:
    """Check the logits of the last streams, of the asked tokens, against those of the model."""
    last = adjoints.last.leaf.detach()[:, -1]
    if (modules := model.places.modules) is None:
        logits, own = model.places.logits(last), adjoints.logits
        size = float(own.abs().max())
        check_sum("The logit of the last stream", logits, own, size=size)
        return
    n = modules.normalised(last.to(modules.dtype))
    for row, own in enumerate(adjoints.logits):
        score = scores[row % len(scores)]
        # The likeliest token too: a logit near 0 tells little of a wrong factor.
        tokens = [*score.tokens, *score.minus, *score.spoken, int(own.argmax())]
        W, b = modules.logit_weights(tokens)
        size = float(n[row].norm() * W.norm(dim=0).max())
        z = modules.capped(n[row].to(W) @ W + b)
        check_sum("W_U n + b_U", z, own[tokens], size=size)


def _flows(model: ResidualModel, origin: Origin, fitted: Sequence[Fitted]) -> list[Flow]:
    """Return the flow of each question of a pass.

    Raises:
        BilensError: the flows do not add up to the number.
    """
    adjoints = origin.adjoints()
    questions, time = adjoints.questions, adjoints.ids.shape[1]
    places = adjoints.places
    n_layers, n_heads = len(places.layers), places.n_heads
    like = adjoints.embedding.value.detach()
    heads = like.new_zeros(questions, n_layers, n_heads, time)
    mlps = like.new_zeros(questions, n_layers, time)
    choices = like.new_zeros(questions, n_layers)
    pairs: list[list[Pairs | None]] = [[None] * n_layers for _ in range(questions)]
    absolute, lacked = like.new_zeros(questions), like.new_zeros(questions, adjoints.lacked)
    for layer, graph in adjoints.layers():
        if graph.mlp is not None and graph.of_mlp is not None:
            mlps[:, layer] = (graph.of_mlp[:questions] * adjoints.change(graph.mlp.leaf)).sum(-1)
        if graph.heads is not None and graph.of_heads is not None:
            terms = graph.of_heads[:questions] * adjoints.change(graph.heads.leaf)
            heads[:, layer] = terms.unflatten(-1, (n_heads, -1)).sum(-1).transpose(1, 2)
            if graph.mix is not None:
                for question, of_question in enumerate(_pairs(adjoints, graph)):
                    pairs[question][layer], size = of_question
                    absolute[question] += size.to(absolute)
            else:
                absolute += heads[:, layer].abs().sum((1, 2))
        choices[:, layer] = _of_choices(adjoints, graph, lacked)
    absolute += mlps.abs().sum((1, 2))
    embeddings = token_flows(adjoints, adjoints.of_first)
    embeddings[:, : adjoints.lacked] += lacked
    for starts in (embeddings, choices):
        absolute += starts.abs().flatten(1).sum(1)
    flows = []
    for question in range(questions):
        entry, tokens = fitted[question], tuple(shown_tokens(model, adjoints.ids[question]))
        flow = Flow(
            question=entry.question,
            fitted=entry,
            ids=adjoints.ids[question].clone(),
            tokens=tokens,
            second=_second_tokens(model, entry, tokens),
            values=(
                float(adjoints.numbers[question]),
                float(adjoints.numbers[question + questions]),
            ),
            heads=heads[question].clone(),
            mlps=mlps[question].clone(),
            embeddings=embeddings[question].clone(),
            choices=choices[question].clone(),
            pairs=tuple(pairs[question]),
            absolute=float(absolute[question]),
            rounded=rounded_size([entry] * 2, adjoints.logits[question::questions]),
            streams=adjoints.last.leaf.detach()[question::questions].clone(),
            changes_stream=adjoints.changes_stream,
            origin=origin,
            row=question,
        )
        try:
            check_flow(flow)
        except BilensError:
            if not cancels(flow):
                scores = [Score(model, of_question) for of_question in fitted]
                check_rules(model, _runs(model, fitted, scores))  # which names the operation
            raise
        flows.append(flow)
    return flows


def _second_tokens(model: ResidualModel, entry: Fitted, tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens of a second text, at the places of the first's; none of another run."""
    if entry.corrupt is None or entry.embeddings is not None:
        return ()
    return (*tokens[: entry.starts[1]], *shown_tokens(model, entry.corrupt))


def _of_choices(
    adjoints: Adjoints, layer: LayerGraph, lacked: Float[Tensor, "questions lacked"]
) -> Float[Tensor, " questions"]:
    """Return the flow of what a layer chose; add that of seen tokens which one text lacks."""
    total = adjoints.embedding.leaf.new_zeros(adjoints.questions)
    for leaf, w in zip(layer.leaves, layer.of_leaves, strict=True):
        if w is not None:
            of_seen = lacked_flows(adjoints, leaf, w).to(total)
            rest = start_flows(adjoints, leaf.value, w).to(total) - of_seen.sum(1)
            # Where all of it is of such tokens, the difference of both sums is rounding.
            total += rest.where(rest.abs() > ROUNDING * of_seen.abs().sum(1), 0)
            lacked += of_seen
    return total


@torch.no_grad()
def _pairs(adjoints: Adjoints, layer: LayerGraph) -> Iterator[tuple[Pairs, Tensor]]:
    """Yield the strongest pairs of each question, and the sum of all sizes."""
    mix = layer.mix
    assert mix is not None
    assert layer.of_heads is not None
    questions, time = adjoints.questions, adjoints.ids.shape[1]
    w = layer.of_heads.unflatten(-1, (mix.output.shape[1], -1)).transpose(1, 2)[:questions]
    attention = w.new_zeros(questions, time, time)
    sizes = w.new_zeros(questions)
    blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(questions)]
    for heads in mix.blocks():
        pattern, values = mix.pattern(heads), mix.values[:, heads].detach()
        attention += pattern[:questions].abs().sum(1)
        of_texts = w[:, heads].repeat(2, 1, 1, 1)
        flows = adjoints.change(pattern * (of_texts @ values.mT))
        sizes += flows.abs().sum((1, 2, 3))
        for question in range(questions):
            index = flows[question].nonzero()
            of_pairs = flows[question][tuple(index.T)]
            index[:, 0] += heads.start
            blocks[question].append(_strongest(of_pairs, index))
    for question in range(questions):
        flows, places = (torch.cat(parts) for parts in zip(*blocks[question], strict=True))
        flows, places = _strongest(flows, places)
        yield Pairs(flows, places.int(), attention[question] / mix.output.shape[1]), sizes[question]


def _strongest(flows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    if len(flows) <= KEPT_PAIRS:
        return flows, places
    index = flows.abs().topk(KEPT_PAIRS).indices
    return flows[index], places[index]


def cancels(flow: Flow) -> bool:
    """Return whether parts or logits are so much larger than the change that rounding hides it."""
    return ROUNDING * (flow.absolute + flow.rounded) > 0.01 * abs(flow.value)


def check_flow(flow: Flow) -> None:
    """Raise unless the flows of embeddings and choices add up to the value.

    They do within rounding of the absolute flow, and within a hundredth of the value.
    """
    starts = (flow.embeddings, flow.choices)
    total = float(sum(part.cpu().double().sum() for part in starts))
    ends = sum(map(abs, flow.values))
    if cancels(flow) and abs(total - flow.value) > 0.01 * abs(flow.value) + ROUNDING * ends:
        raise BilensError(
            f"The flow of tokens and choices adds up to {total:.6g}, expected "
            f"{flow.value:.6g}: its parts are {flow.absolute:.2g} in all, of logits up to "
            f"{flow.rounded:.2g}, and the change is too small beside their rounding. Take a text "
            "or mean embeddings as the second run, or open the model with dtype=torch.float64"
        )
    size = flow.absolute + flow.rounded
    check_sum("The flow of tokens and choices", total, flow.value, size=size)


# Attention of bilens's own models without softmax: by its equations.


@rule("bilinear_attention")
def _attended(mode: Rules, func: Any, q: Tensor, k: Tensor, *others: Any, **options: Any) -> Tensor:
    constant = options.pop("constant", None)
    with mode:
        if constant is not None:
            # One more coordinate of queries and keys, since both models may have their own.
            column = constant.reshape(-1, q.shape[1], 1, 1).expand(len(q), -1, q.shape[2], 1)
            q, k = torch.cat([q, column], -1), functional.pad(k, (0, 1), value=1)
        return func(q, k, *others, **options, kernel="reference")
