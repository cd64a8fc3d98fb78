"""The layouts of other people's checkpoints that bilens reads, known by their config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from bilens.convert.paper import paper_classifier, paper_model
from bilens.convert.tensor_transformers import tensor_transformer
from bilens.convert.weights import Row, fill, read_weights
from bilens.errors import BilensError, CheckpointError

__all__ = ["LAYOUTS", "Layout", "find_layout"]

Build = Callable[[Mapping[str, Any], dict[str, Tensor]], tuple[nn.Module, list[Row]]]
"""An empty model by settings and weights, and the key table of its weights."""
GENERAL = frozenset(PreTrainedConfig().to_dict()) | {"torch_dtype", "auto_map"}
"""Settings that transformers adds to any configuration, and that no layout reads."""


@dataclass(frozen=True)
class Layout:
    """How somebody saves models.

    Attributes:
        name: what errors call it.
        marks: settings that it alone has.
        settings: all that have to be there; `others` may be there too.
        build: an empty model and its key table.
        tokenizers: the repositories of tokenizers by the names that config.json gives them; under
            None the one where it gives no name.
    """

    name: str
    marks: frozenset[str]
    settings: frozenset[str]
    others: frozenset[str]
    build: Build
    tokenizers: Mapping[str | None, str]

    def open(self, source: str | Path, settings: dict[str, Any], **place: Any) -> nn.Module:
        """The model with its weights, by its config.json, in evaluation mode.

        Raises:
            CheckpointError: a setting or a weight is missing, unknown or out of range, or a file
                missing or damaged.
        """
        for complaint, names in (
            ("missing", self.settings - settings.keys()),
            ("unknown", settings.keys() - self.settings - self.others - GENERAL),
        ):
            if names:
                raise CheckpointError(
                    f"{source}: {complaint} settings for {self.name}: {', '.join(sorted(names))}"
                )
        weights = read_weights(source, **place)
        try:
            model, rows = self.build(settings, weights)
        except (BilensError, TypeError) as error:
            raise CheckpointError(f"{source}: config.json cannot be used: {error}") from error
        fill(model, weights, rows, source)
        return model.eval()


LAYOUTS = (
    Layout(
        name="a model of the post on tensor-transformer variants",
        marks=frozenset({"n_embd", "squared_mlp"}),
        settings=frozenset(
            {"n_layer", "n_head", "n_embd", "vocab_size", "bilinear", "gated", "expansion_factor"}
            | {"squared_mlp", "squared_attn", "bilinear_attn"}
        ),
        others=frozenset({"step"}),
        build=tensor_transformer,
        tokenizers={None: "openai-community/gpt2"},
    ),
    Layout(
        name="a language model of the paper's repository",
        marks=frozenset({"d_hidden", "normalization"}),
        settings=frozenset(
            {"n_layer", "n_head", "d_model", "d_hidden", "bilinear", "gate", "normalization"}
        ),
        others=frozenset({"n_ctx", "bias", "tokenizer", "repo"}),
        build=paper_model,
        tokenizers={
            "ts-4096": "tdooms/ts-tokenizer-4096",
            "mistral": "mistral-community/Mixtral-8x22B-v0.1",
            "gpt2": "openai-community/gpt2",
        },
    ),
    Layout(
        name="an image classifier of the paper's repository",
        marks=frozenset({"d_input", "d_output"}),
        settings=frozenset({"n_layer", "d_input", "d_hidden", "d_output", "bias", "residual"}),
        others=frozenset({"lr", "wd", "epochs", "batch_size", "seed", "device"}),
        build=paper_classifier,
        tokenizers={},
    ),
)
"""All that are known."""


def find_layout(settings: Mapping[str, Any]) -> Layout | None:
    """The layout that a config.json is of; None for models of transformers and of bilens."""
    if settings.get("model_type"):
        return None
    return next((layout for layout in LAYOUTS if layout.marks <= settings.keys()), None)
