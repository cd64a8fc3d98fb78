"""What the view of a transformer refuses."""

from functools import partial

import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel

import bilens
from bilens.checks import check_sum
from bilens.circuits import edit
from bilens.convert.gates import gated_mlps
from bilens.convert.language_model import as_language_model
from bilens.errors import CheckpointError, NotBilinearError
from bilens.flows import flow
from bilens.transformer import Pass, ResidualModel
from bilens.transformer.parts import Part
from tests.families import FAMILIES, LIKE_LLAMA, altered, some_text, tiny
from tests.refusals import refused
from tests.tokenizers_of_all_kinds import small_llama, tokenizer_of


def llama() -> ResidualModel:
    return ResidualModel(tiny("llama"))


def mixtral() -> ResidualModel:
    return ResidualModel(tiny("mixtral"))


def split(view):
    return flow(view, TEXT, view.direction(5), labels=0)


def changed(name, value, model="llama", opened=None):
    """Return how a model is opened, or a view of it read, after one of its attributes changed."""

    def read():
        made = tiny(model)
        view = ResidualModel(made) if opened else None
        altered(made, name, value)
        return opened(view) if view else ResidualModel(made)

    return read


def of_number(model, name, value):
    """Open a model one of whose weights is changed in place, to a number or a type."""
    weight = model.get_parameter(name)
    if isinstance(value, torch.dtype):
        weight.data = weight.data.to(value)
    else:
        weight.data[3, 4] = value
    ResidualModel(model)


def compiled(name, anew=False):
    """Open a model of which a part was compiled in place, or in a module around it."""
    model = tiny("llama")
    part = model.get_submodule(name)
    if anew:
        part = torch.compile(part, backend="eager")
        model = altered(model, name, part) if name else part
    else:
        part.compile(backend="eager")
    ResidualModel(model)


def shared(name, other):
    model = tiny("llama")
    ResidualModel(altered(model, name, model.get_submodule(other)))


def products_of_groups():
    """The default of transformers, of which test_experts.py has others."""
    model = tiny("mixtral")
    model.set_experts_implementation("grouped_mm")
    ResidualModel(model)


class Shifted(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) + 1


BAD_INPUT = {
    "layer=2, expected 0 to 1": lambda v: v.mlp(2),
    "slope=nan, expected a finite number": lambda v: v.layer(0).mlp.factors(float("nan")),
    "layer=-1, expected 0 to 1": lambda v: v.qk(-1),
    "layer=True, expected a whole number": lambda v: v.layer(True).heads.weights(),
    "distance=-1, expected a whole number, at least 0": lambda v: v.qk(0, -1),
    "token=30, expected 0 to 29": lambda v: v.direction(30),
    "minus=-1, expected 0 to 29": lambda v: v.direction(3, [2, -1]),
    "ids holds the number 30, expected 0 to": lambda v: Pass.of(v, torch.tensor([3, 30])),
    "ids holds the number -1, expected 0 to 29": lambda v: Pass.of(v, BELOW[None]),
    r"ids has shape \(0,\), expected at": lambda v: Pass.of(v, torch.zeros(0).long()),
    "text is a tensor of shape .* expected text": lambda v: Pass.of(v, torch.zeros(3)),
    "ids is a tensor of shape .* expected a tenso": lambda v: v.logits(torch.zeros(3).long()),
    **{
        f"'{address}' is n": lambda v, address=address: Part.parse(address, v)
        for address in ("mlp", "head.1", "mlp.2", "head.0.4", "mlp.1@", "token@1")
    },
}
TEXT, BELOW = some_text()[0], torch.tensor([3, -1])
EYE = torch.eye(16).double()
test_bad_input_is_named = refused(BAD_INPUT, given=llama)
LEARNED = {
    "position=None, and the model has learned positions": lambda v: v.modules.embedded(TEXT),
    "position=12, expected 0 to 11": lambda v: v.modules.embedded(TEXT, 12),
    "tokens holds the number -1, expected 0 to": lambda v: v.modules.embedded(BELOW, 5),
}
test_positions_and_tokens_that_are_not_embedded_are_named = refused(
    LEARNED, given=lambda: ResidualModel(tiny("gpt2"))
)
NAMES = {
    "token='tt7', expected a single token .* nearest are t7": lambda view: view.token("tt7"),
    "token=.t7., but the model came without a tokenizer: write": lambda: llama().token("t7"),
    "token='3 7', expected the number of a single token": lambda: llama().token("3 7"),
    "token='3 70', expected 0 to|token=70, expected 0 to": lambda: llama().answer("3 70"),
    "token='t99', expected a single token": lambda view: view.direction(7, minus="t99"),
    "text='' holds no token": lambda view: view.ids(""),
    "text has .* tokens, expected up to": lambda view: view.ids("t7 " * 1000),
    "text='t7', but the model came without a tokenizer": lambda: llama().ids("t7"),
    "holds the number 77, expected 0 to": lambda: llama().ids("7 77"),
}
test_what_no_tokenizer_knows_is_said = refused(NAMES)
test_operations_without_experts_are_errors = refused(
    {
        "has experts, whose weights depend on the input": lambda view: view.mlp(0),
        "has experts": lambda view: edit(view, layer=0, vectors=EYE[:1]),
        "3 layers and 0 gated MLPs": lambda view: gated_mlps(view.model),
        "MixtralConfig has experts": lambda view: as_language_model(view.model),
        "number=4, expected 0 to 3, an expert of the layer": lambda v: v.layer(1).mlp.expert(4),
    },
    given=mixtral,
)
ADDRESSES = ("expert.1.4", "expert.0.0", "expert.3.0", "expert.1", "choice.1@2")
test_experts_that_are_not_there_are_named = refused(
    {
        **{f"'{name}' is n": lambda v, name=name: Part.parse(name, v) for name in ADDRESSES},
        "layers.0.mlp has no experts": lambda view: view.layer(0).mlp.expert(0),
        "layer=0 has no experts": lambda view: split(view).experts(0, 2),
    },
    given=lambda: ResidualModel(tiny("qwen3-dense")),
)
test_plain_mlps_have_no_tensor = refused(
    {"has no gate, so that there is no product in": lambda: ResidualModel(tiny("gpt2")).mlp(0)},
    NotBilinearError,
)

ATTENTION = "model.layers.1.self_attn"
BIDIRECTIONAL = {**FAMILIES["gemma3"][1], "use_bidirectional_attention": True}
HEADS, MAPPED = "config.num_attention_heads", partial(changed, opened=lambda v: v.direction(3))
OTHERS = {
    "BertModel, whose structure is not known, and which does not predict": lambda: bilens.load(
        BertModel(BertConfig(hidden_size=12, intermediate_size=4))
    ),
    "self_attn is not causal": [
        lambda: ResidualModel(tiny("gemma3", settings=BIDIRECTIONAL)),
        # It changes masks, and what the modules say of themselves stays.
        changed("config.use_bidirectional_attention", True, "gemma3"),
    ],
    "layers.1.self_attn is not causal": changed(f"{ATTENTION}.is_causal", False),
    "when this view was made": [
        MAPPED("config.logits_scaling", 3.0, "granite"),
        MAPPED("config.final_logit_softcapping", 2.0, "gemma2"),
        MAPPED("config.logit_scale", 7.0, "cohere2"),
        MAPPED(HEADS, 2),
        MAPPED("config.use_bidirectional_attention", True, "gemma3"),
    ],
    "2 layers and num_hidden_layers=3": changed("config.num_hidden_layers", 3),
    "which do not fit 2 heads": changed(HEADS, 2),
    "which do not fit 3 heads": changed(HEADS, 3),
    "share 4 heads of keys": changed("config.num_key_value_heads", 4),
    "has 0 layers": changed("model.layers", nn.ModuleList()),
    "is compiled, .* and read the model": lambda: compiled("", anew=True),
    "layers.1 is compiled, .* and read the model": lambda: compiled("model.layers.1", anew=True),
    "the model is compiled": lambda: compiled(""),
    "model.layers.1 is compiled": lambda: compiled("model.layers.1"),
    "has clip_qkv=0.5": changed("config.clip_qkv", 0.5, "olmoe"),
    r"cannot run in torch.float64: .*mplementation\(": products_of_groups,
    r"layers\.0\.mlp\.down_proj.*one module stands in sever": lambda: shared(
        "model.layers.1.mlp", "model.layers.0.mlp"
    ),
    r"input_layernorm: one module stands in several places": lambda: shared(
        "model.layers.0.post_attention_layernorm", "model.layers.0.input_layernorm"
    ),
    "model.norm is a Shifted and computes something else": changed(
        "model.norm", Shifted(16, dtype=torch.float64)
    ),
    r"its family does not have, .*: model.extra.weig": changed("model.extra", nn.Linear(2, 2)),
    "model's own number, which W_U n is compared with, is N": lambda: check_sum(
        "W_U n", torch.tensor([1.0]), torch.tensor([torch.nan]), size=1.0
    ),
}
test_models_that_are_something_else_are_refused = refused(OTHERS)


def open_other(tmp_path, *parts):
    for part in parts:
        part.save_pretrained(tmp_path)
    bilens.load(tmp_path)


def open_llava(tmp_path):
    text = transformers.LlamaConfig(**LIKE_LLAMA)
    open_other(tmp_path, transformers.LlavaConfig(text_config=text))


def open_with_larger_vocabulary(tmp_path):
    tokenizer = tokenizer_of("SentencePiece")
    open_other(tmp_path, small_llama(len(tokenizer) - 1), tokenizer)


UP = "model.layers.1.mlp.up_proj.weight"
WEIGHTS = {
    "is on the device meta": lambda: ResidualModel(tiny("llama").to("meta")),
    "lm_head.weight is of torch.float8_e4m3fn": lambda: of_number(
        tiny("llama", dtype=torch.float32), "lm_head.weight", torch.float8_e4m3fn
    ),
    f"{UP} holds NaN": lambda: of_number(tiny("llama"), UP, torch.nan),
    "LlavaConfig": open_llava,
    "they do not belong together": open_with_larger_vocabulary,
}
test_weights_that_cannot_be_read_are_refused = refused(WEIGHTS, CheckpointError)
