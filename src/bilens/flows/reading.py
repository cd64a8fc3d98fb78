"""The flow of a logit on a text as a reading: a question, its answer, its strongest nodes."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from torch import Tensor

from bilens.analysis import Reading
from bilens.checks import checked
from bilens.errors import BilensError
from bilens.flows.ablation import Ablation, with_effects, without_parts
from bilens.flows.fitted import Score, token_hints
from bilens.flows.graph import DRAWN, Flow, FlowGraph
from bilens.flows.nodes import LEAVES, Node, NodeKind, Sublayer, node_columns, strongest_first
from bilens.flows.question import Question, is_text
from bilens.flows.split import flows
from bilens.flows.token_lens import labelled
from bilens.language.names import exact_names, quoted
from bilens.sections import Columns, Fact, Percent, signed
from bilens.settings import Between, CheckedSettings, Count
from bilens.transformer import ResidualModel
from bilens.transformer.parts import Part


@dataclass(frozen=True)
class PageNode(CheckedSettings):
    """A node of a flow on a page; fields without a comment are those of `Node`."""

    rank: int  # its place from the logit down to the tokens
    kind: NodeKind
    name: str  # its address and tokens
    label: str  # its name in the picture
    flow: float
    measured: float | None
    effect: str  # the tokens that it raises and lowers, in words
    raises: tuple[str, ...]
    lowers: tuple[str, ...]
    sources: tuple[str, ...]
    layer: int | None
    part: Sublayer | None
    position: int | None
    source: int | None
    number: int | None
    removable: bool  # whether it can be removed from the running model
    sink: bool  # whether it is at an attention sink


@dataclass(frozen=True)
class FlowPage(CheckedSettings):
    """The strongest nodes of a flow, their edges, and their share of it, for pages and JSON.

    Fields without a comment are those of `Flow`.
    """

    metric: str  # what is split, in words
    tokens: tuple[str, ...]
    second: tuple[str, ...]  # tokens of the second text; empty of another second run
    value: float
    values: tuple[float, ...]
    absolute: float
    layers: int
    n_nodes: int  # number of nodes of the flow, without the logit
    sum: float  # flow of all nodes
    sinks: tuple[int, ...]
    # The logit first, then the largest |flow| first: the first n are the graph of the n - 1
    # strongest.
    nodes: tuple[PageNode, ...]
    # Numbers of the upper and the lower node, and the flow between them.
    edges: tuple[tuple[int, int, float], ...]
    # Counts of nodes, and the share of the logit on paths among so many of them.
    shares: tuple[tuple[int, float], ...]
    # Flow of each token and of choices; they add up to the value.
    leaves: tuple[tuple[str, float], ...]
    start: int  # the place in `shares` with which a page begins


def flow_page(graph: FlowGraph, *, metric: str) -> FlowPage:
    """Return the graph of the strongest nodes of a flow for a page, and its `metric` in words."""
    flow = graph.flow
    order = sorted(range(1, len(graph.nodes)), key=lambda i: -abs(graph.nodes[i].flow))
    place = {i: rank for rank, i in enumerate([0, *order])}
    # Small edges are left out of files.
    large = graph.edges.abs() >= 1e-3 * float(graph.edges.abs().max())
    large &= graph.edges != 0
    ends, flows = large.nonzero().tolist(), graph.edges[large].tolist()
    edges = [(place[a], place[b], through) for (a, b), through in zip(ends, flows, strict=True)]
    counts = _counts(len(order))
    shares = []
    for count in counts:
        some = graph.some([graph.nodes[i] for i in order[:count]])
        shares.append((count, some.share_of_logit))
    return FlowPage(
        metric=metric,
        tokens=flow.tokens,
        second=flow.second,
        value=flow.value,
        values=flow.values,
        absolute=flow.absolute,
        layers=flow.n_layers,
        n_nodes=len(flow.nodes),
        sum=sum(node.flow for node in flow.nodes),
        sinks=flow.sinks,
        nodes=tuple(_page_node(flow, i, graph.nodes[i]) for i in [0, *order]),
        edges=tuple(sorted(edges, key=lambda edge: -abs(edge[2]))),
        shares=tuple(shares),
        leaves=tuple(_leaves(flow).items()),
        start=counts.index(min(DRAWN, counts[-1])),
    )


def _page_node(flow: Flow, rank: int, node: Node) -> PageNode:
    return PageNode(
        rank=rank,
        kind=node.kind,
        name=flow.name(node),
        label=node.label,
        flow=node.flow,
        measured=node.measured,
        effect=node.effect(),
        raises=node.raises,
        lowers=node.lowers,
        sources=node.sources,
        layer=node.layer,
        part=node.part,
        position=node.position,
        source=node.source,
        number=node.number,
        removable=node.is_removable,
        sink=node.kind != "output" and not {*flow.sinks}.isdisjoint({node.position, node.source}),
    )


def _leaves(flow: Flow) -> dict[str, float]:
    leaves: dict[str, float] = defaultdict(float)
    for node in flow.nodes:
        if node.kind in LEAVES:
            leaves[flow.name(node)] += node.flow
    return leaves


def _counts(most: int) -> list[int]:
    """Return counts that grow by 1.3 at each step, up to all; that of a picture is among them."""
    counts = {min(1, most), most, min(DRAWN, most)}
    step = 1
    while step < most:
        counts.add(step)
        step = max(step + 1, round(1.3 * step))
    return sorted(counts)


@dataclass(frozen=True, eq=False, repr=False)
class FlowReading(Reading):
    """The flow of a logit on a text, and what became of it without its strongest nodes.

    Attributes:
        flow: The flow.
        question: The question that it answers.
        page: Its strongest nodes and the edges between them.
        probability: Of the token after the text.
        strongest: The heads and MLPs among the nodes of a picture, at their positions.
        together: Change of the number without these, all at once.
        preferred: The most likely of its tokens after each text, empty if two are equal; of all
            tokens, if none is subtracted.
        notes: Warnings about the tokens.
        other: Name of the second run; empty without one.
    """

    flow: Flow = field(repr=False)
    question: Question
    page: FlowPage
    probability: float
    strongest: tuple[Part, ...]
    together: float
    preferred: tuple[str, ...]
    notes: tuple[str, ...] = ()
    other: str = ""

    has_plain_fields: ClassVar[bool] = True
    axes: ClassVar[dict[str, str]] = Flow.axes
    is_picture: ClassVar[bool] = True
    formats: ClassVar[dict[str, str]] = dict.fromkeys(("flow", "measured effect"), "+#.3g")

    @property
    def title(self) -> str:
        """The question that the flow answers: only where the model prefers the token, why."""
        token, minus = _words(self.question)
        first = f"“{self._text}”"
        holds = [name in self.question.tokens for name in self.preferred]
        if holds == [True, False]:
            instead = f" rather than {' or '.join(minus)}" if minus else ""
            at = "after" if self._are_texts else "with"
            return f"Why {token}{instead} after {first}, and not {at} {self._second}?"
        metric = f"{token} minus {', '.join(minus)}" if minus else token
        if not minus or self.question.target != "logit":
            metric = f"the {self.question.target} of {metric}"
        return f"What changes {metric} from {self._second} to {first}?"

    @property
    def preference(self) -> str:
        """The token that the model prefers after each text, by how much, and the change."""
        question, values = self.question, self.flow.values
        token, minus = _words(question)
        names = [quoted(name) if name else "neither" for name in self.preferred]
        if len(minus) == len(question.tokens) == 1:
            sizes = " and ".join(format(abs(x), ".3g") for x in values)
            sizes += "" if question.target == "logit" else f" in {question.target}"
            change = f"the difference changes by {signed(self.flow.value)}"
            return f"The model prefers {self._each(names)}, by {sizes}; {change}."
        value = " and ".join(map(signed, values))
        change = f", and changes by {signed(self.flow.value)}"
        if minus:
            among = f"{', '.join([token, *minus[:-1]])} and {minus[-1]}"
            most = f"Of {among} the model prefers {self._each(names)}"
            return f"{most}; {token} minus the mean of the others is {value}{change}."
        metric = f"the {question.target} of {token} is {value}{change}"
        return f"The model predicts {self._each(names)}; {metric}."

    def answer(self) -> str:
        """Return what is preferred, where it starts, the parts that carry it, and warnings."""
        flow = self.flow
        starts = [node for node in flow.nodes if node.kind == "token"]
        if not starts:
            return " ".join([self.preference, "The change starts at no token.", *self.notes])
        start = max(starts, key=lambda node: abs(node.flow)).position or 0
        carried: dict[str, float] = defaultdict(float)
        for node in flow.nodes:
            if node.measured is not None and node.part is not None:
                carried[node.address] += node.measured
        parts = sorted(carried, key=lambda part: -abs(carried[part]))[:3]
        text = f"The change starts mostly at “{flow.tokens[start].strip()}”"
        if parts:
            n, rest = len(self.strongest), signed(self.left)
            strongest = f"the {n} strongest parts" if n > 1 else "the strongest part"
            text += (
                f" and passes through {', '.join(parts)}; with {strongest} exchanged the change "
                f"is {rest}, not "
            )
            text += signed(flow.value)
        return " ".join([self.preference, f"{text}.", *self.notes])

    @property
    def left(self) -> float:
        """What is left of the change without the strongest parts."""
        rest = self.flow.value + self.together
        # Rounding is no number to read.
        return rest if abs(rest) > 1e-5 * abs(self.flow.value) else 0.0

    @property
    def _text(self) -> str:
        text = self.question.text
        return text if isinstance(text, str) else "".join(self.flow.tokens)

    @property
    def _second(self) -> str:
        """The second run in words."""
        against = self.question.against
        if isinstance(against, str):
            return "the neutral text" if self.question.is_neutral else f"“{against}”"
        if isinstance(against, Tensor):
            return self.other or "other embeddings"
        return f"the mean of {' and '.join(f'“{text}”' for text in against)}"

    def _each(self, names: Sequence[str]) -> str:
        """Return what is preferred in both runs: two names that may be the same."""
        after, text = ("after", "text") if self._are_texts else ("in", "run")
        first, second = names
        pair, last = f"both {text}s", "the second"
        if self.question.is_neutral:
            pair, last = "this text and the neutral one", "the neutral one"
        if first == second:
            return f"{first} {after} {pair}"
        return f"{first} {after} the first {text} and {second} {after} {last}"

    @property
    def _are_texts(self) -> bool:
        return self.question.is_neutral or is_text(self.question.against)

    @property
    def ablated(self) -> list[Ablation]:
        """The nodes that were removed one at a time."""
        flow = self.flow
        return [
            Ablation(-node.flow, -node.measured, flow.name(node), node.kind)
            for node in strongest_first(flow.nodes)
            if node.measured is not None
        ]

    def facts(self) -> list[Fact]:
        """Return the value, the number of nodes, and the share that is shown."""
        n, share = self.page.shares[self.page.start]
        return [
            (f"change of {self.page.metric}", self.page.value),
            ("probability of the token after the first text", Percent(self.probability)),
            ("nodes", self.page.n_nodes),
            (f"share on paths among the {n} strongest", Percent(share)),
        ]

    def columns(self) -> Columns:
        """Return the strongest nodes, those that are measured first."""
        nodes = self.flow.nodes[: len(self.page.nodes) - 1]
        return node_columns(strongest_first(nodes), self.flow.tokens, self.flow.second)


@checked
def answer_question(
    model: ResidualModel,
    question: Question,
    other: str = "",
    *,
    shown: Count = 200,
    ablate: Annotated[int, Between(0)] = DRAWN,
) -> FlowReading:
    """Return the answer to a question, for pages; the options are those of `bilens flow`.

    `other` names the second run.

    Raises:
        BilensError: the question is of a direction, about which there is no page.
    """
    if question.vector is not None:
        raise BilensError("vector is given, expected a token, about which a page is; flow takes it")
    (through,) = flows(model, [question])
    through = with_effects(model, labelled(model, through, DRAWN), ablate)
    graph = through.top(shown)
    through = replace(through, named=graph.named)
    addresses = [
        Part(node.kind, node.layer, node.number, node.position)
        for node in through.strongest(DRAWN)
        if node.kind in ("head", "mlp")
    ]
    # Of texts of unlike length none are exchanged.
    strongest = () if any(through.fitted.starts) else tuple(dict.fromkeys(addresses))
    reading = FlowReading(
        flow=through,
        question=through.question,
        page=flow_page(graph, metric=through.question.metric),
        probability=_probability(model, through),
        strongest=strongest,
        together=without_parts(model, through, strongest) if strongest else 0.0,
        preferred=_preferred(model, through),
        notes=(*token_hints(model, [question]), *_notes(through)),
        other=other or _name(through.question),
    )
    through.origin.release()
    return reading


def _notes(flow: Flow) -> list[str]:
    """Return what a reader may miss in the tables, and why."""
    if not flow.nodes:
        return ["Both texts are the same to the model, so that nothing changes."]
    if any(flow.fitted.starts):
        return [
            "The texts have unlike lengths: tokens that are as far from the end stand against each "
            "other, and nodes have neither labels nor measured effects."
        ]
    return []


def _name(question: Question) -> str:
    """Return the name of the second run of a question, if it is one text."""
    if question.is_neutral:
        return "the neutral text"
    return question.against if isinstance(question.against, str) else ""


def _words(question: Question) -> tuple[str, list[str]]:
    """Return the answer of a question, and the tokens that it subtracts, in words."""
    return " or ".join(map(quoted, question.tokens)), [*map(quoted, question.minus)]


def _probability(model: ResidualModel, flow: Flow) -> float:
    """Return the probability of the answer after the first text, or of any of several tokens."""
    score = Score(model, dataclasses.replace(flow.fitted, minus=(), target="probability"))
    return len(score.tokens or [0]) * float(score(flow.streams[:1])[0])


def _preferred(model: ResidualModel, flow: Flow) -> tuple[str, ...]:
    """Return the most likely of a question's tokens in each run; empty if two are equal.

    If no token is subtracted, it is the most likely of all tokens.
    """
    question = flow.question
    if len(question.tokens) == len(question.minus) == 1:
        names = {True: question.tokens[0], False: question.minus[0]}
        return tuple(names[value > 0] if value else "" for value in flow.values)
    score = Score(model, flow.fitted)
    numbers = [*score.tokens, *score.minus]
    among = numbers if question.minus else range(model.vocab_size)
    # The names of the question itself, which may spell a token in another way.
    name_of = dict(zip(numbers, (*question.tokens, *question.minus), strict=False))
    result = []
    for streams in flow.streams:
        if score.spoken and score.is_answer(streams):
            result.append(question.tokens[0])
            continue
        logits = model.places.logits(streams[-score.length][None])[0]
        token = among[int(logits[among].argmax())]
        result.append(name_of.get(token) or exact_names(model, [token])[0])
    return tuple(result)
