"""What readings of classifiers and of weights refuse."""

from dataclasses import replace
from functools import partial

import torch

from bilens.errors import NotBilinearError
from bilens.images import (
    TruncationCurve,
    attack,
    box_bounds,
    certify,
    class_mask,
    class_spectra,
    classifier_bonds,
    explain,
    path_accuracies,
    read_bonds,
    read_classifier,
    read_deep,
    shared_by_classes,
    top_inputs,
    truncation_curve,
)
from bilens.images.chain import accuracy
from bilens.language import (
    attention_pairs,
    attention_scores,
    bigrams,
    following,
    head_outputs,
    pair_trigrams,
    read_stream,
    skip_trigrams,
    token_components,
    top_contexts,
)
from bilens.language.heads import output_pairs
from bilens.nn import ClassifierConfig, ImageClassifier
from bilens.tensor import FactoredMatrix, Spectrum, decompile
from tests.models import digit_model, digits, random_text, small_model, view_of
from tests.refusals import refused
from tests.tensor.factors import random_tensor

TENSOR, DATA = random_tensor(64, 6, 10, 0).to(torch.float32), digits()
ONE, BATCH = TENSOR.interaction(output=0).eigh(), TENSOR.interaction(output=range(10)).eigh()
SMALL = small_model()
X, LABELS, ONES = DATA.test_images, DATA.test_labels, torch.ones(64)
LOWERING = Spectrum(torch.tensor([-1.0, 0.0]), torch.eye(2), torch.zeros(2))
THREES = LABELS == 3


def attacked(x=X, labels=LABELS, mask=ONES, label=3, norm=1.0):
    attack(digit_model(), x, labels, mask, label=label, norm=norm)


def accuracies_of_one_direction():
    single = decompile(digit_model(n_layers=2).tensors(), torch.eye(10)[0], 5)
    path_accuracies(single, DATA, [1])


def bonds_on(images):
    few = {"train_images": DATA.train_images[:images], "train_labels": DATA.train_labels[:images]}
    return lambda: of_two(read_bonds, replace(DATA, **few))


def of_two(read, data=DATA, **options):
    return read(digit_model(n_layers=2), data, **options)


CLASSIFIERS = {
    "data has [23] training images, expected at least 4": [bonds_on(2), bonds_on(3)],
    r"mask is .* \(63,\).* beside x \(360, 64\)": lambda: attacked(mask=torch.ones(63)),
    r"mask has shape .* expected \(64,\), not all zero": lambda: attacked(mask=0 * ONES),
    "norm=-1.0, expected a finite number, at least 0": lambda: attacked(norm=-1.0),
    "label=1000000000, expected 0 to 9": lambda: attacked(label=10**9),
    "labels holds the number 10": lambda: attacked(labels=LABELS + 1),
    "no image of another class than label=3": lambda: attacked(X[THREES], LABELS[THREES]),
    "without a positive eigenvalue whose eigenvector": lambda: class_mask(LOWERING),
    "metric='cosine', expected one of images, g": lambda: of_two(classifier_bonds, metric="cosine"),
    "drop=-1, expected a finite number, at least 0 and": lambda: of_two(read_bonds, drop=-1),
    r"batch shape \(\); expected one for each of the 10": accuracies_of_one_direction,
    r"batch shape \(\), expected one axis, the classes": [
        lambda: truncation_curve(ONE, X, LABELS),
        lambda: shared_by_classes(class_spectra(digit_model())[3]),
    ],
    r"labels is .* \(3,\).* beside x \(360, 64\)": lambda: truncation_curve(BATCH, X, LABELS[:3]),
    "labels holds the number -1": lambda: truncation_curve(BATCH, X, LABELS - 1),
    "the model has n_classes=1, expected two classes or more": [
        lambda measure=measure: measure(ImageClassifier(ClassifierConfig(64, 1)), X, 0 * LABELS)
        for measure in (certify, box_bounds, accuracy)
    ],
    "labels is empty": lambda: truncation_curve(BATCH, X[:0], LABELS[:0]),
    r"x is a tensor of shape \(2, 64\)": lambda: explain(BATCH, X[:2]),
    "n_classes=-1, expected a whole number, at least 1": lambda: explain(BATCH, X[0], n_classes=-1),
    "k=0, expected a whole number, at least 1": lambda: explain(BATCH, X[0], k=0),
    "k=10, expected a whole number, 1 to 9": lambda: top_inputs(ONE, X[:9], 10),
    "k=7, expected a whole number, 1 to 6": lambda: TruncationCurve((0.5,) * 6, 0.5).drop(7),
    "x holds NaN": [
        lambda: explain(BATCH, X[0] * torch.nan),
        lambda: top_inputs(BATCH, X * torch.nan),
        lambda: truncation_curve(BATCH, X / 0, LABELS),
    ],
    "basis='PIXELS', expected one of model, pix": lambda: read_classifier(SMALL, DATA, "PIXELS"),
    r"model is .*Linear, expected TensorChain": [
        lambda read=read: read(torch.nn.Linear(64, 10), DATA)
        for read in (read_classifier, read_deep)
    ],
}
test_misuse_of_a_classifier_is_explained = refused(CLASSIFIERS)


def gated(**parts):
    return ImageClassifier(ClassifierConfig(64, 10, gate="relu", **parts))


NO_TENSORS = {
    "gate relu": [
        lambda: read_bonds(gated(n_layers=2), DATA),
        lambda: read_deep(gated(n_layers=2), DATA),
        lambda: read_classifier(gated(), DATA),
    ],
    "`bilens linearise` fits lines, `bilens": lambda llama: skip_trigrams(llama, 3, 0, layer=0),
}
test_what_needs_a_tensor_says_so = refused(NO_TENSORS, NotBilinearError)


def learned(read, *args):
    return lambda: read(view_of(positions="learned"), *args, layer=0)


def contexts(direction, texts, **sizes):
    """Return the contexts of a spectrum along a direction, which a function of the view makes."""

    def read(view):
        spectrum = view.mlp(0).interaction(direction(view)).eigh(2)
        top_contexts(view, spectrum, texts, layer=0, **sizes)

    return read


LANGUAGE = {
    "part='ov', expected one of direct, mlp": lambda view: bigrams(view, layer=0, part="ov"),
    "layer=2, expected 0 to 1": lambda view: bigrams(view, layer=2),
    "head=4, expected 0 to 3": lambda view: skip_trigrams(view, 3, 4, layer=0),
    "k=0, expected a whole number, at least 1": lambda view: pair_trigrams(view, k=0),
    "among: expected numbers of tokens": lambda view: bigrams(view, layer=0, among=[]),
    "tokens from 0 to 29, at least one": lambda view: bigrams(view, layer=0, among=[30]),
    "texts is empty": contexts(lambda view: view.direction(3), []),
    "batch_size=0, expected": contexts(lambda view: view.direction(3), ["t3"], batch_size=0),
    "batch_size=-1, expected": contexts(lambda view: view.direction(3), ["t3"], batch_size=-1),
    "spectrum is a batch of shape": contexts(lambda view: view.W_U.T[:2], [random_text()]),
    "position=9, expected 0 to 8": lambda view: read_stream(view, random_text(), 9, layer=0),
    "position=None, and the model has learned positions": [
        learned(following, 3),
        learned(skip_trigrams, 3, 0),
    ],
}
test_bad_input_is_named = refused(LANGUAGE)


def scores(layer=0, positions="rotary", **options):
    return attention_scores(view_of(positions=positions), layer=layer, **options)[0]


def components(matrix=None, **options):
    matrix = scores()[0] if matrix is None else matrix
    return token_components(view_of(), matrix, sides=("a", "b"), **options)


shortformer = partial(scores, positions="shortformer")
NARROW = FactoredMatrix(torch.ones(3, 1), torch.ones(1, 2))
HEADS = {
    "layer=1, expected 0 to 0": lambda: scores(layer=1),
    "distance=-1, expected a whole number, at least 0": lambda: scores(distance=-1),
    "position=None, but the model has learned positions": lambda: scores(positions="learned"),
    "position=12, expected 1 to 11": lambda: shortformer(position=12),
    "position=2, expected 3 or more": lambda: scores(distance=3, position=2),
    "position=None": learned(head_outputs),
    "attention='differential' has a pattern that is not ordered by one number": lambda: (
        attention_pairs(view_of(attention="differential"), [0], layer=0)
    ),
    "head=4, expected 0 to 3": lambda view: attention_pairs(view, [4], layer=0),
    "k=0, expected a whole number": lambda view: attention_pairs(view, [0], layer=0, k=0),
    "head=-1, expected 0 to 3": lambda view: output_pairs(view, [-1], layer=0),
    r"matrix is of shape \(4, 30, 30\), expected one table": lambda: components(scores()),
    r"matrix is of shape \(3, 2\), expected one table": lambda: components(NARROW),
    "expected one table of 2 tokens against 2": lambda: components(among=[1, 2]),
    "k=31, expected a whole number, 1 to 30": lambda: components(k=31),
    "components=5, expected a whole number, 1 to 4": lambda: components(components=5),
}
test_what_cannot_be_read_of_heads_is_refused_by_name = refused(HEADS)
