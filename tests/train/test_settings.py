"""Settings that no model or training has are named, with what is expected."""

import math

import pytest

from bilens.errors import BilensError
from bilens.nn import ClassifierConfig
from bilens.nn.language import LanguageConfig
from bilens.train import AnnealTraining, ClassifierTraining, LanguageTraining

CLASSIFIERS = [
    ({"n_layers": 0}, "n_layers=0, expected a whole number, at least 1 and at most 1024"),
    ({"d_model": None}, "d_model=None, expected a whole number"),
    ({"d_hidden": -1}, "d_hidden=-1, expected a whole number"),
    ({"beta": math.nan}, "beta=nan, expected a finite number"),
    ({"image_shape": (3, 3)}, r"image_shape=\(3, 3\) has 9 pixels, but the model reads n_inputs"),
    ({"image_shape": (4,)}, r"image_shape=\(4,\), expected 2 values"),
    ({"class_names": ("a",)}, "class_names has 1 names, expected n_classes=2"),
    ({"norm": "batch"}, "norm='batch', expected one of none, scalar, rms"),
]
LANGUAGE_MODELS = [
    ({"mlp": "cubic"}, "mlp='cubic', expected one of bilinear"),
    ({"norm": "batch"}, "norm='batch', expected one of none"),
    ({"positions": "alibi"}, "positions='alibi', expected one of rotary"),
    ({"attention": "cubic"}, "attention='cubic', expected one of softmax"),
    ({"attention_norm": "max"}, "attention_norm='max', expected one of none"),
    ({"attention": "bilinear", "attention_norm": "sum"}, "attention_norm='sum' is for attention"),
    ({"mlp_bias": "in"}, "mlp_bias='in', expected one of none, out, all"),
    ({"norm_eps": -1e-8}, "norm_eps=-1e-08, expected a finite number, above 0"),
    ({"logit_cap": 0.0}, "logit_cap=0.0, expected a finite number, above 0"),
    ({"hidden_size": -1}, "d_model=-1, expected a whole number, at least 1"),
    ({"n_layers": 10**12}, "n_layers=1000000000000, expected a whole number, at least 1 and"),
    ({"attention_scale": math.nan}, "attention_scale=nan, expected a finite number or none"),
    ({"d_model": 10, "n_heads": 4}, "d_model=10 is not a multiple of n_heads=4"),
    ({"n_heads": 4, "n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
]
TRAININGS = [
    ({"epochs": 0}, "epochs=0, expected a whole number, at least 1"),
    ({"batch_size": 2.5}, "batch_size=2.5, expected a whole number, at least 1"),
    ({"learning_rate": 0.0}, "learning_rate=0.0, expected a finite number, above 0"),
    (
        {"learning_rate": 1e38},
        r"learning_rate=1e\+38, expected a finite number, above 0 and at most 1,000,000,000,000",
    ),
    ({"decay": math.nan}, "decay=nan, expected a finite number, above 0"),
    ({"weight_decay": math.nan}, "weight_decay=nan, expected a finite number, at least 0"),
    ({"input_noise": math.inf}, "input_noise=inf, expected a finite number, at least 0"),
    ({"latent_noise": -1.0}, "latent_noise=-1.0, expected a finite number, at least 0"),
    ({"seed": 2**64}, "seed=.*, expected a whole number, at least 0 and at most 4,294,967,295"),
]
LANGUAGE_TRAININGS = [
    ({"batch_size": 0}, "batch_size=0, expected a whole number, at least 1"),
    ({"epochs": 0}, "epochs=0, expected a finite number, above 0"),
    ({"learning_rate": math.inf}, "learning_rate=inf, expected a finite number, above 0"),
    ({"weight_decay": -1}, "weight_decay=-1, expected a finite number, at least 0"),
    ({"evaluate_every": -1}, "evaluate_every=-1, expected a whole number, .* or none"),
    ({"target_loss": math.nan}, "target_loss=nan, expected a finite number or none"),
    ({"warmup": 1}, "warmup=1, expected a finite number, at least 0 and below 1"),
    ({"seed": 2**64}, "seed=18446744073709551616, expected a whole number, at least 0 and at"),
    ({"optimizer": "lomo"}, "optimizer='lomo', expected one of adamw_torch, adamw_torch_fused"),
]
ANNEALINGS = [
    ({"schedule": "cubic"}, "schedule='cubic', expected one of linear, cosine, zero, held"),
    ({"decay": "cubic"}, "decay='cubic', expected one of none, linear, cosine"),
    ({"length": 10**12}, "length=1000000000000, expected a whole number"),
    ({"length": 8, "batch_size": 4, "tokens": 31}, "tokens=31, expected at least 32, one step of"),
    ({"annealing": 0}, "annealing=0, expected a finite number, above 0 and at most 1"),
]
SETTINGS = [
    (lambda **changed: ClassifierConfig(**{"n_inputs": 4, "n_classes": 2, **changed}), CLASSIFIERS),
    (LanguageConfig, LANGUAGE_MODELS),
    (ClassifierTraining, TRAININGS),
    (LanguageTraining, LANGUAGE_TRAININGS),
    (AnnealTraining, ANNEALINGS),
]


@pytest.mark.parametrize(
    ("make", "changed", "words"), [(make, *case) for make, cases in SETTINGS for case in cases]
)
def test_bad_settings_are_named(make, changed, words):
    with pytest.raises(BilensError, match=f"^{words}"):
        make(**changed)
