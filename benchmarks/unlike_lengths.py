"""Flows between texts of unlike length, in six families.

`python -m benchmarks.unlike_lengths --write` takes half a minute and writes
`results/unlike_lengths.json`. Models are small and have random weights. A row is the largest error
of the sum of a flow's tokens and choices, against the change between the model's own runs on each
text alone, as a share of the absolute flow, over pairs of texts of 2 to 12 tokens.
"""

import argparse
from itertools import permutations

import torch
from experiments.results import Recording, Row
from tests.families import exact_norms, family_view, some_text

from bilens.flows import flow

FAMILIES = ("gpt2", "llama", "cohere2", "gemma3", "mixtral", "own-layer")
LENGTHS = (2, 5, 8, 12)
EXACT = 1e-6
"""Relative errors of exact sums are smaller."""
TOKEN, MINUS = 3, 7


def error(family: str) -> float:
    """Return the largest error of a family."""
    view, (first, second, _) = family_view(family), some_text()
    cap, found = view.modules.softcap, list[float]()
    for lengths in permutations(LENGTHS, 2):
        texts = [row[-n:] for row, n in zip((first, second), lengths, strict=True)]
        through = flow(view, texts[0], TOKEN, minus=MINUS, against=texts[1], labels=0)
        total = float(through.embeddings.sum() + through.choices.sum())
        logits = [view.logits(text[None])[0, -1].double() for text in texts]
        logits = [z if cap is None else cap * torch.atanh(z / cap) for z in logits]
        first_own, second_own = (float(z[TOKEN] - z[MINUS]) for z in logits)
        found.append(abs(total - (first_own - second_own)) / through.absolute)
    return max(found)


def main() -> None:
    """Measure every family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    recording = Recording() if parser.parse_args().write else None
    pairs, rows = len(LENGTHS) * (len(LENGTHS) - 1), list[Row]()
    with exact_norms():
        for family in FAMILIES:
            rows.append(Row(f"{family}: error of the sum", error(family), n=pairs))
            print(rows[-1], flush=True)
    if recording is not None:
        recording.write(
            "unlike_lengths",
            title="Flows between texts of unlike length",
            command="python -m benchmarks.unlike_lengths --write",
            rows=rows,
            settings={"exact below": EXACT, "families": list(FAMILIES), "tokens": list(LENGTHS)},
        )


if __name__ == "__main__":
    main()
