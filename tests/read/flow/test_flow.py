"""A flow adds up to the logit of every family, and conserves at every node."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bilens.read.flow import flow
from tests.families import EACH_READ, exact_norms, family_view, some_text
from tests.models import parts, random_text, view_of
from tests.read.flow.flows import DIRECTION, check, logit


@pytest.mark.parametrize("name", EACH_READ)
def test_a_flow_adds_up_and_conserves(name):
    view, ids = family_view(name), some_text()[0]
    second = torch.cat([ids[:2], ids[4:5], ids[3:5], ids[2:3], ids[6:8]])
    with exact_norms():
        one = flow(view, ids, DIRECTION, position=7, ablate=0)
        two = flow(view, ids[:8], DIRECTION, against=second, ablate=0)
        values = [logit(view, text) for text in (ids[:8], second)]
        # Eager softmax and rotary positions round to float32 in some families.
        tolerance = 1e-6
        check(one, values[0], tolerance)
        check(two, values[0] - values[1], tolerance)
    assert {"token", "head", "mlp"} <= {node.kind for node in two.nodes}


@given(
    st.fixed_dictionaries(parts),
    st.sampled_from(["bilinear", "swiglu", "relu2"]),
    st.integers(0, 8),
    st.booleans(),
)
def test_own_models_of_all_parts_flow(settings, mlp, position, two_texts):
    view = view_of(n_layers=2, mlp=mlp, **settings)
    ids, second = random_text(seed=1), random_text(seed=2)
    against = second if two_texts else None
    result = flow(view, ids, DIRECTION, position=position, against=against, ablate=0)
    value = logit(view, ids[: position + 1])
    if two_texts:
        value -= logit(view, second[: position + 1])
    check(result, value)
