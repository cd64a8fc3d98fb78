"""bilens on pretrained models: SmolLM2-135M and Gemma 3 270M."""

import re
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken

import bilens
from bilens.circuits import circuit
from bilens.convert import process, save_model
from bilens.errors import BilensError
from bilens.flows import Question, flow, read_lens, read_pairs, remove
from bilens.language import TokenDirection
from bilens.shipped import task_names
from bilens.testing import check_family
from bilens.transformer import ResidualModel, in_chat
from tests.command_line import ROOT
from tests.flows.flows import flow_unless_rounded, leaves
from tests.flows.own_runs import by_hand
from tests.real.packages import GEMMA3, SMOLLM2, gguf_file

pytestmark = [pytest.mark.models, pytest.mark.xdist_group("real models")]
PROMPTS = [
    ("The keys to the cabinet", " are", " is"),
    ("The key to the cabinets", " is", " are"),
    ("The teachers near the doctor", " are", " is"),
    ("When Mary and John went to the store, John gave a drink to", " Mary", " John"),
    ("Monday, Tuesday, Wednesday,", " Thursday", " Monday"),
]
MODELS = [SMOLLM2, GEMMA3]


@cache
def opened(package: str) -> ResidualModel:
    model = bilens.load(gguf_file(package), dtype=torch.float32)
    assert isinstance(model, ResidualModel)
    return model


def prompt(model: ResidualModel, number: int) -> tuple[torch.Tensor, TokenDirection, list[int]]:
    """Return a text, a direction by the names of two tokens, and their numbers."""
    text, *words = PROMPTS[number]
    tokenizer = model.tokenizer
    numbers = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
    token, minus = tokenizer.convert_ids_to_tokens(numbers)
    return torch.tensor(tokenizer(text)["input_ids"]), TokenDirection(token, (minus,)), numbers


@pytest.mark.parametrize("package", MODELS)
def test_a_flow_between_two_texts_adds_up(package):
    model = opened(package)
    ids, direction, (token, minus) = prompt(model, 0)
    before, _, _ = prompt(model, 1)
    logits = [model.logits(text[None])[0, -1].double() for text in (ids, before)]
    expected = float(logits[0][token] - logits[0][minus] - logits[1][token] + logits[1][minus])
    flows = flow(model, ids, direction, against=before, labels=0)
    assert leaves(flows) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("package", MODELS)
def test_no_lens_between_texts_of_the_tasks_is_refused_for_rounding(package):
    model = opened(package)
    for task in task_names():
        asked = read_pairs(model, task)[0]
        if len(model.ids(asked.text)) == len(model.ids(asked.against)):
            assert read_lens(model, asked.text, asked.against, layers=2).error < 1e-4


@pytest.mark.parametrize("package", MODELS)
@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_a_small_change_of_nearly_equal_logits_is_exact_or_said_to_be_too_small(package, size):
    """Between models, and between embeddings: logits are rounded by their own size."""
    model, generator = opened(package), torch.Generator().manual_seed(0)
    ids, _, _ = prompt(model, 0)
    logits = model.logits(ids[None])[0, -1]
    order = logits.argsort(descending=True)[:200]
    place = int(logits[order].diff().abs().argmin())
    token, minus = (f"[{int(x)}]" for x in order[place : place + 2])
    tuned = deepcopy(model.model)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.mul_(1 + size * torch.randn(weight.shape, generator=generator))
    between = bilens.diff(model, ResidualModel(tuned, model.tokenizer), ids, token, minus)
    rounding = 4e-6 * float(logits.abs().max())
    change = float(between.flows.sum() + between.rest.sum())
    assert abs(change - between.value) < 2 * rounding
    rows = model.places.rows(ids[None])[0]
    second = rows * (1 + size * torch.randn(rows.shape, generator=generator))
    through = flow_unless_rounded(model, ids, token, minus, second)
    if through is None:
        assert size == 1e-5
        return
    assert abs(leaves(through) - through.value) <= max(0.01 * abs(through.value), rounding)


def test_a_chat_is_read_as_the_tokenizer_writes_it():
    model = opened(SMOLLM2)
    first, second = ("What is the capital of France?", "What is the capital of Spain?")
    said = [{"role": "user", "content": first}]
    own = model.tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    assert in_chat(model).ids(first).tolist() == own
    through = flow(in_chat(model), first, against=second, labels=0)
    assert leaves(through) == pytest.approx(through.value, rel=1e-5)


def test_nodes_are_removed_together_as_by_own_hooks():
    model = opened(SMOLLM2)
    ids, direction, (token, minus) = prompt(model, 0)
    texts = [ids, prompt(model, 1)[0]]
    flows = flow(model, ids, direction, against=texts[1], labels=0)
    nodes = [node for node in flows.nodes if node.kind in ("head", "mlp", "token")][:16]
    assert {node.kind for node in nodes} == {"head", "mlp", "token"}
    expected = by_hand(model, nodes, texts, lambda logits: logits[token] - logits[minus])
    assert remove(model, flows, nodes).actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("package", MODELS)
def test_processing_changes_no_log_probability(package):
    model = opened(package)
    ids, _, (token, minus) = prompt(model, 2)
    processed, report = process(model.model)
    assert {"fold_norms"} <= set(report.folded) | set(report.refused)
    assert report.change < 2e-3
    before = model.logits(ids[None])[0, -1]
    after = processed(ids[None], use_cache=False).logits[0, -1]
    difference = (after[token] - after[minus]) - (before[token] - before[minus])
    assert abs(float(difference)) < 1e-3


@pytest.mark.parametrize("package", MODELS)
def test_a_saved_model_is_the_model(package, tmp_path):
    model = opened(package)
    ids, _, _ = prompt(model, 3)
    save_model(tmp_path, model.model, model.tokenizer)
    saved, own = (x.logits(ids[None]) for x in (bilens.load(tmp_path), model))
    torch.testing.assert_close(saved, own, rtol=1e-5, atol=1e-4)


def test_gains_above_a_thousand_are_read():
    model = opened(GEMMA3)
    heads = [layer.heads for layer in model.modules.layers]
    assert all(part.norm.offset == 1 for part in heads)
    assert max(part.out_norm.gain().abs().max() for part in heads) > 1


@pytest.mark.parametrize("package", MODELS)
def test_the_family_is_known(package):
    check_family(opened(package).model)


def test_digits_of_smollm2_are_tokens_of_their_own():
    """Its GGUF file names the rules; the numbers are those of its tokenizer on the hub."""
    model = opened(SMOLLM2)
    assert model.ids("Hello world! 123").tolist() == [19556, 905, 17, 216, 33, 34, 35]
    assert model.ids("  multiple   spaces").tolist() == [216, 2701, 256, 5600]


def test_gemma_3_in_the_form_of_the_hub(tmp_path):
    """In bfloat16, with a token for images that only the tokenizer has."""
    original = opened(GEMMA3)
    tokenizer = deepcopy(original.tokenizer)
    tokenizer.add_tokens([AddedToken("<image_soft_token>", special=True)])
    deepcopy(original.model).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = bilens.load(tmp_path)
    wide = bilens.load(tmp_path, dtype=torch.float32)
    numbers = torch.arange(0, model.vocab_size, 97)
    own = model.model.get_input_embeddings()(numbers)
    assert torch.equal(model.modules.embed.rows(numbers).bfloat16(), own)
    torch.testing.assert_close(model.W_E[numbers], wide.W_E[numbers], rtol=2**-7, atol=0)
    text, right, wrong = PROMPTS[0]
    second = "The key to the cabinet"
    # Raises unless the parts add up to the model's own number.
    values = [flow(x, text, right, minus=wrong, against=second).value for x in (model, wide)]
    assert values[0] == pytest.approx(values[1], rel=0.1)
    questions = [Question(text, right, (wrong,), second)]
    for one in ("dog", "boy"):
        texts = f"The {one}s near the cabinet", f"The {one} near the cabinet"
        questions.append(Question(texts[0], right, (wrong,), texts[1]))
    found = circuit(model, questions)
    assert found.circuits[0].measured.restored.value > 0.5
    with pytest.raises(BilensError, match="'<image_soft_token>' is token 262144 of the tokenizer"):
        model.token("<image_soft_token>")


@pytest.mark.parametrize("package", MODELS)
@pytest.mark.parametrize("task", task_names())
def test_questions_that_come_with_bilens_are_read(package, task):
    assert len(read_pairs(opened(package), task)) == 72


def test_the_readme_finds_the_file_of_smollm2():
    (line,) = re.findall(r"^MODEL=.*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    # As in an active environment.
    script = f'python() {{ "{sys.executable}" "$@"; }}\n{line}\necho "$MODEL"'
    found = subprocess.check_output(["bash", "-c", script], text=True).strip()
    assert Path(found).samefile(gguf_file(SMOLLM2))
