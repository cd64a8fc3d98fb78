"""The Triton kernels: in Triton's interpreter on a CPU, and on a GPU where there is one."""

import importlib.util

import pytest
import torch

from tests.kernels.inputs import error, random_inputs, results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def triton_kernels():
    """With chunks of two tiles."""
    pytest.importorskip("triton")
    name = "bilens.kernels.triton_chunked"
    # Triton reads the source of its kernels, which the check of shapes wraps: leave it out here.
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(name).origin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 32)
        patch.setattr(module, "TILE", 16)
        patch.setattr(module, "HALF_COLUMNS", 16)
        yield module


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(
    ("time", "width", "d_value", "sharing", "dtype", "bound"),
    [
        (1, 8, 8, 1, torch.float32, 1e-4),
        (37, 16, 8, 2, torch.float32, 1e-4),
        (34, 20, 24, 1, torch.float32, 1e-4),
        # The interpreter multiplies in float32 whatever the inputs are; a GPU, bf16 in bf16.
        (34, 16, 16, 1, torch.bfloat16, 4e-3 if DEVICE == "cpu" else 2e-2),
    ],
)
def test_triton_is_the_reference(
    triton_kernels, time, width, d_value, sharing, squared, dtype, bound
):
    inputs = [
        None if x is None else x.detach().to(DEVICE).requires_grad_()
        for x in random_inputs(
            kv_heads=1,
            time=time,
            width=width,
            d_value=d_value,
            sharing=sharing,
            squared=squared,
            dtype=dtype,
        )
    ]
    y = triton_kernels.triton_chunked(*inputs, width**-2)
    assert y.dtype == dtype
    assert error(results(y, inputs), inputs, width**-2) < bound
