"""The explorer: its app, the requests that it answers, and its folder for a Hugging Face Space.

It answers to its own name, to its own page, and takes no files. A page of somebody else's that is
open in the same browser can send requests here. It is refused by its origin; and if its own name
points to this machine (DNS rebinding), by that name.
"""

import ipaddress
import json
import os
import shutil
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from huggingface_hub import SpaceCardData
from torch import nn

from bilens.analyses import find_analyses
from bilens.checks import check_count, checked
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.explore.screen import html
from bilens.files import written_whole
from bilens.images.bonds import recorded_settings
from bilens.inputs import check_data, data_for, names_data
from bilens.lazy_imports import gradio as gr
from bilens.lazy_imports import lazy_import
from bilens.models import load
from bilens.progress import logger
from bilens.tensor import TensorChain

if TYPE_CHECKING:
    from starlette import middleware, requests, responses

    from bilens.explore import pages
else:
    middleware, requests, responses = (
        lazy_import(f"starlette.{part}", install=".[explore]")
        for part in ("middleware", "requests", "responses")
    )
    pages = lazy_import("bilens.explore.pages")

FOLDER = Path(__file__).parent


@dataclass(frozen=True, eq=False)
class Explorer:
    """An app on one model, ready to be launched."""

    blocks: gr.Blocks

    @checked
    def launch(
        self,
        *,
        host: str | None = None,
        port: int | None = None,
        share: bool = False,
        open_browser: bool = False,
        wait: bool = True,
    ) -> str:
        """Serve the app, for this machine only by default, and return its address.

        Args:
            host: address to listen at; by default 127.0.0.1, or the one of a Space.
            port: by default the first free one from 7860.
            share: also open a public address, through a server of Gradio's, for a week.
            open_browser: open it in the default browser.
            wait: until ctrl-C; otherwise serve in the background, until `close`.

        Raises:
            BilensError: host and port cannot be listened on.
        """
        guard = middleware.Middleware(guarded, names=own_names(host, share=share))
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
                css_paths=[FOLDER / "style.css", FOLDER.parent / "pages" / "flow.css"],
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
            logger.info("explorer: %s  (ctrl-C stops it)", address)
            self.blocks.block_thread()
        return str(address)

    def close(self) -> None:
        """Stop serving."""
        self.blocks.close(verbose=False)


@checked
def explorer(
    source: Any,
    *,
    data: str | ImageData | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    add: Sequence[str] = (),
) -> Explorer:
    """Build an app that shows a model: directions, eigenvectors, and their effect on inputs.

    Heavy parts are read here, once; a click is then answered at once.

    Args:
        source: a run directory, the name of a repository on the hub, or a model of your own, such
            as `bilens.load(module)`.
        data: name of the data, by default that of the training, or images of your own. A language
            model needs none for flows and circuits.
        data_dir: folder of the data; see `bilens.data.load_images`.
        device: device of the model.
        add: names of further readings, such as heads, and files with readings of your own.

    Raises:
        BilensError: Gradio is not installed, or this kind of model has no explorer.
        NotBilinearError: the model is not a tensor.
        CheckpointError: the model is missing or damaged, or does not name its data.
    """
    model: Any = source
    is_place = isinstance(source, str | Path)
    # A flow and a circuit need no texts, so that a language model may come without any.
    has_data = data is not None or (is_place and names_data(source))
    if is_place and has_data and not isinstance(data, ImageData):
        check_data(source, data, data_dir)
    if isinstance(source, str | Path | nn.Module):
        model = load(source, device=device)
    model_name = source if is_place else type(model).__name__
    is_tensor = isinstance(model, TensorChain)
    if data is None and is_tensor and not is_place:
        raise BilensError(f"data=None, expected the name of data for {model_name}, such as 'mnist'")
    if data_dir is not None and not (has_data or is_tensor):
        raise BilensError(f"data_dir={str(data_dir)!r} is the folder of data; give data too")
    # Refused before texts are tokenized, which takes seconds.
    added = [entry for reading in add for entry in find_analyses(reading)]
    for entry in added:
        if not entry.fits(model):
            raise BilensError(f"add={entry.name!r} reads no {type(model).__name__}")
    shown: Any = data
    if not (has_data or is_tensor):
        shown = None
    elif not isinstance(data, ImageData):
        shown = data_for(model, source, data, data_dir, images=is_tensor)
    elif data_dir is not None or not is_tensor:
        other = "a folder beside them" if data_dir is not None else "the texts of a language model"
        raise BilensError(f"data holds images, and {other} cannot be read from them; name the data")
    title = f"{Path(model_name).name}, read from its weights"
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as blocks:
        html("title", f"<h1>{escape(title)}</h1>")
        if is_tensor:
            recorded = recorded_settings(source) if isinstance(source, str | Path) else {}
            pages.ImagePage(model, shown.to(device), added, recorded).screen()
        else:
            pages.LanguagePage(model, shown, added).screen()
    return Explorer(blocks)


@checked
def explore(
    source: Any,
    *,
    host: str | None = None,
    port: int | None = None,
    open_browser: bool = False,
    wait: bool = True,
    **settings: Any,
) -> str:
    """Serve the explorer of a model until ctrl-C, and return its address.

    See `Explorer.launch` for the place, and `explorer` for an app that is launched later.

    Args:
        source: a run directory, the name of a repository on the hub, or a model.
        host: address to listen at; by default this machine's own.
        port: by default the first free one from 7860.
        open_browser: open it in the default browser.
        wait: False serves in the background and returns at once.
        settings: data, data_dir, device and add of `explorer`.

    Raises:
        BilensError: as `explorer`, or host and port cannot be listened on.
    """
    app = explorer(source, **settings)
    return app.launch(host=host, port=port, open_browser=open_browser, wait=wait)


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
    script = (FOLDER / "script.js").read_text(encoding="utf-8")
    return f"() => {{{script}}}"


def _theme() -> gr.Theme:
    # No font is fetched; and the grey of small print is too pale for it.
    fonts = ["Inter", "Helvetica Neue", "Arial", "sans-serif"]
    monospaced = ["ui-monospace", "monospace"]
    theme = gr.themes.Default(primary_hue="blue", font=fonts, font_mono=monospaced)
    return theme.set(body_text_color_subdued="*neutral_500")


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LARGEST = 2**21
"""Bytes of a request: a drawing has a few thousand."""

NOTHING_ELSE = "The explorer takes what its page sends and nothing else."


def own_names(host: str | None, *, share: bool) -> frozenset[str]:
    """Return the names that this explorer is reached by, besides IP addresses."""
    names = {"localhost", socket.gethostname(), host, os.environ.get("SPACE_HOST")}
    names |= {".gradio.live"} if share else set()
    return frozenset(name.lower() for name in names if name)


def is_own_name(host: str, names: frozenset[str]) -> bool:
    """Return True if a Host header has a name of this explorer, or an address.

    One of the names that begins with a dot matches all that end in it.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").lower()
        ends = tuple(name for name in names if name.startswith("."))
        # An address has no owner who could make it point here, as a name has.
        return name in names or name.endswith(ends) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def guarded(app: App, names: frozenset[str]) -> App:
    """Return an app that refuses all requests but those of its own page, uploads among them.

    They are refused with status 403 and the reason.
    """

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        request = requests.Request(scope)
        reason = _refusal(request, names)
        if not reason and request.method == "POST":
            body = await _body(receive)
            reason = "" if _is_plain(body) else NOTHING_ELSE
            receive = _again(body, receive)
        await (responses.PlainTextResponse(reason, 403) if reason else app)(scope, receive, send)

    return answer


def _refusal(request: "requests.Request", names: frozenset[str]) -> str:
    """Return why a request is refused by its head, or nothing."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    # A page of another site could reach this machine by a name of its own that points here.
    if not is_own_name(host, names):
        return "The explorer answers to its own name only; for another, start it with --host."
    # Programs that are no browsers send no origin.
    if origin is not None and urlsplit(origin).netloc != host:
        return "The explorer answers to its own page only."
    # The page's events go here; Gradio takes uploads and more at other addresses.
    is_event = request.scope["path"].endswith("/queue/join")
    return "" if request.method in ("GET", "HEAD") or is_event else NOTHING_ELSE


async def _body(receive: Receive) -> bytes:
    """Return the body of a request, up to its limit and one piece more."""
    body, more = b"", True
    while more and len(body) <= LARGEST:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a body that has been read, and then the remaining messages."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def call() -> Message:
        return next(parts, None) or await receive()

    return call


def _is_plain(body: bytes) -> bool:
    """Return True if all values are numbers and texts, or lists of them.

    Gradio takes an object for a file, and would fetch it from any address that it names.
    """
    try:
        values = json.loads(body)["data"] if len(body) <= LARGEST else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(values, list) and not any(
        isinstance(part, dict | list)
        for value in values
        for part in (value if isinstance(value, list) else [value])
    )


@checked
def write_space(folder: str | Path, source: str | Path, *, data: str | None = None) -> None:
    """Write a folder with app.py, requirements.txt, README.md and the model.

    `python app.py` in it serves the explorer, here or in a Space.

    Args:
        folder: folder to write, which must not exist yet.
        source: run directory or file of a model, which is copied; or the name of a repository on
            the hub, which the Space will fetch.
        data: name of the data, or texts, which are copied; by default the data of
            the training.

    Raises:
        BilensError: the folder is there already, or Gradio is not installed.
        CheckpointError: the system refuses.
    """
    folder, model = Path(folder), Path(source)
    if folder.exists():
        raise BilensError(f"{folder} is there already; choose another folder for the Space")
    card = SpaceCardData(
        title=f"{model.stem}, read from its weights",
        sdk="gradio",
        sdk_version=gr.__version__,
        app_file="app.py",
        tags=["bilens"],
    )
    # A Space with half a model would start and fail, so that the folder appears when it is whole.
    with written_whole(folder) as draft:
        draft.mkdir()
        source = _copied(model, draft, "model")
        options = "" if data is None else f", data={json.dumps(_copied(Path(data), draft, 'data'))}"
        files = {
            "app.py": "from bilens.explore import explorer\n\n"
            f"explorer({json.dumps(source)}{options}).launch()\n",
            "requirements.txt": f"bilens[explore]=={version('bilens')}\n",
            "README.md": f"---\n{card.to_yaml()}\n---\n\nMade by `bilens explore --space`.\n",
        }
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")


def _copied(path: Path, folder: Path, kind: str) -> str:
    """Return its place in the folder; a name on the hub, or of data that bilens knows, stays."""
    if not path.exists():
        return str(path)
    (folder / kind).mkdir()
    place = f"{kind}/{path.name}"
    if path.is_dir():
        # Files of a run that the explorer does not need
        unused = shutil.ignore_patterns("checkpoints", "cut", "figures", "*.html", ".*")
        shutil.copytree(path, folder / place, ignore=unused)
    else:
        shutil.copy(path, folder / place)
    return place
