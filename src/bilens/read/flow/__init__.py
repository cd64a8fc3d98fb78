"""An exact split of a logit on a text, through every layer, and interventions that test it.

Whoever compares another search for circuits, or other directions, takes its parts from here:
`Cases` measure masks of parts, `search_circuit` and `find_circuit` order parts by any scores, and
`EdgeGraph` and `EdgeCases` are the same for edges.
"""

from bilens.read.flow.ablation import Ablation, measure, remove, without_output
from bilens.read.flow.circuit_measures import Circuit, Split, find_circuit, part_effects
from bilens.read.flow.circuit_reading import CircuitReading, circuit
from bilens.read.flow.circuit_search import Cases, search_circuit
from bilens.read.flow.directions import MLPDirections
from bilens.read.flow.edges import EdgeCases, EdgeGraph, find_edges
from bilens.read.flow.edits import edit, edit_head_along, edit_heads, edit_mlp_along
from bilens.read.flow.gradients import Attributions, eap_ig, gradient_effects
from bilens.read.flow.graph import Flow
from bilens.read.flow.interval import Interval
from bilens.read.flow.nodes import Node
from bilens.read.flow.patching import Effects, parts_in, patch, patched
from bilens.read.flow.proposals import propose_questions
from bilens.read.flow.question import Question, read_pairs
from bilens.read.flow.reading import FlowReading, read_flow
from bilens.read.flow.recurring import Snapshots, find_directions, share_held, task_directions
from bilens.read.flow.split import adjoints_of, flow
from bilens.read.flow.weights import PartWeights, open_part

__all__ = [
    "Ablation",
    "Attributions",
    "Cases",
    "Circuit",
    "CircuitReading",
    "EdgeCases",
    "EdgeGraph",
    "Effects",
    "Flow",
    "FlowReading",
    "Interval",
    "MLPDirections",
    "Node",
    "PartWeights",
    "Question",
    "Snapshots",
    "Split",
    "adjoints_of",
    "circuit",
    "eap_ig",
    "edit",
    "edit_head_along",
    "edit_heads",
    "edit_mlp_along",
    "find_circuit",
    "find_directions",
    "find_edges",
    "flow",
    "gradient_effects",
    "measure",
    "open_part",
    "part_effects",
    "parts_in",
    "patch",
    "patched",
    "propose_questions",
    "read_flow",
    "read_pairs",
    "remove",
    "search_circuit",
    "share_held",
    "task_directions",
    "without_output",
]
