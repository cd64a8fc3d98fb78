"""Small models and their tokenizers; a test that changes one makes its own.

Fixtures and cached functions are shared by all tests of a process, whose end compares weights.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import datasets
import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from bilens.data import Corpus, Grammar, ImageData, load_images
from bilens.images import read_bonds
from bilens.images.bonds import BondReading
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.layers import ScalarNorm
from bilens.train import ClassifierTraining, train_classifier
from bilens.transformer import ResidualModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of models whose data stay on the CPU
VOCAB = 30

parts = {
    "norm": st.sampled_from(["none", "scalar", "rms", "layer"]),
    "positions": st.sampled_from(["rotary", "learned", "shortformer", "none"]),
    "bias": st.booleans(),
    "n_kv_heads": st.sampled_from([1, 2, 4]),
    "attention": st.sampled_from(["softmax", "squared", "bilinear", "differential"]),
    "qk_norm": st.booleans(),
    "mlp_bias": st.sampled_from([None, "none", "out", "all"]),
    "norm_eps": st.sampled_from([None, 0.3]),
    "value_mix": st.booleans(),
    "embed_mix": st.booleans(),
    "logit_cap": st.sampled_from([None, 2.0]),
}
apart = ("norm", "value_mix", "embed_mix", "logit_cap")
plain = {name: part for name, part in parts.items() if name not in apart}


def random_model(seed: int = 0, **parts: Any) -> LanguageModel:
    """In float64, with weights and biases of order one so that nothing is nearly zero."""
    sizes = {"vocab_size": VOCAB, "d_model": 16, "n_heads": 4, "d_hidden": 20, "n_ctx": 12}
    model = LanguageModel(LanguageConfig(**{**sizes, **parts}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = values.double() / parameter.shape[-1] ** 0.5
    for number, module in enumerate(model.modules()):
        if isinstance(module, ScalarNorm):  # as a training leaves it
            module.mean_square.fill_(1 + number % 5)
            module.weight.fill_(0.5)
    return model.double().eval().requires_grad_(False)


def check_same_model(a: Any, b: Any) -> None:
    """Return the same weights to the bit, and the same outputs within rounding.

    Products of the same numbers differ in the last bit between alignments of memory. Weights
    from a file have another alignment.
    """
    weights = b.state_dict()
    assert a.state_dict().keys() == weights.keys()
    assert [n for n, x in a.state_dict().items() if not torch.equal(x, weights[n])] == []
    ids = torch.arange(2, 8)[None]
    torch.testing.assert_close(a(ids).logits, b(ids).logits, rtol=1e-4, atol=1e-5)


def random_text(length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def toy_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


TOKENS = toy_tokenizer()


def numbers(names: Iterable[str]) -> list[int]:
    return TOKENS.convert_tokens_to_ids(list(names))


def view_of(**options: Any) -> ResidualModel:
    return ResidualModel(random_model(**options), TOKENS)


def place(view: ResidualModel, position: int = 3) -> int | None:
    """Position of a token, for models that need it."""
    asks = view.modules.positions is not None or view.modules.hidden_positions is not None
    return position if asks else None


@cache
def small_corpus(texts: int = 40, length: int = 8) -> Corpus:
    """Texts of the grammar, few and short."""
    grammar = Grammar()
    ids = grammar.sample(texts, length, seed=0)
    rows = [datasets.Dataset.from_dict({"input_ids": part}) for part in (ids, ids[:10])]
    train, validation = (part.with_format("torch") for part in rows)
    return Corpus("grammar", grammar.tokenizer(), train, validation)


def grammar_view(**parts: Any) -> ResidualModel:
    """Return a model with random weights in the words of the grammar."""
    tokenizer = small_corpus().tokenizer
    return ResidualModel(random_model(vocab_size=len(tokenizer), **parts), tokenizer)


def small_config(**changes: Any) -> LanguageConfig:
    sizes = {"d_model": 16, "n_heads": 2, "d_hidden": 20, "n_ctx": 8}
    return LanguageConfig(**{"vocab_size": len(Grammar().vocabulary), **sizes, **changes})


SHARED: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []


def shared(model: Any) -> Any:
    """Return the model, whose weights are compared with those of now after all tests."""
    SHARED.append((model, {name: x.clone() for name, x in model.state_dict().items()}))
    return model


@pytest.fixture(scope="session", autouse=True)
def shared_models_are_left_as_they_are():
    yield
    for model, before in SHARED:
        assert [n for n, x in model.state_dict().items() if not x.equal(before[n])] == []


def shared_view(model: nn.Module) -> ResidualModel:
    return ResidualModel(shared(model), TOKENS)


@pytest.fixture(scope="session")
def view():
    """Two layers as most models have them: norms, rotary positions, softmax and bilinear MLPs."""
    return shared_view(random_model(n_layers=2, norm="rms"))


@pytest.fixture(scope="session")
def biased():
    """The same, all of whose maps have biases."""
    return shared_view(random_model(n_layers=2, norm="rms", bias=True))


@pytest.fixture(scope="session")
def llama():
    """A family of transformers, whose MLPs are no tensors."""
    from tests.families import tiny  # noqa: PLC0415

    return shared_view(tiny("llama"))


GENTLE = ClassifierTraining(epochs=12, batch_size=50, weight_decay=0.0, input_noise=0.2)


@cache
def digits() -> ImageData:
    return load_images("digits")


@cache
def digit_model(n_layers: int = 1, bias: bool = False) -> ImageClassifier:
    config = ClassifierConfig(64, 10, 24, n_layers, bias=bias, image_shape=(8, 8))
    return shared(train_classifier(config, digits(), GENTLE)[0])


@cache
def small_model(n_layers: int = 1, bias: bool = False) -> ImageClassifier:
    """Return a classifier that has not learned, whose readings and figures are quickly made."""
    torch.manual_seed(0)
    config = ClassifierConfig(64, 10, 6, n_layers, bias=bias, image_shape=(8, 8))
    return shared(ImageClassifier(config))


@cache
def digit_bonds(bias: bool = False) -> BondReading:
    """Return the bonds of two layers, whose cut loses up to 2 points of accuracy."""
    return read_bonds(digit_model(2, bias), digits(), drop=0.02)
