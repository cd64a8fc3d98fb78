"""Draw those pictures of the ideas that need no run: `python -m docs.draw_ideas`.

A language model is trained on the grammar for them, which takes a minute.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from experiments.curves import BLUE, GREY, RED
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bilens.data import Grammar, load_corpus, load_images
from bilens.language import TokenDirection, bigram_matrix, contribution, top_contexts
from bilens.nn import ClassifierConfig, Gate
from bilens.nn.language import LanguageConfig
from bilens.pages import Canvas, heat_figure, new_figure, save_figure, styled
from bilens.train import ClassifierTraining, LanguageTraining, train_classifier
from bilens.train.language import train_language
from bilens.transformer import Pass, ResidualModel

FOLDER = Path(__file__).parent / "pictures"
GRAMMAR = Grammar()
RICE = TokenDirection("rice", ("soup", "bread", "corn", "fish", "jam"))


def draw() -> None:
    """Draw them all."""
    save_figure(swish_figure(), FOLDER / "swish.svg")
    save_figure(gate_figure(), FOLDER / "gate-lines.svg")
    save_figure(folding_figure(), FOLDER / "folding.svg")
    save_figure(layer_figure(), FOLDER / "layer.svg")
    model = trained()
    save_figure(bigram_figure(model), FOLDER / "bigrams.svg")
    save_figure(context_figure(model), FOLDER / "contexts.svg")
    save_figure(parts_figure(model), FOLDER / "parts.svg")


def trained() -> ResidualModel:
    """Train the model of the third tutorial, and centre its unembedding."""
    corpus = load_corpus("grammar", n_ctx=16)
    size = len(corpus.tokenizer)
    config = LanguageConfig(vocab_size=size, d_model=64, n_heads=2, d_hidden=128, n_ctx=16)
    training = LanguageTraining(epochs=2, batch_size=64, learning_rate=5e-3)
    with tempfile.TemporaryDirectory() as run:
        model, _ = train_language(config, corpus, training, Path(run), use_cpu=True)
    model.requires_grad_(False)
    model.unembed.weight -= model.unembed.weight.mean(0)
    return ResidualModel(model, corpus.tokenizer)


@styled
def swish_figure() -> Figure:
    """Swish for several beta, from SiLU to a straight line."""
    z = torch.linspace(-6, 6, 121)
    figure, axes = new_figure(width=640, height=340, alt="Swish for several beta")
    shades = {1.702: "#053061", 1.0: BLUE, 0.5: "#4393c3", 0.2: "#92c5de", 0.0: RED}
    names = {1.702: "β = 1.702, nearly GELU", 1.0: "β = 1, SiLU", 0.0: "β = 0, z/2"}
    for beta, color in shades.items():
        y = Gate("swish", beta)(z)
        axes.plot(z.tolist(), y.tolist(), color=color, label=names.get(beta, f"β = {beta}"))
    axes.set_xlabel("z")
    axes.set_ylabel("z sigmoid(β z)")
    axes.legend(loc="upper left")
    return figure


@styled
def gate_figure() -> Figure:
    """SiLU, the line that it has for beta = 0, and the nearest lines of two hidden units."""
    silu = torch.nn.functional.silu
    figure, axes = new_figure(width=640, height=340, alt="SiLU and lines near it")
    z = torch.linspace(-5, 4, 91)
    lines = {"SiLU": (z, silu(z), GREY), "β = 0, z/2": (z, z / 2, "#bbbbbb")}
    draws = torch.Generator().manual_seed(0)
    for name, mean, color in (
        ("a unit that is mostly off", -2.0, RED),
        ("one that is mostly on", 1.5, BLUE),
    ):
        g = mean + torch.randn(2000, 1, generator=draws)  # what it has for a gate, on a text
        u = torch.randn(2000, 1, generator=draws)  # and what the gate is multiplied by
        columns = torch.cat([g, torch.ones_like(g)], 1)
        a, b = torch.linalg.lstsq(u * columns, u * silu(g)).solution.flatten()
        where = torch.linspace(mean - 2, mean + 2, 2)
        lines[name] = (where, a * where + b, color)
    for name, (x, y, color) in lines.items():
        axes.plot(x.tolist(), y.tolist(), color=color, linewidth=2, label=name)
    axes.set_xlabel("gate g")
    axes.set_ylabel("what it multiplies by")
    axes.legend(loc="upper left")
    return figure


@styled
def folding_figure() -> Figure:
    """Draw the operations between the stream and a map, before and after the fold of a norm."""
    figure, axes = new_figure(width=520, height=260, alt="A norm before and after it is folded")
    norm = {0: "stream", 1: "take the\nmean away", 2: "divide by\nthe length"}
    before = {**norm, 3: "times g\nplus b", 4: "times W\nplus e"}
    after = {**norm, 4: "times W diag(g)\nplus e + W b"}
    for y, name, cells in ((1, "before", before), (0, "after", after)):
        axes.text(-0.5, y + 0.42, name, weight="bold", ha="center")
        axes.plot([0, 4], [y, y], color=GREY, zorder=1)
        for x, text in cells.items():
            box: dict[str, Any] = {
                "edgecolor": {2: RED}.get(x, BLUE),
                "facecolor": "white",
                "pad": 5,
            }
            axes.text(x, y, text, ha="center", va="center", bbox=box)
    axes.set_axis_off()
    axes.set_xlim(-0.75, 4.7)
    axes.set_ylim(-0.5, 1.6)
    return figure


def layer_figure() -> Figure:
    """Draw a layer, its tensor along 3 minus 8 as a matrix, and the matrix as eigenvectors.

    In a matrix, each pixel has a picture of its partners.
    """
    data = load_images("digits")
    config = ClassifierConfig(data.n_inputs, data.n_classes, d_model=64, image_shape=data.shape)
    model, _ = train_classifier(config, data, ClassifierTraining(epochs=20, batch_size=50))
    model.requires_grad_(False)
    u = torch.eye(10)[3] - torch.eye(10)[8]
    three, eight = model.tensor().interaction(output=[3, 8]).dense()
    spectrum = model.tensor().interaction(u).eigh(k=2).oriented(data.test_images)
    canvas = Canvas(8, 4.5, unit=90, title="", alt="A layer, its tensor and its eigenvectors")

    def matrix(values: Tensor, name: str, *, x: float, y: float) -> None:
        blocks = values.reshape(8, 8, 8, 8).transpose(1, 2)
        canvas.eigenvector(blocks.flatten(), (64, 64), x=x, y=y)
        canvas.label(name, x=x + 0.5, y=y + 1.02)

    parts = {
        "x": (0.9, 0.5),
        "L x": (2.2, 0.2),
        "R x": (2.2, 0.8),
        "product of each unit": (3.9, 0.5),
    }
    for name, (x, y) in {**parts, "D, sums": (5.7, 0.5), "g(x)": (7.1, 0.5)}.items():
        canvas.label(name, x=x, y=y - 0.1)
    for side in (-1, 1):
        canvas.line((1.1, 0.5 + 0.05 * side), (1.9, 0.5 + 0.3 * side), color=BLUE, width=2)
        canvas.line((2.5, 0.5 + 0.3 * side), (2.9, 0.5 + 0.1 * side), color=BLUE, width=2)
    for start, end in ((4.9, 5.2), (6.2, 6.8)):
        canvas.line((start, 0.5), (end, 0.5), color=BLUE, width=2)
    for x, sign, values, name in (
        (1.2, "1 ×", three, "the tensor's output 3"),
        (3.4, "− 1 ×", eight, "its output 8"),
        (5.6, "=", three - eight, "Q(u), u = 3 − 8"),
    ):
        canvas.label(sign, x=x - 0.4, y=1.75)
        matrix(values, name, x=x, y=1.35)
    matrix(three - eight, "Q(u)", x=0.1, y=2.95)
    for number, x in enumerate((2.2, 5.3)):
        value, vector = float(spectrum.values[number]), spectrum.vectors[number]
        canvas.label(f"{'+' if number else '='} {value:.2f} ×", x=x - 0.5, y=3.35)
        matrix(torch.outer(vector, vector), f"v{number + 1} v{number + 1}ᵀ", x=x, y=2.95)
        canvas.eigenvector(vector, data.shape, x=x + 1.05, y=2.95)
        canvas.label(f"v{number + 1}", x=x + 1.55, y=3.97)
    canvas.label("+ …", x=7.7, y=3.35)
    return canvas.figure()


def bigram_figure(model: ResidualModel) -> Figure:
    """Draw the logit of each second word of the grammar's bigrams after each first word."""
    firsts, seconds = (list(words) for words in zip(*GRAMMAR.bigrams, strict=True))
    rows, columns = (torch.tensor([*map(model.token, words)]) for words in (firsts, seconds))
    logits = bigram_matrix(model, layer=0).rows(rows)[:, columns]
    return heat_figure(logits, firsts, seconds, title="", across="then", down="first")


def context_figure(model: ResidualModel) -> Figure:
    """Draw the contexts of two eigenvectors of rice, with the contribution of each token."""
    spectrum = model.mlp(0).interaction(RICE.vector(model)).eigh(k=2)
    texts = GRAMMAR.sample(500, 9, seed=2)
    by_eigenvector = top_contexts(model, spectrum, texts, layer=0, k=3)
    contexts_of_both = [context for contexts in by_eigenvector for context in contexts]
    width = 1 + max(context.position for context in contexts_of_both)
    rows, words = [], []
    for place, context in enumerate(contexts_of_both):
        before = width - 1 - context.position
        parts = contribution(model, spectrum, place // 3, context, layer=0).tokens()
        rows.append(torch.nn.functional.pad(parts, (before, 0)))
        seen = [GRAMMAR.vocabulary[number] for number in context.ids[: context.position + 1]]
        words.append([""] * before + seen)
    values = torch.stack(rows)
    figure = heat_figure(values, [""] * len(rows), [""] * width, title="")
    axes = _bare(figure)
    for row, line in enumerate(words):
        for column, word in enumerate(line):
            is_dark = abs(values[row, column]) > 0.6 * values.abs().max()
            look: dict[str, Any] = {
                "color": "white" if is_dark else "black",
                "ha": "center",
                "va": "center",
            }
            axes.text(column, row, word, **look)
    return figure


def parts_figure(model: ResidualModel) -> Figure:
    """Draw the output of each part at the end of a text, in the logits of six words."""
    words = ("soup", "bread", "rice", "corn", "fish", "jam")
    tokens = ("then", "ben", "was", "happy", "and", "ate")
    of_text = Pass.of(model, torch.tensor([*map(model.token, tokens)]))
    before, after = of_text.streams
    between = of_text.layer(0).mlp_input
    written = {
        "embedding of “ate”": before,
        "both heads": between - before,
        "MLP": after - between,
        "sum: the logit": after,
    }
    reads = model.modules.logit_weights([*map(model.token, words)])[0].T
    values = torch.stack([part[0, -1] @ reads.T for part in written.values()])
    numbers = [[f"{x:.2f}" for x in row] for row in values.tolist()]
    return heat_figure(values, [*written], words, title="", words=numbers)


def _bare(figure: Figure) -> Axes:
    """Take the scale and the names of a matrix away, and return its axes."""
    axes, scale = figure.axes
    scale.remove()
    axes.set_axis_off()
    return axes


if __name__ == "__main__":
    draw()
