"""A folder of a model is opened for what it holds, or refused with the cause; see the tables."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bilens
from bilens.convert import save_model
from bilens.errors import BilensError, CheckpointError
from tests.tokenizers_of_all_kinds import small_llama, tokenizer_of

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
PAGE = "<!DOCTYPE html>\n<html><body>404</body></html>"
WEIGHTS = "model.safetensors"


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def setting(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def shards(folder):
    (folder / WEIGHTS).unlink()
    small_llama(372).save_pretrained(folder, max_shard_size="20KB")


def shard_pointer(folder):
    shards(folder)
    sorted(folder.glob("model-0*.safetensors"))[1].write_text(POINTER)


def adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.ones(2, 16)}, folder / "adapter_model.safetensors")


adapter_alone = both(adapter, remove("config.json", WEIGHTS))


def sentencepiece_file(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")


def whole_numbers(folder):
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.ones(20, 16, dtype=torch.int8)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


OPENED = {
    "as it was saved": lambda folder: None,
    "in shards": shards,
    "a pointer of other weights": write("pytorch_model.bin", POINTER),
    "a pointer of another form of the tokenizer": write("tokenizer.model", POINTER),
    "a page of another form of the tokenizer": write("vocab.txt", PAGE),
    "no tokenizer": remove("tokenizer.json", "tokenizer_config.json"),
    "a token for padding": setting(pad_token_id=0),
    "no token for padding": setting(pad_token_id=-1),
}
REFUSED = {
    f"{WEIGHTS} .* pointer of Git LFS": write(WEIGHTS, POINTER),
    f"{WEIGHTS} .* a web page": write(WEIGHTS, PAGE),
    f"{WEIGHTS} .* a text, 'Entry not found'": write(WEIGHTS, "Entry not found"),
    "model-00002-.* pointer of Git LFS": shard_pointer,
    "index.json .* a web page": both(shards, write(f"{WEIGHTS}.index.json", PAGE)),
    "config.json .* pointer of Git": write("config.json", POINTER),
    "tokenizer.json .* pointer": write("tokenizer.json", POINTER),
    "tokenizer_config.json .* pointer of Git LFS": write("tokenizer_config.json", POINTER),
    "vocab.txt .* a web page": both(remove("tokenizer.json"), write("vocab.txt", PAGE)),
    "tokenizer.model only, .* sentencepiece protobuf": sentencepiece_file,
    "an adapter, adapter_config.json, beside its model": adapter,
    "config.json; only an adapter of another model: .* merge it": adapter_alone,
    "pad_token_id=372 in config.json, expected 0 to 371": setting(pad_token_id=372),
    "eos_token_id=400 in config": setting(eos_token_id=[2, 400]),
    "do not fit .*lm_head.weight.*372.*373": setting(vocab_size=373),
    "do not fit config.json .*q_proj.weight": setting(head_dim=8),
    "mlp.up_proj.weight holds numbers of type I8": whole_numbers,
    "no config.json; expected": lambda folder: shutil.rmtree(folder) or folder.mkdir(),
    "holds no complete language model: ": remove(WEIGHTS),
}


@pytest.fixture
def folder(tmp_path):
    small_llama(372).save_pretrained(tmp_path / "model")
    tokenizer_of("SentencePiece").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("case", OPENED)
def test_a_folder_is_opened(folder, case):
    expected = bilens.load(folder).logits(torch.arange(9)[None])
    OPENED[case](folder)
    opened = bilens.load(folder)
    logits = opened.logits(torch.arange(9)[None])
    assert torch.isfinite(logits).all()
    if case != "in shards":  # whose weights are others
        torch.testing.assert_close(logits, expected)
    assert (opened.tokenizer is None) == (case == "no tokenizer")


@pytest.mark.parametrize("with_peft", [False, True])
@pytest.mark.parametrize("cause", REFUSED)
def test_a_folder_is_refused_with_the_cause(folder, cause, with_peft, monkeypatch):
    if with_peft:
        monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: True)
    REFUSED[cause](folder)
    with pytest.raises(CheckpointError, match=cause) as refused:
        bilens.load(folder)
    assert str(folder) in str(refused.value)
    assert "by this name" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_gguf_file_that_is_a_pointer(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_text(POINTER)
    with pytest.raises(CheckpointError, match="model.gguf .* pointer of Git LFS"):
        bilens.load(tmp_path / "model.gguf")


def test_adapters_around_a_model_are_merged_first():
    class PeftModelForCausalLM(torch.nn.Sequential):
        def merge_and_unload(self):
            return self[0]

    model = PeftModelForCausalLM(small_llama(30))
    for open_it in (bilens.load, bilens.transformer.ResidualModel):
        with pytest.raises(BilensError, match=r"PeftModelForCausalLM, .* model.merge_and_unload"):
            open_it(model)
    assert bilens.load(model.merge_and_unload()).vocab_size == 30


def cached(cache: Path, revisions: dict[str, dict[str, str]]) -> None:
    """Write a repository as the hub's cache has it: a folder for each revision."""
    repository = cache / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for number, (revision, tokenizer) in enumerate(revisions.items()):
        (repository / "refs" / revision).write_text(str(number) * 40)
        snapshot = repository / "snapshots" / (str(number) * 40)
        small_llama(372).save_pretrained(snapshot)
        if tokenizer:
            tokenizer_of(tokenizer).save_pretrained(snapshot)


@pytest.mark.parametrize("main", ["", "byte-level"])
def test_a_revision_is_that_of_the_tokenizer_too(tmp_path, monkeypatch, main):
    cached(tmp_path, {"main": main, "other": "SentencePiece"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = bilens.load("some/model", revision="other", cache_dir=tmp_path)
    assert model.tokenizer.get_vocab() == tokenizer_of("SentencePiece").get_vocab()
    on_main = bilens.load("some/model", cache_dir=tmp_path).tokenizer
    assert (on_main is None) == (not main)
    assert main == "" or on_main.get_vocab() == tokenizer_of(main).get_vocab()


def test_a_folder_within_a_folder_is_opened(folder):
    within = bilens.load(folder.parent, subfolder="model")
    assert within.token("are") == bilens.load(folder).token("are")


def test_a_model_that_is_saved_stays_as_it_is(tmp_path):
    model, tokenizer = small_llama(372), tokenizer_of("byte-level")
    save_model(tmp_path / "a", model, tokenizer)
    assert not hasattr(model.config, "bilens_tokenizer")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["bilens_tokenizer"]
