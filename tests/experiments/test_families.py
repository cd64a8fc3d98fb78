"""A type of each kind by day, all types every night."""

import pytest
from experiments.families import NEEDS, SUMS, counts, is_exact, measure
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.nightly import nightly

pytestmark = pytest.mark.long

KINDS = (
    *("llama", "opt", "mixtral", "mamba", "rwkv", "qwen3_next", "deepseek_v32", "zamba", "bart"),
    *("nanochat", "inkling2_text", "longcat_flash", "zaya", "gemma3", "apertus"),
)
"""Dense, with relu, a mixture, Mamba, RWKV, the delta rule, chosen keys, heads after the MLP, a
decoder; a last norm that runs before the layers too, streams that are joined after them, experts
that do nothing, routers that read earlier ones, a model of texts and images, and activations with
weights."""


@pytest.mark.parametrize("kind", nightly(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), KINDS))
def test_a_sum_is_exact_or_refused_by_name(kind):
    row = measure(kind)
    if row["not made"]:
        assert kind in NEEDS
        return
    for way in SUMS:
        assert is_exact(row[way]) or (kind not in KINDS and row[f"{way}: refused by"]), row


def test_nan_is_not_exact_and_is_counted_as_off():
    row = {"type": "a", "class": "A", "not made": ""}
    for way in SUMS:
        error = None if way == "sdpa attention" else float("nan")
        row |= {way: error, f"{way}: refused by": "softmax" if error is None else ""}
    counted = counts([row])
    assert (counted["eager attention: exact"], counted["eager attention: off"]) == (0, 1)
    assert (counted["sdpa attention: exact"], counted["sdpa attention: refused"]) == (0, 1)
