"""Commands that write arrays of weights: `bilens decompose` and `token-spectra`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import bilens
from bilens.analyses import find_analysis
from bilens.cli.console import Device, ModelName, RunDir, check_own, choose_device, out, show_table
from bilens.cli.readings import show_reading
from bilens.errors import BilensError
from bilens.options import Basis, Metric, layer_of, token_list
from bilens.sections import signed
from bilens.settings import Count, Share, Tolerance


def decompose(
    run_dir: RunDir,
    *,
    data_dir: Path | None = None,
    basis: Basis | None = None,
    paths: Count | None = None,
    bonds: bool = False,
    drop: Share | None = None,
    metric: Metric | None = None,
    device: Device = "auto",
) -> dict[str, Any]:
    """Take a classifier apart, and print how few eigenvectors, paths or directions it needs.

    For a model of one layer, writes spectra.safetensors: values, vectors and residuals, batched
    over the classes. For a deeper one, writes paths.safetensors: roots, indices,
    eigenvalues, effective eigenvalues and vectors of the strongest paths. Both come with
    decomposition.json. With --bonds, writes bonds.safetensors (shares, read and write of each bond)
    and bonds.json. The smallest cut that keeps the accuracy is then an ordinary run, in the folder
    cut.

        bilens decompose runs/mnist
        bilens decompose runs/two --bonds --json

    Args:
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
    options = {"basis": basis, "paths": paths, "drop": drop, "metric": metric}
    given = {name: value for name, value in options.items() if value is not None}
    _check_effects(given, ("drop", "metric") if bonds else ("basis", "paths"))

    from bilens.inputs import loader
    from bilens.models import load
    from bilens.nn import ImageClassifier
    from bilens.pages.exporters import write_arrays

    model = load(run_dir, device=choose_device(device))
    if not isinstance(model, ImageClassifier):
        raise BilensError(
            f"{run_dir} holds no image classifier; for a language model `bilens contexts` "
            "prints the eigenvectors of a token and `bilens ngrams` its n-grams"
        )
    name = "bonds" if bonds else "paths" if len(model.layers) > 1 else "eigenvectors"
    if not bonds:
        _check_effects(given, ("paths" if name == "paths" else "basis",))
    settings = given | {"data_dir": data_dir} | ({} if paths is None else {"k": paths})
    reading = find_analysis(name).run(model, settings, loader(model, run_dir), source=run_dir)
    show_reading(reading)
    write_arrays(reading, run_dir, model=run_dir.name)
    out.print(f"written: {run_dir}")
    return reading.record()


def _check_effects(given: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise if an option was given that is for other models, or for another reading of them."""
    layers = {"basis": "a model of one layer", "paths": "a model of several layers"}
    for name, value in given.items():
        if name not in names:
            needed = f"{layers[name]}, without --bonds" if name in layers else "--bonds"
            raise BilensError(
                f"--{name}={value} has no effect here, expected {needed}; leave it out"
            )


def token_spectra(
    model: ModelName,
    *,
    layer: int | None = None,
    tokens: str = "all",
    top: Count = 8,
    batch: Count = 256,
    tolerance: Tolerance = 1e-4,
    output: Path | None = None,
    device: Device = "auto",
    low_memory: bool = False,
) -> dict[str, Any] | None:
    """Find the top eigenpairs of a bilinear layer along the logit of every token, and save them.

    Writes spectra.json and spectra-NNNNN.safetensors, each the spectra of some tokens; what is
    there already is kept. For several devices write `torchrun --nproc-per-node=N -m bilens`
    instead of `bilens`.

        bilens token-spectra runs/annealed --layer 3
        bilens token-spectra runs/annealed --layer 3 --tokens cat,dog --top 4 --json

    Args:
        model: folder of a bilinear model: annealed, exported, or trained with bilens.
        layer: number of the layer, from 0; models of one layer do not need it.
        tokens: all, or some separated by commas, each as the vocabulary writes it or its number;
            one with a comma stands in double quotes.
        top: eigenpairs of each token.
        batch: tokens in a file.
        tolerance: largest residual of a pair.
        output: folder; by default runs/spectra-NAME-LAYER.
        low_memory: leave the weights of other layers in their files.
    """
    from bilens.language import token_names
    from bilens.processes import this_process

    opened: Any = bilens.load(model, device=choose_device(device), low_memory=low_memory)
    if not isinstance(opened, bilens.ResidualModel):
        raise BilensError(
            f"{model} holds {type(opened).__name__}, and this command reads language "
            "models; `bilens eigenvectors` reads classifiers"
        )
    layer = layer_of(opened, layer)
    numbers = _numbers(opened, tokens)
    folder = output or Path("runs") / f"spectra-{Path(model).stem}-{layer}"
    if output is None:
        check_own(folder)
    bilens.convert.write_spectra(
        opened.mlp(layer),
        opened.modules.logit_weights(numbers)[0].T,
        folder,
        names=numbers,
        k=top,
        batch_size=batch,
        tolerance=tolerance,
    )
    state = this_process()
    if state.num_processes > 1:
        out.print(f"{folder}: the part of process {state.process_index} is done")
        return None
    # Read back from the files: some may be of an earlier run.
    names, spectrum = bilens.convert.read_spectra(folder)
    values, residuals = spectrum.values.tolist(), spectrum.residuals.amax(-1).tolist()
    rows = list(zip(map(int, names), token_names(opened, names), values, residuals, strict=True))
    cells = [(name, "  ".join(map(signed, v)), f"{r:.1e}") for _, name, v, r in rows[:10]]
    show_table(("token", "eigenvalues", "largest residual"), cells, words=2)
    out.print(f"{len(names):,} tokens: {folder}")
    keys = ("number", "token", "eigenvalues", "largest_residual")
    return {"output": folder, "tokens": [dict(zip(keys, row, strict=True)) for row in rows]}


def _numbers(model: "bilens.ResidualModel", tokens: str) -> list[int]:
    """Return the tokens' numbers: all, or those of names or numbers."""
    from bilens.checks import check_index

    if tokens == "all":
        return list(range(model.modules.unembed.n_out))
    known = model.tokenizer.get_vocab() if model.tokenizer is not None else {}
    return [
        # Python refuses to read numbers of thousands of digits.
        check_index("tokens", int(name[:20]), model.vocab_size, "the model's tokens")
        if name.isdecimal() and name not in known
        else model.token(name)
        for name in token_list(tokens)
    ]
