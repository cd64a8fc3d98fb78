"""Draw those pictures of the ideas that need no run: `python -m docs.draw_ideas`.

A language model is trained on the grammar for them, which takes a minute.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import torch
from experiments.curves import BLUE, GREY, RED
from torch import Tensor

from bilens.data import Grammar, load_corpus, load_images
from bilens.language import TokenDirection, bigram_matrix, contribution, top_contexts
from bilens.nn import ClassifierConfig, Gate
from bilens.nn.language import LanguageConfig
from bilens.pages import dress, save_figure
from bilens.train import ClassifierTraining, LanguageTraining, train_classifier
from bilens.train.language import train_language
from bilens.transformer import Pass, ResidualModel

FOLDER = Path(__file__).parent / "pictures"
SHADES = ("#67001f", RED, "#f4a582", "#f7f7f7", "#92c5de", BLUE, "#053061")
COLORS = [[place / 6, color.upper()] for place, color in enumerate(SHADES)]
GRAMMAR = Grammar()
RICE = TokenDirection("rice", ("soup", "bread", "corn", "fish", "jam"))


def draw() -> None:
    """Draw them all."""
    save_figure(swish_figure(), FOLDER / "swish.svg", width=640)
    save_figure(gate_figure(), FOLDER / "gate-lines.svg", width=640)
    save_figure(folding_figure(), FOLDER / "folding.svg", width=520)
    save_figure(form_figure(), FOLDER / "form.svg", width=560)
    model = trained()
    save_figure(bigram_figure(model), FOLDER / "bigrams.svg", width=560)
    save_figure(context_figure(model), FOLDER / "contexts.svg", width=460)
    save_figure(parts_figure(model), FOLDER / "parts.svg", width=560)


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


def swish_figure() -> go.Figure:
    """Swish for several beta, from SiLU to a straight line."""
    z, figure = torch.linspace(-6, 6, 121), go.Figure()
    shades = {1.702: "#053061", 1.0: BLUE, 0.5: "#4393c3", 0.2: "#92c5de", 0.0: RED}
    names = {1.702: "β = 1.702, nearly GELU", 1.0: "β = 1, SiLU", 0.0: "β = 0, z/2"}
    for beta, color in shades.items():
        y = Gate("swish", beta)(z)
        name = names.get(beta, f"β = {beta}")
        figure.add_scatter(x=z.tolist(), y=y.tolist(), name=name, line={"color": color, "width": 2})
    figure.update_xaxes(title="z")
    figure.update_yaxes(title="z sigmoid(β z)")
    return dress(figure, height=340).update_layout(legend={"x": 0.02, "y": 0.98})


def gate_figure() -> go.Figure:
    """SiLU, the line that it has for beta = 0, and the nearest lines of two hidden units."""
    silu, figure = torch.nn.functional.silu, go.Figure()
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
        line = {"color": color, "width": 3}
        figure.add_scatter(x=x.tolist(), y=y.tolist(), name=name, mode="lines", line=line)
    figure.update_xaxes(title="gate g")
    figure.update_yaxes(title="what it multiplies by")
    return dress(figure, height=340).update_layout(legend={"x": 0.02, "y": 0.98})


def folding_figure() -> go.Figure:
    """Draw the operations between the stream and a map, before and after the fold of a norm."""
    figure = go.Figure(go.Scatter(x=[0], y=[0], mode="markers", marker={"opacity": 0}))
    norm = {0: "stream", 1: "take the<br>mean away", 2: "divide by<br>the length"}
    before = {**norm, 3: "times g<br>plus b", 4: "times W<br>plus e"}
    after = {**norm, 4: "times W diag(g)<br>plus e + W b"}
    for y, name, cells in ((1, "before", before), (0, "after", after)):
        figure.add_annotation(x=-0.5, y=y + 0.42, text=f"<b>{name}</b>", showarrow=False)
        line = {"color": GREY, "width": 1.5}
        figure.add_shape(x0=0, x1=4, y0=y, y1=y, type="line", layer="below", line=line, opacity=1)
        for x, text in cells.items():
            figure.add_annotation(
                x=x,
                y=y,
                text=text,
                showarrow=False,
                bordercolor={2: RED}.get(x, BLUE),
                borderpad=6,
                bgcolor="white",
            )
    figure.update_xaxes(visible=False, range=[-0.75, 4.7])
    figure.update_yaxes(visible=False, range=[-0.5, 1.6])
    return dress(figure, height=260).update_layout(margin={"l": 4, "r": 4, "b": 4})


def form_figure() -> go.Figure:
    """Draw the interaction matrix of the logit of 3: for each pixel a picture of its partners."""
    data = load_images("digits")
    config = ClassifierConfig(data.n_inputs, data.n_classes, d_model=64, image_shape=data.shape)
    model, _ = train_classifier(config, data, ClassifierTraining(epochs=20, batch_size=50))
    matrix = model.tensor().interaction(output=3).dense().detach()
    blocks = (
        matrix.unflatten(1, (8, 8)).unflatten(0, (8, 8)).transpose(1, 2).flatten(2).flatten(0, 1)
    )
    places = list(map(str, range(64)))
    figure = _map(blocks, places, places).update_traces(xgap=0, ygap=0, showscale=False)
    for edge in range(8, 64, 8):
        figure.add_vline(edge - 0.5, line={"color": GREY, "width": 1})
        figure.add_hline(edge - 0.5, line={"color": GREY, "width": 1})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    return dress(figure, height=560).update_layout(margin={"l": 4, "r": 4, "b": 4, "t": 4})


def bigram_figure(model: ResidualModel) -> go.Figure:
    """Draw the logit of each second word of the grammar's bigrams after each first word."""
    firsts, seconds = (list(words) for words in zip(*GRAMMAR.bigrams, strict=True))
    rows, columns = (torch.tensor([*map(model.token, words)]) for words in (firsts, seconds))
    logits = bigram_matrix(model, layer=0).rows(rows)[:, columns]
    figure = _map(logits, seconds, firsts)
    figure.update_xaxes(title="then")
    figure.update_yaxes(title="first", autorange="reversed")
    return dress(figure, height=420).update_layout(margin={"l": 90})


def context_figure(model: ResidualModel) -> go.Figure:
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
    figure = _map(torch.stack(rows), list(map(str, range(width))), list(map(str, range(len(rows)))))
    figure.update_traces(text=words, texttemplate="%{text}", showscale=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    return dress(figure, height=220).update_layout(margin={"l": 4, "r": 4, "b": 4})


def parts_figure(model: ResidualModel) -> go.Figure:
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
    figure = _map(
        torch.stack([part[0, -1] @ reads.T for part in written.values()]), words, [*written]
    )
    figure.update_traces(texttemplate="%{z:.1f}", showscale=False)
    figure.update_yaxes(autorange="reversed")
    return dress(figure, height=240).update_layout(margin={"l": 140, "r": 4})


def _map(values: Tensor, x: Sequence[str], y: Sequence[str]) -> go.Figure:
    reach = float(values.abs().max())
    heat = go.Heatmap(
        z=values.tolist(), x=x, y=y, zmin=-reach, zmax=reach, colorscale=COLORS, xgap=1, ygap=1
    )
    return go.Figure(heat)


if __name__ == "__main__":
    draw()
