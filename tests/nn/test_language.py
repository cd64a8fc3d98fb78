"""The transformer against the equations written out, and as a Hugging Face model."""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    width = config.d_model // config.n_heads
    first = None
    for block in model.blocks:
        if config.embed_mix:
            x = block.residual_mix[0] * x + block.residual_mix[1] * start
        read, attn = norm_by_hand(config, block.attn_norm, x), block.attn
        values = attn.value(read)
        first = values if first is None else first
        if config.value_mix:
            values = (1 - attn.value_mix_share) * values + attn.value_mix_share * first
        looked = read + (places if config.positions == "shortformer" else 0)
        y = x.clone()
        if config.bias:
            y += attn.out.bias
        for h in range(config.n_heads):
            shared = h * config.n_kv_heads // config.n_heads
            v, maps = values.unflatten(1, (-1, width))[:, shared], [(attn.query, attn.key)]
            pairs = [(looked @ attn.W_Q[h], looked @ attn.W_K[h])]
            if config.attention in ("bilinear", "differential"):
                pairs.append((looked @ attn.W_Q2[h], looked @ attn.W_K2[h]))
                maps.append((attn.query2, attn.key2))
            if config.bias:
                pairs = [
                    (
                        q + query.bias.unflatten(0, (-1, width))[h],
                        k + key.bias.unflatten(0, (-1, width))[shared],
                    )
                    for (q, k), (query, key) in zip(pairs, maps, strict=True)
                ]
            size = torch.nn.RMSNorm(width).double() if config.qk_norm else torch.nn.Identity()
            pairs = [(size(q), size(k)) for q, k in pairs]
            for t in range(time):
                scores = torch.zeros(len(pairs), t + 1).double()
                for number, (q, k) in enumerate(pairs):
                    for s in range(t + 1):
                        turned = q[t]
                        if config.positions == "rotary":
                            # Only the distance counts: turn the query by all of it.
                            turned = turn_by_hand(q[t], t - s, config.rope_base)
                        scores[number, s] = turned @ k[s]
                looks = looks_by_hand(config, attn, scores)
                mixed = looks @ v[: t + 1]
                if config.attention_norm == "rms":
                    mixed = mixed / mixed.square().mean().sqrt()
                y[t] += mixed @ attn.W_O[h]
        x = y + mlp_by_hand(config, block.mlp, norm_by_hand(config, block.mlp_norm, y))
    logits = norm_by_hand(config, model.norm, x) @ model.W_U
    return (
        logits
        if config.logit_cap is None
        else config.logit_cap * (logits / config.logit_cap).tanh()
    )


def mlp_by_hand(config, mlp: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
    hidden = (z @ mlp.W_L.T) * (z @ mlp.W_R.T)
    if config.mlp_bias == "all":
        hidden = (z @ mlp.W_L.T + mlp.left.bias) * (z @ mlp.W_R.T + mlp.right.bias)
    return hidden @ mlp.W_D.T + (0 if config.mlp_bias == "none" else mlp.out.bias)


def norm_by_hand(config, norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if config.norm == "none":
        return x
    if config.norm == "scalar":
        mean = norm.mean_square / norm.weight
        return x / (mean + (1e-6 if config.norm_eps is None else config.norm_eps)).sqrt()
    eps = {"rms": torch.finfo(x.dtype).eps, "layer": 1e-5}[config.norm]
    eps = eps if config.norm_eps is None else config.norm_eps
    x = x - x.mean(-1, keepdim=True) if config.norm == "layer" else x
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    return y + norm.bias if config.norm == "layer" else y


def looks_by_hand(config, attn, scores: torch.Tensor) -> torch.Tensor:
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


def turn_by_hand(q: torch.Tensor, distance: int, base: float) -> torch.Tensor:
    half = len(q) // 2
    turned = q.clone()
    for i in range(half):
        angle = torch.tensor(distance * base ** (-i / half), dtype=torch.float64)
        turned[i] = q[i] * angle.cos() - q[i + half] * angle.sin()
        turned[i + half] = q[i + half] * angle.cos() + q[i] * angle.sin()
    return turned


@given(**parts)
def test_logits_are_those_of_the_equations(**options):
    model = random_model(n_layers=2, **options)
    ids = random_text()
    # Rotary angles are worked out in float32.
    torch.testing.assert_close(
        model(ids[None]).logits[0], naive_logits(model, ids), rtol=1e-5, atol=1e-5
    )


NORMED = [
    {"attention": "squared", "attention_norm": "sum"},
    {"attention": "squared", "attention_norm": "rms"},
    {"attention": "bilinear", "attention_norm": "rms"},
]


@pytest.mark.parametrize(
    "options", [*NORMED, *({"attention": a, "attention_scale": 0.7} for a in ATTENTIONS)]
)
def test_normed_and_scaled_attention_is_that_of_the_equations(options):
    model = random_model(bias=True, n_kv_heads=2, positions="shortformer", **options)
    ids = random_text()
    expected = naive_logits(model, ids)
    torch.testing.assert_close(model(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-4)


@given(**parts)
def test_decoding_with_a_cache_is_decoding_without(**options):
    model = random_model(**options)
    ids = random_text()[None]
    full = model(ids).logits
    start = model(ids[:, :4], use_cache=True)
    middle = model(ids[:, 4:6], past_key_values=start.past_key_values)
    last = [model(ids[:, t : t + 1], past_key_values=start.past_key_values) for t in (6, 7, 8)]
    pieces = [start.logits, middle.logits, *(out.logits for out in last)]
    torch.testing.assert_close(torch.cat(pieces, 1), full)


@pytest.mark.parametrize("options", nightly([{"attention": "bilinear"}, NORMED[0]], NORMED))
def test_a_model_compiles_as_one_graph(options):
    """`aot_eager` traces both passes, and generates no code, which would take a minute."""
    model = random_model(**options).train().requires_grad_()
    ids = torch.randint(0, model.config.vocab_size, (2, 7))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(ids).logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_generate_gives_the_most_likely_token_each_time(attention):
    model, ids = random_model(attention=attention), random_text(4)[None]
    written = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=VOCAB)
    for length in range(4, 9):
        assert written[0, length] == model(written[:, :length]).logits[0, -1].argmax()
    again = model.generate(
        ids, max_new_tokens=5, do_sample=False, eos_token_id=VOCAB, use_cache=False
    )
    assert torch.equal(written, again)


@pytest.mark.parametrize("attention", ["squared", "bilinear"])
def test_beams_go_on_from_their_own_states(attention):
    model, ids = random_model(attention=attention), random_text(4)[None].repeat(2, 1)
    result = [
        model.generate(ids, max_new_tokens=6, num_beams=3, eos_token_id=VOCAB, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*result)


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
    again = model(random_text()[None], past_key_values=cache).logits
    torch.testing.assert_close(again, model(random_text()[None]).logits)


def test_padding_changes_nothing_of_a_state():
    model, ids = random_model(attention="bilinear", positions="none"), random_text(6)[None]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    start = model(padded[:, :7], attention_mask=mask[:, :7], use_cache=True)
    end = model(padded[:, 7:], attention_mask=mask, past_key_values=start.past_key_values)
    torch.testing.assert_close(end.logits, model(ids).logits[:, 4:])


CONSTANT = {"attention": "squared", "attention_norm": "sum", "attention_constant": True}


@pytest.mark.parametrize(
    "options", [CONSTANT, *NORMED, *({"attention": attention} for attention in ATTENTIONS)]
)
def test_padding_changes_nothing(options):
    model, ids = random_model(positions="rotary", **options), random_text(6)[None]
    for block in model.blocks if "attention_constant" in options else ():
        block.attn.score_constant.fill_(0.5)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_loss_is_that_of_the_next_token():
    model, ids = random_model(), random_text()[None]
    out = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)


# What released models add, with two layers.
RELEASED = {
    **{"value_mix": True, "embed_mix": True, "logit_cap": 3.0, "qk_norm": True, "n_layers": 2},
    **{"rope_bfloat16": True, "mlp_bias": "out", "norm_eps": 1e-8, "attention": "differential"},
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
    for weight, std in (
        (model.W_E, 0.02),
        (block.attn.query.weight, 0.02),
        (block.mlp.W_L, 0.02),
        (block.attn.out.weight, 0.01),
        (block.mlp.W_D, 0.01),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)


def test_gradients_pass_checkpointing_unchanged():
    ids, gradients = random_text()[None], []
    for checkpointed in (False, True):
        model = random_model(n_layers=2, value_mix=True, embed_mix=True, logit_cap=5.0)
        model.requires_grad_(True).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


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
        torch.testing.assert_close(pattern.sum(-1), torch.full((1, 4, 9), total).double())
    values = attn.values(read, v_first).repeat_interleave(4 // n_kv_heads, 1)
    mixed = attn.out((pattern @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(read, pos_embed, rope, v_first=v_first), mixed)


@pytest.mark.parametrize("name", get_args(MlpName))
def test_mlps(name):
    torch.manual_seed(0)
    mlp, x = make_mlp(name, 6, 10, bias=True).double(), torch.randn(5, 6).double()
    functions = {
        "bilinear": lambda z: z,
        "glu": torch.sigmoid,
        "swiglu": torch.nn.functional.silu,
        "geglu": torch.nn.functional.gelu,
        "reglu": torch.relu,
        "relu": torch.relu,
        "relu2": lambda z: torch.relu(z) ** 2,
        "gelu": torch.nn.functional.gelu,
    }
    sigma = functions[name]
    if name in ("relu", "relu2", "gelu"):
        expected = mlp.out(sigma(mlp.inner(x)))
    else:
        expected = mlp.out(mlp.left(x) * sigma(mlp.right(x)))
    torch.testing.assert_close(mlp(x), expected)
    if name == "bilinear":
        torch.testing.assert_close(mlp.tensor()(x), mlp(x))


@pytest.mark.parametrize("positions", [3, 300, 40_000])
def test_rounded_rotary_positions_are_rounded_to_bfloat16(positions):
    model = random_model(rope_bfloat16=True, d_model=64, n_heads=1)
    ids = random_text(5)[None]
    places = torch.arange(positions, positions + 5)[None]
    _, _, (cos, sin) = model.embed_text(ids, places)
    exact = random_model(d_model=64, n_heads=1).embed_text(ids, places)[2]
    assert torch.equal(cos.double(), exact[0].float().bfloat16().double())
    assert torch.equal(sin.double(), exact[1].float().bfloat16().double())
    _, _, turn = model.embed_text(ids, places)
    x = torch.randn(1, 1, 5, 64).double()
    first, second = x.chunk(2, -1)
    by_hand = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    assert by_hand.dtype == torch.float64
    assert torch.equal(rotate(x, turn), by_hand)


@pytest.mark.parametrize("attention", ["softmax", "squared"])
def test_a_cache_has_the_names_of_all_versions_of_transformers(attention):
    """From 5.24 on it is `cache`, which must not be taken for an option of the loss."""
    model, ids = random_model(attention=attention), random_text(6)[None]
    expected = model(ids).logits[:, -1:]
    for name in ("past_key_values", "cache"):
        start = model(ids[:, :-1], use_cache=True)
        given = {name: start[CACHE], "use_cache": True}
        torch.testing.assert_close(model(ids[:, -1:], **given).logits, expected)
