"""`bilens explore`: a model in the browser."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bilens
from bilens.cli.console import DataDir, Device, ModelName, choose_device
from bilens.cli.terminal import out


@dataclass(frozen=True)
class Explore:
    """Look into a trained model in the browser: directions, eigenvectors, your own inputs.

    Serves a page to this machine only, and sends nothing elsewhere. Each view has an
    address of its own; each picture and table can be saved.

        bilens explore runs/mnist --open-browser
        bilens explore runs/grammar --space grammar-space

    Attributes:
        model: run directory, or folder or name of a model of a known family.
        data: name of the data; by default that of the training.
        data_dir: folder of the data; see `bilens train images --help` and `train language --help`.
        host: address to listen at; 0.0.0.0 lets other machines in.
        port: by default the first free one from 7860.
        share: also open a public address, through a server of Gradio's, for a week.
        open_browser: open the page in the default browser.
        save_to: (language models) folder where the page's visitors may save models that they edit,
            each under a name of its own; by default nothing is written.
        add: names of further readings, such as heads, and files with readings of your own.
        space: write a folder instead that Hugging Face runs as a Space, the model in it.
    """

    model: ModelName
    data: str | None = None
    data_dir: DataDir = None
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    open_browser: bool = False
    save_to: Path | None = None
    add: tuple[str, ...] = ()
    space: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        """Read the model and serve until ctrl-C."""
        # A Space starts its own explorer, so nothing is read here.
        if self.space is not None:
            bilens.explore.write_space(self.space, self.model, data=self.data)
            out.print(f"Space: {self.space}; `python app.py` in it serves it here")
            return {"space": self.space}
        device = str(choose_device(self.device))
        app = bilens.explore.explorer(
            self.model,
            data=self.data,
            data_dir=self.data_dir,
            device=device,
            save_to=self.save_to,
            add=self.add,
        )
        address = app.launch(
            host=self.host, port=self.port, share=self.share, open_browser=self.open_browser
        )
        return {"address": address}
