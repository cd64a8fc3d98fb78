"""Checkpoints of every way of quantising that transformers knows: dequantised, refused, or neither.

`python -m benchmarks.quantised --write` takes a minute, and writes `results/quantised.json`. A
small Llama with random weights says in its configuration that it is quantised. In FP8 its weights
are really of eight bits, with a scale for each matrix; it is dequantised exactly if each weight is
the product of both. A refusal is an error of bilens that names the way.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from experiments.results import Recording, Row
from safetensors.torch import load_file, save_file
from tests.families import tiny
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import bilens
from bilens import BilensError
from bilens.transformer import ResidualModel

LARGEST = 448
"""Largest number of float8_e4m3fn."""


def write(way: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint, and return the weights that it stands for."""
    tiny("llama", dtype=torch.float32).save_pretrained(folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    stored = load_file(file)
    expected = dict(stored)
    if way == "fp8":
        for name in [name for name in stored if name.endswith("proj.weight")]:
            scale = stored[name].abs().max() / LARGEST
            stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
            expected[name] = stored[name].float() * scale
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
        save_file(stored, file, {"format": "pt"})
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": way}
    if way == "fp8":
        config["quantization_config"]["weight_block_size"] = [128, 128]
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return expected


def outcome(way: str) -> str:
    """Return what becomes of a checkpoint."""
    with TemporaryDirectory() as name:
        expected = write(way, Path(name))
        try:
            model = bilens.load(name)
        except BilensError as error:
            return "refused by name" if way.partition("_")[0] in str(error) else "refused"
        except Exception:  # it is counted
            return "raw error"
        assert isinstance(model, ResidualModel)
        opened = model.model.named_parameters()
        is_exact = all(torch.equal(weight, expected[name]) for name, weight in opened)
        return "dequantised exactly" if is_exact else "other weights"


def main() -> None:
    """Try each way, and write what became of how many."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    recording = Recording() if parser.parse_args().write else None
    ways = list(AUTO_QUANTIZATION_CONFIG_MAPPING)
    found = {way: outcome(way) for way in ways}
    print(json.dumps(found, indent=2))
    kinds = ("dequantised exactly", "refused by name", "refused", "other weights", "raw error")
    rows = [Row(kind, [*found.values()].count(kind), n=len(ways)) for kind in kinds]
    print(*rows, sep="\n")
    if recording is not None:
        recording.write(
            "quantised",
            title="Ways of quantising that transformers knows, on load",
            command="python -m benchmarks.quantised --write",
            rows=rows,
            settings={"of each": found},
        )


if __name__ == "__main__":
    main()
