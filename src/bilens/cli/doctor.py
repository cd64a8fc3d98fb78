"""`bilens doctor`: versions, devices, and optional packages that are missing."""

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import Any

import torch
from huggingface_hub import constants

from bilens import __version__
from bilens.cli.terminal import show_table
from bilens.kernels import triton_problem

NEEDED = ("torch", "transformers", "datasets", "tokenizers", "accelerate", "plotly", "tyro")
OPTIONAL = {
    "triton": "attention without softmax on a GPU; computed in chunks without it",
    "gradio": "bilens explore",
    "gguf": "GGUF files",
    "tensorboard": "--report-to tensorboard",
    "wandb": "--report-to wandb",
    "trackio": "--report-to trackio",
}
BROWSERS = ("google-chrome", "chrome", "chromium", "chromium-browser")


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices, places of data and caches, and optional packages that are missing.

    bilens doctor --json
    """

    def run(self) -> dict[str, Any]:
        """Look and print."""
        optional = {name: _version(name) for name in OPTIONAL}
        # Installed is not enough: it has to fit the GPU and its driver.
        if optional["triton"] is not None and (problem := triton_problem()) is not None:
            optional["triton"] = f"{problem}; the chunked kernel is used"
        # Any of these browsers draws pictures.
        optional["Chrome"] = next((path for name in BROWSERS if (path := which(name))), None)
        uses = {**OPTIONAL, "Chrome": "bilens report --figures"}
        data = os.environ.get("BILENS_DATA")
        checks: dict[str, Any] = {
            "versions": {
                "bilens": __version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                **{name: _version(name) for name in NEEDED},
            },
            "devices": {
                "cpu": f"{torch.get_num_threads()} threads of torch, {os.cpu_count()} cores",
                **{f"cuda:{i}": _gpu(i) for i in range(torch.cuda.device_count())},
                **({"mps": "Apple"} if torch.backends.mps.is_available() else {}),
            },
            "places": {
                "BILENS_DATA": data if data is None or Path(data).is_dir() else f"{data} (missing)",
                "models and data of the hub": constants.HF_HUB_CACHE,
                "token ids": str(Path(constants.HF_HOME) / "bilens"),
                "hub": "offline (HF_HUB_OFFLINE)"
                if constants.HF_HUB_OFFLINE
                else constants.ENDPOINT,
            },
            "optional": optional,
        }
        for title, rows in checks.items():
            cells = {name: str(value or "missing") for name, value in rows.items()}
            if title == "optional":
                show_table(
                    ("", "", "for"), [(n, c, uses[n]) for n, c in cells.items()], title, words=3
                )
            else:
                show_table(("", ""), cells.items(), title, words=2)
        return checks


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu(number: int) -> str:
    about = torch.cuda.get_device_properties(number)
    return f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
