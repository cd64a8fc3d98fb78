"""Do flows agree with those of the engine before, which had a secant for each kind of node?

    python -m benchmarks.earlier_flows

The flow of each head and MLP at each position is taken by this code and, in a process of its own,
by the code of the last commit with that engine. The engines divide the flow of a head among its
sources in different ways, and agree on its sum. Writes `results/earlier_flows.json`.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from experiments.pretrained import model_paths
from experiments.results import ROOT, Recording, Row
from torch import Tensor

import bilens
from bilens.flows import flow
from bilens.transformer import ResidualModel

COMMIT = "a31c8f6b"
PAIRS = (
    ("The keys to the cabinet", " are", " is", "The key to the cabinet"),
    ("The capital of France is", " Paris", " Rome", "The capital of Italy is"),
    ("Mary and John were here, and John gave it to", " Mary", " John",
     "Mary and John were here, and Mary gave it to"),
)  # fmt: skip
BEFORE = """
import sys, torch
import bilens
from bilens.flows.question import Question
from bilens.flows.split import split
given = torch.load(sys.argv[1])
model = bilens.load(given["model"], dtype=torch.float32)
rows = []
for pair in given["pairs"]:
    of = split(model, Question.of(*pair))
    heads = torch.stack([sum(roles.values()) for roles in of.heads])
    rows.append(torch.cat([heads, torch.stack(of.mlps)[:, None]], 1))
torch.save(rows, sys.argv[2])
"""


def before(tree: Path, folder: Path, model: str) -> list[Tensor]:
    """Return the flows of heads and MLPs of each pair by the code of another tree."""
    given, found = folder / "given.pt", folder / "found.pt"
    torch.save({"model": model, "pairs": PAIRS}, given)
    command = [sys.executable, "-c", BEFORE, str(given), str(found)]
    subprocess.run(command, check=True, cwd=tree, env={"PYTHONPATH": str(tree / "src")})
    rows: list[Tensor] = torch.load(found)
    return rows


def now(model: ResidualModel) -> tuple[list[Tensor], list[float]]:
    """Return the flows of heads and MLPs of each pair, and the change that they explain."""
    rows, changes = [], []
    for text, token, minus, against in PAIRS:
        of = flow(model, text, token, minus=minus, against=against, ablate=0)
        rows.append(torch.cat([of.heads, of.mlps[:, None]], 1))
        changes.append(of.value)
    return rows, changes


def main() -> None:
    """Measure all models that are installed, and write the results."""
    torch.set_num_threads(1)
    recording, rows = Recording(), []
    with TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, COMMIT], check=True)
        try:
            for model_name, path in model_paths(Path(name)).items():
                model = bilens.load(str(path), dtype=torch.float32)
                assert isinstance(model, ResidualModel)
                found, changes = now(model)
                largest, differing, count = 0.0, 0, 0
                earlier = before(tree, Path(name), str(path))
                for one, other, change in zip(found, earlier, changes, strict=True):
                    error = ((one - other) / change).abs()
                    largest = max(largest, float(error.max()))
                    differing += int((error > 1e-4).sum())
                    count += error.numel()
                claim = f"{model_name}: heads and MLPs whose flows differ"
                rows.append(Row(claim, differing, n=count))
                rows.append(Row(f"{model_name}: largest difference, of the change", largest))
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    recording.write(
        "earlier_flows",
        title="Flows by the engine before",
        command="python -m benchmarks.earlier_flows",
        rows=rows,
        settings={"pairs": len(PAIRS), "differ": "by more than 1e-4 of the change"},
    )


if __name__ == "__main__":
    main()
