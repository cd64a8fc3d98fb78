"""`bilens decompose`, `report` and `explore`: a trained model as files, as a page and live."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from bilens.analysis import find_analysis
from bilens.cli.analyses import EXPORTERS, show_reading
from bilens.cli.console import DataDir, Device, ModelName, RunDir, check_own, choose_device, out
from bilens.errors import BilensError
from bilens.options import Basis, Metric, Order


@dataclass(frozen=True)
class Decompose:
    """Take a trained classifier apart and print how few eigenvectors, paths or directions it needs.

    For a model of one layer, writes spectra.safetensors: values, vectors and residuals, batched
    over the classes. For a deeper one, writes paths.safetensors: roots, indices,
    eigenvalues, effective eigenvalues and vectors of the strongest paths. Both come with
    decomposition.json. With --bonds, writes bonds.safetensors (shares, read and write of each bond)
    and bonds.json. The smallest cut that keeps the accuracy is then an ordinary run, in the folder
    cut.

        bilens decompose runs/mnist
        bilens decompose runs/two --bonds --json

    Attributes:
        run_dir: directory that `bilens train images` wrote.
        data_dir: folder of the data, if it is not where it was at the training.
        basis: (one layer) eigenvectors orthonormal after the embedding, as in the paper and by
            default, or in pixels.
        paths: (several layers) how many of the strongest paths to find; 1000 by default.
        bonds: find the few directions between the layers instead.
        drop: (bonds) accuracy that the cut may lose, as a share of the images; 0.01 by default.
        metric: (bonds) directions for the training images, as by default, for a Gaussian of their
            mean and covariance, or for standard normal inputs, from the weights only.
    """

    run_dir: RunDir
    data_dir: DataDir = None
    basis: Basis | None = None
    paths: int | None = None
    bonds: bool = False
    drop: float | None = None
    metric: Metric | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        self._check_effects(given, ("drop", "metric") if self.bonds else ("basis", "paths"))

        from bilens.inputs import loader
        from bilens.models import load
        from bilens.nn import ImageClassifier

        model = load(self.run_dir, device=choose_device(self.device))
        if not isinstance(model, ImageClassifier):
            raise BilensError(
                f"{self.run_dir} holds no image classifier; for a language model `bilens contexts` "
                "prints the eigenvectors of a token and `bilens ngrams` its n-grams"
            )
        name = "bonds" if self.bonds else "paths" if len(model.layers) > 1 else "eigenvectors"
        if not self.bonds:
            self._check_effects(given, ("paths" if name == "paths" else "basis",))
        settings = given if self.paths is None else given | {"k": self.paths}
        load_data = loader(model, self.run_dir)
        reading = find_analysis(name).run(model, settings, load_data, source=self.run_dir)
        show_reading(reading)
        (arrays,) = EXPORTERS[type(reading).__name__]
        arrays.write(reading, self.run_dir, name, self.run_dir.name)
        out.print(f"written: {self.run_dir}")
        return reading.record()

    def _check_effects(self, given: Mapping[str, Any], names: Collection[str]) -> None:
        for name in ("basis", "paths", "drop", "metric"):
            if name in given and name not in names:
                with_bonds = f"with{'' if self.bonds else 'out'} --bonds"
                raise BilensError(
                    f"--{name}={given[name]} has no effect {with_bonds} on this model; leave it out"
                )


@dataclass(frozen=True)
class Report:
    """Write the report of a trained model: one HTML file that works offline.

        bilens report runs/mnist --figures png
        bilens report runs/grammar --token soup --minus rice,jam
        bilens report runs/grammar --token soup --prompt "then ben ate" --add flow copying.py

    Attributes:
        model: run directory, or folder or name of a model of a known family.
        data: name of the data; by default that of the training.
        data_dir: folder of the data; see `bilens train images --help` and `train language --help`.
        output: the page; by default report.html in the run directory, or runs/report-NAME.html.
        figures: also save every figure in this format into the folder figures beside the page.
        add: names of further readings, such as flow, and files with readings of your own.
        basis: (images) eigenvectors orthonormal after the embedding, as in the paper, or in
            pixels; for models of one layer.
        drop: (images) accuracy that the cut to few directions may lose, as a share of the images;
            for models of several layers. By default that of `decompose --bonds`, or else 0.01.
        metric: (images) inputs of the directions, as in `decompose --bonds`; by default those that
            it was run with, or else the training images.
        order: (images) eigenvectors by eigenvalue, or by mean activation over the test set.
        token: (language) the output to explain; by default the token that the model predicts with
            the largest margin at the beginning of a held-out text.
        minus: (language) tokens whose mean is subtracted from it, separated by commas.
        layer: (language) number of the layer whose heads and MLP are read, from 0; by default 0 if
            its MLP is a tensor, or else none.
        among: (language) read heads of this many tokens, the first of the vocabulary.
        prompt: (language) the text whose flow the page begins with, and that of readings that need
            one; by default the held-out text of the largest margin.
    """

    model: ModelName
    data: str | None = None
    data_dir: DataDir = None
    output: Path | None = None
    figures: Literal["png", "svg", "pdf"] | None = None
    add: tuple[str, ...] = ()
    basis: Basis | None = None
    drop: float | None = None
    metric: Metric | None = None
    order: Order | None = None
    token: str | None = None
    minus: str | None = None
    layer: int | None = None
    among: int | None = None
    prompt: str | None = None
    device: Device = "auto"

    @property
    def place(self) -> Path:
        folder = Path(self.model)
        name = Path("runs") / f"report-{folder.stem}.html"
        return folder / "report.html" if folder.is_dir() else name

    def run(self) -> dict[str, Any]:
        page = self.output or self.place
        if self.figures:
            check_own(page.parent / "figures", page)

        from bilens.figures.paper import require_matplotlib
        from bilens.inputs import check_data
        from bilens.models import load
        from bilens.report import save_figures, write_report
        from bilens.report.model import report_readings

        check_data(self.model, self.data, self.data_dir)
        if self.figures:
            require_matplotlib()
        model = load(self.model, device=choose_device(self.device))
        others = ("model", "output", "figures", "add", "device")
        settings = {name: value for name, value in vars(self).items() if name not in others}
        readings = report_readings(model, settings, source=self.model, add=self.add)
        title = f"{Path(self.model).name}, read from its weights"
        drawn = write_report(page, readings, title=title)
        out.print(f"report: {page}")
        if self.figures:
            save_figures(drawn, page.parent / "figures", self.figures)
            out.print(f"figures: {page.parent / 'figures'}")
        return {"report": page, "figures": list(drawn)}


@dataclass(frozen=True)
class Explore:
    """Look into a trained model in the browser: directions, eigenvectors, your own inputs.

    Serves a page to this machine only, and sends nothing elsewhere. Each view has an
    address of its own; each picture and table can be saved.

        bilens explore runs/mnist --open-browser
        bilens explore runs/grammar --space grammar-space

    Attributes:
        model: run directory, or folder or name of a model of a known family.
        data: name of the data; by default that of the training. A language model needs none for
            flows and circuits.
        data_dir: folder of the data; see `bilens train images --help` and `train language --help`.
        host: address to listen at; 0.0.0.0 lets other machines in.
        port: by default the first free one from 7860.
        share: also open a public address, through a server of Gradio's, for a week.
        open_browser: open the page in the default browser.
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
    add: tuple[str, ...] = ()
    space: Path | None = None
    device: Device = "auto"

    def run(self) -> dict[str, Any]:
        from bilens import explore

        # A Space starts its own explorer, so nothing is read here.
        if self.space is not None:
            unused = ("data_dir", "host", "port", "share", "open_browser", "add", "device")
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in unused and value != field.default:
                    raise BilensError(
                        f"--{field.name.replace('_', '-')}={value} has no effect with --space, "
                        "which starts its own explorer; leave it out"
                    )
            explore.write_space(self.space, self.model, data=self.data)
            out.print(f"Space: {self.space}; `python app.py` in it serves it here")
            return {"space": self.space}
        device = str(choose_device(self.device))
        app = explore.explorer(
            self.model, data=self.data, data_dir=self.data_dir, device=device, add=self.add
        )
        address = app.launch(
            host=self.host, port=self.port, share=self.share, open_browser=self.open_browser
        )
        return {"address": address}
