"""Seconds of the processor that each task of docs/howto/tasks.md takes, on SmolLM2.

`python -m benchmarks.tasks` writes results/tasks.json, in ten minutes, after `make test-models`.
Calls are timed after the model is loaded; commands include their imports and the loading. Needs
`BILENS_DATA`, a run `runs/demo/grammar` of `bilens demo`, and nnsight for its task.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jupytext
import torch
from PIL import Image
from tests.real.packages import SMOLLM2, gguf_file

import bilens
from bilens.files import write_json
from bilens.read.flow import Question, edit_heads, patch, remove, task_directions
from bilens.read.language import generate_text
from bilens.residual import ResidualModel

ROOT = Path(__file__).parents[1]
TEXT, OTHER = "The keys to the cabinet", "The key to the cabinet"
FACTS = ("The capital of France is", "The capital of Italy is")
COPYING = ROOT / "docs" / "howto" / "analysis.md"


def calls(model: ResidualModel) -> dict[str, Callable[[], object]]:
    """Return the calls of the page by their tasks."""
    graph = bilens.flow(model, TEXT, " are", minus=" is", against=OTHER)
    heads = [i for i in graph.strongest() if graph.nodes[i].kind == "head"][:2]
    paris = {"minus": " Rome", "against": FACTS[1]}
    questions = [Question(TEXT, " are", (" is",), OTHER), Question(OTHER, " is", (" are",), TEXT)]

    def induction() -> object:
        half = torch.arange(500, 520)
        layers = model.trace(torch.cat([half, half])).layers
        patterns = torch.stack([layer.pattern for layer in layers])
        return patterns.diagonal(1 - len(half), -2, -1)[..., 1:].mean(-1)

    def stored() -> object:
        buffer = io.BytesIO()
        torch.save(graph, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False).value

    return {
        "logit lens": lambda: [x.stream[-1] @ model.W_U for x in model.trace(TEXT).layers],
        "the likeliest next tokens": lambda: model.trace(TEXT).logits[-1].topk(5),
        "induction heads": induction,
        "remove two parts together": lambda: remove(model, graph, heads),
        "noising and denoising": lambda: patch(model, TEXT, " are", minus=" is", against=OTHER),
        "the change of a probability": lambda: bilens.flow(
            model, FACTS[0], " Paris", against=FACTS[1], target="probability"
        ),
        "a fact against another": lambda: bilens.flow(model, FACTS[0], " Paris", **paris),
        "a mean embedding as baseline": lambda: bilens.flow(
            model, FACTS[0], " Paris", against=model.W_E.mean(0)
        ),
        "an answer of two tokens": lambda: patch(
            model,
            "The Statue of Liberty is in",
            " New York",
            against="The Eiffel Tower of it is in",
        ),
        "many prompts at once": lambda: task_directions(model, questions, k=2),
        "turn a head off and write text": lambda: generate_text(edit_heads(model, 26, [0]), TEXT),
        "the spectrum of a head's OV": lambda: model.ov(26)[0].svd(),
        "store a flow, and read it again": stored,
    }
