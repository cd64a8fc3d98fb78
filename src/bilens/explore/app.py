"""Open a model, choose its screen, and serve it."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bilens.checks import check_count
from bilens.data import ImageData, load_images
from bilens.errors import BilensError
from bilens.explore.deep import DeepView, deep_screen
from bilens.explore.images import ImageView, image_screen
from bilens.explore.layout import html
from bilens.explore.request_guard import RequestGuard, own_names
from bilens.lazy_imports import gradio as gr
from bilens.lazy_imports import lazy_import, middleware
from bilens.models import load
from bilens.nn import SparseAutoencoder
from bilens.read.figures.style import DARK
from bilens.registry import named_analyses
from bilens.tensor import TensorChain
from bilens.train import read_training

if TYPE_CHECKING:
    from bilens.explore import language, language_screen
    from bilens.read.language import contexts
else:  # transformers takes seconds to import, and classifiers do without it.
    language = lazy_import("bilens.explore.language")
    language_screen = lazy_import("bilens.explore.language_screen")
    contexts = lazy_import("bilens.read.language.contexts")

FOLDER = Path(__file__).parent
FONTS = ["Inter", "Helvetica Neue", "Arial", "sans-serif"]
MONOSPACED = ["ui-monospace", "monospace"]


@dataclass(frozen=True, eq=False)
class Explorer:
    """An app on one model, ready to be launched.

    Attributes:
        blocks: the app, of Gradio.
    """

    blocks: gr.Blocks

    def launch(
        self,
        *,
        host: str | None = None,
        port: int | None = None,
        share: bool = False,
        open_browser: bool = False,
        wait: bool = True,
    ) -> str:
        """Serve the app: for this machine only, by default.

        Args:
            host: address to listen at; by default 127.0.0.1, or the one of a Space.
            port: by default the first free one from 7860.
            share: also open a public address, through a server of Gradio's, for a week.
            open_browser: open it in the default browser.
            wait: until ctrl-C; otherwise serve in the background, until `close`.

        Returns:
            The address.

        Raises:
            BilensError: host and port cannot be listened on.
        """
        guard = middleware.Middleware(RequestGuard, names=own_names(host, share=share))
        try:
            _check_place(host, port)
            _, local, public = self.blocks.launch(
                server_name=host,
                server_port=port,
                share=share,
                inbrowser=open_browser,
                prevent_thread_lock=True,
                quiet=True,
                ssr_mode=False,
                run_history=False,
                enable_monitoring=False,
                footer_links=[],
                pwa=False,
                mcp_server=False,
                app_kwargs={"middleware": [guard]},
                theme=_theme(),
                css_paths=[FOLDER / "style.css", FOLDER.parent / "report" / "flow.css"],
                js=_script(),
            )
        except OSError as error:
            raise BilensError(
                f"host={host}, port={port} cannot be listened on: {error}. Another program may use "
                "the port, or the host is not a name or address of this machine; leave out --host "
                "and --port to have them chosen."
            ) from error
        address = public or local
        if wait:
            print(f"explorer: {address}  (ctrl-C stops it)")  # noqa: T201
            self.blocks.block_thread()
        return str(address)

    def close(self) -> None:
        """Stop serving."""
        self.blocks.close(verbose=False)


def explorer(
    source: Any,
    *,
    data: str | ImageData | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    save_to: str | Path | None = None,
    add: Sequence[str] = (),
) -> Explorer:
    """Build an app that shows a model: directions, eigenvectors, and their effect on inputs.

    Heavy parts are read here, once; a click is then answered at once.

    Args:
        source: a run directory, the name of a repository on the hub, or a model of your own, such
            as `bilens.load(module)`.
        data: name of the data, by default that of the training, or images of your own.
        data_dir: folder of the data; see `bilens.data.load_images`.
        device: device of the model.
        save_to: folder where visitors may save the language models that they edit, each under a
            name of its own; by default nothing is written.
        add: names of further readings, such as heads, and files with readings of your own.

    Raises:
        BilensError: Gradio is not installed, this kind of model has no explorer, or it is
            one that is not edited.
        NotBilinearError: the model is not a tensor.
        CheckpointError: the model is missing or damaged, or does not name its data.
    """
    model: Any = source
    if isinstance(source, str | Path | nn.Module):
        model = load(source, device=device)
    of = source if isinstance(source, str | Path) else type(model).__name__
    if isinstance(model, SparseAutoencoder):
        raise BilensError(f"{of} holds a sparse autoencoder, which has no explorer")
    if save_to is not None and isinstance(model, TensorChain):
        raise BilensError(f"save_to={save_to}, but {of} is a classifier, which is not edited")
    if data is None and not isinstance(source, str | Path):
        raise BilensError(f"data=None, expected the name of data for {of}, such as 'mnist'")
    added = [entry for reading in add for entry in named_analyses(reading)]
    for entry in added:
        if not entry.fits(model):
            raise BilensError(f"add={entry.name!r} reads no {type(model).__name__}")
    name = str(data or read_training(str(source))["data"])
    title = f"{Path(of).name}, read from its weights"
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as blocks:
        html("title", f"<h1>{escape(title)}</h1>")
        html("parts-of-page", '<nav aria-label="parts of the page"></nav>')
        if isinstance(model, TensorChain):
            images = data if isinstance(data, ImageData) else load_images(name, data_dir)
            images = images.to(device)
            if len(model.layer_tensors()) > 1:
                deep_screen(DeepView(model, images, Path(of), added))
            else:
                image_screen(ImageView(model, images, added))
        else:
            corpus = contexts.corpus_for(model, name, data_dir)
            folder = None if save_to is None else Path(save_to)
            view = language.LanguageView(model, corpus, folder, added)
            language_screen.language_screen(view)
    return Explorer(blocks)


def _check_place(host: str | None, port: int | None) -> None:
    # Gradio would ask for the name once for each port that it tries.
    if port is not None:
        check_count("port", port, 65535)
    if host is not None:
        try:
            kind, *_, place = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        except UnicodeError as error:  # a part of the name is empty or too long
            raise OSError(str(error)) from error
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)


def _script() -> str:
    figures = (FOLDER.parent / "report" / "figures.js").read_text(encoding="utf-8")
    script = (FOLDER / "script.js").read_text(encoding="utf-8")
    return f"() => {{{figures}\nconst COLOURS = {json.dumps(DARK)};\n{script}}}"


def _theme() -> gr.Theme:
    # No font is fetched; and the grey of small print is too pale for it.
    theme = gr.themes.Default(primary_hue="blue", font=FONTS, font_mono=MONOSPACED)
    return theme.set(body_text_color_subdued="*neutral_500")
