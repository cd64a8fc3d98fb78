"""`bilens explore`: a model in the browser."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bilens.cli.console import DataDir, Device, ModelName, choose_device
from bilens.lazy_imports import lazy_import

if TYPE_CHECKING:
    from bilens import explore
else:  # Gradio is optional, and takes seconds to import.
    explore = lazy_import("bilens.explore")

__all__ = ["Explore"]


@dataclass(frozen=True)
class Explore:
    """Look into a trained model in the browser: directions, eigenvectors, your own inputs.

    Serves a page to this machine alone, from which nothing is sent elsewhere. Each view has an
    address of its own; each picture and table can be saved.

        bilens explore runs/mnist --open-browser

    Attributes:
        model: run directory, or folder or name of a model of a known family.
        data: name of the data; by default what the model was trained on.
        data_dir: where the data is; see `bilens train images --help` and `train language --help`.
        host: where to listen; 0.0.0.0 lets other machines in.
        port: by default the first free one from 7860.
        share: also give it a public address, through a server of Gradio's, for a week.
        open_browser: open the page in the default browser.
    """

    model: ModelName
    data: str | None = None
    data_dir: DataDir = None
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    open_browser: bool = False
    device: Device = "auto"

    def run(self) -> None:
        """Read the model and serve until ctrl-C."""
        device = str(choose_device(self.device))
        app = explore.explorer(self.model, data=self.data, data_dir=self.data_dir, device=device)
        app.launch(host=self.host, port=self.port, share=self.share, open_browser=self.open_browser)
