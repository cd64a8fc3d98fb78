"""The parts that answer questions: found on some, measured on others, and exchanged.

Whoever compares another search for circuits, or other directions, takes its parts from here:
`Cases` measure masks of parts, `search_circuit` and `find_circuit` order parts by any scores, and
`find_stages` and `find_cuts` are the short answer.
"""

from bilens.circuits.cases import ROLES, Cases
from bilens.circuits.controls import nonsense, verdict
from bilens.circuits.cuts import Cuts, find_cuts, passed
from bilens.circuits.directions import MLPDirections, task_directions
from bilens.circuits.edits import edit, edit_heads, edit_mlp_along
from bilens.circuits.gradients import eap_ig, gradient_effects
from bilens.circuits.measures import Split, find_circuit
from bilens.circuits.patching import patch, patched
from bilens.circuits.reading import circuit
from bilens.circuits.stages import Stages, find_stages, mask_of
from bilens.flows.interval import Interval

__all__ = [
    "ROLES",
    "Cases",
    "Cuts",
    "Interval",
    "MLPDirections",
    "Split",
    "Stages",
    "circuit",
    "eap_ig",
    "edit",
    "edit_heads",
    "edit_mlp_along",
    "find_circuit",
    "find_cuts",
    "find_stages",
    "gradient_effects",
    "mask_of",
    "nonsense",
    "passed",
    "patch",
    "patched",
    "task_directions",
    "verdict",
]
