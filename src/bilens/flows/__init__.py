"""An exact split of an answer on a text, or between two, through every layer of a model."""

from bilens.flows.ablation import measure, remove
from bilens.flows.answers import answer_flows
from bilens.flows.both_models import BothModels
from bilens.flows.fitted import answered
from bilens.flows.graph import Flow
from bilens.flows.nodes import Node
from bilens.flows.question import Question
from bilens.flows.saved import load_graph
from bilens.flows.sources import read_pairs
from bilens.flows.split import adjoints_of, flow
from bilens.flows.stream_lens import read_lens
from bilens.flows.table import flow_table
from bilens.flows.token_lens import lens
from bilens.flows.tuning import ModelDiffs, diff, diffs

__all__ = [
    "BothModels",
    "Flow",
    "ModelDiffs",
    "Node",
    "Question",
    "adjoints_of",
    "answer_flows",
    "answered",
    "diff",
    "diffs",
    "flow",
    "flow_table",
    "lens",
    "load_graph",
    "measure",
    "read_lens",
    "read_pairs",
    "remove",
]
