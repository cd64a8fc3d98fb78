"""Flows of questions: one pass under rules, and the flow of every part of a model."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bilens.checks import EPS, ROUNDING, check_sum, detached
from bilens.errors import BilensError
from bilens.flows.ablation import measurable, name_by_measurement
from bilens.flows.adjoints import Adjoints, LayerGraph, first_flows, start_flows
from bilens.flows.fitted import Fitted, Score, fit
from bilens.flows.graph import DRAWN, Flow, Pairs
from bilens.flows.origin import Origin
from bilens.flows.question import Against, Answer, Question, Tokens, likely_answer, replaced
from bilens.flows.rules import RELEVANCE, SECANTS, Rule, Rules, Shared, rule
from bilens.flows.sources import AnyModel, opened
from bilens.language.names import TokenDirection, names_of, shown_tokens
from bilens.options import Target
from bilens.settings import Between
from bilens.transformer import ResidualModel
from bilens.transformer.passes import embedded

KEPT_BYTES = 1024**3
"""Graphs of all layers are kept in memory if they take no more than about this."""
KEPT_PAIRS = 2**16
"""Pairs of positions of a layer's heads whose flows are kept, the strongest."""

OneText = Annotated[
    str | Int[Tensor, " time"], "one of them; circuit and task_directions take several questions"
]
"""A text, or its tokens' numbers."""


@detached
def flow(  # noqa: PLR0913  both kinds of flow have one signature
    model: AnyModel,
    text: OneText,
    token: Answer = (),
    position: int = -1,
    *,
    minus: Tokens = (),
    against: Against | None = None,
    replace: Mapping[str, str] | None = None,
    target: Target = "logit",
    through_patterns: bool = False,
    ablate: Annotated[int, Between(0)] = DRAWN,
) -> Flow:
    """Split the change of a logit between two texts, or a logit on one, over a model's parts.

    **Two texts** (`against` or `replace`): nothing is frozen. Both run side by side, and in the
    backward pass every operation has its secant between them in place of its derivative. With D the
    difference of a quantity and a bar its mean:

        product      D(ab) = a_ Db + b_ Da
        function     D f(x) = [f(x1) - f(x0)] / (x1 - x0) Dx
        softmax      Dp_i = L_i (Dz_i - sum L Dz / sum L),   L: logarithmic means of both p

    The flow of a part is w . D of its output, w the adjoint there. The flows of the tokens add up
    to the change of the logit, exactly, whatever the model computes.

    **One text**: layer-wise relevance propagation with frozen patterns (AttnLRP, RelP). Held fixed
    are norms' scales, attention patterns and the ratios act(g) / g of gates, and every product of
    two factors gives half to each. It sees no effect through a pattern.

        bilens.flow(model, "The keys", " are", minus=" is", against="The key").top(10)

    Args:
        model: any, also of transformers, or a name or folder that `bilens.load` opens.
        text: the text, or its tokens' numbers.
        token: the token whose logit is split, by name or number, or several, whose mean is taken;
            between two texts also an answer of several tokens, whose log-probability is split; or a
            direction u of the last normalised stream, which has no bias. By default the likeliest
            token, minus its rival; see `likely_answer`.
        position: the position whose next token is predicted, counted from the end if negative.
        minus: tokens whose mean logit is subtracted.
        against: the second run: a text of as many tokens, its numbers, embeddings at each position
            or one for all positions, or texts. Of several texts the mean embedding is taken.
        replace: words of the text and the words that the second run has instead.
        target: the logit before a soft cap, the log-probability or the probability of the token.
        through_patterns: on one text, split patterns of bilinear and squared attention too. A head
            is a product of five factors then, and each one carries a fifth.
        ablate: number of the strongest nodes whose effect is measured in the running model, and
            which are named by the tokens that it changes.

    Returns:
        The flow of every head, MLP and token; `top(k)` is the graph of the strongest.

    Raises:
        BilensError: the flows do not add up to the model's logit, or the model has an operation
            without a rule.

    Source: Shrikumar et al. 2017 for secants; for one text Achtibat et al. 2024 (arXiv 2402.05602)
        and Rezaei Jafari et al. 2025 (arXiv 2508.21258).
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
    (through,) = flows(model, [question], through_patterns=through_patterns)
    named = measurable(model, through)[:ablate] if ablate else []
    result = name_by_measurement(model, through, named)
    through.origin.release()
    return result


@torch.no_grad()
def flows(
    model: ResidualModel, questions: Sequence[Question], *, through_patterns: bool = False
) -> list[Flow]:
    """Return the flow of each question; those with two texts of one length run side by side.

    Raises:
        BilensError: texts or tokens do not fit the model, or flows do not add up to its numbers.
    """
    if through_patterns:
        _check_patterns(model, questions)
    fitted = [fit(model, question) for question in questions]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, of_question in enumerate(fitted):
        # On one text constants are starts of the flow, and those of several cannot be told apart.
        alone = number if of_question.corrupt is None else -1
        groups[len(of_question.clean), alone].append(number)
    results: list[Flow | None] = [None] * len(questions)
    for numbers in groups.values():
        asked = [fitted[number] for number in numbers]
        run = partial(_adjoints, model, asked, through_patterns=through_patterns)
        of_group = _flows(model, Origin(model.model, run), asked)
        for number, through in zip(numbers, of_group, strict=True):
            results[number] = through
    return [through for through in results if through is not None]


def adjoints_of(
    model: ResidualModel, questions: Sequence[Question], *, through_patterns: bool = False
) -> Adjoints:
    """Return the pass of questions of one length: all with two texts, or a single one with one."""
    fitted = [fit(model, question) for question in questions]
    return _adjoints(model, fitted, through_patterns=through_patterns)


def _adjoints(
    model: ResidualModel, questions: Sequence[Fitted], *, through_patterns: bool
) -> Adjoints:
    two_texts = questions[0].corrupt is not None
    scores = [Score(model, question) for question in questions]
    if not two_texts and questions[0].target != "logit":
        raise BilensError(
            f"target={questions[0].target!r} needs two runs; add against, or take target='logit'"
        )
    # The first texts of all questions, and then the second ones.
    ids = torch.stack(
        [row for rows in zip(*(x.rows for x in questions), strict=True) for row in rows]
    )
    tokens = [question.embeddings for question in questions]

    def score(x: Float[Tensor, "texts time d_model"]) -> Float[Tensor, " texts"]:
        # Both texts of a question side by side, as rules have them.
        of_texts = x.unflatten(0, (-1, len(questions)))
        numbers = [of_question(of_texts[:, i]) for i, of_question in enumerate(scores)]
        return torch.stack(numbers, 1).flatten()

    given: AbstractContextManager[None] = nullcontext()
    if any(of_second is not None for of_second in tokens):
        rows = model.places.rows(ids)
        for number, of_second in enumerate(tokens, len(questions)):
            if of_second is not None:
                rows[number] = of_second
        given = embedded(model, rows)
    with given:
        adjoints = Adjoints(
            model.places,
            ids,
            score,
            positions=max(of_question.length for of_question in scores),
            two_texts=two_texts,
            table=RELEVANCE | THROUGH_PATTERNS if through_patterns else None,
            keep=_fits(model, ids),
        )
    _check_logits(model, adjoints, scores)
    return adjoints


def _check_patterns(model: ResidualModel, questions: Sequence[Question]) -> None:
    if any(question.has_two_texts for question in questions):
        raise BilensError(
            "through_patterns=True with a second text, whose flow goes through patterns of every "
            "kind; leave it out"
        )
    if model.modules.attention not in ("bilinear", "squared"):
        raise BilensError(
            f"through_patterns=True, but patterns of {model.modules.attention} attention are not "
            "polynomials of the stream; leave it out to hold them fixed"
        )


def _fits(model: ResidualModel, ids: Tensor) -> bool:
    """Return whether the graphs of all layers fit into `KEPT_BYTES`, or have to be kept."""
    if model.places.crosses:
        return True
    # Some numbers for each output of each map.
    weights = [x for x in model.places.layers[0].module.parameters() if x.dim() > 1]
    numbers = 3 * sum(x[..., 0].numel() for x in weights)
    return ids.numel() * model.n_layers * numbers * model.places.dtype.itemsize <= KEPT_BYTES


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
        z = modules.capped(n[row] @ W + b)
        check_sum("W_U n + b_U", z, own[tokens], size=size)


def _flows(model: ResidualModel, origin: Origin, asked: Sequence[Fitted]) -> list[Flow]:
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
    biases, choices = like.new_zeros(questions, n_layers, 2), like.new_zeros(questions, n_layers)
    pairs: list[list[Pairs | None]] = [[None] * n_layers for _ in range(questions)]
    absolute = like.new_zeros(questions)
    for layer, graph in adjoints.layers():
        if graph.mlp is not None and graph.of_mlp is not None:
            mlps[:, layer] = (graph.of_mlp[:questions] * adjoints.change(graph.mlp.leaf)).sum(-1)
        if graph.heads is not None and graph.of_heads is not None:
            terms = graph.of_heads[:questions] * adjoints.change(graph.heads.leaf)
            heads[:, layer] = terms.unflatten(-1, (n_heads, -1)).sum(-1).transpose(1, 2)
            if graph.mix is not None:
                for question, of_question in enumerate(_pairs(adjoints, graph)):
                    pairs[question][layer], size = of_question
                    absolute[question] += size
            else:
                absolute += heads[:, layer].abs().sum((1, 2))
        choices[:, layer], biases[:, layer] = _starts(adjoints, graph)
    absolute += mlps.abs().sum((1, 2))
    embeddings, positions = first_flows(adjoints, adjoints.of_first)
    unembedding = _last_constants(adjoints)
    for starts in (embeddings, positions, biases, choices, unembedding[:, None]):
        absolute += starts.abs().flatten(1).sum(1)
    flows = []
    for question in range(questions):
        texts = range(question, len(adjoints.ids), questions)
        flow = Flow(
            question=asked[question].question,
            fitted=asked[question],
            ids=adjoints.ids[question].clone(),
            tokens=tuple(shown_tokens(model, adjoints.ids[question])),
            values=tuple(float(adjoints.numbers[text]) for text in texts),
            heads=heads[question].clone(),
            mlps=mlps[question].clone(),
            embeddings=embeddings[question].clone(),
            positions=positions[question].clone(),
            biases=biases[question].clone(),
            unembedding=float(unembedding[question]),
            choices=choices[question].clone(),
            pairs=tuple(pairs[question]),
            absolute=float(absolute[question]),
            streams=adjoints.last.leaf.detach()[question::questions].clone(),
            frozen=_frozen(adjoints),
            origin=origin,
            row=question,
        )
        check_flow(flow)
        flows.append(flow)
    return flows


def _frozen(adjoints: Adjoints) -> tuple[str, ...]:
    """Return what is held fixed at its value on one text."""
    if adjoints.two_texts:
        return ()
    is_relevance = adjoints.table is RELEVANCE
    patterns = "patterns of attention" if is_relevance else "norms inside patterns of attention"
    return ("scales of norms", patterns, "ratios of activations")


def _starts(
    adjoints: Adjoints, layer: LayerGraph
) -> tuple[Float[Tensor, " questions"], Float[Tensor, "questions 2"]]:
    """Return the flow of what a layer chose, and of the biases of its attention and its MLP."""
    of_choices = adjoints.embedding.leaf.new_zeros(adjoints.questions)
    of_biases = of_choices.new_zeros(adjoints.questions, 2)
    for number, (leaf, w) in enumerate(zip(layer.leaves, layer.of_leaves, strict=True)):
        kind, part = layer.start(number)
        # Constants are the same in both texts.
        if w is None or (kind == "bias" and adjoints.two_texts):
            continue
        through = start_flows(adjoints, leaf.value, w)
        if kind == "choice":
            of_choices += through
        else:
            of_biases[:, int(part == "mlp")] += through
    return of_choices, of_biases


def _last_constants(adjoints: Adjoints) -> Float[Tensor, " questions"]:
    """Return the flow of constants after the last layer."""
    unembedding = adjoints.embedding.leaf.new_zeros(adjoints.questions)
    if not adjoints.two_texts:
        for leaf, w in zip(adjoints.last_leaves, adjoints.of_last_leaves, strict=True):
            if w is not None:
                unembedding += start_flows(adjoints, leaf.value, w)
    return unembedding


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
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(questions)]
    for heads in mix.blocks():
        pattern, values = mix.pattern(heads), mix.values[:, heads].detach()
        attention += pattern[:questions].abs().sum(1)
        of_texts = w[:, heads].repeat(len(pattern) // questions, 1, 1, 1)
        flows = adjoints.change(pattern * (of_texts @ values.mT))
        sizes += flows.abs().sum((1, 2, 3))
        for question in range(questions):
            index = flows[question].nonzero()
            of_pairs = flows[question][tuple(index.T)]
            index[:, 0] += heads.start
            kept[question].append(_strongest(of_pairs, index))
    for question in range(questions):
        flows, places = (torch.cat(parts) for parts in zip(*kept[question], strict=True))
        flows, places = _strongest(flows, places)
        yield Pairs(flows, places.int(), attention[question] / mix.output.shape[1]), sizes[question]


def _strongest(flows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    if len(flows) <= KEPT_PAIRS:
        return flows, places
    index = flows.abs().topk(KEPT_PAIRS).indices
    return flows[index], places[index]


def check_flow(flow: Flow) -> None:
    """Raise unless the flows of embeddings, positions, biases and choices add up to the value.

    They do within rounding of the absolute flow, and within a hundredth of the value.
    """
    starts = (flow.embeddings, flow.positions, flow.biases, flow.choices)
    total = float(sum(part.cpu().double().sum() for part in starts)) + flow.unembedding
    ends = sum(map(abs, flow.values))
    size = flow.absolute + ends
    is_lost = ROUNDING * size > 0.01 * abs(flow.value)
    if is_lost and abs(total - flow.value) > 0.01 * abs(flow.value) + ROUNDING * ends:
        raise BilensError(
            f"The flow of tokens, positions, biases and choices adds up to {total:.6g}, expected "
            f"{flow.value:.6g}: its parts are {size:.2g} in all and cancel beyond rounding. Take a "
            "text or mean embeddings as the second run, not vectors near 0, or dtype=torch.float64"
        )
    check_sum("The flow of tokens, positions, biases and choices", total, flow.value, size=size)


# Attention of bilens's own models without softmax: by its equations.

THROUGH_PATTERNS: dict[str, Rule] = {}
"""The rule by which a flow of one text goes through patterns that are products."""


@rule("bilinear_attention", SECANTS)
def _attended(mode: Rules, func: Any, *inputs: Any, **options: Any) -> Tensor:
    with mode:
        return func(*inputs, **options, kernel="reference")


@rule("bilinear_attention", RELEVANCE)
def _attended_frozen(
    mode: Rules, func: Any, q1: Tensor, k1: Tensor, v: Tensor, *others: Any, **options: Any
) -> Tensor:
    constant = [x.detach() if isinstance(x, Tensor) else x for x in others]
    with mode:
        return func(q1.detach(), k1.detach(), v, *constant, **options, kernel="reference")


@rule("bilinear_attention", THROUGH_PATTERNS)
def _attended_by_fifths(  # noqa: PLR0913  the arguments of the function
    mode: Rules,
    func: Any,
    q1: Tensor,
    k1: Tensor,
    v: Tensor,
    q2: Tensor | None,
    k2: Tensor | None,
    *,
    scale: float,
    constant: Tensor | None,
    normalised: bool,
    **_: Any,
) -> Any:
    groups = q1.shape[1] // k1.shape[1]
    queries, keys = [q1, q1 if q2 is None else q2], [k1, k1 if k2 is None else k2]
    with mode:
        if constant is not None:
            # One more coordinate of queries, which is 1 in keys.
            c = mode.constant(constant, q1)[:, None, None].expand_as(q1[..., :1])
            one = mode.constant(torch.ones_like(k1[..., :1]), k1)
            queries = [torch.cat([q, c], -1) for q in queries]
            keys = [torch.cat([k, one], -1) for k in keys]
        keys = [k.repeat_interleave(groups, 1) for k in keys]
        values = v.repeat_interleave(groups, 1)

    def pattern(q: Tensor, k: Tensor, other_q: Tensor, other_k: Tensor) -> Tensor:
        return (scale * (q @ k.mT) * (other_q @ other_k.mT)).tril()

    factors = (queries[0], keys[0], queries[1], keys[1], values)
    rows = torch.ones_like(q1[..., :1]).detach()
    if normalised:
        sums = pattern(*(x.detach() for x in factors[:4])).sum(-1, keepdim=True)
        rows = 1 / sums.clamp_min(EPS)
    # As in Euler's theorem on homogeneous functions: each of five factors carries a fifth.
    return Shared.apply(lambda q, k, r, s, v: rows * pattern(q, k, r, s) @ v, *factors)
