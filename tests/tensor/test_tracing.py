"""Factors found by running a module on probes, held against the module itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bilens
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import BilinearTensor, TensorChain, TensorStack
from tests.families import tiny
from tests.tensor.factors import normal


class Layer(nn.Module):
    def __init__(self, n_in, n_out, rank, *, bias=True, style="mul", residual=False, norm=False):
        super().__init__()
        self.left, self.right = (nn.Linear(n_in, rank, bias=bias) for _ in range(2))
        self.out = nn.Linear(rank, n_out, bias=bias)
        self.norm = nn.BatchNorm1d(n_in) if norm else nn.Identity()
        self.style, self.residual = style, residual

    def forward(self, x):
        y = self.norm(x)
        a, b = self.left(y), self.right(y)
        product = {
            "mul": lambda: a * b,
            "method": lambda: torch.mul(a, b),
            "squares": lambda: ((a + b).square() - (a - b) ** 2) / 4,
            "halves": lambda: torch.cat([a[..., :1] * b[..., :1], a[..., 1:] * b[..., 1:]], -1),
            "in place": lambda: a.mul_(b),
        }[self.style]()
        return self.out(product) + (x if self.residual else 0)


def trained(module, n_in):
    """With statistics in its norms, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = module.double().train()
        module(3 * torch.randn(50, n_in, dtype=torch.float64) + 1)
    return module.eval()


@given(
    n_in=st.integers(2, 7),
    n_out=st.integers(1, 6),
    rank=st.integers(2, 9),
    bias=st.booleans(),
    norm=st.booleans(),
    style=st.sampled_from(["mul", "method", "squares", "halves", "in place"]),
)
def test_a_layer_is_its_tensor(n_in, n_out, rank, bias, norm, style):
    layer = trained(Layer(n_in, n_out, rank, bias=bias, style=style, norm=norm), n_in)
    tensor, x = BilinearTensor.of(layer), normal(20, n_in)
    torch.testing.assert_close(tensor(x), layer(x), rtol=1e-9, atol=1e-9)
    assert tensor.constant == (bias or norm)
    assert tensor.left.dtype == torch.float64
    if style == "mul" and not bias and not norm:
        # The factors are the module's own, not merely equal as a tensor.
        torch.testing.assert_close(tensor.left, layer.left.weight.detach())
        torch.testing.assert_close(tensor.out, layer.out.weight.detach())


@given(
    n_layers=st.integers(1, 4),
    width=st.integers(2, 6),
    bias=st.booleans(),
    residual=st.booleans(),
    norm=st.booleans(),
    embedded=st.booleans(),
)
def test_a_stack_is_its_chain(n_layers, width, bias, residual, norm, embedded):
    how = {"bias": bias, "residual": residual, "norm": norm}
    layers = [Layer(width, width, 7, **how) for _ in range(n_layers)]
    embed = nn.Linear(9, width, bias=bias) if embedded else nn.Identity()
    n_in = 9 if embedded else width
    module = trained(nn.Sequential(embed, *layers, nn.Linear(width, 3, bias=bias)), n_in)
    stack, x = TensorStack(module), normal(20, n_in)
    assert isinstance(stack, TensorChain)
    assert len(stack.layer_tensors()) == n_layers
    # No state between layers is wider than the stack.
    assert all(t.n_in - t.constant <= width for t in stack.layer_tensors())
    outputs = x if stack.embedding() is None else x @ stack.embedding().T
    for tensor in stack.layer_tensors():
        outputs = tensor(outputs)
    torch.testing.assert_close(outputs, module(x), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(stack(x), module(x))


def test_rounding_of_a_map_is_no_direction_of_a_state():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Layer(5, 5, 7) for _ in range(4)]
        stack = TensorStack(nn.Sequential(nn.Linear(9, 5), *layers, nn.Linear(5, 3)).double())
    assert [tensor.n_in - tensor.constant for tensor in stack.layer_tensors()] == [5] * 4


def test_connections_of_any_kind_are_in_the_state():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(n, 4, 5) for n in (4, 8, 12))

        def forward(self, x):
            for layer in self.layers:
                x = torch.cat([x, layer(x)], -1)
            return x[..., :3] + 2 * x[..., -3:]

    module = Dense().double()
    stack, x = TensorStack(module), normal(9, 4)
    outputs = x
    for tensor in stack.layer_tensors():
        outputs = tensor(outputs)
    torch.testing.assert_close(outputs, module(x), rtol=1e-8, atol=1e-8)


def test_two_products_side_by_side_are_one_layer():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Layer(4, 3, 5), Layer(4, 3, 2)
            self.pairs = nn.Bilinear(4, 4, 3)

        def forward(self, x):
            return self.a(x) + self.b(x) + self.pairs(x, 2 * x)

    module = Two().double()
    tensor, x = BilinearTensor.of(module), normal(9, 4)
    torch.testing.assert_close(tensor(x), module(x), rtol=1e-9, atol=1e-9)


def test_powers_and_images():
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Conv2d(2, 3, 3) for _ in range(2))
            self.head = nn.Linear(12, 5)

        def forward(self, x):
            return self.head((self.a(x) * self.b(x)).flatten(1))

    module, x = Images().double(), normal(6, 2 * 4 * 4)
    stack = bilens.load(module, input_shape=(2, 4, 4))
    (tensor,) = stack.layer_tensors()
    seen = x if stack.embedding() is None else x @ stack.embedding().T
    torch.testing.assert_close(tensor(seen), module(x.reshape(-1, 2, 4, 4)))

    class Cube(nn.Module):
        def forward(self, x):
            return x**3

    stack, x = TensorStack(Cube(), (4,)), normal(5, 4)
    assert len(stack.layer_tensors()) == 2
    first, second = (t.to(torch.float64) for t in stack.layer_tensors())
    torch.testing.assert_close(second(first(x)), x**3, rtol=1e-5, atol=1e-5)


def test_the_tensors_of_a_classifier_are_found_again():
    config = ClassifierConfig(16, 3, 6, 3, bias=True, residual=True, norm="scalar")
    model = ImageClassifier(config).double().eval()
    result, x = TensorStack(model), normal(9, 16)
    outputs, expected = x @ result.embedding().T, x
    for ours, plain in zip(result.layer_tensors(), model.tensors(), strict=True):
        outputs, expected = ours(outputs), plain(expected)
    torch.testing.assert_close(outputs, expected, rtol=1e-8, atol=1e-8)


def test_the_module_stays_as_it_is():
    module = Layer(4, 4, 5, norm=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    stack = bilens.load(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())
    assert all(part.training for part in stack.modules())


def test_load_knows_what_it_is_given():
    classifier = ImageClassifier(ClassifierConfig(16, 3, 6))
    assert bilens.load(classifier) is classifier
    assert isinstance(bilens.load(tiny("llama")), bilens.ResidualModel)
    assert isinstance(bilens.load(Layer(4, 3, 5)), TensorStack)
