"""Gemma as the hub has it: in 16 bits, with a token more in its tokenizer, or with a vision tower.

Its embedding is multiplied by sqrt(d_model) in the type of its weights. Widths of other tests are
squares, whose roots are exact in any type; this one is not.
"""

import pytest
import torch
import transformers
from tokenizers import AddedToken

import bilens
from bilens.circuits import circuit
from bilens.flows import Question
from tests.families import LIKE_LLAMA
from tests.tokenizers_of_all_kinds import tokenizer_of

TOKENIZER = tokenizer_of("SentencePiece without a space before texts")
SIZES = {
    **LIKE_LLAMA,
    "vocab_size": len(TOKENIZER),
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KINDS = {"Gemma": "GemmaConfig", "Gemma2": "Gemma2Config", "Gemma3": "Gemma3TextConfig"}
QUESTION = {"text": "The keys to the cabinet", "token": " are", "minus": (" is",)}
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def saved(folder, kind, dtype):
    torch.manual_seed(0)
    config = getattr(transformers, KINDS[kind])(**SIZES)
    getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).save_pretrained(folder)
    tokenizer = tokenizer_of("SentencePiece without a space before texts")
    tokenizer.add_tokens([AddedToken("<image_soft_token>", special=True)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_the_hub_is_the_model_in_float32_within_rounding(tmp_path, kind, dtype):
    model = bilens.load(saved(tmp_path, kind, dtype))
    wide = bilens.load(tmp_path, dtype=torch.float32)
    numbers = torch.arange(SIZES["vocab_size"])
    own = model.model.get_input_embeddings()(numbers)
    assert own.dtype == dtype
    assert torch.equal(model.W_E.to(dtype), own)
    torch.testing.assert_close(model.W_E, wide.W_E, rtol=ROUNDING[dtype], atol=0)
    assert torch.equal(model.W_E[3:9], model.modules.embed.rows(numbers[3:9]))
    # Raises unless the flow adds up to the model's own number.
    for second in ("", "The key to the cabinet"):
        asked = {"minus": " is", "against": second or None}
        flows = [bilens.flow(x, QUESTION["text"], " are", **asked) for x in (model, wide)]
        scale = sum(abs(node.flow) for node in flows[1].nodes)
        assert abs(flows[0].value - flows[1].value) < ROUNDING[dtype] * scale


def test_a_circuit_of_the_form_of_the_hub(tmp_path):
    model = bilens.load(saved(tmp_path, "Gemma3", torch.bfloat16))
    found = circuit(model, [Question(**QUESTION, against="The key to the cabinet")])
    assert found.circuits[0].measured.restored.value > 0


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_texts_and_images_opens_as_its_text_model(tmp_path, dtype, low_memory):
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**SIZES),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
    )
    transformers.Gemma3ForConditionalGeneration(config).to(dtype).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    model = bilens.load(tmp_path, low_memory=low_memory)
    ids = model.ids(QUESTION["text"])[None]
    # Logits are those of a copy in float32, whatever the weights are stored in.
    kind = transformers.Gemma3ForConditionalGeneration
    whole = kind.from_pretrained(tmp_path).float().eval()
    assert model.model.dtype == dtype
    with torch.no_grad():
        torch.testing.assert_close(model.logits(ids), whole(ids).logits)
    bilens.flow(model, QUESTION["text"], " are", minus=" is")
