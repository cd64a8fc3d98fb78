"""What each process of the two runs; see test_anneal.py."""

import sys
from pathlib import Path

from bilens.train.anneal import anneal
from tests.train.test_anneal import TRAINING, corpus, fresh

anneal(fresh(), corpus(), TRAINING, Path(sys.argv[1]), use_cpu=True)
