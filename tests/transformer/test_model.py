"""One view of every transformer: its parts compute the same as the model."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from bilens.circuits.directions import name_tokens
from bilens.convert import give_swish
from bilens.errors import BilensError, NotBilinearError
from bilens.flows import flow
from bilens.language import TokenDirection
from bilens.tensor import with_constant
from bilens.testing import CHECKS, FamilyCase, sum_of_parts
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.families import known_families, known_norm
from bilens.transformer.running import wide_passes
from tests.families import EACH, EACH_GATED, FAMILIES, MIXTURES, exact_norms, some_text, tiny
from tests.flows.flows import leaves
from tests.models import TOKENS, parts, random_model, random_text
from tests.tokenizers_of_all_kinds import small_llama


@cache
def view_of(name: str) -> ResidualModel:
    """Return a tiny model of a family, for tests that leave it as it is."""
    return ResidualModel(tiny(name))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", EACH)
def test_a_family_passes_every_check(name, check):
    with exact_norms():
        CHECKS[check](FamilyCase(view_of(name), some_text()[0], rounding=1e-12))


@given(st.fixed_dictionaries(parts), st.sampled_from(["bilinear", "swiglu", "relu2"]))
def test_own_models_of_all_parts_add_up(settings, mlp):
    view = ResidualModel(random_model(n_layers=2, mlp=mlp, **settings))
    of_text = Pass.of(view, random_text())
    total, logits = sum_of_parts(of_text), of_text.logits[0]
    assert (total - logits).abs().max() < 1e-10 * logits.abs().max()


def test_norms_of_queries_and_keys_give_their_gain_to_qk():
    view = ResidualModel(tiny("qwen3"))
    attn = view.layer(0).heads.module
    before = view.qk(0)[0].dense()
    attn.q_norm.weight.mul_(2)
    attn.k_norm.weight.mul_(3)
    torch.testing.assert_close(view.qk(0)[0].dense(), 6 * before)


@pytest.mark.parametrize("name", EACH_GATED)
def test_the_mlp_is_a_tensor_once_its_gate_is_linear(name):
    model = tiny(name)
    with pytest.raises(NotBilinearError, match=r"layers.1.mlp has an activation that is not linea"):
        ResidualModel(model).mlp(1)
    give_swish(model).beta = 0.0
    view = ResidualModel(model)
    with exact_norms():
        n, norm = view.mlp_inputs(1, some_text()), view.layer(1).mlp.norm
        tensor, mlp = view.mlp(1), view.layer(1).mlp.module
        expected = view.layer(1).mlp.residual_scale * mlp(n if norm is None else norm.applied(n))
    if view.layer(1).mlp.out_norm is not None:
        expected = expected * view.layer(1).mlp.out_norm.gain()
    torch.testing.assert_close(tensor(n), expected)
    u = view.direction(3, [7, 8])
    z = with_constant(n) if tensor.constant else n
    torch.testing.assert_close(view.mlp(1).interaction(u)(z), tensor(n) @ u)


def test_learned_positions_are_embedded():
    view = ResidualModel(tiny("gpt2"))
    model = view.model.transformer
    expected = model.wte.weight[[3, 4]] + model.wpe.weight[5]
    torch.testing.assert_close(view.modules.embedded(torch.tensor([3, 4]), 5), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_weights_are_read_in_float32(dtype):
    model = tiny("llama", dtype=dtype)
    give_swish(model).beta = 0.0
    view = ResidualModel(model)
    assert view.mlp(0).out.dtype == view.W_U.dtype == view.qk(0)[0].left.dtype == torch.float32
    assert Pass.of(view, some_text()).pattern(0).dtype == torch.float32
    assert view.mlp(0).interaction(view.direction(3)).eigh(3).values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(st.integers(1, 4), st.booleans())
def test_gradients_of_small_weights_keep_no_copy_in_float32(dtype, n, transposed):
    linear = nn.Linear(3, n, dtype=dtype)
    wide = linear.weight.detach().double()
    x = torch.randn(2, 3, requires_grad=True)
    with wide_passes(linear):
        y = x @ linear.weight.T if transposed else linear(x)
        z = x @ linear.weight.T if transposed else linear(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), wide.sum(0).expand(2, 3))
    # A backward pass reads the weight that is stored, so that a later change of it shows.
    linear.weight.data.zero_()
    (gradient,) = torch.autograd.grad(z.sum(), x)
    assert transposed or not gradient.any()


@pytest.mark.parametrize("name", [*EACH, *MIXTURES])
def test_texts_side_by_side_have_the_numbers_of_each(name):
    view = view_of(name)
    texts = some_text()
    together = Pass.of(view, texts)
    for row, ids in enumerate(texts):
        alone = Pass.of(view, ids)
        pairs = [(getattr(together, x), getattr(alone, x)) for x in ("stream", "logits", "tokens")]
        pairs.append((together.next_logits, alone.logits[:, -1]))
        for layer in range(view.n_layers):
            pairs.append((together.pattern(layer), alone.pattern(layer)))
            pairs.append((together.streams[layer], alone.streams[layer]))
            first, second = (vars(x.layer(layer)) for x in (together, alone))
            pairs += [(first[x], second[x]) for x in first if second[x] is not None]
        for several, expected in pairs:
            # transformers computes softmax in float32.
            torch.testing.assert_close(several[[row]], expected, rtol=1e-5, atol=1e-6)


def test_a_pass_shows_the_likeliest_next_tokens(view):
    ids = random_text()
    one, two = Pass.of(view, ids), Pass.of(view, torch.stack([ids.flip(0), ids]))
    best = view.logits(ids[None])[0, -1].softmax(-1).max()
    assert list(one.frame().columns) == ["next token", "probability"]
    assert one.frame().probability[0] == pytest.approx(float(best))
    assert two.frame().probability[10] == pytest.approx(float(best))
    assert two.frame()["text"].tolist() == [0] * 10 + [1] * 10


def test_logits_of_a_pass_are_those_of_given_embeddings(llama):
    ids = some_text()[:1]
    tokens = llama.W_E[: ids.shape[1]][None]
    own = llama.model(inputs_embeds=tokens, use_cache=False).logits
    torch.testing.assert_close(Pass.of(llama, ids, tokens).logits, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "gemma3", "gpt2", "own-layer-bias"])
@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Softplus()])
def test_activations_that_are_not_zero_at_zero(name, act):
    model = tiny(name)
    mlp = ResidualModel(model).layer(1).mlp
    setattr(mlp.module, mlp.activation, act)
    mlp.reads[0].module.weight[..., :3] = 0  # hidden units that are exactly 0
    mlp.reads[0].module.weight[:3] = 0
    view = ResidualModel(model, TOKENS)
    with exact_norms():
        of_text = Pass.of(view, some_text()[0])
        total, logits = sum_of_parts(of_text), of_text.logits[0]
        split = flow(view, some_text()[0], TokenDirection("t3"))
    assert (total - logits).abs().max() < 1e-11 * logits.abs().max()
    assert leaves(split) == pytest.approx(split.value, rel=1e-9)


def test_forward_hooks_are_refused_by_name():
    view, ids = ResidualModel(tiny("llama")), some_text()[0]
    mlp = view.model.model.layers[1].mlp

    def double(module, args, output):
        return 2 * output

    of_text = Pass.of(view, ids)
    readings = [lambda: of_text.layer(0), lambda: view.layer(1), lambda: view.ov(1)]
    for hook in (mlp.register_forward_hook(double), mlp.register_forward_pre_hook(double)):
        for read in (*readings, lambda: ResidualModel(view.model)):
            with pytest.raises(BilensError, match=r"layers\.1\.mlp has a forward hook, .*double"):
                read()
        hook.remove()
    prune.random_unstructured(mlp.up_proj, "weight", 0.5)
    with pytest.raises(BilensError, match=r"layers\.1\.mlp\.up_proj has a forward hook, torch"):
        ResidualModel(view.model)
    prune.remove(mlp.up_proj, "weight")
    for read in readings:
        read()


def test_every_family_is_tested():
    models = map(tiny, (*FAMILIES, "own-none", *MIXTURES))
    tested = {type(model).__name__ for model in models}
    assert tested == {name for name in known_families() if not name.startswith("Made")}


def test_directions_by_name_or_number(view):
    assert view.token("t7") == 7
    assert torch.equal(view.direction(7, [3, 9]), view.direction("t7", minus=["t3", 9]))
    assert torch.equal(view.direction(7, minus=3), view.direction("t7", minus="t3"))


def test_weights_of_two_types_are_refused():
    """The model itself does not run."""
    model = small_llama(30)
    model.model.layers[1].mlp.to(torch.bfloat16)
    with pytest.raises(BilensError, match=r"layers.1.mlp.gate_proj is stored in torch.bfloat16 an"):
        ResidualModel(model)
    assert ResidualModel(model.to(torch.float32)).vocab_size == 30


def test_a_vocabulary_of_two_tokens():
    view = ResidualModel(small_llama(2, bos_token_id=None, eos_token_id=None))
    assert len(name_tokens(view, torch.tensor([2.0, 1.0]))) == 2


class MadeNorm(nn.Module):
    """A norm of any of the four formulas, times a factor, with the eps that it says or another."""

    def __init__(self, weight, centres, offset, factor=1.0, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.centres, self.offset, self.factor = centres, offset, factor
        self.eps, self.true_eps = 1e-6, eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        n = x * (x.square().mean(-1, keepdim=True) + self.true_eps).rsqrt()
        return self.factor * n * (self.offset + self.weight)


@given(
    largest=st.sampled_from([0.1, 1.0, 40.0, 1649.0]),
    centres=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_the_closest_of_the_four_formulas_is_taken(largest, centres, offset, dtype):
    weight = largest * torch.rand(64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    norm = known_norm("norm", MadeNorm(weight.to(dtype), centres, offset))
    assert (norm.centres, norm.offset) == (centres, offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes", [{"factor": 1.005}, {"factor": 1.0001}, {"offset": 0.9}, {"eps": 1e-5}]
)
def test_a_norm_that_is_a_little_different_is_refused(changes, dtype):
    weight = torch.rand(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"centres": False, "offset": 1.0, **changes}
    with pytest.raises(BilensError, match=r"norm is a MadeNorm and computes something else"):
        known_norm("norm", MadeNorm(weight, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_torch_itself_chooses_the_same_eps(dtype):
    norm = known_norm("norm", nn.RMSNorm(8, dtype=dtype))
    assert (norm.centres, norm.offset) == (False, 0.0)
