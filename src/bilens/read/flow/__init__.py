"""An exact split of a logit on a text, through every layer, and interventions that test it."""

from bilens.read.flow.ablation import Ablation, measure, remove
from bilens.read.flow.circuit_measures import Circuit
from bilens.read.flow.circuit_reading import CircuitReading, circuit
from bilens.read.flow.edits import edit, edit_head_along, edit_heads, edit_mlp_along
from bilens.read.flow.gradients import Attributions, eap_ig
from bilens.read.flow.graph import Flow
from bilens.read.flow.nodes import Node
from bilens.read.flow.patching import Effects, patch, patched
from bilens.read.flow.proposals import propose_questions
from bilens.read.flow.question import Question
from bilens.read.flow.reading import FlowReading, read_flow
from bilens.read.flow.recurring import task_directions
from bilens.read.flow.split import flow
from bilens.read.flow.weights import PartWeights, open_part

__all__ = [
    "Ablation",
    "Attributions",
    "Circuit",
    "CircuitReading",
    "Effects",
    "Flow",
    "FlowReading",
    "Node",
    "PartWeights",
    "Question",
    "circuit",
    "eap_ig",
    "edit",
    "edit_head_along",
    "edit_heads",
    "edit_mlp_along",
    "flow",
    "measure",
    "open_part",
    "patch",
    "patched",
    "propose_questions",
    "read_flow",
    "remove",
    "task_directions",
]
