"""The public names: what is promised, and nothing by accident."""

import subprocess
import sys

import bilens
import bilens.data


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


def test_the_names_of_the_data_room():
    assert sorted(bilens.data.__all__) == [
        "Corpus",
        "Grammar",
        "ImageData",
        "clean",
        "load_corpus",
        "load_documents",
        "load_images",
        "read_texts",
        "token_id",
        "train_tokenizer",
    ]
    assert all(hasattr(bilens.data, name) for name in bilens.data.__all__)


def test_the_data_room_is_quick_to_import():
    """Each of these takes seconds, and no command needs all of them."""
    code = (
        "import sys, bilens.data\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'datasets', 'pyarrow', 'sklearn', 'tokenizers', 'transformers'})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
