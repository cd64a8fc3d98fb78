"""What each process of the two runs; see test_two_processes.py."""

import json
import sys
from pathlib import Path

from accelerate import PartialState

from bilens.read.language import interaction, output_direction, top_contexts
from bilens.train.language import LanguageTraining, train_language
from tests.language import random_model, random_text, small_config, small_corpus

TRAINING = LanguageTraining(epochs=2, batch_size=8, learning_rate=1e-2)


def contexts() -> list[list[list[float]]]:
    model = random_model()
    spectrum = interaction(model, output_direction(model, 3)).eig(2)
    texts = [random_text(seed=seed) for seed in range(9)]
    found = top_contexts(model, spectrum, texts, k=4, batch_size=2)
    return [[[c.position, c.activation, *c.ids.tolist()] for c in some] for some in found]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train_language(small_config(), small_corpus(), TRAINING, folder, use_cpu=True)
    text = json.dumps(contexts())
    (folder / f"contexts-{PartialState().process_index}.json").write_text(text)
