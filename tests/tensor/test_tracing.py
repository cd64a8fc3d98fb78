"""Factors found by running a module on probes, held against the module itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bilens
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import BilinearTensor, TensorChain
from bilens.tensor.chain import TensorStack
from tests.families import tiny
from tests.tensor.deep import forward
from tests.tensor.factors import normal

flag = st.booleans()


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


class Composed(nn.Module):
    """Modules, and a function of them and x that puts them together."""

    def __init__(self, together, **parts):
        super().__init__()
        self.together = together
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.together(self, x)


def trained(module, n_in):
    """With statistics in its norms, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = module.double().train()
        module(3 * torch.randn(50, n_in, dtype=torch.float64) + 1)
    return module.eval()


STYLES = st.sampled_from(["mul", "method", "squares", "halves", "in place"])


@given(st.integers(2, 7), st.integers(1, 6), st.integers(2, 9), flag, flag, STYLES)
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


def outputs(stack, x):
    seen = x if stack.embedding() is None else x @ stack.embedding().T
    return forward(stack.layer_tensors(), seen)


@given(st.integers(1, 4), st.integers(2, 6), flag, flag, flag, flag)
def test_a_stack_is_its_chain(n_layers, width, bias, residual, norm, with_embedding):
    how = {"bias": bias, "residual": residual, "norm": norm}
    layers = [Layer(width, width, 7, **how) for _ in range(n_layers)]
    embed = nn.Linear(9, width, bias=bias) if with_embedding else nn.Identity()
    n_in = 9 if with_embedding else width
    module = trained(nn.Sequential(embed, *layers, nn.Linear(width, 3, bias=bias)), n_in)
    stack, x = TensorStack(module), normal(20, n_in)
    assert isinstance(stack, TensorChain)
    assert len(stack.layer_tensors()) == n_layers
    # No state between layers is wider than the stack.
    assert all(t.n_in - t.constant <= width for t in stack.layer_tensors())
    torch.testing.assert_close(outputs(stack, x), module(x), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(stack(x), module(x))


def test_rounding_of_a_map_is_no_direction_of_a_state():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Layer(5, 5, 7) for _ in range(4)]
        stack = TensorStack(nn.Sequential(nn.Linear(9, 5), *layers, nn.Linear(5, 3)).double())
    assert [tensor.n_in - tensor.constant for tensor in stack.layer_tensors()] == [5] * 4


def test_connections_of_any_kind_are_in_the_state():
    def dense(layers, x):
        for layer in layers.children():
            x = torch.cat([x, layer(x)], -1)
        return x[..., :3] + 2 * x[..., -3:]

    layers = {str(n): Layer(n, 4, 5) for n in (4, 8, 12)}
    module, x = Composed(dense, **layers).double(), normal(9, 4)
    torch.testing.assert_close(outputs(TensorStack(module), x), module(x), rtol=1e-8, atol=1e-8)


def test_two_products_side_by_side_are_one_layer():
    parts = {"a": Layer(4, 3, 5), "b": Layer(4, 3, 2), "pairs": nn.Bilinear(4, 4, 3)}
    module = Composed(lambda m, x: m.a(x) + m.b(x) + m.pairs(x, 2 * x), **parts).double()
    x = normal(9, 4)
    torch.testing.assert_close(BilinearTensor.of(module)(x), module(x), rtol=1e-9, atol=1e-9)


def test_powers_and_images():
    parts = {"a": nn.Conv2d(2, 3, 3), "b": nn.Conv2d(2, 3, 3), "head": nn.Linear(12, 5)}
    module = Composed(lambda m, x: m.head((m.a(x) * m.b(x)).flatten(1)), **parts).double()
    x, stack = normal(6, 2 * 4 * 4), bilens.load(module, input_shape=(2, 4, 4))
    assert len(stack.layer_tensors()) == 1
    torch.testing.assert_close(outputs(stack, x), module(x.reshape(-1, 2, 4, 4)))

    stack, x = TensorStack(Composed(lambda m, x: x**3), (4,)), normal(5, 4)
    first, second = (t.to(torch.float64) for t in stack.layer_tensors())
    torch.testing.assert_close(second(first(x)), x**3, rtol=1e-5, atol=1e-5)


def test_the_tensors_of_a_classifier_are_found_again():
    config = ClassifierConfig(16, 3, 6, 3, bias=True, residual=True, norm="scalar")
    model = ImageClassifier(config).double().eval()
    stack, x = TensorStack(model), normal(9, 16)
    assert len(stack.layer_tensors()) == len(model.tensors())
    torch.testing.assert_close(outputs(stack, x), forward(model.tensors(), x), rtol=1e-8, atol=1e-8)


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
