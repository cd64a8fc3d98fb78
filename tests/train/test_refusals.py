"""What trainings refuse: bad settings, data that do not fit, and models without a tensor."""

import math
from dataclasses import replace
from functools import partial

import torch

from bilens.convert.language_model import as_language_model
from bilens.nn import ClassifierConfig
from bilens.nn.language import LanguageConfig
from bilens.train import train_classifier, train_classifiers
from bilens.train.language import train_language
from bilens.train.linearise import linearise
from bilens.train.settings import AnnealTraining, ClassifierTraining, LanguageTraining
from tests.families import FAMILIES, VOCAB, tiny
from tests.models import digits, random_model, small_config, small_corpus
from tests.refusals import refused

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
    (partial(ClassifierConfig, n_inputs=4, n_classes=2), CLASSIFIERS),
    (LanguageConfig, LANGUAGE_MODELS),
    (ClassifierTraining, TRAININGS),
    (LanguageTraining, LANGUAGE_TRAININGS),
    (AnnealTraining, ANNEALINGS),
]
BAD: dict[str, list] = {}
for make, cases in SETTINGS:
    for settings, words in cases:
        BAD.setdefault(f"^{words}", []).append(lambda make=make, bad=settings: make(**bad))
test_bad_settings_are_named = refused(BAD)

BRIEF, WORDS = ClassifierTraining(epochs=1), LanguageTraining(batch_size=8)
CLASSIFIER = ClassifierConfig(64, 10, d_model=24, image_shape=(8, 8))


def train_words(training=WORDS, **config):
    return lambda tmp_path: train_language(
        small_config(**config), small_corpus(), training, tmp_path, use_cpu=True
    )


def texts(n=3):
    return torch.randint(VOCAB, (n, 12), generator=torch.Generator().manual_seed(0))


def lines(**changed):
    return lambda: linearise(tiny("llama"), **{"texts": texts(), "held_out": texts(), **changed})


def copied(name, **settings):
    def copy():
        model = tiny(name)
        for key, value in settings.items():
            setattr(model.config, key, getattr(model.config, key) | value)
        as_language_model(model)

    return copy


TRAINED = {
    "64 pixels and 10 classes; the model reads 32": lambda: train_classifier(
        ClassifierConfig(32, 10), digits(), BRIEF
    ),
    "needs the run directory": lambda: train_classifier(CLASSIFIER, digits(), BRIEF, resume=True),
    r"seeds=\[1, 1\], expected at least one and none of them": lambda: train_classifiers(
        CLASSIFIER, digits(), BRIEF, [1, 1]
    ),
    "tokenizer of grammar has 72 tokens; the model has vocab_size=5": train_words(vocab_size=5),
    "texts of grammar are 8 tokens long; the model has n_ctx=4": train_words(n_ctx=4),
    "batch_size=8 cannot be shared out evenly over 1": train_words(replace(WORDS, accumulate=3)),
    "batch_size=100000, expected at most 40": train_words(replace(WORDS, batch_size=100_000)),
}
test_what_cannot_be_trained_is_named = refused(TRAINED)
CONVERTED = {
    r"layers=\[2\], expected some of 0 to 1": lines(layers=[2]),
    r"layers=\[\], expected some of 0 to 1": lines(layers=[]),
    "budget=-1.0, expected a finite number, at least 0 and .* or none": lines(budget=-1.0),
    r"texts holds the number \d+, expected 0 to .*, token ids": lines(texts=texts() + VOCAB),
    r"held_out holds the number -\d+, expected 0 to": lines(held_out=texts() - VOCAB),
    r"shape \(3, 1\), expected at least one text, of 2 to": lines(texts=texts()[:, :1]),
    r"held_out has shape \(0, 12\), expected at least one text, of": lines(held_out=texts(0)),
    r"texts has shape \(3, 48\), .* of 2 to 24 tokens, the positions": lambda: linearise(
        tiny("llama", settings=FAMILIES["llama"][1] | {"max_position_embeddings": 24}),
        texts().repeat(1, 4),
        texts(),
    ),
    # A budget of 0 is a budget, as one of 0.01 is.
    "budget=[0.1]+: a model of bilens has one kind of MLP": [
        lambda budget=budget: linearise(random_model(mlp="swiglu"), texts(), texts(), budget=budget)
        for budget in (0, 0.0, 0.01)
    ],
    "norms after attention": copied("gemma2"),
    "learned positions, MLPs without gates, LayerNorms": copied("gpt2"),
    "norms of queries and keys": copied("qwen3"),
    "widths do not add up": copied("mistral"),
    "shortformer positions": copied("own-none"),
    "attention other than softmax, mixed values": copied("own-mixed"),
    # Sixteen tokens would not tell: the scales act over thousands.
    "scaled rotary positions": copied("llama", rope_parameters={"rope_type": "llama3"}),
}
test_what_cannot_be_made_bilinear_is_named = refused(CONVERTED)
