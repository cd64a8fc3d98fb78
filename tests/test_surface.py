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
        "MlpBias",
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
        "BranchExplanation",
        "ClassPaths",
        "ClassifierReading",
        "DeepExplanation",
        "DeepLogitExplanation",
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
        "class_paths",
        "class_spectra",
        "explain",
        "explain_deep",
        "load_paths",
        "logit_spectra",
        "loss_recovered",
        "path_accuracies",
        "read_classifier",
        "read_deep",
        "save_paths",
        "shared_by_classes",
        "shared_by_paths",
        "sparsity",
        "top_inputs",
        "truncation_curve",
    ],
    "read.language": [
        "AttentionReading",
        "BigramPart",
        "Composition",
        "Context",
        "ContextIndex",
        "Contribution",
        "DirectionReading",
        "FoundContext",
        "HeadPairs",
        "HeadReading",
        "LogitParts",
        "LogitTerms",
        "NGramReading",
        "Output",
        "Stream",
        "TrigramPart",
        "bigrams",
        "block_inputs",
        "composition_scores",
        "contribution",
        "example_outputs",
        "exciting_tokens",
        "following",
        "head_map",
        "interaction",
        "look_pairs",
        "output_direction",
        "output_pairs",
        "ov_maps",
        "pair_trigrams",
        "preceding",
        "qk_maps",
        "read_attention",
        "read_direction",
        "read_ngrams",
        "read_stream",
        "salient_bigrams",
        "skip_trigrams",
        "split_by_eigenvectors",
        "split_logits",
        "token_components",
        "token_names",
        "token_outputs",
        "token_scores",
        "top_contexts",
        "write_on",
    ],
    "report": [
        "Axis",
        "Branch",
        "ContextLine",
        "ContextList",
        "Order",
        "Section",
        "Table",
        "branches_html",
        "classifier_figures",
        "comparison_table",
        "contexts_html",
        "deep_explanation_figure",
        "deep_figures",
        "direction_figure",
        "eigenvector_figure",
        "explanation_figure",
        "heat_figure",
        "kept_figure",
        "logits_figure",
        "loss_figure",
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
        "write_comparison_report",
        "write_deep_report",
        "write_page",
    ],
    "tensor": [
        "BilinearTensor",
        "Dictionary",
        "Extrema",
        "FactoredMatrix",
        "FactoredSVD",
        "Features",
        "LazyTree",
        "Paths",
        "QuadraticForm",
        "Reexpression",
        "Spectrum",
        "Steering",
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
        "steer",
        "steering_map",
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
    "train.compare": [
        "Architecture",
        "Comparison",
        "Cost",
        "LossCurve",
        "Point",
        "Summary",
        "compare_architectures",
        "count_parameters",
        "of_equal_size",
        "variants",
    ],
    "train.language": [
        "LanguageTraining",
        "finished_history",
        "last_checkpoint",
        "train_language",
    ],
}


SLOW = ["torch", "huggingface_hub", "plotly", "datasets", "sklearn", "pyarrow", "tokenizers"]
SLOW += ["transformers"]


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


def test_an_unknown_name_is_said():
    with pytest.raises(AttributeError, match="module 'bilens' has no attribute 'lode'"):
        bilens.lode  # noqa: B018


def test_the_names_come_from_their_rooms():
    assert bilens.BilinearTensor is importlib.import_module("bilens.tensor").BilinearTensor
    assert bilens.load is importlib.import_module("bilens.models").load
    assert bilens.read is importlib.import_module("bilens.read")


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_of_a_room(room):
    module = importlib.import_module(f"bilens.{room}")
    assert sorted(module.__all__) == ROOMS[room]
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    ("code", "without"),
    [
        ("import bilens", SLOW),
        ("from bilens.cli import main; main(['--help'])", SLOW),
        ("from bilens import BilinearTensor; import bilens.tensor.search", SLOW[1:]),
        ("import bilens.data", SLOW[3:]),
    ],
)
def test_importing_is_lazy(code, without):
    """Each of these takes a second or more; the mathematics needs torch and einops alone."""
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = shown.stdout.split()
    assert "bilens" in loaded
    assert not set(without) & set(loaded)
