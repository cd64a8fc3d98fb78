"""The public names: what is promised, and nothing by accident."""

import importlib
import subprocess
import sys

import pytest

import bilens

ROOMS = {
    "convert": [
        "Processing",
        "Share",
        "Swish",
        "center_unembed",
        "center_writing_weights",
        "check_finite",
        "find_swish",
        "fold_norms",
        "fold_value_biases",
        "give_swish",
        "make_bilinear",
        "mlp_tensor",
        "open_model",
        "open_tokenizer",
        "process",
        "read_spectra",
        "reading_directions",
        "save_model",
        "unembedding_directions",
        "write_spectra",
    ],
    "data": [
        "Corpus",
        "Grammar",
        "ImageData",
        "clean",
        "fit_drawing",
        "ink_of",
        "load_corpus",
        "load_documents",
        "load_images",
        "read_texts",
        "token_id",
        "train_tokenizer",
    ],
    "explore": [
        "Explorer",
        "explorer",
    ],
    "kernels": [
        "KERNELS",
        "KernelName",
        "bilinear_attention",
        "resume_attention",
    ],
    "nn": [
        "ATTENTIONS",
        "AttentionName",
        "AttentionNorm",
        "AutoencoderConfig",
        "Bilinear",
        "ClassifierConfig",
        "GATES",
        "Gate",
        "GateName",
        "GatedLayer",
        "ImageClassifier",
        "MLPS",
        "MlpName",
        "NormName",
        "PlainMLP",
        "PositionName",
        "SparseAutoencoder",
        "make_mlp",
        "read_config",
    ],
    "nn.language": [
        "Attention",
        "Block",
        "LanguageConfig",
        "LanguageModel",
    ],
    "read": [
        "Attack",
        "Basis",
        "ClassifierReading",
        "DeepReading",
        "Explanation",
        "LogitExplanation",
        "SharedFeature",
        "SharedFeatures",
        "SparsityReport",
        "TruncationCurve",
        "Use",
        "attack",
        "bottleneck_curve",
        "class_mask",
        "class_spectra",
        "explain",
        "logit_spectra",
        "loss_recovered",
        "path_accuracies",
        "read_classifier",
        "read_deep",
        "shared_by_classes",
        "shared_by_paths",
        "sparsity",
        "top_inputs",
        "truncation_curve",
    ],
    "read.language": [
        "BigramPart",
        "Context",
        "ContextIndex",
        "Contribution",
        "DirectionReading",
        "FoundContext",
        "LogitParts",
        "LogitTerms",
        "NGramReading",
        "Output",
        "Stream",
        "TrigramPart",
        "bigrams",
        "block_inputs",
        "contribution",
        "example_outputs",
        "exciting_tokens",
        "following",
        "head_map",
        "interaction",
        "output_direction",
        "pair_trigrams",
        "preceding",
        "read_direction",
        "read_ngrams",
        "read_stream",
        "salient_bigrams",
        "skip_trigrams",
        "split_by_eigenvectors",
        "split_logits",
        "token_names",
        "top_contexts",
        "write_on",
    ],
    "report": [
        "Branch",
        "ContextLine",
        "ContextList",
        "Order",
        "Section",
        "Table",
        "branches_html",
        "classifier_figures",
        "contexts_html",
        "deep_figures",
        "direction_figure",
        "eigenvector_figure",
        "explanation_figure",
        "kept_figure",
        "logits_figure",
        "path_figure",
        "render_page",
        "save_figure",
        "save_figures",
        "shared_figure",
        "spectrum_figure",
        "summands_figure",
        "table_html",
        "tree_figure",
        "truncation_figure",
        "truncation_table",
        "write_classifier_report",
        "write_deep_report",
        "write_page",
    ],
    "tensor": [
        "BilinearTensor",
        "Dictionary",
        "Extrema",
        "Features",
        "OpenedTree",
        "Paths",
        "QuadraticForm",
        "Reexpression",
        "Spectrum",
        "TensorSVD",
        "TopPaths",
        "affine",
        "best_match",
        "cluster",
        "decompile",
        "expected_cosine",
        "expected_inner",
        "form_cosines",
        "local_extrema",
        "reexpress",
        "top_paths",
        "tree_to_networkx",
        "with_constant",
    ],
    "train": [
        "AutoencoderTraining",
        "ClassifierTraining",
        "METRICS_NAME",
        "STATE_NAME",
        "Sampler",
        "TRAINING_NAME",
        "pair_sampler",
        "read_training",
        "row_sampler",
        "similarity_penalty",
        "train_autoencoder",
        "train_classifier",
    ],
    "train.language": [
        "LanguageTraining",
        "last_checkpoint",
        "train_language",
    ],
}


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


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_of_a_room(room):
    module = importlib.import_module(f"bilens.{room}")
    assert sorted(module.__all__) == ROOMS[room]
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_data_room_is_quick_to_import():
    """Each of these takes seconds, and no command needs all of them."""
    code = (
        "import sys, bilens.data\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'datasets', 'pyarrow', 'sklearn', 'tokenizers', 'transformers'})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
