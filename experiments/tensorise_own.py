"""A model of two blocks with wide heads, made a tensor and read.

It is trained here on TinyStories (0.7 million parameters, heads of 64 coordinates, 1,024 tokens,
softmax and SwiGLU). Each variant learns from a million tokens, nine tenths of them from TinyStories
and one tenth drawn from the model. The tables are those of `tensorise` and `tensor_readings`.

Both scales are the same: 18 minutes of processor time on one core, in float32.
"""

from experiments import tensor_readings, tensorise
from experiments.context import Outcome, RecipeContext

OWN = "two blocks"
ROWS: tuple[tensorise.Row, ...] = (
    *((OWN, variant, {}) for variant in ("gates", "attention", "both")),
    *((OWN, v, {"tokens": 250_000}) for v in ("both", "both, without local stages")),
)


def run(context: RecipeContext) -> Outcome:
    """Train the model and its variants, compare them, and read the tensor."""
    losses = tensorise.compare(context, ROWS)
    readings = tensor_readings.read(context, ((OWN, "both", {}),))
    return Outcome(
        losses.numbers | readings.numbers,
        parts=[*losses.parts, *readings.parts],
        rows=[*losses.rows, *readings.rows],
        settings=losses.settings | readings.settings,
    )
