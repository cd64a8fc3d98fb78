"""The transformer against the equations written out, and as a Hugging Face model."""

import pytest
import torch
from hypothesis import given
from transformers import AutoModelForCausalLM

from bilens.errors import BilensError, NotBilinearError
from bilens.nn import MLPS, make_mlp
from bilens.nn.language import LanguageConfig, LanguageModel
from bilens.nn.norm import make_norm
from bilens.nn.position import rotate, rotation
from tests.language import VOCAB, parts, random_model, random_text


def test_paper_preset_has_the_size_of_table_3():
    with torch.device("meta"):
        model = LanguageModel(LanguageConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_020_096


def naive_logits(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """The model token by token and head by head, from the weights under their field names."""
    config, time = model.config, len(ids)
    places = model.places.weight[:time] if config.positions in ("learned", "shortformer") else 0
    x = model.W_E[ids] + (places if config.positions == "learned" else 0)
    width = config.d_model // config.n_heads
    for block in model.blocks:
        read, attn = block.attn_norm(x), block.attn
        looked = read + (places if config.positions == "shortformer" else 0)
        y = x.clone()
        if config.bias:
            y += attn.out.bias
        for h in range(config.n_heads):
            shared = h * config.n_kv_heads // config.n_heads
            q, k, v = looked @ attn.W_Q[h], looked @ attn.W_K[h], read @ attn.W_V[h]
            if config.bias:
                q = q + attn.query.bias.unflatten(0, (-1, width))[h]
                k = k + attn.key.bias.unflatten(0, (-1, width))[shared]
                v = v + attn.value.bias.unflatten(0, (-1, width))[shared]
            for t in range(time):
                scores = []
                for s in range(t + 1):
                    turned = q[t]
                    if config.positions == "rotary":
                        # Only the distance counts: turn the query by all of it.
                        turned = turn_by_hand(q[t], t - s, config.rope_base)
                    scores.append(turned @ k[s] / width**0.5)
                looks = torch.stack(scores).softmax(0)
                y[t] += looks @ v[: t + 1] @ attn.W_O[h]
        z, mlp = block.mlp_norm(y), block.mlp
        hidden = (z @ mlp.W_L.T) * (z @ mlp.W_R.T)
        if config.bias:
            hidden = (z @ mlp.W_L.T + mlp.left.bias) * (z @ mlp.W_R.T + mlp.right.bias)
        x = y + hidden @ mlp.W_D.T + (mlp.out.bias if config.bias else 0)
    return model.norm(x) @ model.W_U


def turn_by_hand(q: torch.Tensor, distance: int, base: float) -> torch.Tensor:
    half = len(q) // 2
    turned = q.clone()
    for i in range(half):
        angle = torch.tensor(distance * base ** (-i / half), dtype=torch.float64)
        turned[i] = q[i] * angle.cos() - q[i + half] * angle.sin()
        turned[i + half] = q[i + half] * angle.cos() + q[i] * angle.sin()
    return turned


@given(**parts)
def test_logits_are_those_of_the_equations(norm, positions, bias, n_kv_heads):
    model = random_model(
        norm=norm, positions=positions, bias=bias, n_kv_heads=n_kv_heads, n_layers=2
    )
    ids = random_text()
    # Rotary angles are worked out in float32.
    torch.testing.assert_close(
        model(ids[None]).logits[0], naive_logits(model, ids), rtol=1e-5, atol=1e-5
    )


@given(**parts)
def test_decoding_with_a_cache_is_decoding_without(norm, positions, bias, n_kv_heads):
    model = random_model(norm=norm, positions=positions, bias=bias, n_kv_heads=n_kv_heads)
    ids = random_text()[None]
    whole = model(ids).logits
    start = model(ids[:, :4], use_cache=True)
    middle = model(ids[:, 4:6], past_key_values=start.past_key_values)
    last = [model(ids[:, t : t + 1], past_key_values=start.past_key_values) for t in (6, 7, 8)]
    pieces = [start.logits, middle.logits, *(out.logits for out in last)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


def test_generate_gives_the_most_likely_token_each_time():
    model, ids = random_model(), random_text(4)[None]
    written = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=VOCAB)
    for length in range(4, 9):
        assert written[0, length] == model(written[:, :length]).logits[0, -1].argmax()


def test_padding_changes_nothing():
    model, ids = random_model(positions="rotary"), random_text(6)[None]
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_is_found_by_the_auto_class(tmp_path, tied):
    model = random_model(tie_word_embeddings=tied, norm="rms")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LanguageModel)
    assert (again.embed.weight is again.unembed.weight) == tied
    assert torch.equal(again(random_text()[None]).logits, model(random_text()[None]).logits)


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
        model = random_model().requires_grad_(True).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        gradients.append(model.W_E.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@given(**parts)
def test_patterns_are_what_the_heads_mix_by(norm, positions, bias, n_kv_heads):
    model = random_model(norm=norm, positions=positions, bias=bias, n_kv_heads=n_kv_heads)
    ids = random_text()[None]
    x, places, turn = model.start(ids, torch.arange(9)[None])
    attn, read = model.blocks[0].attn, model.blocks[0].attn_norm(x)
    pattern = attn.pattern(read, places, turn)
    assert torch.equal(pattern, pattern.tril())
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 4, 9, dtype=torch.float64))
    values = attn._heads(attn.value(read)).repeat_interleave(4 // n_kv_heads, 1)
    mixed = attn.out((pattern @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(read, places, turn), mixed)


@pytest.mark.parametrize("name", MLPS)
def test_mlps(name):
    torch.manual_seed(0)
    mlp, x = make_mlp(name, 6, 10, bias=True).double(), torch.randn(5, 6).double()
    functions = {
        "bilinear": lambda z: z,
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
    else:
        with pytest.raises(NotBilinearError, match="blocks\\[3\\].mlp"):
            mlp.tensor("blocks[3].mlp")


@given(**{"positions": parts["positions"]})
def test_only_the_distance_counts_for_rotary_positions(positions):
    q, k = torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()

    def score(t: int, s: int) -> torch.Tensor:
        turns = [rotation(torch.tensor([[p]]), 8, 100.0, q) for p in (t, s)]
        return (rotate(q, turns[0]) * rotate(k, turns[1])).sum()

    torch.testing.assert_close(score(7, 4), score(13, 10), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp": "cubic"}, "mlp='cubic', expected one of bilinear"),
        ({"norm": "batch"}, "norm='batch', expected one of none"),
        ({"positions": "alibi"}, "positions='alibi', expected one of rotary"),
        ({"d_model": 0}, "d_model=0, expected a whole number of at least 1"),
        ({"d_model": 10, "n_heads": 4}, "d_model=10 is no multiple of n_heads=4"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_heads=4 is no multiple of n_kv_heads=3"),
    ],
)
def test_bad_settings_are_named(unchecked, settings, message):
    with pytest.raises(BilensError, match=message):
        LanguageConfig(**settings)


def test_bad_parts_are_named(unchecked):
    with pytest.raises(BilensError, match="norm='batch', expected one of none, rms, layer"):
        make_norm("batch", 4)
    with pytest.raises(BilensError, match="mlp='cubic', expected one of bilinear"):
        make_mlp("cubic", 4, 4, bias=False)
    with pytest.raises(BilensError, match="heads of even width"):
        rotation(torch.arange(3)[None], 5, 100.0, torch.zeros(1))


def test_learned_positions_have_an_end():
    model = random_model(positions="learned")
    with pytest.raises(BilensError, match="reaches position 12; learned positions end at n_ctx=12"):
        model(random_text(13)[None])
    with pytest.raises(BilensError, match="layer=1, expected 0 to 0"):
        model.mlp(1)
