"""The Triton kernels, in Triton's interpreter on a CPU, and on a GPU if present."""

import importlib.util
import sys
from itertools import product

import pytest
import torch

from bilens.kernels import bilinear_attention, resume_attention
from tests.kernels.inputs import cases, each, error, need_triton, random_inputs, results

pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def kernels_as_they_are_written():
    """Triton reads the source of its kernels, which the tests' check of shapes would wrap."""
    need_triton()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bilens.kernels.triton_kernels", "bilens.kernels.triton_quadratic"):
            origin = importlib.util.find_spec(name).origin
            spec = importlib.util.spec_from_file_location(name, origin)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "bilens.kernels.triton_chunked", raising=False)
        yield


def on_device(**sizes):
    inputs = random_inputs(**{"kv_heads": 1, "dtype": torch.float32, **sizes})
    return each(inputs, lambda x: x.detach().to(DEVICE).requires_grad_())


def check(inputs, width, given=None):
    """Compare the kernels with the reference, on the inputs or on others of the same numbers."""
    dtype = inputs[0].dtype
    y = bilinear_attention(*(given or inputs), kernel="triton")
    assert y.dtype == dtype
    assert error(results(y, inputs), inputs, width**-2) < BOUNDS[dtype]


def cut_into_chunks(monkeypatch, length):
    monkeypatch.setattr("bilens.kernels.triton_chunked.chunk_length", lambda time, width: length)


def padding(k):
    """Return which tokens are seen: of the last text not the first, nor some others."""
    seen = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=DEVICE)
    seen[-1, :9] = seen[-1, 66] = False
    return seen


# The interpreter multiplies in float32 whatever the inputs are; a GPU, bf16 in bf16, and float32
# by three products of tf32.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-3 if DEVICE == "cpu" else 2e-2}
BOTH, TYPES = [False, True], [torch.float32, torch.bfloat16]
# The interpreter runs each program of a kernel by itself: by day some cases, each with both scores.
# Up to 16^2 tokens are one chunk, and more are chunks of 128.
SIZES = [(1, 8, 8, 1, TYPES[0]), (37, 20, 24, 1, TYPES[0]), (260, 16, 12, 2, TYPES[0])]
SIZES += [(260, 16, 16, 1, TYPES[1])]
ALL = [(*sizes, squared) for sizes, squared in product(SIZES, BOTH)]


@cases("time width d_value sharing dtype squared", ALL, [ALL[0], ALL[3], ALL[7]])
def test_triton_is_the_reference(time, width, d_value, sharing, squared, dtype):
    sizes = {"time": time, "width": width, "d_value": d_value, "sharing": sharing}
    check(on_device(squared=squared, dtype=dtype, **sizes), width)


WIDE = product((64, 16), (64, 128), TYPES, BOTH)


@cases("width d_value dtype squared", WIDE, [(16, 128, torch.float32, True)])
def test_tiles_of_wide_heads_and_values(width, d_value, dtype, squared, monkeypatch):
    """Cut into two chunks of as few tokens as tiles allow, instead of one."""
    length = 64 if dtype == torch.float32 else 128
    cut_into_chunks(monkeypatch, length)
    sizes = {"time": length + 12, "width": width, "d_value": d_value}
    check(on_device(squared=squared, dtype=dtype, **sizes), width)


@cases("time segments squared", product([140, 290], [2, 3, 5], BOTH), [(140, 3, True)])
def test_segments_of_a_text_are_summed_side_by_side(time, segments, squared, monkeypatch):
    """Three or five chunks; of as many segments each is one, and of two the last is shorter."""
    cut_into_chunks(monkeypatch, 64)
    monkeypatch.setattr("bilens.kernels.triton_chunked.segment_count", lambda *_: segments)
    check(on_device(time=time, width=8, d_value=8, squared=squared), 8)


@cases("one_chunk squared", product(BOTH, BOTH), [(True, False)])
def test_inputs_are_read_where_they_are(squared, one_chunk, monkeypatch):
    """Lay heads side by side in a row of the stream, as a model does."""
    length, time = (1000, 20) if one_chunk else (64, 70)
    cut_into_chunks(monkeypatch, length)
    inputs = on_device(batch=2, kv_heads=2, time=time, width=12, d_value=20, squared=squared)
    side_by_side = each(inputs, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not side_by_side[0].is_contiguous()
    check(inputs, 12, side_by_side)


DAILY = [(False, True, 256, False), (True, False, 256, True), (True, True, 64, True)]


@cases("constant normalised length padded", product(BOTH, BOTH, (64, 256), BOTH), DAILY)
def test_constants_and_sums_of_rows(constant, normalised, length, padded, monkeypatch):
    """Outputs, gradients, and gradients of gradients, of one chunk or two, in float64 too."""
    cut_into_chunks(monkeypatch, length)
    plain = on_device(batch=2, time=70, width=12, d_value=10, sharing=2, squared=True)[:3]
    seen = padding(plain[1]) if padded else None
    # Neither the constants nor, in a model, the gradients of outputs are numbers in a row.
    offsets = torch.linspace(0.5, 1, 4, device=DEVICE)[::2] if constant else None
    results_of = {}
    for kernel, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in plain]
        added = None if offsets is None else offsets.to(dtype).detach().requires_grad_()
        options = {"constant": added, "normalised": normalised, "seen": seen}
        y = bilinear_attention(*inputs, **options, kernel=kernel)
        wanted = inputs if added is None else [*inputs, added]
        in_stream = y.transpose(1, 2).flatten(2)
        first = torch.autograd.grad(in_stream.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), wanted)
        results_of[kernel] = [y, *first, *second]
    for result, expected in zip(results_of["triton"], results_of["reference"], strict=True):
        assert (result - expected).norm() < BOUNDS[torch.float32] * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("squared", BOTH)
def test_gradients_of_gradients_are_those_of_the_reference(squared):
    inputs = on_device(time=20, width=4, d_value=3, sharing=2, squared=squared)
    given, result = [x for x in inputs if x is not None], []
    for kernel in ("reference", "triton"):
        y = bilinear_attention(*inputs, scale=0.3, kernel=kernel)
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        result.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    for a, b in zip(*result, strict=True):
        assert (a - b).norm() < BOUNDS[torch.float32] * a.norm()


OPTIONS = [(False, False, False), *product([True], BOTH, BOTH)]


@cases("squared constant normalised", OPTIONS, [OPTIONS[0], OPTIONS[-1]])
def test_a_text_goes_on_from_a_state(squared, constant, normalised, monkeypatch):
    """It begins with padding, by the kernels twice and by the recurrence once, from one state."""
    take = "bilens.kernels.attention._linear"
    monkeypatch.setattr(take, lambda inputs: "gpu")
    cut_into_chunks(monkeypatch, 64)
    inputs = on_device(time=76, width=6, d_value=5, sharing=1 + squared, squared=squared)
    if squared:  # what has gradients is not resumed inside the kernels
        inputs = each(inputs, torch.Tensor.detach)
    seen = padding(inputs[1])
    offsets = torch.tensor([0.5, -1.0], device=DEVICE) if constant else None
    y, state = [], None
    for span in (slice(0, 10), slice(10, 11), slice(11, 76)):
        parts = each(inputs, lambda x, span=span: x[:, :, span])
        options = {"scale": 0.3, "normalised": normalised, "seen": seen[:, span]}
        out, state = resume_attention(*parts, state=state, constant=offsets, **options)
        y.append(out)
    exact = each(inputs, lambda x: x.detach().double().requires_grad_())
    offsets = None if offsets is None else offsets.double()
    options = {"scale": 0.3, "constant": offsets, "normalised": normalised, "seen": seen}
    whole = bilinear_attention(*exact, **options, kernel="reference")
    actual, expected = [torch.cat(y, 2)], [whole]
    if not squared:
        actual, expected = results(actual[0], inputs), results(whole, exact)
    # Nothing of a state is lost: the plain recurrence makes the same one.
    monkeypatch.setattr(take, lambda inputs: "chunked")
    _, last = resume_attention(*exact, **options)
    for a, b in zip([*actual, state], [*expected, last], strict=True):
        assert (a - b).norm() < BOUNDS[torch.float32] * b.norm()
