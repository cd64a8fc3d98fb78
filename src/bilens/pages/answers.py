"""The page of an answer: from which tokens each of its tokens comes."""

from functools import partial

import torch

from bilens.figures.plots import heat_figure
from bilens.figures.sheet import Figure
from bilens.flows.answers import AnswerFlows
from bilens.pages.layout import plot_of, sections_of
from bilens.sections import Picture, Section, Table, by_column, signed


@sections_of.register
def answer_sections(reading: AnswerFlows) -> list[Section]:
    """Return the map of tokens, and for each token of the answer those that it comes from most."""
    earlier = "Earlier tokens of the answer are in the same place after both, and have no flow."
    if reading.is_neutral:
        earlier = "Earlier tokens of the answer count as those of the text do."
    text = (
        f"Each row splits the change of a token's {reading.target} from {reading.second} to the "
        f"text, exactly over the tokens before it: blue raises it, red lowers it. {earlier}"
    )
    rows = []
    for i, token in enumerate(reading.spoken):
        first, second = reading.values[i].tolist()
        most = ", ".join(f"{name} {signed(x)}" for name, x in reading.strongest(i).items())
        rows.append((token, first, second, first - second, most))
    names = ["token", "in the first run", "in the second", "change", "comes mostly from"]
    table = Table(by_column(names, rows))
    picture = Picture("answer", partial(answer_figure, reading))
    return [Section(reading.title, text, [[picture], [table]], reading.facts())]


@plot_of.register
def answer_figure(reading: AnswerFlows) -> Figure:
    """Draw the flow of each token to each token of the answer; tokens without one are left out."""
    columns = reading.flows.any(0)
    flows = torch.where(reading.is_before, reading.flows, torch.nan)[:, columns]
    tokens = [name for name, here in zip(reading.tokens, columns.tolist(), strict=True) if here]
    return heat_figure(flows, list(reading.spoken), tokens, title="", across="token", down="answer")
