"""Private names of other libraries that bilens uses: each is here, with its version.

A new version of the library may take it away. The test then fails before anything else does.
"""

import ast
import inspect
import typing
from collections.abc import Iterator

import pytest
import torch
import transformers
from torch import nn
from transformers.utils.hub import cached_file

from tests.families import some_text, tiny
from tests.source import SOURCE, nodes_of_files

# Methods that bilens overrides or calls, with their parameters.
METHODS = [
    ("transformers 5.23", transformers.Trainer, "_save_checkpoint", ["self", "model", "trial"]),
    ("transformers 5.23", transformers.Trainer, "_get_output_dir", ["self", "trial"]),
    ("transformers 5.23", transformers.Trainer, "_get_train_sampler", ["self", "train_dataset"]),
]
# Attributes of objects, and their types.
ATTRIBUTES = [
    ("torch 2.13", nn.Linear(1, 1), "_forward_hooks", dict),
    ("torch 2.13", nn.Linear(1, 1), "_forward_pre_hooks", dict),
    ("torch 2.13", nn.Linear(1, 1), "_compiled_call_impl", type(None)),
    ("torch 2.13", nn.modules.module, "_global_forward_hooks", dict),
    ("torch 2.13", nn.modules.module, "_global_forward_pre_hooks", dict),
    ("transformers 5.23", transformers.LlamaConfig(), "_attn_implementation", (str, type(None))),
    ("Python 3.11", typing.Protocol, "_is_protocol", bool),
]
# Names that only a run shows, or an optional library, and the tests that fail without them.
ELSEWHERE = {
    "_raise_exceptions_for_missing_entries": "an option of cached_file of transformers 5.23, below",
    "_tr_loss": "of the Trainer of transformers 5.23, below",
    "_globalstep_last_logged": "of the Trainer of transformers 5.23, below",
    "_hub_mixin_config": "huggingface_hub 1.0: tests/nn/test_classifier.py",
    "_hf_hook": "accelerate 1.0, on modules that it moves: tests/residual/test_model.py",
    "_is_runtime_protocol": "typing of Python 3.11, beside _is_protocol",
}
PUBLIC = {"_exit", "_replace"}  # of os and of named tuples, in the documentation of Python


@pytest.mark.parametrize(("version", "owner", "name", "parameters"), METHODS)
def test_a_private_method_is_as_it_was(version, owner, name, parameters):
    method = getattr(owner, name, None)
    assert method is not None, f"{name} is not there any more, as it was in {version}"
    if inspect.isfunction(method):
        assert [*inspect.signature(method).parameters] == parameters, f"not as in {version}"


@pytest.mark.parametrize(("version", "owner", "name", "kind"), ATTRIBUTES)
def test_a_private_attribute_is_as_it_was(version, owner, name, kind):
    assert isinstance(getattr(owner, name, ...), kind), f"not as in {version}"


def test_a_file_that_is_missing_is_none(tmp_path):
    assert cached_file(tmp_path, "no.file", _raise_exceptions_for_missing_entries=False) is None


def test_the_trainer_keeps_its_losses_where_a_resume_puts_them(tmp_path):
    seen = []

    class Watching(transformers.Trainer):
        def _save_checkpoint(self, model, trial):
            seen.append((float(self._tr_loss), self._globalstep_last_logged))
            super()._save_checkpoint(model, trial)

    model = tiny("llama", dtype=torch.float32).requires_grad_()
    rows = [{"input_ids": ids, "labels": ids} for ids in some_text()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        save_steps=2,
        logging_steps=3,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Watching(model, arguments, train_dataset=rows).train()
    # In transformers 5.23: the sum since the last record, and the step of that record.
    assert seen[0][0] > 0
    assert seen[0][1] == 0


def private_names() -> Iterator[tuple[str, str]]:
    """Yield private names that the package uses and does not define, and where."""
    source = nodes_of_files()
    defined: set[str] = set()
    for nodes in source.values():
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                defined.add(str(node.slice.value))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                # Of the package's own objects; one of another library is stored to through a name.
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                defined |= {node.attr} if own else set()
    for path, nodes in source.items():
        for node in nodes:
            name = ""
            if isinstance(node, ast.Attribute):
                name = node.attr
            elif isinstance(node, ast.keyword):
                name = node.arg or ""
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "vars"):
                name = next((str(a.value) for a in node.args if isinstance(a, ast.Constant)), "")
            if name.startswith("_") and not name.startswith("__") and name not in defined:
                yield name, f"{path.relative_to(SOURCE)}:{node.lineno}"


def test_every_private_name_of_another_library_is_listed():
    listed = {name for _, _, name, _ in (*METHODS, *ATTRIBUTES)} | ELSEWHERE.keys() | PUBLIC
    assert [place for name, place in private_names() if name not in listed] == []
    # `model.__class__ = ...` of objects that other libraries made.
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert not stored or node.attr != "__class__" or path.name == "lazy_imports.py"
