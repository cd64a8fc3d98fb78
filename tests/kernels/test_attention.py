"""Every kernel, outputs and gradients, against the whole pattern."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu
from hypothesis import assume, given
from hypothesis import strategies as st

import bilens.kernels
from bilens.errors import BilensError
from bilens.kernels import attention, bilinear_attention, resume_attention
from bilens.kernels.attention import reference
from bilens.kernels.products import row_length
from tests.kernels.inputs import cases, each, error, need_triton, random_inputs, results, shapes


@pytest.fixture(autouse=True)
def fresh_memory_holds_nan(monkeypatch):
    """Return a part that a kernel forgets to write would show."""

    def filled(make):
        return lambda *args, **options: make(*args, **options).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))


def test_the_names_of_the_kernels_room():
    assert {*bilens.kernels.__all__} == {"bilinear_attention", "resume_attention"}


@given(**{**shapes, "time": st.integers(1, 12)})
def test_the_reference_is_the_equation(squared, **sizes):
    q1, k1, v, q2, k2 = random_inputs(squared=squared, **sizes)
    q2, k2 = (q1, k1) if squared else (q2, k2)
    y = torch.zeros(*q1.shape[:3], v.shape[-1]).double()
    for h in range(q1.shape[1]):
        shared = h // sizes["sharing"]
        for t in range(sizes["time"]):
            for s in range(t + 1):
                first = (q1[:, h, t] * k1[:, shared, s]).sum(-1)
                second = (q2[:, h, t] * k2[:, shared, s]).sum(-1)
                y[:, h, t] += (0.3 * first * second)[:, None] * v[:, shared, s]
    inputs = (q1, k1, v, None, None) if squared else (q1, k1, v, q2, k2)
    torch.testing.assert_close(reference(inputs, 0.3), y)


SHAPES = st.fixed_dictionaries(shapes)


@given(st.integers(1, 50), st.sampled_from([1, 300, 10_000]), st.integers(1, 5), SHAPES)
def test_kernels_are_the_reference(chunk, numbers, threads, sizes):
    inputs = random_inputs(**sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bilens.kernels.chunked.CHUNK", chunk)
        patch.setattr("bilens.kernels.chunked.FEATURES", numbers)
        patch.setattr("torch.get_num_threads", lambda: threads)
        for kernel in ("auto", "chunked", "recurrent"):
            y = bilinear_attention(*inputs, scale=0.3, kernel=kernel)
            assert error(results(y, inputs), inputs, 0.3) < 1e-10


SIZES = [(1, 8, 1), (255, 8, 3), (257, 16, 2), (513, 32, 1), (300, 64, 2), (301, 128, 1)]
# bf16 keeps 8 bits: inputs are exact, outputs and gradients are rounded once.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-3}
PRECISIONS = [(*case, *sizes) for sizes in SIZES for case in product([False, True], BOUNDS)]


# Each size by day, and each type with both scores.
@cases("squared dtype time width sharing", PRECISIONS, PRECISIONS[::5])
def test_precision(squared, dtype, time, width, sharing):
    sizes = {"time": time, "width": width, "d_value": width, "sharing": sharing}
    inputs = random_inputs(squared=squared, dtype=dtype, **sizes)
    for kernel in ("chunked", "reference"):
        result = results(bilinear_attention(*inputs, kernel=kernel), inputs)
        assert {x.dtype for x in result} == {dtype}
        assert error(result, inputs, width**-2) < BOUNDS[dtype]


# Squares of an odd and of an even number of features have other layouts; products have one.
@cases("width squared", product([3, 4], [False, True]), [(3, False), (3, True), (4, True)])
def test_gradients_are_finite_differences(width, squared, monkeypatch):
    monkeypatch.setattr("bilens.kernels.chunked.CHUNK", 2)
    inputs = random_inputs(time=3, kv_heads=1, width=width, d_value=2, sharing=2, squared=squared)
    state = torch.randn_like(resume_attention(*inputs)[1]).requires_grad_()

    def resume(*inputs):
        return resume_attention(*inputs[:-1], state=inputs[-1])

    torch.autograd.gradcheck(resume, (*inputs, state))
    torch.autograd.gradgradcheck(resume, (*inputs, state), fast_mode=True)


@given(**{**shapes, "time": st.integers(1, 10), "width": st.integers(1, 6)})
def test_gradients_of_gradients_are_those_of_the_reference(**sizes):
    inputs = random_inputs(**sizes)
    given, result = [x for x in inputs if x is not None], []
    for kernel in ("reference", "chunked", "recurrent"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bilens.kernels.chunked.CHUNK", 7)
            orders = [[bilinear_attention(*inputs, scale=0.3, kernel=kernel)]]
            for _ in range(3):
                power = sum(x.square().sum() for x in orders[-1])
                orders.append(torch.autograd.grad(power, given, create_graph=True))
            result.append([x.detach() for order in orders for x in order])
    for expected, *others in zip(*result, strict=True):
        assert all((x - expected).norm() <= 1e-10 * expected.norm() for x in others)


BOTH = [False, True]


@pytest.mark.parametrize(("kernel", "squared"), [*product(["chunked", "reference"], BOTH)])
def test_what_a_mask_hides_may_overflow(kernel, squared):
    """A later token's key, or the product of the scores that nobody has with it."""
    inputs = random_inputs(time=30, width=4, squared=squared, dtype=torch.float32)
    plain = bilinear_attention(*inputs, kernel=kernel)[:, :, :29].detach()
    for large in (1e30, torch.inf):
        changed = each(inputs, lambda x: x.detach().clone())
        for place, number in ((0, 0), (3, 0), (1, large), (4, large)):
            if changed[place] is not None:
                changed[place][:, :, 29] = number
        given = [x.requires_grad_() for x in changed if x is not None]
        y = bilinear_attention(*changed, kernel=kernel)[:, :, :29]
        torch.testing.assert_close(y, plain)
        if large < torch.inf:
            # A finite key has a gradient, and so has whatever does not look at it.
            assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), given))


def padding(k):
    """Return which tokens are seen: not the first of a text, nor every fifth."""
    seen = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
    seen[:, 0] = seen[-1, 3::5] = False
    return seen


KERNELS = st.sampled_from(["reference", "chunked", "recurrent", "auto"])


@given(KERNELS, st.booleans(), st.booleans(), st.booleans(), SHAPES)
def test_constants_and_normalised_rows(kernel, normalised, with_constant, padded, sizes):
    """Against the whole pattern in float64: outputs, and gradients of inputs and constants."""
    q, k, v, _, _ = random_inputs(**{**sizes, "squared": True})
    constant = torch.randn(q.shape[1], generator=torch.Generator().manual_seed(3)).double()
    constant = constant.requires_grad_() if with_constant else None
    seen = padding(k) | (not padded)
    options = {"constant": constant, "normalised": normalised, "seen": seen if padded else None}
    y = bilinear_attention(q, k, v, scale=0.3, kernel=kernel, **options)
    keys, values = (x.repeat_interleave(sizes["sharing"], 1) for x in (k, v))
    scores = q @ keys.mT + (0 if constant is None else constant[:, None, None])
    pattern = (0.3 * scores**2).tril() * seen[:, None, None]
    # States hold sums of products, whose rounding a row of small scores alone is divided by.
    rows = pattern.detach().sum(-1)
    assume(not normalised or rows[rows > 0].min() > 1e-4)
    if normalised:
        pattern = pattern / pattern.sum(-1, keepdim=True).clamp_min(1e-20)
    inputs = [x for x in (q, k, v, constant) if x is not None]
    actual, expected = (results(x, inputs) for x in (y, pattern @ values))
    for a, b in zip(actual, expected, strict=True):
        # A row of a single small score has a large gradient on both sides.
        assert (a - b).norm() <= 1e-8 * (b.norm() + 1)


@given(**shapes, cut=st.integers(1, 39), normalised=st.booleans(), with_constant=st.booleans())
def test_a_text_goes_on_from_its_state(cut, normalised, with_constant, **sizes):
    inputs = random_inputs(**{**sizes, "time": 40})
    seen, wanted = padding(inputs[1]), [x for x in inputs if x is not None]
    options = {"scale": 0.3, "normalised": normalised and sizes["squared"]}
    if with_constant and sizes["squared"]:
        options["constant"] = torch.linspace(-1, 1, inputs[0].shape[1]).double().requires_grad_()
        wanted.append(options["constant"])
    y, state = [], None
    # The last token alone goes through the recurrence.
    for span in (slice(0, cut), slice(cut, 39), slice(39, 40)):
        parts = each(inputs, lambda x, span=span: x[:, :, span])
        if parts[0].shape[2]:
            out, state = resume_attention(*parts, state=state, seen=seen[:, span], **options)
            y.append(out)
    expected = bilinear_attention(*inputs, kernel="reference", seen=seen, **options)
    for a, b in zip(results(torch.cat(y, 2), wanted), results(expected, wanted), strict=True):
        assert (a - b).norm() <= 1e-8 * (b.norm() + 1)
    # A constant is a further coordinate of queries and keys.
    width = sizes["width"] + ("constant" in options)
    features = width * row_length(width, symmetric=sizes["squared"])
    assert state.shape[2:] == (features, sizes["d_value"] + options["normalised"])


# A model compiles by day, with such attention; see tests/nn/test_language.py.
@pytest.mark.slow
@pytest.mark.parametrize(("time", "squared"), [*product([20, 300], BOTH)])
def test_attention_compiles_as_one_graph(squared, time):
    """`aot_eager` traces both passes, and generates no code, which would take a minute."""
    inputs = random_inputs(time=time, squared=squared, sharing=2)
    compiled = torch.compile(bilinear_attention, fullgraph=True, backend="aot_eager")
    actual, expected = (results(f(*inputs), inputs) for f in (compiled, bilinear_attention))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@cases("everything", BOTH, [False])
def test_the_operators_keep_the_rules_of_torch(everything):
    inputs = random_inputs(time=5, width=4)
    state = torch.randn_like(resume_attention(*inputs)[1])
    # Torch's own test compares shapes and strides that a compiler assumes with real ones; the rest
    # of it compiles, which takes seconds.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.bilens.attend.default
    torch.library.opcheck(operator, ("chunked", *inputs, None, 0.3), test_utils=some)
    how = {} if everything else {"test_utils": some}
    torch.library.opcheck(operator, ("chunked", *inputs, state, 0.3), **how)


def test_mixed_precision_leaves_the_arithmetic_alone():
    inputs = random_inputs(time=300, dtype=torch.float32)
    plain = results(bilinear_attention(*inputs, kernel="chunked"), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = results(bilinear_attention(*inputs, kernel="chunked"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def test_memory_is_that_of_inputs_and_outputs():
    """Autograd keeps the inputs only, neither a pattern nor states of tokens."""
    inputs, kept = random_inputs(time=2000, width=8, dtype=torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        bilinear_attention(*inputs, kernel="chunked")
    sizes = [sum(x.untyped_storage().nbytes() for x in tensors) for tensors in (kept, inputs)]
    assert sizes[0] < 1.1 * sizes[1]


def choice(device, dtype=torch.float32, width=64, time=100):
    """Return the kernel of inputs, by those attributes of them that decide."""
    shape, device = (1, 1, time, width), torch.device(device)
    return attention._choose((SimpleNamespace(device=device, dtype=dtype, shape=shape),) * 5)


@pytest.fixture
def triton_of(monkeypatch):
    """Install a Triton of some version, or none."""

    def forget():
        for cached in (attention.triton_problem, attention._warn_once):
            cached.cache_clear()

    def install(version):
        module = SimpleNamespace(__version__=version)
        monkeypatch.setattr(attention, "find_spec", lambda name: version)
        monkeypatch.setattr(attention, "import_module", lambda name: module)
        forget()

    yield install
    forget()


def kernel_of_a_gpu():
    kernels = bilens.kernels.products.KERNELS
    return "chunked" if kernels["gpu"]() is kernels["chunked"]() else "triton"


def test_auto_takes_the_whole_pattern_for_short_texts(monkeypatch):
    assert choice("cpu", width=8, time=128) == "reference"
    assert choice("cpu", width=8, time=129) == "chunked"
    monkeypatch.setattr("bilens.kernels.attention.PATTERN", 128**2 - 1)
    assert choice("cpu", width=8, time=128) == "chunked"


def test_a_gpu_takes_a_triton_that_was_tested(triton_of, monkeypatch):
    monkeypatch.setattr("bilens.kernels.attention._import_triton", lambda: None)
    for version in ("3.9.0", "3.9.0+git1234"):
        triton_of(version)
        assert kernel_of_a_gpu() == "triton"
        with pytest.raises(BilensError, match=r"not torch\.float64 on cpu, 8 and 8; take 'chun"):
            bilinear_attention(*random_inputs(), kernel="triton")
    assert choice("cuda") == choice("cuda", torch.bfloat16, time=10_000) == "gpu"
    assert choice("cuda", torch.float64, time=10_000) == choice("mps", time=10_000) == "chunked"
    assert choice("cuda", width=129) == choice("mps", time=64**2) == "reference"
    assert choice("cuda", width=129, time=129**2 + 1) == "chunked"


@pytest.mark.parametrize("version", [None, "3.6.0", "3.9.0.dev1"])
def test_any_other_triton_is_left_out_with_a_single_warning(triton_of, version):
    problem = f"Triton {version} is untested, expected 3.9.0" if version else "Triton is missing"
    triton_of(version)
    with pytest.warns(UserWarning, match=f"{problem}.* takes the chunked kernel; pip install trit"):
        assert kernel_of_a_gpu() == "chunked"
    # A second warning would be an error.
    assert kernel_of_a_gpu() == "chunked"
    with pytest.raises(BilensError, match=f"kernel='triton', but {problem}"):
        bilinear_attention(*random_inputs(), kernel="triton")


def patch_gpu(monkeypatch, **values):
    """Let the benchmark of a GPU run the chunked kernel here."""
    for name, value in {"DEVICE": "cpu", "KERNEL": "chunked", **values}.items():
        monkeypatch.setattr(gpu, name, value)


@pytest.mark.parametrize("place", [None, 0, 3])
def test_the_benchmark_of_a_gpu_compares_graphs_with_eager_launches(monkeypatch, place):
    """A graph that replays to other bits is named, though each of its replays is the same."""

    def recorded(call):
        outputs = call()
        if place is not None:
            outputs[place] = outputs[place] * (1 + 2**-22)
        return (lambda: None), outputs

    patch_gpu(monkeypatch, HEADS=1, recorded=recorded)
    if place is None:
        gpu.check(8, torch.float32)
        return
    with pytest.raises(RuntimeError, match=f"other bits than run 0: {['y', 'dv'][place // 3]}"):
        gpu.check(8, torch.float32)


def test_the_benchmark_for_a_gpu_prints_every_row(monkeypatch, capsys):
    """All but the clocks, the card and the kernels of others is run here."""
    need_triton()
    patch_gpu(monkeypatch, find_spec=lambda name: None)
    for clock in ("milliseconds", "graph_milliseconds"):
        monkeypatch.setattr(gpu, clock, lambda call: float(call() is None) + 1)
    gpu.row(64, 32, 1e12)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["32", "64"]] * 4
    assert all("nan" in line for line in lines)
