"""Weights in eight bits: each row of a matrix is whole numbers from -127 to 127, times its scale.

So that a small model takes a quarter of its size in a file. Once opened it is in float32 as any
other, and its readings are exact for the weights that it has then.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bilens.errors import CheckpointError

MARK = "bilens_eight_bits"
"""Setting of a configuration whose weights are stored in this way."""
ROWS, SCALE = ".int8", ".scale"
"""What the names of the whole numbers and of the scales add to that of the matrix.

No library takes the numbers for the matrix, as it would under the name of the matrix."""
LARGEST = 127


def round_rows(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return matrices as int8 with the scale of each row, and all other weights as they are."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            tensors[name] = weight
            continue
        # In half precision a scale is so coarse that 127 of its steps would leave int8.
        numbers = weight.to(torch.promote_types(weight.dtype, torch.float32))
        # A row of zeros has the scale 1.
        largest = numbers.abs().amax(dim=1, keepdim=True)
        scale = torch.where(largest > 0, largest / LARGEST, 1.0)
        tensors[name + ROWS] = (numbers / scale).round().to(torch.int8)
        tensors[name + SCALE] = scale
    return tensors


def restore_rows(stored: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """Return the weights of `round_rows`, each number within half a step of its row.

    Raises:
        CheckpointError: a matrix has no scale for each of its rows.
    """
    rows = {name for name in stored if name.endswith(ROWS)}
    scales = {name.removesuffix(ROWS) + SCALE for name in rows}
    weights = {name: stored[name] for name in stored.keys() - rows - scales}
    for name in rows:
        matrix = name.removesuffix(ROWS)
        scale = stored.get(matrix + SCALE)
        if scale is None or scale.shape != (len(stored[name]), 1):
            raise CheckpointError(f"{source}: {matrix} has no scale for each of its rows")
        weights[matrix] = stored[name] * scale
    return weights
