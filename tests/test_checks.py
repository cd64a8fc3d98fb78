"""Arguments and settings are checked by one checker, with messages that name them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bilens import checks
from bilens.errors import BilensError, CheckpointError
from bilens.settings import Between, CheckedSettings, Count, Share, Size, read_settings

X, LABELS = torch.zeros(3, 4), torch.tensor([1, 2, 3])


@checks.checked
def read(
    x: Float[Tensor, "samples n"],
    labels: Int[Tensor, " samples"] | None = None,
    weights: Float[Tensor, "*batch n"] | None = None,
    *,
    k: Count = 1,
    order: Literal["size", "value"] = "size",
    share: float = 0.5,
    exact: bool = False,
    ids: Int[Tensor, " n_ids"] | Iterable[int] = (),
    shape: tuple[int, int] = (1, 1),
    numbers: Sequence[int] = (),
    blocks: Sequence[Float[Tensor, "rows n"]] = (),
    loss: Callable[..., Tensor] | None = None,
    named: Mapping[str, int] | None = None,
) -> int:
    """Return the number of samples, as a function of every kind of argument may."""
    return len(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"labels": LABELS, "weights": torch.zeros(7, 2, 4)},
        {"ids": [1, 2], "k": np.int64(3), "share": 1, "exact": np.bool_(True)},
        {"share": np.float32(0.5), "shape": [8, 8], "loss": torch.sum},
        # Blocks need not have one number of rows.
        {"blocks": [X, X[:2, :3]], "numbers": np.arange(3)},
        {"blocks": X[None], "numbers": torch.arange(3)},
        {"numbers": (1, np.int64(2))},
        {"numbers": range(3), "ids": LABELS, "named": {"a": 1}},
    ],
)
def test_what_fits_passes(settings):
    assert read(X, **settings) == read(x=X, **settings) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": 3}, r"x=3, expected a tensor of real numbers of shape \(samples, n\)$"),
        ({"x": np.zeros((3, 4))}, "x is numpy.ndarray, expected a tensor of real"),
        ({"x": X.long()}, r"x is a tensor of shape \(3, 4\) and torch.int64, expected"),
        ({"x": X[None]}, r"x is a tensor of shape \(1, 3, 4\) .*; x\[0\] fits$"),
        (
            {"labels": LABELS[:2]},
            r"labels is .* \(2,\) and torch.int64, expected a tensor of whole numbers of shape "
            r"\(samples\) or none beside x \(3, 4\)$",
        ),
        ({"labels": LABELS.float()}, "labels is .* torch.float32, expected a tensor of whole"),
        ({"ids": LABELS[None]}, r"ids is .* \(1, 3\) .* or a list, .*; ids\[0\] fits$"),
        ({"weights": torch.zeros(2, 5)}, r"weights is .* \(2, 5\).* or none beside x \(3, 4\)$"),
        ({"x": None}, "x=None, expected a tensor of real"),
        ({"k": None}, "k=None, expected a whole number, at least 1 and at most"),
        *(({"k": k}, "k=.*, expected a whole number, at least") for k in (0, 2.5, True, "3")),
        ({"k": 2**70}, "k=1180591620717411303424, expected a whole number"),
        ({"k": np.int64(0)}, r"k=np.int64\(0\), expected a whole number"),
        ({"order": "largest"}, "order='largest', expected one of size, value"),
        *(({"share": x}, "share=.*, expected a finite") for x in (np.nan, np.inf, 10**400, True)),
        ({"share": np.float32("nan")}, "share=.*nan.*, expected a finite number"),
        ({"exact": 1}, "exact=1, expected true or false"),
        *(({"shape": s}, "shape=.*, expected 2 values, each") for s in (8, (8,), (8, None))),
        ({"numbers": [*range(20), 2.5]}, "numbers=.*, expected a list, each a whole number"),
        ({"numbers": torch.tensor([0.5])}, r"numbers is .* \(1,\).*, expected a list, each"),
        ({"numbers": "12"}, "numbers='12', expected a list"),
        ({"blocks": [X, None]}, r"blocks=.*, expected a list, each .* of shape \(rows, n\)"),
        ({"blocks": [X, X.long()]}, "blocks=.*, expected a list, each a tensor of real"),
        ({"loss": 3}, "loss=3, expected a function or none"),
        *(({"named": x}, "named=.*, expected a dictionary") for x in ({"a": "b"}, {1: 1}, [1])),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    with pytest.raises(BilensError, match=f"^{message}") as caught:
        read(**{"x": X, **wrong})
    assert caught.value.__cause__ is caught.value.__context__ is None
    # Shapes of other arrays say nothing about a value that should be none.
    said = str(caught.value)
    assert "a tensor of" in said or " beside " not in said


@checks.checked
@dataclass
class Model:
    width: Size

    def read(self, x: Float[Tensor, "samples n"]) -> Tensor:
        return x @ x.T

    def __call__(self, x: Float[Tensor, "samples n"]) -> Tensor:
        return self.read(x)

    @classmethod
    def of(cls, size: Size) -> "Model":
        return cls(size)


def test_public_methods_of_a_class_are_checked():
    model = Model.of(3)
    for call in (lambda: model.read(3), lambda: model(3), lambda: model(x=3)):
        with pytest.raises(BilensError, match="^x=3, expected"):
            call()
    for call, name in ((lambda: Model(0), "width"), (lambda: Model.of(0), "size")):
        with pytest.raises(BilensError, match=f"^{name}=0, expected"):
            call()


def test_numbers_are_computed_in_their_own_precision():
    x = torch.ones(2, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16
        assert Model(3)(x).dtype == torch.float32
        assert (x @ x.T).dtype == torch.bfloat16
    assert Model(3)(x).requires_grad
    assert not checks.detached(lambda x: x @ x.T)(x).requires_grad
    with pytest.raises(BilensError, match="A decomposition failed: .*The weights may be damaged"):
        checks.checked(lambda x: torch.linalg.cholesky(x))(-torch.eye(2))  # noqa: PLW0108


@dataclass(frozen=True)
class Some(CheckedSettings):
    """Settings of every kind."""

    d_model: Size = 8
    d_hidden: Size | None = None
    rate: Annotated[float, Between(0, above=True)] = 0.1
    share: Share = 0.5
    bias: bool = False
    names: tuple[str, ...] = ()
    shape: tuple[int, int] | None = None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("d_model", 10**12, "a whole number, at least 1 and at most 1,048,576"),
        ("d_model", None, "a whole number"),
        ("d_hidden", -1, "a whole number, at least 1 and at most 1,048,576 or none"),
        ("rate", 0, "a finite number, above 0"),
        ("rate", float("nan"), "a finite number, above 0"),
        ("share", 1.5, "a finite number, at least 0 and at most 1"),
        ("names", "ab", "a list, each text"),
        ("names", ("a", 1), "a list, each text"),
        ("shape", (2, 3.0), "2 values, each a whole number or none"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(name, value, expected):
    with pytest.raises(BilensError) as error:
        Some(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r}, expected {expected}")


def test_settings_are_plain_values_that_can_be_hashed_and_written():
    settings = Some(d_model=np.int64(3), share=np.float32(0.5), bias=np.bool_(True), names=["a"])
    assert settings == Some(d_model=3, share=0.5, bias=True, names=("a",))
    assert hash(settings)
    assert json.dumps(asdict(settings))


def test_settings_of_a_file_are_all_known():
    given = asdict(Some())
    reading = read_settings(Some, {**given, "names": ["a"], "shape": [2, 3]}, "config.json")
    assert (reading.names, reading.shape) == (("a",), (2, 3))
    with pytest.raises(CheckpointError, match=r"config.json: unknown settings: width. It was"):
        read_settings(Some, {**given, "width": 1}, "config.json")
    with pytest.raises(CheckpointError, match="config.json: missing settings: d_model"):
        read_settings(Some, {k: v for k, v in given.items() if k != "d_model"}, "config.json")
    with pytest.raises(CheckpointError, match="config.json cannot be used: shape=.*, expected 2"):
        read_settings(Some, {**given, "shape": [8]}, "config.json")


def test_numbers_of_things_have_limits():
    checks.check_index("layer", np.int64(2), 3)
    for five in (5, np.int64(5), torch.tensor(5)):
        checks.check_count("k", five, 5, "the number of inputs")
    for value in (-1, 6, 10**30, 0.5, True, None, "1", torch.nan):
        with pytest.raises(BilensError, match=r"^layer=.*, expected 0 to 2, those of the model$"):
            checks.check_index("layer", value, 3, "those of the model")
        with pytest.raises(BilensError, match="^k=.*, expected a whole number, 1 to 5, the number"):
            checks.check_count("k", value, 5, "the number of inputs")
    with pytest.raises(BilensError, match="k=0, expected a whole number, at least 1$"):
        checks.check_count("k", 0)


def test_labels_are_numbers_of_classes():
    checks.check_labels(torch.tensor([0, 2, 1]), 3)
    for wrong in ([0, 3], [-1, 0]):
        with pytest.raises(
            BilensError, match="labels holds .*, expected 0 to 2, numbers of classes"
        ):
            checks.check_labels(torch.tensor(wrong), 3)
    with pytest.raises(BilensError, match="labels is empty"):
        checks.check_labels(torch.tensor([], dtype=torch.long), 3)


class Quantised(Tensor):
    """A tensor like torchao's, whose numbers are not the weights."""

    __module__ = "torchao.quantization"


def test_numbers_have_to_be_finite_and_plain():
    checks.check_finite(left=torch.ones(3), labels=torch.ones(3).long())
    layer = nn.Linear(2, 2).requires_grad_(False)
    for value in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(BilensError, match="right holds NaN or infinite values, expected fini"):
            checks.check_finite(left=torch.ones(3), right=torch.tensor([1.0, value]))
        layer.weight[0, 0] = value
        with pytest.raises(CheckpointError, match="mlp.weight holds NaN or infinite values. Fetch"):
            checks.check_weights(layer, "mlp")
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Quantised))
    with pytest.raises(CheckpointError, match="mlp.weight is a Quantised, expected a plain te"):
        checks.check_weights(layer, "mlp")
