"""Adapters of PEFT: low-rank changes of a base model, from their files."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bilens.errors import BilensError, CheckpointError
from bilens.files import read_json_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PART = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?$"
)
Change = Tensor | tuple[Tensor, Tensor]
"""The tuned weight, or the factors A and B of its change B A."""


def is_adapter(path: Path | str) -> bool:
    """Return whether a folder holds an adapter."""
    return (Path(path) / CONFIG).is_file()


def load_adapter(path: Path | str, base: nn.Module) -> dict[str, Change]:
    """Return the changes that an adapter of LoRA makes, by the name of the parameter.

    LoRA and rsLoRA are low-rank changes, scale included. DoRA, and modules that were saved whole,
    are weights.

    Raises:
        CheckpointError: the files are damaged, or belong to another model.
        BilensError: the adapter is of another kind.
    """
    folder = Path(path)
    config = read_json_object(folder / CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BilensError(
            f"{folder} holds an adapter of kind {kind}, expected LORA (with rsLoRA or DoRA)"
        )
    for option in ("lora_bias", "trainable_token_indices", "use_qalora", "alora_invocation_tokens"):
        if config.get(option):
            raise BilensError(f"{folder} is an adapter with {option}, which bilens does not read")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from None
    parameters = dict(base.named_parameters(remove_duplicate=False))
    parts: dict[str, dict[str, Tensor]] = {}
    changes: dict[str, Change] = {}
    for key, tensor in tensors.items():
        if match := PART.match(key):
            parts.setdefault(match["module"], {})[match["part"]] = tensor
            continue
        name = re.sub(r"^(?:base_model\.model\.)?|\.modules_to_save(?:\.default)?", "", key)
        is_own, name = ".base_layer." in name, name.replace(".base_layer.", ".")
        weight = _parameter(name, parameters, folder)
        if is_own and weight.shape == tensor.shape and torch.equal(weight, tensor.to(weight)):
            continue  # the base model's own, saved beside its change
        if is_own or weight.shape != tensor.shape:
            raise CheckpointError(
                f"{folder} has {name} of shape {tuple(tensor.shape)} or of other numbers, expected "
                f"{tuple(weight.shape)} as in the base model"
            )
        changes[name] = tensor.to(weight)
    for module, pieces in parts.items():
        name = f"{module}.weight"
        weight = _parameter(name, parameters, folder)
        changes[name] = _change(module, pieces, weight, config, folder)
    if not changes:
        raise CheckpointError(f"{folder / WEIGHTS} holds no change of a weight")
    _check_untied(changes, base)
    return changes


def _parameter(name: str, parameters: Mapping[str, Tensor], folder: Path) -> Tensor:
    if name not in parameters:
        raise CheckpointError(
            f"{folder} changes {name}, which the base model does not have; expected the model that "
            "the adapter was trained on, not processed"
        )
    return parameters[name].detach()


def _check_untied(changes: Mapping[str, Change], base: nn.Module) -> None:
    """Raise if a change is of one use of a parameter that the model uses twice."""
    uses: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    for names in uses.values():
        if len(names) > 1 and (matches := [name for name in names if name in changes]):
            others = ", ".join(name for name in names if name != matches[0])
            raise BilensError(
                f"the adapter changes {matches[0]}, which the base model ties to {others}, and "
                "PEFT changes one of both alone; merge it into a model, and compare the models"
            )


def _change(
    module: str,
    pieces: Mapping[str, Tensor],
    weight: Tensor,
    config: Mapping[str, object],
    folder: Path,
) -> Change:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    names = ("lora_A", "lora_B") if "lora_A" in pieces else ("lora_embedding_A", "lora_embedding_B")
    missing = [name for name in names if name not in pieces]
    if missing:
        raise CheckpointError(f"{folder} has no {missing[0]} of {module}, expected both factors")
    A, B = (pieces[name].to(wide) for name in names)
    rank = len(A)
    alpha = _of_module(module, config.get("alpha_pattern"), config.get("lora_alpha", rank))
    scale = float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
    # Conv1D of GPT-2 stores its weight the other way round, and embeddings have a row a token.
    if tuple(weight.shape) == (A.shape[1], len(B)) and (
        config.get("fan_in_fan_out") or names[0] != "lora_A"
    ):
        A, B = B.T, A.T
    if tuple(weight.shape) != (len(B), A.shape[1]):
        raise CheckpointError(
            f"{folder} changes {module} by a matrix of shape {(len(B), A.shape[1])}, expected "
            f"{tuple(weight.shape)}, that of the base model"
        )
    magnitude = pieces.get("lora_magnitude_vector")
    if magnitude is None:
        if config.get("use_dora"):
            raise CheckpointError(f"{folder} has no magnitude of {module}, expected one of DoRA")
        return A, scale * B
    # DoRA: each row has a length of its own.
    axis = 0 if config.get("fan_in_fan_out") else 1
    weights = weight.to(wide) + scale * B @ A
    length = weights.norm(dim=axis, keepdim=True)
    return magnitude.to(wide).reshape(length.shape) * weights / length


def _of_module(module: str, pattern: object, default: object) -> float:
    """Return the setting of a module: that of the first pattern that ends its name."""
    for key, value in (pattern if isinstance(pattern, Mapping) else {}).items():
        if re.match(rf"(?:.*\.)?{key}$", module):
            return float(value)
    return float(default)  # type: ignore[arg-type]
