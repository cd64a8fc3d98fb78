"""Eigenvectors of an MLP as a batch of features, which Neuronpedia's converter reads."""

from typing import Any

import torch

from bilens.checks import checked
from bilens.read.language import DirectionReading, token_names
from bilens.residual import ResidualModel

__all__ = ["feature_batch"]

HISTOGRAM = 50
UNUSED = ("neuron_alignment", "correlated_neurons", "correlated_features")
"""Neighbours of a feature among neurons and features, which eigenvectors have none of."""


@torch.no_grad()
@checked
def feature_batch(
    model: ResidualModel, reading: DirectionReading, *, name: str, data: str, k: int = 10
) -> dict[str, Any]:
    """The eigenvectors of a reading as features: the content of a file batch-0.json.

        activation (v . z)^2,   logits W_U B(v, v)

    so that activation times logits is what the layer adds to the logits along v, exactly but for
    the last norm. Eigenvectors are active everywhere: `frac_nonzero` is 1, and there is no
    histogram of frequencies. The converter asks for the names of the source set and of its author.

    Args:
        model: that the reading is of.
        reading: see `bilens.read.language.read_direction`.
        name: of the model.
        data: name of the texts.
        k: tokens that a feature raises and lowers most.

    Source:
        decoderesearch/SAEDashboard, `sae_dashboard/neuronpedia/neuronpedia_dashboard.py`;
        hijohnnylin/neuronpedia, `convert-saedashboard-to-neuronpedia-export.py`.
    """
    tensor, W_U = model.mlp(reading.layer), model.W_U
    features = []
    for number, (v, found) in enumerate(
        zip(reading.spectrum.vectors, reading.contexts, strict=True)
    ):
        written = tensor.out @ ((tensor.left @ v) * (tensor.right @ v))
        logits = written @ W_U
        most = min(k, model.vocab_size)
        high, low = logits.topk(most), logits.topk(most, largest=False)
        counts, edges = torch.histogram(logits.float().cpu(), HISTOGRAM)
        texts = torch.stack([some.context.ids for some in found])
        read = model.mlp_inputs(texts, reading.layer)
        width = read.shape[-1]
        active = (read @ v[:width] + v[width:].sum()).square()
        features.append(
            {
                "feature_index": number,
                **{f"{what}_indices": [] for what in UNUSED},
                **{f"{what}_l1": [] for what in UNUSED},
                "neuron_alignment_values": [],
                "correlated_neurons_pearson": [],
                "correlated_features_pearson": [],
                "neg_str": _words(model, low.indices),
                "neg_values": low.values.tolist(),
                "pos_str": _words(model, high.indices),
                "pos_values": high.values.tolist(),
                "frac_nonzero": 1.0,
                "freq_hist_data_bar_values": [],
                "freq_hist_data_bar_heights": [],
                "logits_hist_data_bar_heights": counts.tolist(),
                "logits_hist_data_bar_values": ((edges[1:] + edges[:-1]) / 2).tolist(),
                "n_prompts_total": len(texts),
                "n_tokens_in_prompt": texts.shape[1],
                "dataset": data,
                "decoder_weights_dist": [],
                "vector": written.tolist(),
                "activations": [
                    {
                        "tokens": _words(model, some.context.ids),
                        "values": values.tolist(),
                        "qualifying_token_index": some.context.position,
                        "bin_min": -1.0,
                        "bin_max": float(active.max()),
                        "bin_contains": -1.0,
                    }
                    for some, values in zip(found, active, strict=True)
                ],
            }
        )
    return {
        "model_id": name,
        "layer": reading.layer,
        "sae_set": "bilens",
        "sae_id_suffix": None,
        "features": features,
    }


def _words(model: ResidualModel, ids: torch.Tensor) -> list[str]:
    """Tokens as they are written, with spaces for the marks of tokenizers."""
    return [name.replace("Ġ", " ").replace("▁", " ") for name in token_names(model, ids)]
