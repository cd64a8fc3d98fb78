"""A larger story model than the one that comes with bilens: what more weights and passes bring.

No figure of the papers. The preset `story` with twice its tokens and MLPs one and a half times as
wide, 5.5 million weights, trained by Muon in bfloat16. It is measured by the program of `story`,
beside the model that ships and stories260K, on the same validation stories. More passes bring
nothing: after the fifth it knows the stories of its training better, and others less well.

Small: a twentieth of a pass. Paper: five passes, an hour or two on one core.
"""

from dataclasses import replace
from typing import Any

from bilens import load
from bilens.train import PRESETS
from experiments.context import Outcome, RecipeContext, validation_loss
from experiments.results import Row
from experiments.story import bits_row, fitting_row


def run(context: RecipeContext) -> Outcome:
    """Train the larger model, and measure it beside the one that ships."""
    preset = PRESETS["story"]
    sizes = replace(preset.model, vocab_size=4096, d_hidden=768)
    training = replace(
        preset.training, epochs=context.choose(0.05, 5), optimizer="muon", precision="bf16"
    )
    larger: Any = context.language("tinystories", training, sizes)
    shipped: Any = load("story")
    corpus = context.corpus("tinystories", sizes.n_ctx, sizes.vocab_size)
    rows = [
        bits_row(context, larger, {"the model that ships": shipped}),
        Row(
            "loss a token of the validation texts",
            validation_loss(larger.model, corpus),
            unit="nats",
        ),
        Row("weights", sum(x.numel() for x in larger.model.parameters())),
        fitting_row(context, larger),
    ]
    settings = {"passes": training.epochs, "optimizer": training.optimizer}
    return Outcome({row.claim: row.value for row in rows}, rows=rows, settings=settings)
