"""Top eigenpairs of many directions at once, against full decompositions one by one.

`python -m benchmarks.spectra` takes 64 directions of a random layer of the size of a model of 1.1
billion parameters, on a GPU if present. With `--model PATH` it takes a layer of any Llama that
`bilens.load` opens. L and R are its gate and up projection after the norm's gain, the gate taken as
linear. D is its down projection, and the directions are the logits of random tokens. The time of
the reference is proportional to the number of directions, so it does a few of them in each turn.
Ratios are of wall time and, for machines that do other work beside, of the processor's time.
`--write` writes `results/spectra.json`.

`--arpack WIDTH ...` compares with ARPACK on the built matrix instead, for small random layers on a
CPU, and writes `results/eigenpairs.json`. ARPACK finds pairs without a test that none was missed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.results import Recording, Row
from scipy.sparse.linalg import eigsh
from torch import Tensor

from benchmarks.clock import seconds
from benchmarks.launches import count
from bilens.convert import open_model
from bilens.tensor import BilinearTensor, Spectrum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
D_MODEL, D_HIDDEN = (2048, 5632) if DEVICE == "cuda" else (1024, 3072)
SAMPLE, REPEATS, K, TOLERANCE = 16, 5, 8, 1e-4


def random_layer(
    directions: int, d_model: int = D_MODEL, d_hidden: int = D_HIDDEN
) -> tuple[BilinearTensor, Tensor]:
    """Return a layer of independent weights, and as many directions."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).div(shape[-1] ** 0.5)

    left, right = normal(d_hidden, d_model), normal(d_hidden, d_model)
    tensor = BilinearTensor(left, right, normal(d_model, d_hidden))
    return tensor, normal(directions, d_model)


def trained_layer(path: Path, layer: int, directions: int) -> tuple[BilinearTensor, Tensor]:
    """Return a layer of a Llama, and the logits of random tokens."""
    # Weights of any format are read as those of the same layer.
    weights = open_model(path).state_dict()
    mlp, norm = (f"model.layers.{layer}.{name}" for name in ("mlp", "post_attention_layernorm"))
    gain = weights[f"{norm}.weight"]
    left, right = (weights[f"{mlp}.{name}.weight"] * gain for name in ("gate_proj", "up_proj"))
    tensor = BilinearTensor(left, right, weights[f"{mlp}.down_proj.weight"])
    logits = weights["model.embed_tokens.weight"] * weights["model.norm.weight"]
    selected = torch.randperm(len(logits), generator=torch.Generator().manual_seed(0))
    return tensor, logits[selected[:directions]]


def main() -> None:
    """Print both times, their ratio in each repeat, and how good the pairs are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Llama; a random layer by default")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--directions", type=int, default=64)
    parser.add_argument("--arpack", type=int, nargs="+", metavar="WIDTH")
    parser.add_argument("--write", action="store_true", help="to results/spectra.json")
    given = parser.parse_args()
    if given.arpack:
        compare_with_arpack(given.arpack, given.directions)
        return
    recording = Recording() if given.write else None
    tensor, directions = (
        trained_layer(given.model, given.layer, given.directions)
        if given.model
        else random_layer(given.directions)
    )
    form = tensor.to(DEVICE).interaction(directions.to(DEVICE))
    result: list[Spectrum] = []
    tops: list[Tensor] = []

    def together() -> None:
        result[:] = [form.eigh(K, tolerance=TOLERANCE)]

    def one_after_another() -> None:
        tops.clear()
        for number in range(SAMPLE):
            values = torch.linalg.eigh(form[number].dense()).eigenvalues
            tops.append(values[values.abs().argsort(descending=True)[:K]])

    one_after_another()
    together()
    share = len(directions) / SAMPLE
    turns = [(both_clocks(one_after_another), both_clocks(together)) for _ in range(REPEATS)]
    times = [(*(share * taken for taken in reference), *ours) for reference, ours in turns]
    (spectrum,) = result
    assert spectrum.miss_chance is not None
    exact = torch.stack(tops).abs()
    difference = ((spectrum.values[:SAMPLE].abs() - exact).abs() / exact[:, :1]).max()
    what = f"{given.model.name}, layer {given.layer}" if given.model else "random layer"
    print(f"{what}, d_model {tensor.n_in}, hidden {tensor.rank}")
    print(f"{len(directions)} directions, top {K}, medians of {REPEATS}")
    wall, processor, mine_wall, mine_processor = map(statistics.median, zip(*times, strict=True))
    print(f"dense build and eigh one by one   {wall:8.2f} s, {processor:8.2f} s of processor")
    print(f"eigh(k={K}), certified to {TOLERANCE}   {mine_wall:8.2f} s, {mine_processor:8.2f} s")
    rows = []
    for name, full, top in (("wall", 0, 2), ("processor", 1, 3)):
        ratios = sorted(row[full] / row[top] for row in times)
        claim = f"dense decompositions one by one over eigh(k): {name} time"
        rows.append(Row.of_range(claim, ratios))
        shown = ", ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"ratio, {name:9}                  {statistics.median(ratios):8.1f} x ({shown})")
    launches, waits = count(together)
    print(f"launches and waits of a call      {launches:8} {waits:8}")
    print(f"error of an eigenvalue            {difference:8.1e} of the largest")
    print(f"residual                          {spectrum.residuals.max():8.1e}")
    print(f"chance that one is missing        {spectrum.miss_chance.max():8.1e}")
    print(f"forms decomposed whole            {int((spectrum.miss_chance == 0).sum()):8}")
    if recording is not None:
        recording.write(
            "spectra",
            title="Top eigenpairs of many directions",
            command="python -m benchmarks.spectra --write",
            rows=[*rows, Row("error of an eigenvalue, of the largest", float(difference))],
            settings={
                **{"layer": what, "d_model": tensor.n_in, "hidden": tensor.rank},
                **{"directions": len(directions), "eigenpairs": K, "turns": REPEATS},
                "low and high": "least and most of the turns",
            },
        )


def compare_with_arpack(widths: list[int], directions: int) -> None:
    """Measure seconds of the processor in turns, and write their ratios."""
    recording, rows = Recording(), []
    for width in widths:
        tensor, along = random_layer(directions, width, 3 * width)
        form = tensor.interaction(along)

        def ours(form: Any = form) -> None:
            form.eigh(K, tolerance=TOLERANCE)

        def builds(form: Any = form) -> list[Tensor]:
            return [form[number].dense() for number in range(len(form.weights))]

        def arpack(form: Any = form) -> None:
            for number in range(len(form.weights)):
                eigsh(form[number].dense().numpy(), k=K, tol=TOLERANCE)

        calls = (arpack, builds, ours)
        turns = [[both_clocks(call)[1] for call in calls] for _ in range(REPEATS)]
        least = min(reference for reference, *_ in turns)
        for number, what in enumerate(("building alone", "eigh(k)"), start=1):
            ratios = [turn[number] / turn[0] for turn in turns]
            claim = f"d {width}, {what}: time over that of ARPACK on the built matrices"
            rows.append(Row.of_range(claim, ratios, baselines={"ARPACK, seconds": least}))
            print(rows[-1], flush=True)
    recording.write(
        "eigenpairs",
        title="Eigenpairs of small forms",
        command=f"python -m benchmarks.spectra --arpack {' '.join(map(str, widths))}",
        rows=rows,
        settings={
            **{"d_model": widths, "directions": directions, "eigenpairs": K, "turns": REPEATS},
            "low and high": "least and most of the turns",
        },
        seeds=[0],
    )


def both_clocks(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and the processor's time of a call, in seconds."""
    start = time.process_time()
    wall = seconds(call, 1, warm=False)
    return wall, time.process_time() - start


if __name__ == "__main__":
    main()
