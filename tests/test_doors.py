"""Private names of other libraries that bilens uses: each is here, with its version.

A new version of the library may take it away.
"""

import ast
from collections.abc import Iterator

from tests.source import SOURCE, nodes_of_files

NAMES = {
    "_C": "torch 2.13",
    "_set_grad_enabled": "torch 2.13: what no_grad calls in a TorchFunctionMode",
    "_forward_cls": "nodes of graphs of torch 2.13: the torch.autograd.Function of each",
    "_tr_loss": "the Trainer of transformers 5.23: the sum since the last record",
    "_attn_implementation": "configurations of transformers 5.23",
    "_raise_exceptions_for_missing_entries": "an option of cached_file of transformers 5.23",
    "_forward_hooks": "modules of torch 2.13",
    "_forward_pre_hooks": "modules of torch 2.13",
    "_compiled_call_impl": "modules of torch 2.13",
    "_global_forward_hooks": "torch 2.13",
    "_global_forward_pre_hooks": "torch 2.13",
    "_hub_mixin_config": "huggingface_hub 1.0",
    "_replace": "named tuples, in the documentation of Python",
}


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
    used = {*private_names()}
    assert [place for name, place in used if name not in NAMES] == []
    assert NAMES.keys() <= {name for name, _ in used}
    # `model.__class__ = ...` of objects that other libraries made.
    for path, nodes in nodes_of_files().items():
        for node in nodes:
            stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            assert not stored or node.attr != "__class__" or path.name == "lazy_imports.py"
