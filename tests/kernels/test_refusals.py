"""What the kernels refuse."""

import torch

from bilens.kernels import bilinear_attention, resume_attention
from bilens.nn.language import LanguageModel
from tests.kernels.inputs import random_inputs
from tests.models import small_config
from tests.refusals import refused


def attend(inputs=None, **options):
    return lambda: bilinear_attention(*(inputs or random_inputs()), **options)


def attend_to(place, change):
    inputs = random_inputs(sharing=2)
    inputs[place] = change(inputs[place])
    return attend(inputs)


def resume(change, **shape):
    state = change(resume_attention(*random_inputs(width=16, **shape))[1])
    return lambda: resume_attention(*random_inputs(width=16), state=state)


def multiply_scores_in_float16():
    model = LanguageModel(small_config(norm="rms", attention="bilinear", n_layers=2))
    with torch.autocast("cpu", dtype=torch.float16):
        model(torch.arange(8)[None])


QUERIES_OF_4_AND_KEYS_OF_3 = [
    x[:, :4] if place in (0, 3) else x
    for place, x in enumerate(random_inputs(kv_heads=3, sharing=2))
]
test_bad_input_is_named = refused(
    {
        "constant and normalised are for squared attention": attend(normalised=True),
        "q2 and k2 come together: both for bilinear": attend_to(4, lambda x: None),
        r"q1 is .*\(4, 9, 8\).*batch, heads, time, d_head": attend_to(0, lambda x: x[0]),
        r"v is .*kv_heads, time, d_value.*beside q1": attend_to(2, lambda x: x[:, :, :0]),
        "k1 is torch.float32 and v is torch.float64": attend_to(1, lambda x: x.float()),
        "q1 is torch.float16 .* The range of float16": attend([x.half() for x in random_inputs()]),
        "q2 is on meta and v on cpu; move": attend_to(3, lambda x: x.to("meta")),
        "q1 has shape .* expected no size to be zero": attend(random_inputs(width=0)),
        "q1 has 4 heads, not a multiple of the 3": attend(QUERIES_OF_4_AND_KEYS_OF_3),
        r"k2 is .*\(1, 2, 9, 7\).*beside q1 \(1, 4": attend_to(4, lambda x: x[..., :7]),
        "kernel='flash', expected one of auto, reference": attend(kernel="flash"),
        r"constant is .*, expected \(2,\), one for each head": [
            attend(random_inputs(squared=True), constant=constant)
            for constant in (torch.ones(3), 0.5, torch.ones(2, 1))
        ],
        r"seen is .*, expected \(1, 9\) of torch.bool": [
            attend(seen=seen)
            for seen in (torch.ones(1, 9), torch.ones(1, 8, dtype=torch.bool), True)
        ],
        "The range of float16 is too small": multiply_scores_in_float16,
        r"state has shape .* start with state=None": resume(lambda x: x, squared=True),
        "state has dtype torch.float32, expected torch.float64": resume(lambda x: x.float()),
        "state has device meta, expected cpu": resume(lambda x: x.to("meta")),
    }
)
