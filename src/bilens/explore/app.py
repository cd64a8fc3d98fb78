"""The explorer: a local web app on one model, and its folder for a Hugging Face Space."""

import json
import os
import shutil
import threading
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from bilens.analyses import find_analyses
from bilens.analysis import Analysis
from bilens.checks import check_count, checked
from bilens.data import ImageData
from bilens.errors import BilensError
from bilens.explore.model_pages import ModelPages
from bilens.explore.server import Server
from bilens.files import written_whole
from bilens.images.bonds import recorded_settings
from bilens.inputs import check_data, data_for, is_known, names_data
from bilens.models import load
from bilens.progress import logger
from bilens.shipped import find_model
from bilens.tensor import TensorChain

HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
FIRST_PORT, PORTS = 7860, 100


@dataclass(eq=False)
class Explorer:
    """An app on one model, ready to be launched.

    Attributes:
        pages: the readings of the model.
        title: the name of the model.
    """

    pages: ModelPages
    title: str
    _servers: list[Server] = field(default_factory=list)

    @checked
    def launch(
        self,
        *,
        host: str | None = None,
        port: int | None = None,
        open_browser: bool = False,
        wait: bool = True,
    ) -> str:
        """Serve the app, for this machine only by default, and return its address.

        Args:
            host: address to listen at; by default 127.0.0.1, and in a Space all.
            port: by default the first free one from 7860.
            open_browser: open it in the default browser.
            wait: until ctrl-C; otherwise serve in the background, until `close`.

        Raises:
            BilensError: host and port cannot be listened on.
        """
        if port is not None:
            check_count("port", port, 65535)
        host = host or (EVERYWHERE if "SPACE_HOST" in os.environ else HERE)
        server = self._server(host, port)
        self._servers.append(server)
        name = "localhost" if host in (EVERYWHERE, "::") else f"[{host}]" if ":" in host else host
        address = f"http://{name}:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        if open_browser:
            webbrowser.open(address)
        if wait:
            logger.info("explorer: %s  (ctrl-C stops it)", address)
            try:
                thread.join()
            finally:
                self.close()
        return address

    def _server(self, host: str, port: int | None) -> Server:
        ports = [port] if port else range(FIRST_PORT, FIRST_PORT + PORTS)
        for candidate in ports:
            try:
                return Server((host, candidate), self.pages, self.title)
            except (OSError, UnicodeError) as error:  # a part of a name is empty or too long
                refusal = error
        raise BilensError(
            f"host={host}, port={port} cannot be listened on: {refusal}. Another program may use "
            "the port, or the host is not a name or address of this machine; leave out --host and "
            "--port to have them chosen."
        ) from refusal

    def close(self) -> None:
        """Stop serving."""
        while self._servers:
            server = self._servers.pop()
            server.shutdown()
            server.server_close()


@checked
def explorer(
    source: Any,
    *,
    data: str | ImageData | None = None,
    data_dir: str | Path | None = None,
    device: str = "cpu",
    add: Sequence[str] = (),
) -> Explorer:
    """Build an app that shows a model: its pages, with boxes for what they are of.

    Args:
        source: a run directory, the name of a repository on the hub, or a model of your own, such
            as `bilens.load(module)`.
        data: name of the data, by default that of the training, or images of your own. A language
            model needs none for flows and circuits.
        data_dir: folder of the data; see `bilens.data.load_images`.
        device: device of the model.
        add: names of further readings, such as heads, and files with readings of your own.

    Raises:
        BilensError: this kind of model has no explorer, or data or a reading does not fit it.
        NotBilinearError: the model is not a tensor.
        CheckpointError: the model is missing or damaged, or does not name its data.
    """
    is_place = isinstance(source, str | Path)
    if is_place and not isinstance(data, ImageData):
        check_data(source, data, data_dir)
    model = load(source, device=device) if is_place or isinstance(source, nn.Module) else source
    # Refused before texts are tokenized, which takes seconds.
    extra: list[Analysis] = []
    for name in add:
        for entry in find_analyses(name):
            if not entry.fits(model):
                raise BilensError(f"add={entry.name!r} reads no {type(model).__name__}")
            extra.append(entry)
    inputs: Any = None
    starts: dict[str, Any] = {}
    if isinstance(model, TensorChain):
        inputs = _data(model, source, data, data_dir).to(device)
        starts = recorded_settings(source) if is_place else {}
    # A flow and a circuit need no texts, so that a language model may come without any.
    elif data is not None or (is_place and names_data(source)):
        inputs = _data(model, source, data, data_dir)
    elif data_dir is not None:
        raise BilensError(f"data_dir={str(data_dir)!r} is the folder of data; give data too")
    title = Path(source).name if is_place else type(model).__name__
    return Explorer(ModelPages(model, inputs, extra, starts), f"{title}, read from its weights")


def _data(model: Any, source: Any, data: str | ImageData | None, folder: str | Path | None) -> Any:
    """Return the images or texts of a model."""
    is_tensor = isinstance(model, TensorChain)
    if isinstance(data, ImageData):
        if is_tensor and folder is None:
            return data
        other = "the texts of a language model" if folder is None else "a folder beside them"
        raise BilensError(f"data holds images, and {other} cannot be read from them; name the data")
    if data is None and not isinstance(source, str | Path):
        name = type(model).__name__
        raise BilensError(f"data=None, expected the name of data for {name}, such as 'mnist'")
    return data_for(model, source, data, folder, images=is_tensor)


@checked
def write_space(folder: str | Path, source: str | Path, *, data: str | None = None) -> None:
    """Write a folder with app.py, Dockerfile, requirements.txt, README.md and the model.

    `python app.py` in it serves the explorer, here or in a Space.

    Args:
        folder: folder to write, which must not exist yet.
        source: run directory or file of a model, which is copied; or the name of a shipped model or
            of a repository on the hub, which the Space will open.
        data: name of the data, or texts, which are copied; by default the data of the training.

    Raises:
        BilensError: the folder is there already.
        CheckpointError: the system refuses.
    """
    folder, model = Path(folder), Path(source)
    if folder.exists():
        raise BilensError(f"{folder} is there already; choose another folder for the Space")
    title = f"{model.stem}, read from its weights"
    head = f"title: {json.dumps(title)}\nsdk: docker\napp_port: {FIRST_PORT}\ntags: [bilens]\n"
    # A Space with half a model would start and fail, so that the folder appears when it is whole.
    with written_whole(folder) as draft:
        draft.mkdir()
        place = _copied(model, draft, "model", is_name=find_model(source) != source)
        options = ""
        if data is not None:
            data_name = _copied(Path(data), draft, "data", is_name=is_known(data))
            options = f", data={json.dumps(data_name)}"
        files = {
            "app.py": "from bilens.explore import explorer\n\n"
            f"explorer({json.dumps(place)}{options}).launch()\n",
            "Dockerfile": Path(__file__).with_name("Dockerfile").read_text(encoding="utf-8"),
            "requirements.txt": f"bilens[train,gguf]=={version('bilens')}\n",
            "README.md": f"---\n{head}---\n\nMade by `bilens explore --space`.\n",
        }
        for name, text in files.items():
            (draft / name).write_text(text, encoding="utf-8")


def _copied(path: Path, folder: Path, kind: str, *, is_name: bool) -> str:
    """Return a path's place in a folder, into which it is copied; a name stays as it is.

    What opens a model or data decides what is a name, and a path that is there may have that name.
    """
    if is_name or not path.exists():
        return str(path)
    (folder / kind).mkdir()
    place = f"{kind}/{path.name}"
    if path.is_dir():
        # Files of a run that the explorer does not need
        ignore = shutil.ignore_patterns("checkpoints", "cut", "figures", "*.html", ".*")
        shutil.copytree(path, folder / place, ignore=ignore)
    else:
        shutil.copy(path, folder / place)
    return place
