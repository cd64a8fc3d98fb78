"""What `bilens.convert` refuses: files that hold something else, and models that do not convert."""

import json
import math
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import OPTConfig, OPTForCausalLM

import bilens
from bilens.convert import give_swish, make_bilinear, open_model, process, save_model
from bilens.errors import CheckpointError
from bilens.memory import MemoryLimitError
from tests.convert.foreign import IMAGES, PAPER, RELEASED, write
from tests.families import altered, tiny
from tests.models import random_model, toy_tokenizer
from tests.refusals import refused

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path / "model", tiny("llama", dtype=torch.float32), toy_tokenizer())
    return tmp_path / "model"


def changed(name, settings=(), **more):
    """Return the opening of a model one of whose files has other settings."""

    def opened(saved):
        path = saved / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | dict(settings, **more)))
        bilens.load(saved)

    return opened


config = partial(changed, CONFIG)


def steps(*values):
    return config({STEPS: dict(zip(("steps", "added_biases"), values, strict=True))})


LINES, SWISH, STEPS = "bilens_linear_gates", "bilens_swish", "bilens_processing"
LAYERS = ([99], ["x"], "0", [-1], [0, 0], [0.5], 0, None, [[0]], {"a": 1}, [True])
NOT_COMPLETE = "holds no complete language model"
ROTARY = {"rope_type": "default", "rope_theta": -1.0}
FILES = {
    f"{NOT_COMPLETE}.*attention_bias": config(attention_bias="x"),
    NOT_COMPLETE: [
        *(config({name: 0}) for name in ("num_attention_heads", "vocab_size")),
        *(config({name: x}) for name, x in (("dtype", "x"), ("intermediate_size", 2**62))),
    ],
    "num_hidden_layers=1000000000000, expected": config(num_hidden_layers=10**12),
    "do not fit config.json .*layers.2.mlp": config(num_hidden_layers=3),
    "do not fit config.json .*layers.1.mlp": config(num_hidden_layers=1),
    "do not fit config.json .*mlp.down_proj": config(intermediate_size=21),
    "pad_token_id=1000000000000 in config.json, exp": config(pad_token_id=10**12),
    "pad_token_id=30 in config.json, expected 0 to 29": config(pad_token_id=30),
    "config.json, which describes": config(vocab_size=2**24, hidden_size=2**20),
    "vocab_size=1099511627776, expected a whole number, 1 to": config(vocab_size=2**40),
    "max_position_embeddings=-5, expected a whole number": config(max_position_embeddings=-5),
    "bos_token_id=1000000000 in config.json, expected 0 to 29": config(bos_token_id=10**9),
    f"{NOT_COMPLETE}.*bos_token_id": config(bos_token_id="x"),
    "bos_token_id=-1 in config.json, expected 0 to 29": config(bos_token_id=-1),
    "inv_freq holds NaN or infinite values by the settings in": config(rope_parameters=ROTARY),
    "is quantised by some method": config(quantization_config=[1]),
    **{
        f"quantised by {name}, and what its lay": config(quantization_config={"quant_method": name})
        for name in ("gptq", "bitsandbytes", "awq", "hqq", "compressed-tensors")
    },
    r"from_pretrained\(...\).dequantize": config(
        quantization_config={"quant_method": "bitsandbytes"}
    ),
    LINES: [
        *(config({LINES: {"was": "silu", "layers": layers}}) for layers in LAYERS),
        *(config({LINES: {"was": was, "layers": [0]}}) for was in ("nothing", 3, None)),
        *(config({LINES: x}) for x in ({"layers": [0]}, {"was": "silu"}, [], "x", 3, {})),
    ],
    SWISH: [
        *(config({SWISH: {"was": "silu", "beta": x}}) for x in ("x", None, -1.0, 1e400, math.nan)),
        *(config({SWISH: x}) for x in ({"was": "silu"}, {"beta": 1.0}, [], "x", 3, {})),
        config({SWISH: {"was": "nothing", "beta": 1.0}}),
    ],
    "steps=3, expected a list, each text": steps(3, []),
    "added_biases='abc', expected a list": steps([], "abc"),
    "expected a list, each text": steps([], [3]),
    r"missing_keys: \['no.such.bias'\]": steps([], ["no.such"]),
    "missing_keys:.*layers.0.bias": steps([], ["model.layers.0"]),
    "expected a JSON object": [config({STEPS: record}) for record in ([], "x")],
    "holds no complete tokenizer: invalid type: null": changed("tokenizer.json", version=None),
    "holds no complete tokenizer: data did not match": changed("tokenizer.json", model={}),
    "index.json is damaged and names no file": changed(INDEX, weight_map=3),
}
test_what_a_file_should_not_hold_is_named = refused(FILES, CheckpointError)


def cut(saved):
    path = saved / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    open_model(saved)


def pickled(saved):
    torch.save(tiny("llama").state_dict(), saved / "pytorch_model.bin")
    (saved / WEIGHTS).unlink()
    open_model(saved)


@pytest.fixture
def in_shards(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "many", max_shard_size="4KB")
    return tmp_path / "many"


def without_a_shard(in_shards):
    sorted(in_shards.glob("model-*.safetensors"))[1].unlink()
    open_model(in_shards)


def elsewhere(name):
    def opened(in_shards):
        settings = json.loads((in_shards / INDEX).read_text())
        settings["weight_map"]["model.norm.weight"] = name
        (in_shards / INDEX).write_text(json.dumps(settings))
        open_model(in_shards)

    return opened


def not_finite(value, read):
    def opened(tmp_path):
        model = tiny("llama", dtype=torch.float32)
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
        save_model(tmp_path, model, None)
        read(tmp_path)

    return opened


def of_defaults(saved):
    (saved / CONFIG).write_text('{"model_type": "llama"}')
    bilens.load(saved)


def of_texts(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps({"n_layer": 3}))
    bilens.load(tmp_path)


def beside_cut_weights(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"cut")
    bilens.load(write(tmp_path, PAPER, {}, "model.pt"))


def foreign(settings, state=None, **name):
    """Return the opening of a folder in a layout of other people."""
    state = {"some.weight": torch.ones(3)} if state is None else state
    return lambda tmp_path: bilens.load(write(tmp_path, settings, state, **name))


class Something:
    """An object of Python, which a pickle could run as it is read."""


UNGATED = {key: value for key, value in RELEASED.items() if key != "gated"}
ONES, holding = torch.ones(3), partial(foreign, PAPER)
MODELS = {
    f"model {NOT_COMPLETE}": [cut, pickled],
    "/many: weights are missing: .*model-00002-of-": without_a_shard,
    "expected files beside itself and none elsewhere": [
        elsewhere(name) for name in ("../elsewhere.safetensors", "/tmp/elsewhere.safetensors", "")
    ],
    "layers.1.mlp.up_proj.weight holds NaN": [
        not_finite(*case) for case in product((torch.nan, torch.inf), (open_model, bilens.load))
    ],
    "which describes 6,738,415,616 numbers; the files": of_defaults,
    "nothing.gguf is not there; expected a GGUF file": lambda: open_model(Path("nothing.gguf")),
    "holds no weights; expected one of model.safetensors": holding({}, name="model.pt"),
    "model.safetensors .* a text, 'cut'": beside_cut_weights,
    NOT_COMPLETE: of_texts,
    "unknown settings for a model of the post .*: softcap": foreign(RELEASED | {"softcap": 15}),
    "unknown settings for a language model of the paper.*: mlp": foreign(PAPER | {"mlp": "blp"}),
    "missing settings for .*: gated": foreign(UNGATED),
    "bilinear=False with gate=None in config.json: bilens h": foreign(PAPER | {"bilinear": False}),
    "cannot be used: d_model=16 is not a multiple of n_heads=3": foreign(PAPER | {"n_head": 3}),
    "config.json cannot be used: ": foreign(RELEASED | {"n_embd": "wide"}),
    "config.json cannot be used: d_model=0, expected a whole": foreign(IMAGES | {"d_hidden": 0}),
    "the weights cannot be read": holding({"transformer.wte.weight": Something()}),
    "the weights cannot be read: a Tensor, expected a dictionary": holding(ONES),
    "the weights cannot be read: a list, expected a dictionary of tensors": holding([ONES]),
    "holds 3, a dense tensor of torch.float32, expected names and": holding({3: ONES}),
    "holds 'a', a list, expected names and dense tensors": holding({"a": [ONES]}),
    "holds 'a', a dense tensor of torch.int64, exp": holding({"a": ONES.long()}),
    "a dense tensor of torch.float8_e4m3fn": holding({"a": ONES.to(torch.float8_e4m3fn)}),
    "holds 'a', a dense tensor of torch.compl": holding({"a": ONES.to(torch.complex64)}),
    "holds 'a', a sparse_coo tensor of torch.float32, exp": holding({"a": ONES.to_sparse()}),
    "holds 'a', a meta tensor of torch.float32, expec": holding({"a": ONES.to("meta")}),
    "holds 'model', a dict, expected names and dense": holding({"model": {"a": ONES}, "step": 3}),
}
test_nothing_but_the_weights_of_a_model_is_read = refused(MODELS, CheckpointError)


def open_in_little_memory(saved, monkeypatch):
    monkeypatch.setattr("bilens.memory.available_memory", lambda device: 1000)
    open_model(saved)


test_weights_that_do_not_fit_into_memory = refused(
    {"weights need 0.00 GB of memory on cpu, and 0.00": open_in_little_memory}, MemoryLimitError
)


def use(part, value, used=process):
    """Return the use of a model that has another part or attribute."""
    return lambda: used(altered(tiny("llama"), part, value))


def give_swish_to_no_blocks():
    model = altered(random_model(mlp="gelu"), "blocks", nn.ModuleList())
    give_swish(altered(model, "config.n_layers", 0))


def make_half_linear_bilinear():
    model = tiny("llama")
    give_swish(model).beta = 0.125
    make_bilinear(model)


def opt():
    sizes = {"vocab_size": 30, "hidden_size": 16, "ffn_dim": 20, "num_hidden_layers": 1}
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=4, word_embed_proj_dim=16))


def step(name, **parts):
    return lambda: process(random_model(bias=True, **parts), [name])


NORMED = {"attention": "bilinear", "attention_norm": "rms"}
EXTRA = "model.layers.1.mlp.extra"
factor_heads = partial(step, "factor_heads", positions="learned")
CONVERTED = {
    "source=.* expected text or a path or Module": [
        lambda source=source: bilens.load(source) for source in (None, 5, b"runs", ["runs"])
    ],
    "model is a OPTForCausalLM, whose structure is not known": lambda: process(opt()),
    f"weights that its family does not have.*: {EXTRA}.weight": use(EXTRA, nn.LayerNorm(16)),
    "self_attn.o_proj is a Sequential, expected a plain linear": use(
        "model.layers.0.self_attn.o_proj", nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    ),
    "model.norm is a GroupNorm and computes something el": use("model.norm", nn.GroupNorm(2, 16)),
    "embed_tokens is a Linear, expected an embeddi": use("model.embed_tokens", nn.Linear(3, 3)),
    "do not sum to 1 with attention='squared'": step("fold_value_biases", attention="squared"),
    "the first block's values are mixed into all": [
        step("fold_value_biases", value_mix=True),
        factor_heads(value_mix=True),
    ],
    "queries and keys are divided by their root": factor_heads(qk_norm=True),
    "2 heads share keys and values, which can": factor_heads(n_kv_heads=2),
    "positions without vectors turn queries and keys": step("factor_heads"),
    "outputs of heads are divided by their root mean square": factor_heads(**NORMED),
    "has its own activation, hidden_act='silu'": lambda: make_bilinear(tiny("llama")),
    "not bilinear yet: beta=0.125, expected 0": make_half_linear_bilinear,
    "GPT2LMHeadModel has 2 layers and 0 gated MLPs; expect": lambda: give_swish(tiny("gpt2")),
    "hidden_act='relu' in the model's configuration": use("config.hidden_act", "relu", give_swish),
    "layers.1.mlp has the parts of": use("model.layers.1.mlp.forward", functional.silu, give_swish),
    "mlp='gelu' in the model's configuration; expected one that": give_swish_to_no_blocks,
}
test_models_that_cannot_be_converted_are_refused = refused(CONVERTED)
