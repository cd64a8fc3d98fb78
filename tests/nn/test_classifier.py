import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bilens
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.nn.layers import ScalarNorm
from bilens.tensor import bonds

configs = st.builds(
    ClassifierConfig,
    n_inputs=st.just(12),
    n_classes=st.integers(1, 5),
    d_model=st.integers(1, 6),
    n_layers=st.integers(1, 3),
    d_hidden=st.one_of(st.none(), st.integers(1, 7)),
    bias=st.booleans(),
    residual=st.booleans(),
    norm=st.sampled_from(["none", "scalar"]),
    image_shape=st.just((3, 4)),
)


def build(config: ClassifierConfig) -> ImageClassifier:
    torch.manual_seed(0)
    model = ImageClassifier(config)
    # Scalar norms know what they saw in training.
    for _ in range(3):
        model(torch.randn(5, config.n_inputs))
    return model.eval()


@given(configs)
def test_the_chain_of_tensors_is_the_model(config):
    model = build(config).double()
    x = hidden = torch.randn(5, 12, dtype=torch.float64)
    for tensor in model.tensors():
        hidden = tensor(hidden)
    assert torch.allclose(hidden, model(x), rtol=1e-10, atol=1e-12)


def test_a_scalar_norm_is_the_batch_in_training_and_the_mean_of_batches_behind_it():
    norm, batches = ScalarNorm(), [torch.randn(4, 7) * size for size in (1.0, 5.0, 2.0)]
    assert torch.equal(norm.eval()(batches[0]), batches[0])
    norm.train()
    for x in batches:
        y = norm(x)
        assert float(y.square().mean()) == pytest.approx(1, rel=1e-4)
    shares = [(1 - ScalarNorm.momentum) ** 2, 1 - ScalarNorm.momentum, 1.0]
    squares = [float(x.square().mean()) for x in batches]
    mean = sum(a * b for a, b in zip(shares, squares, strict=True)) / sum(shares)
    assert torch.allclose(norm.eval()(batches[0]), batches[0] / mean**0.5, rtol=1e-4)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ScalarNorm().double(), (x,))


def test_a_normalised_model_runs_and_its_layer_is_a_tensor():
    model = build(ClassifierConfig(4, 2, 3, norm="rms")).double()
    hidden = model.norms[0](model.embed(torch.randn(6, 4, dtype=torch.float64)))
    assert torch.allclose(hidden.pow(2).mean(-1), torch.ones(6, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(model.layers[0].tensor()(hidden), model.layers[0](hidden))


@given(configs)
def test_saved_and_loaded_models_have_the_same_weights(tmp_path_factory, config):
    run = tmp_path_factory.mktemp("run")
    model = build(config)
    model.save_pretrained(run)
    x = torch.randn(3, 12)
    for loaded in (bilens.load(run), ImageClassifier.from_pretrained(run)):
        assert loaded.config == config
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight)
        assert torch.allclose(loaded(x), model(x), rtol=1e-4, atol=1e-6)
    assert {p.name for p in run.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_accuracy_counts():
    model = build(ClassifierConfig(4, 3, 5))
    x = torch.randn(50, 4)
    labels = model(x).argmax(-1)
    labels[:10] = (labels[:10] + 1) % 3
    assert model.accuracy(x, labels, batch_size=7) == 0.8


@given(configs, st.integers(1, 4))
def test_a_cut_model_is_an_ordinary_one(config, k):
    model = build(config).double()
    reading = bonds(model.layer_tensors(), torch.eye(config.n_classes), embedding=model.embedding())
    cut = reading.cut(k)
    small = ImageClassifier.from_cut(cut, model.config).double()
    x = torch.randn(5, 12, dtype=torch.float64)
    scale = cut(x).abs().max().clamp_min(1e-6)
    assert (small(x) - cut(x)).abs().max() <= 1e-4 * scale
    assert small.config.d_model == max(*cut.ranks, config.n_classes)
    assert small.config.class_names == model.config.class_names
    # All directions are the whole model, also when it is read and cut again.
    full = ImageClassifier.from_cut(reading.cut(100), model.config).double()
    assert (full(x) - model(x)).abs().max() <= 1e-4 * model(x).abs().max() + 1e-9
