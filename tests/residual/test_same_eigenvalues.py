"""Whatever shows the eigenvalues of a model, layer and direction shows the same ones."""

import pytest
import torch

from bilens.convert import process, read_spectra, write_spectra
from bilens.nn.language import LanguageModel
from bilens.read.language import TokenDirection, read_direction
from bilens.residual import ResidualModel
from tests.models import random_model, small_corpus

DIRECTION = TokenDirection("lily", ("tom", "ben"))
LAYER = 1


@pytest.mark.parametrize("norm", ["none", "scalar", "rms", "layer"])
def test_all_readings_show_the_same_eigenvalues(norm, tmp_path):
    corpus = small_corpus()
    plain = random_model(vocab_size=len(corpus.tokenizer), norm=norm, n_layers=2)
    model = ResidualModel(plain, corpus.tokenizer)
    u = DIRECTION.vector(model)
    expected = torch.linalg.eigvalsh(model.mlp(LAYER).interaction(u).dense())

    write_spectra(model.mlp(LAYER), u[None], tmp_path / "spectra", k=len(expected))
    changed = LanguageModel(plain.config)
    changed.load_state_dict(plain.state_dict())
    process(changed.double().eval())
    after = ResidualModel(changed, corpus.tokenizer)
    shown = {
        "report, contexts": read_direction(
            model, corpus, DIRECTION.token, minus=DIRECTION.minus, layer=LAYER, k=1
        ).all_eigenvectors.values,
        "spectra": read_spectra(tmp_path / "spectra")[1].values[0],
        "the model behind process": after.mlp(LAYER)
        .interaction(DIRECTION.vector(after))
        .eigh()
        .values,
    }
    for name, values in shown.items():
        result = values.double().sort().values
        assert torch.allclose(result, expected, rtol=1e-6, atol=1e-6 * expected.abs().max()), name
