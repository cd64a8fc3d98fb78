"""What each process of the two runs; see test_language.py."""

import sys
from pathlib import Path

from bilens.train.language import LanguageTraining, train_language
from tests.language import small_config, small_corpus

training = LanguageTraining(epochs=2, batch_size=8, learning_rate=1e-2)
train_language(small_config(), small_corpus(), training, Path(sys.argv[1]), use_cpu=True)
