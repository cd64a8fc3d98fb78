"""Compile RASP programs to weights, for `bilens reproduce truth`.

This file runs in an environment of its own, since tracr needs jax and haiku:

    python -m venv runs/tracr && runs/tracr/bin/pip install tracr-pypi==1.0.0 safetensors
    runs/tracr/bin/python experiments/compiled.py runs/reproduced/models/compiled

Each program is one safetensors file with weights, labels of the stream's coordinates, and outputs
on a few texts. They show whether a model with these weights computes the same.

Source:
    Lindner et al. 2023, "Tracr: compiled transformers as a laboratory for interpretability".
"""

import json
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 6
TEXTS = 8


def programs() -> dict[str, tuple[Any, list[str]]]:
    """Return programs that attend to earlier positions only, and their tokens."""
    lib, rasp = import_module("tracr.compiler.lib"), import_module("tracr.rasp.rasp")
    numerical = rasp.numerical(rasp.tokens == "x")
    return {
        "share of x": (lib.make_frac_prevs(numerical).named("output"), list("wxyz")),
        "pair balance": (lib.make_pair_balance(rasp.tokens, "(", ")").named("output"), list("()a")),
        "count of equals": (lib.make_hist().named("output"), list("abc")),
        "pattern ab": (lib.detect_pattern(rasp.tokens, "ab").named("output"), list("abc")),
        "token before": (lib.shift_by(1, rasp.tokens).named("output"), list("abc")),
        "count of a": (lib.make_count(rasp.tokens, "a").named("output"), list("abc")),
    }


def compile_all(folder: Path) -> None:
    """Write a file for each program."""
    compiling, save = (
        import_module("tracr.compiler.compiling"),
        import_module("safetensors.numpy").save_file,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, (program, tokens) in programs().items():
        model = compiling.compile_rasp_to_model(
            program, vocab=set(tokens), max_seq_len=LENGTH, causal=True, compiler_bos="BOS"
        )
        encoding = model.input_encoder.encoding_map
        drawn = random.Random(0)
        texts = [["BOS", *drawn.choices(tokens, k=LENGTH)] for _ in range(TEXTS)]
        outputs = np.stack([model.apply(text).transformer_output[0] for text in texts])
        tensors = {
            f"{module}/{key}": np.asarray(value, np.float64)
            for module, weights in model.params.items()
            for key, value in weights.items()
        }
        tensors["ids"] = np.array([[encoding[token] for token in text] for text in texts])
        tensors["outputs"] = outputs.astype(np.float64)
        about = {
            "labels": model.residual_labels,
            "tokens": [encoding[token] for token in tokens],
            "first": encoding["BOS"],
            "heads": model.model_config.num_heads,
            "layers": model.model_config.num_layers,
            "key_size": model.model_config.key_size,
            "hidden": model.model_config.mlp_hidden_size,
        }
        save(tensors, folder / f"{name}.safetensors", metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    compile_all(Path(sys.argv[1]))
