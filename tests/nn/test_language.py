"""The transformer against the equations written out, and as a Hugging Face model."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import relu, sigmoid
from torch.nn.functional import cross_entropy, gelu, silu
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bilens.nn import ATTENTIONS
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.language.attention import rotate
from bilens.nn.language.model import CACHE
from bilens.nn.layers import make_mlp
from bilens.nn.settings import MlpName
from tests.models import VOCAB, check_same_model, parts, random_model, random_text
from tests.nightly import nightly


def test_paper_preset_has_the_size_of_table_3():
    with torch.device("meta"):
        model = LanguageModel(LanguageConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_020_096


def naive_logits(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """Compute the model token by token and head by head, from weights by their field names."""
    config, time = model.config, len(ids)
    places = model.pos_embed.weight[:time] if config.positions in ("learned", "shortformer") else 0
    x = start = model.W_E[ids] + (places if config.positions == "learned" else 0)
    width, base, first = config.d_model // config.n_heads, config.rope_base, None
    for block in model.blocks:
        if config.embed_mix:
            x = block.residual_mix[0] * x + block.residual_mix[1] * start
        read, attn = norm_by_hand(config, block.attn_norm, x), block.attn
        values = attn.value(read)
        first = values if first is None else first
        if config.value_mix:
            values = (1 - attn.value_mix_share) * values + attn.value_mix_share * first
        looked = read + (places if config.positions == "shortformer" else 0)
        y = x + (attn.out.bias if config.bias else 0)
        maps = [(attn.query, attn.W_Q, attn.key, attn.W_K)]
        if config.attention in ("bilinear", "differential"):
            weights = [
                linear.weight.unflatten(0, (-1, width)).mT for linear in (attn.query2, attn.key2)
            ]
            W_Q2, W_K2 = (W.repeat_interleave(config.n_heads // len(W), 0) for W in weights)
            maps.append((attn.query2, W_Q2, attn.key2, W_K2))
        size = torch.nn.RMSNorm(width).double() if config.qk_norm else torch.nn.Identity()
        for h in range(config.n_heads):
            shared = h * config.n_kv_heads // config.n_heads
            v, pairs = values.unflatten(1, (-1, width))[:, shared], []
            for query, W_Q, key, W_K in maps:
                q = looked @ W_Q[h] + bias_by_hand(query, width, h)
                k = looked @ W_K[h] + bias_by_hand(key, width, shared)
                pairs.append((size(q), size(k)))
            for t in range(time):
                # Only the distance counts: turn the query by all of it.
                turns = [t - s if config.positions == "rotary" else 0 for s in range(t + 1)]
                scores = [(turn_by_hand(q[t], turns, base) * k[: t + 1]).sum(1) for q, k in pairs]
                mixed = looks_by_hand(config, attn, scores) @ v[: t + 1]
                if config.attention_norm == "rms":
                    mixed = mixed / mixed.square().mean().sqrt()
                y[t] += mixed @ attn.W_O[h]
        x = y + mlp_by_hand(config, block.mlp, norm_by_hand(config, block.mlp_norm, y))
    logits, cap = norm_by_hand(config, model.norm, x) @ model.W_U, config.logit_cap
    return logits if cap is None else cap * (logits / cap).tanh()


def bias_by_hand(part: torch.nn.Module, width: int, head: int) -> torch.Tensor | int:
    return 0 if part.bias is None else part.bias[head * width : (head + 1) * width]


def mlp_by_hand(config, mlp: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
    hidden = (z @ mlp.W_L.T) * (z @ mlp.W_R.T)
    if config.mlp_bias == "all":
        hidden = (z @ mlp.W_L.T + mlp.left.bias) * (z @ mlp.W_R.T + mlp.right.bias)
    return hidden @ mlp.W_D.T + (0 if config.mlp_bias == "none" else mlp.out.bias)


def norm_by_hand(config, norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if config.norm == "none":
        return x
    usual = {"scalar": 1e-6, "rms": torch.finfo(x.dtype).eps, "layer": 1e-5}
    eps = usual[config.norm] if config.norm_eps is None else config.norm_eps
    if config.norm == "scalar":
        return x / (norm.mean_square / norm.weight + eps).sqrt()
    x = x - x.mean(-1, keepdim=True) if config.norm == "layer" else x
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    return y + norm.bias if config.norm == "layer" else y


def looks_by_hand(config, attn, scores: list[torch.Tensor]) -> torch.Tensor:
    width = config.d_model // config.n_heads
    product = config.attention in ("squared", "bilinear")
    scale = config.attention_scale or (1 / width if product else 1 / width**0.5)
    match config.attention:
        case "softmax":
            return (scale * scores[0]).softmax(0)
        case "squared":
            squares = (scale * scores[0]) ** 2
            return squares / squares.sum() if config.attention_norm == "sum" else squares
        case "bilinear":
            return scale * scores[0] * scale * scores[1]
    return (scale * scores[0]).softmax(0) - attn.diff_lambda * (scale * scores[1]).softmax(0)


def turn_by_hand(q: torch.Tensor, distances: list[int], base: float) -> torch.Tensor:
    first, second = q.chunk(2)
    rates = base ** (-torch.arange(len(first)).double() / len(first))
    angles = torch.tensor(distances)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)


@given(**parts)
def test_logits_are_those_of_the_equations(**options):
    model = random_model(n_layers=2, **options)
    ids = random_text()
    # Rotary angles are worked out in float32.
    assert_close(model(ids[None]).logits[0], naive_logits(model, ids), rtol=1e-5, atol=1e-5)


NORMED = [
    {"attention": "squared", "attention_norm": "sum"},
    {"attention": "squared", "attention_norm": "rms"},
    {"attention": "bilinear", "attention_norm": "rms"},
]
SCALED = [{"attention": attention, "attention_scale": 0.7} for attention in ATTENTIONS]


@pytest.mark.parametrize("options", [*NORMED, *SCALED])
def test_normed_and_scaled_attention_is_that_of_the_equations(options):
    model = random_model(bias=True, n_kv_heads=2, positions="shortformer", **options)
    ids = random_text()
    assert_close(model(ids[None]).logits[0], naive_logits(model, ids), rtol=1e-4, atol=1e-4)


@given(**parts)
def test_decoding_with_a_cache_is_decoding_without(**options):
    model = random_model(**options)
    ids = random_text()[None]
    full = model(ids).logits
    start = model(ids[:, :4], use_cache=True)
    middle = model(ids[:, 4:6], past_key_values=start.past_key_values)
    last = [model(ids[:, t : t + 1], past_key_values=start.past_key_values) for t in (6, 7, 8)]
    pieces = [start.logits, middle.logits, *(out.logits for out in last)]
    assert_close(torch.cat(pieces, 1), full)


@pytest.mark.long
@pytest.mark.parametrize("options", nightly([{"attention": "bilinear"}, NORMED[0]], NORMED))
def test_a_model_compiles_as_one_graph(options):
    """`aot_eager` traces both passes, and generates no code, which would take a minute."""
    model, ids = random_model(**options).train().requires_grad_(), torch.randint(VOCAB, (2, 7))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [run(ids).logits.square().sum() for run in (model, compiled)]
    gradients = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
    assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_generate_gives_the_most_likely_token_each_time(attention):
    model, ids = random_model(attention=attention), random_text(4)[None]
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": VOCAB}
    written = model.generate(ids, **greedy)
    for length in range(4, 9):
        assert written[0, length] == model(written[:, :length]).logits[0, -1].argmax()
    assert torch.equal(written, model.generate(ids, **greedy, use_cache=False))


@pytest.mark.parametrize("attention", ["squared", "bilinear"])
def test_beams_go_on_from_their_own_states(attention):
    model, ids = random_model(attention=attention), random_text(4)[None].repeat(2, 1)
    how = {"max_new_tokens": 6, "num_beams": 3, "eos_token_id": VOCAB}
    assert torch.equal(*(model.generate(ids, **how, use_cache=cached) for cached in (True, False)))


def test_a_state_never_grows():
    model = random_model(attention="bilinear", positions="none")
    cache, sizes = model(random_text()[None], use_cache=True).past_key_values, []
    for length in (1, 20):
        model(random_text(length)[None], past_key_values=cache)
        sizes.append(cache.layers[0].keys.numel())
    assert sizes == [4 * 4 * 16] * 2
    assert cache.get_seq_length() == 30
    assert cache.get_max_length() == -1
    cache.batch_repeat_interleave(2)
    assert len(cache.layers[0].keys) == 2
    cache.reset()
    text = random_text()[None]
    assert_close(model(text, past_key_values=cache).logits, model(text).logits)


IDS = random_text(6)[None]
PADDED = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS], 1)
MASK = torch.tensor([[0] * 3 + [1] * 6])


def test_padding_changes_nothing_of_a_state():
    model = random_model(attention="bilinear", positions="none")
    start = model(PADDED[:, :7], attention_mask=MASK[:, :7], use_cache=True)
    end = model(PADDED[:, 7:], attention_mask=MASK, past_key_values=start.past_key_values)
    assert_close(end.logits, model(IDS).logits[:, 4:])


CONSTANT = {"attention": "squared", "attention_norm": "sum", "attention_constant": True}


@pytest.mark.parametrize("options", [CONSTANT, *NORMED, *({"attention": a} for a in ATTENTIONS)])
def test_padding_changes_nothing(options):
    model = random_model(positions="rotary", **options)
    for block in model.blocks if "attention_constant" in options else ():
        block.attn.score_constant.fill_(0.5)
    logits = model(PADDED, attention_mask=MASK).logits[:, 3:]
    assert_close(logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_loss_is_that_of_the_next_token():
    model, ids = random_model(), random_text()[None]
    out = model(ids, labels=ids)
    expected = cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)


# What released models add, with two layers.
RELEASED = {
    "value_mix": True,
    "embed_mix": True,
    "logit_cap": 3.0,
    "qk_norm": True,
    "n_layers": 2,
    "rope_bfloat16": True,
    "mlp_bias": "out",
    "norm_eps": 1e-8,
    "attention": "differential",
}


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, RELEASED])
def test_a_saved_model_is_found_by_the_auto_class(tmp_path, options):
    model = random_model(norm="rms", **options)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LanguageModel)
    assert (again.embed.weight is again.unembed.weight) == ("tie_word_embeddings" in options)
    check_same_model(again, model)


def test_initial_weights_are_those_of_gpt2():
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(vocab_size=500, d_model=128, n_layers=2, d_hidden=256))
    block = model.blocks[1]
    weights = block.attn.query.weight, block.mlp.W_L, block.attn.out.weight, block.mlp.W_D
    stds = [weight.std().item() for weight in (model.W_E, *weights)]
    assert stds == pytest.approx([0.02, 0.02, 0.02, 0.01, 0.01], rel=0.05)


def test_gradients_pass_checkpointing_unchanged():
    ids, gradients = random_text()[None], []
    for checkpointed in (False, True):
        model = random_model(n_layers=2, value_mix=True, embed_mix=True, logit_cap=5.0)
        model.requires_grad_(True).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = model(ids, labels=ids).loss
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert_close(*gradients)


@given(**parts, attention_norm=st.sampled_from(["none", "sum", "rms"]))
def test_patterns_are_what_the_heads_mix_by(attention, attention_norm, n_kv_heads, **options):
    normed = {"attention": attention, "attention_norm": attention_norm}
    if normed not in NORMED:
        normed["attention_norm"] = "none"
    model = random_model(n_kv_heads=n_kv_heads, **normed, **options)
    ids = random_text()[None]
    x, pos_embed, rope = model.embed_text(ids, torch.arange(9)[None])
    attn, read = model.blocks[0].attn, model.blocks[0].attn_norm(x)
    v_first = torch.randn(1, n_kv_heads, 9, 4).double()
    pattern = attn.attention_pattern(read, pos_embed, rope, v_first)
    assert torch.equal(pattern, pattern.tril())
    sums = {"softmax": 1.0, "differential": 1 - float(getattr(attn, "diff_lambda", 0))}
    total = 1.0 if normed["attention_norm"] == "sum" else sums.get(attention)
    if total is not None:
        assert_close(pattern.sum(-1), torch.full((1, 4, 9), total).double())
    values = attn.values(read, v_first).repeat_interleave(4 // n_kv_heads, 1)
    mixed = attn.out((pattern @ values).transpose(1, 2).flatten(2))
    assert_close(attn(read, pos_embed, rope, v_first=v_first), mixed)


@pytest.mark.parametrize("name", get_args(MlpName))
def test_mlps(name):
    torch.manual_seed(0)
    mlp, x = make_mlp(name, 6, 10, bias=True).double(), torch.randn(5, 6).double()
    gates = {"bilinear": lambda z: z, "glu": sigmoid, "swiglu": silu, "geglu": gelu, "reglu": relu}
    plain = {"relu": relu, "relu2": lambda z: relu(z) ** 2, "gelu": gelu}
    is_plain = name in plain
    hidden = plain[name](mlp.inner(x)) if is_plain else mlp.left(x) * gates[name](mlp.right(x))
    assert_close(mlp(x), mlp.out(hidden))
    if name == "bilinear":
        assert_close(mlp.tensor()(x), mlp(x))


@pytest.mark.parametrize("positions", [3, 300, 40_000])
def test_rounded_rotary_positions_are_rounded_to_bfloat16(positions):
    model = random_model(rope_bfloat16=True, d_model=64, n_heads=1)
    ids = random_text(5)[None]
    places = torch.arange(positions, positions + 5)[None]
    turn = cos, sin = model.embed_text(ids, places)[2]
    exact = random_model(d_model=64, n_heads=1).embed_text(ids, places)[2]
    assert torch.equal(cos.double(), exact[0].float().bfloat16().double())
    assert torch.equal(sin.double(), exact[1].float().bfloat16().double())
    x = torch.randn(1, 1, 5, 64).double()
    first, second = x.chunk(2, -1)
    by_hand = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    assert by_hand.dtype == torch.float64
    assert torch.equal(rotate(x, turn), by_hand)


@pytest.mark.parametrize("attention", ["softmax", "squared"])
def test_a_cache_has_the_names_of_all_versions_of_transformers(attention):
    """From 5.24 on it is `cache`, which must not be taken for an option of the loss."""
    model = random_model(attention=attention)
    for name in ("past_key_values", "cache"):
        given = {name: model(IDS[:, :-1], use_cache=True)[CACHE], "use_cache": True}
        assert_close(model(IDS[:, -1:], **given).logits, model(IDS).logits[:, -1:])
