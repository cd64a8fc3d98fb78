"""The public names: what is promised, and nothing by accident."""

import subprocess
import sys

import bilens


def test_the_top_level_names():
    assert sorted(bilens.__all__) == [
        "BilensError",
        "BilinearTensor",
        "CheckpointError",
        "DataError",
        "NotBilinearError",
        "QuadraticForm",
        "Spectrum",
        "TensorSVD",
        "load",
    ]
    assert all(hasattr(bilens, name) for name in bilens.__all__)


def test_the_tensor_room_stands_alone():
    """The mathematics needs torch and einops, and no model, plot or data library."""
    code = (
        "import sys, bilens.tensor.bilinear, bilens.tensor.search, bilens.tensor.dictionary\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'plotly', 'datasets', 'sklearn', 'rich', 'tyro', 'transformers'})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
