"""Readings of models whose parts accelerate has placed, against those on one device.

`python -m benchmarks.device_map --write` takes half a minute and writes `results/device_map.json`.
Models of six families, the last two of which bilens knows by their passes alone, are small and have
random weights. Each is opened with four kinds of maps. A row is the largest difference of a number
of a flow, a circuit, a patch and the model's weights, as a share of the largest number there.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate
import torch
from experiments.families import VOCAB, make, texts
from experiments.results import Recording, Row
from torch import Tensor, nn

import bilens
from bilens.circuits import circuit, patch
from bilens.flows import Question, flow
from bilens.transformer import ResidualModel

FAMILIES = ("llama", "gpt2", "gemma3_text", "mixtral", "opt", "gemma4_text")
OPTIONS: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
"""Products of groups of experts, the default, are none of float64."""
EXACT = 1e-6
"""Relative differences of equal readings are smaller."""


def placed(module: nn.Module, place: Callable[[int], str]) -> dict[str, str]:
    """Return a map that gives each layer a place by its number, and the rest of a model the CPU."""
    parts = [(n, x) for n, x in module.named_modules() if isinstance(x, nn.ModuleList)]
    layers, modules = max(parts, key=lambda part: len(part[1]))
    map_of_layers = {f"{layers}.{number}": place(number) for number in range(len(modules))}
    owner = layers.rpartition(".")[0]
    others = [f"{owner}.{name}" for name, _ in module.get_submodule(owner).named_children()]
    outer = [name for name, _ in module.named_children() if not layers.startswith(name)]
    above = owner.rpartition(".")[0]
    if above:
        outer += [f"{above}.{n}" for n, _ in module.get_submodule(above).named_children()]
    return map_of_layers | {n: "cpu" for n in (*others, *outer) if not layers.startswith(n)}


def kinds(module: Any, folder: Path) -> Iterator[tuple[str, ResidualModel]]:
    """Yield the model with each kind of map, by a name for the row."""
    size = sum(weight.nbytes for weight in module.parameters())

    def load(**given: Any) -> Any:
        return bilens.load(folder, offload_folder=folder / "moved", **OPTIONS, **given)

    yield "auto, half in memory", load(device_map="auto", max_memory={"cpu": size // 2})
    on_cpu = placed(module, lambda _: "cpu")
    yield "two entries on the CPU", load(device_map=on_cpu)
    some = placed(module, lambda number: "disk" if number else "cpu")
    yield "all layers but the first on disk", load(device_map=some)
    other = type(module).from_pretrained(folder, **OPTIONS).requires_grad_(False)
    accelerate.disk_offload(other, folder / "own", execution_device="cpu")
    yield "a module that accelerate has dispatched, all on disk", ResidualModel(other.eval())


def readings(model: ResidualModel) -> dict[str, Tensor]:
    """Return the numbers of a flow, a circuit, a patch and of some weights."""
    first, second = texts()
    between = flow(model, first, 5, minus=6, against=second)
    endings = torch.randint(3, VOCAB, (4, 4), generator=torch.Generator().manual_seed(4))
    questions = []
    for ending in endings:
        pair = [torch.cat([text[:3], ending]) for text in (first, second)]
        logits = [model.logits(text[None])[0, -1] for text in pair]
        answer, other = int(logits[0].argmax()), int((logits[1] - logits[0]).argmax())
        questions.append(Question(pair[0], answer, (other,), pair[1]))
    (found,) = circuit(model, questions, level="parts", size=3).circuits
    effects = patch(model, questions[0])
    read = {
        "flow": torch.cat([x.flatten() for x in (between.heads, between.mlps, between.embeddings)]),
        "circuit": found.mask.double(),
        "restored": torch.tensor([found.measured.restored.value]),
        "patch": torch.stack([effects.noising, effects.denoising]),
    }
    if model.places.modules is not None:
        read["W_E"], read["W_U"] = model.W_E, model.W_U
        ov, (qk, *_) = model.ov(1), model.qk(1)
        read["OV"], read["QK"] = ov.left @ ov.right, qk.left @ qk.right
    return read


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two models' readings, relative to the largest number."""
    gaps = []
    for name, numbers in one.items():
        gap = (numbers - other[name]).nan_to_num(0.0).abs().max()
        gaps.append(float(gap / numbers.nan_to_num(0.0).abs().max()))
    return max(gaps)


def measured(family: str) -> dict[str, float]:
    """Return the difference of each kind of map for a family."""
    module = make(family)
    with TemporaryDirectory() as name:
        module.save_pretrained(name)
        on_one: Any = bilens.load(name, **OPTIONS)
        expected = readings(on_one)
        return {k: difference(expected, readings(x)) for k, x in kinds(module, Path(name))}


def main() -> None:
    """Compare every family and kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    recording = Recording() if parser.parse_args().write else None
    rows = []
    for family in FAMILIES:
        for kind, value in measured(family).items():
            rows.append(Row(f"{family}: {kind}", value))
            print(rows[-1], flush=True)
    equal = sum(row.value is not None and row.value < EXACT for row in rows)
    rows.append(Row("maps whose readings are those of one device", equal, n=len(rows)))
    print(rows[-1])
    if recording is not None:
        recording.write(
            "device_map",
            title="Models whose parts accelerate has placed",
            command="python -m benchmarks.device_map --write",
            rows=rows,
            settings={"equal below": EXACT, "families": list(FAMILIES)},
        )


if __name__ == "__main__":
    main()
