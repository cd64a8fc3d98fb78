"""The same work by bilens and by the tool that a user would take instead, in turns in one run.

The other projects are not part of this one. Name the folder of a clone of each, or install it, and
its rows are printed. Missing projects are named with their address. Seconds are medians of five
turns, after one that does not count; ratios are of one turn, with least and most in brackets.
`--write` writes them to `results/peers.json`.
"""

import argparse
import importlib.util
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from experiments.results import Recording, Row
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.clock import by_turns, machine
from benchmarks.subprocess_memory import peak_above
from bilens.convert import process
from bilens.data import ImageData
from bilens.kernels import bilinear_attention
from bilens.nn import ClassifierConfig
from bilens.tensor import BilinearTensor, Spectrum, expected_cosine
from bilens.train import ClassifierTraining, train_classifier

TURNS = 5
CLONES = {
    "bilinear-decomposition": "github.com/tdooms/bilinear-decomposition",
    "tensor-similarity": "github.com/tdooms/tensor-similarity",
    "flash-linear-attention": "github.com/fla-org/flash-linear-attention",
}
IMAGES, PIXELS, CLASSES, WIDTH = 60_000, 784, 10, 300
HEADS, D_HEAD = 4, 32


def compare(
    what: str,
    peer: str,
    theirs: Callable[[], Any],
    ours: Callable[[], Any],
    agreement: Callable[[Any, Any], str],
) -> Row:
    """Time both in turns, and return the row."""
    agrees = agreement(theirs(), ours())
    return show(what, peer, by_turns(theirs, ours, turns=TURNS), agrees)


def show(what: str, peer: str, turns: Sequence[tuple[float, ...]], agrees: str) -> Row:
    """Print both medians, their ratio turn by turn and the faster side, and return the ratio."""
    ratios = sorted(theirs / custom for theirs, custom in turns)
    theirs, custom = (statistics.median(times) for times in zip(*turns, strict=True))
    wins = "bilens" if ratios[0] > 1 else "the peer" if ratios[-1] < 1 else "neither"
    print(
        f"| {what} | {peer} | {theirs:.3g} s | {custom:.3g} s | {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}) | {agrees} | {wins} |",
        flush=True,
    )
    claim = f"{what}: time of {peer.replace('`', '')} over ours"
    return Row.of_range(claim, ratios, baselines={"ours, seconds": custom})


def relative(theirs: Tensor, ours: Tensor) -> str:
    """Return the largest difference of two results."""
    return f"{(theirs - ours).abs().max() / theirs.abs().max():.1e}"


def module(path: Path) -> ModuleType:
    """One file of a clone, without the package around it."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


class Images(SimpleNamespace):
    """A dataset for its training."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image and its label."""
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.x)


def classifiers(folder: Path) -> list[Row]:
    """Train an image classifier for an epoch, take it apart, and tokens by the same code."""
    rows = []
    sys.path.insert(0, str(folder / "src"))
    Model: Any = module(folder / "src" / "image" / "model.py").Model
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (IMAGES + 10_000,), generator=generator)
    middles = torch.rand(CLASSES, PIXELS, generator=generator)
    images = middles[labels] + torch.randn(len(labels), PIXELS, generator=generator)
    parts = images[:IMAGES], labels[:IMAGES], images[IMAGES:], labels[IMAGES:]
    names = tuple(map(str, range(CLASSES)))
    data = ImageData("noisy middles", *parts, (28, 28), names)
    for batch in (100, 2048):
        settings = {"lr": 1e-3, "wd": 0.5, "epochs": 1, "batch_size": batch}
        sizes = {"d_input": PIXELS, "d_hidden": WIDTH, "d_output": CLASSES}
        training = ClassifierTraining(1, batch, input_noise=0.0)

        def theirs(given: Any = settings | sizes) -> float:
            with redirect_stderr(StringIO()):
                model = Model.from_config(**given)
                history = model.fit(Images(x=parts[0], y=parts[1]), Images(x=parts[2], y=parts[3]))
            torch.set_grad_enabled(True)
            return float(history["val/acc"].iloc[-1])

        def ours(training: ClassifierTraining = training) -> float:
            model, _ = train_classifier(ClassifierConfig(PIXELS, CLASSES, WIDTH), data, training)
            return model.accuracy(data.test_images, data.test_labels)

        what = f"an epoch of {IMAGES:,} images of {PIXELS} pixels, width {WIDTH}, batch {batch}"
        peer = "bilinear-decomposition, `fit`"
        agreement = "accuracy {:.3f} and {:.3f}".format
        rows.append(compare(what, peer, theirs, ours, agreement))
    peer = "bilinear-decomposition, `decompose`"
    with torch.no_grad():
        model = Model.from_config(d_input=PIXELS, d_hidden=WIDTH, d_output=CLASSES)
        layer = BilinearTensor(model.w_l[0], model.w_r[0], model.w_u)
        what = f"all eigenvectors of {CLASSES} classes, width {WIDTH}, as pixels"
        every = layer.interaction(torch.eye(CLASSES))

        def pixels(every: Any = every, E: Any = model.w_e) -> Spectrum:
            return every.eigh().pullback(E)

        rows.append(compare(what, peer, model.decompose, pixels, _same_top))
    return rows


def _same_top(theirs: tuple[Tensor, Tensor], ours: Any) -> str:
    values, _ = theirs
    k = ours.values.shape[-1]
    return relative(values.abs().sort(descending=True).values[:, :k], ours.values.abs())


def whole_svd() -> Row:
    """Time the SVD of a layer's unfolding, the usual way."""
    layer = BilinearTensor(torch.randn(100, 300), torch.randn(100, 300), torch.randn(100, 100))

    def theirs() -> Tensor:
        left, right = (torch.einsum(form, layer.left, layer.right) for form in ("ri,rj->rij",) * 2)
        full = torch.einsum("or,rij->oij", layer.out, (left + right.mT) / 2)
        result: Tensor = torch.linalg.svdvals(full.flatten(1))
        return result

    what = "singular values of a layer, 100 x 300²"
    return compare(
        what, "torch, `einsum` and `svdvals`", theirs, lambda: layer.svd().values[:100], relative
    )


def similarity(folder: Path) -> list[Row]:
    """Time the similarity of two models as functions of Gaussian inputs."""
    rows = []
    sys.path.insert(0, str(folder))
    similar: Any = import_module("src.components.similarity")
    DeepMLP: Any = import_module("src.models.deep_mlp").DeepMLP
    for layers, width, note in ((1, 300, "exact"), (2, 48, "its second moments are approximate")):
        a, b = (DeepMLP(PIXELS, width, width, CLASSES, layers).requires_grad_(False) for _ in "ab")

        def theirs(a: Any = a, b: Any = b) -> Tensor:
            aa, ab, bb = (part[0, 1:, 0, 1:].trace() for part in similar.similarity_parts(a, b))
            cosine: Tensor = ab / (aa * bb).sqrt()
            return cosine

        def ours(a: Any = a, b: Any = b) -> Tensor:
            return expected_cosine(_chain(a), _chain(b))

        similar.precompile(a, b)
        what = f"cosine of two models of {layers} layer{'s' * (layers > 1)}, width {width}"
        peer = "tensor-similarity, `similarity_parts`"
        rows.append(compare(what, peer, theirs, ours, partial(_both, note)))
    return rows


def _both(note: str, theirs: Tensor, ours: Tensor) -> str:
    return f"{theirs:.5f} and {ours:.5f}; {note}"


def _chain(model: Any) -> list[BilinearTensor]:
    first, last = model.embed.weight, model.head.weight
    chain = [BilinearTensor(part.l.weight, part.r.weight, part.d.weight) for part in model.body]
    chain[0] = chain[0].change_basis(inputs=first)
    chain[-1] = chain[-1].change_basis(outputs=last)
    return chain


def attention(length: int, folder: Path | None) -> list[Row]:
    """Time squared and bilinear scores, causal, without softmax."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, length, D_HEAD
    q, k, v, q2, k2 = (torch.randn(shape, generator=generator) for _ in range(5))
    scale, mask = D_HEAD**-2, torch.ones(length, length).tril()

    def textbook() -> Tensor:
        first, second = (torch.einsum("bhqd,bhkd->bhqk", a, b) for a, b in ((q, k), (q2, k2)))
        return torch.einsum("bhqk,bhkd->bhqd", first * second * mask * scale, v)

    size = f"{length:,} tokens, {HEADS} heads of {D_HEAD}"
    bilinear = f"bilinear attention, {size}"
    custom = partial(bilinear_attention, q, k, v, q2, k2)
    rows = [compare(bilinear, "textbook `einsum`", textbook, custom, relative)]
    fused = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
    other = "softmax: another function"
    rows.append(compare(bilinear, "torch's SDPA", fused, custom, lambda *_: other))
    if folder is None:
        return rows
    ops = folder / "fla" / "ops"
    pattern: Any = module(ops / "rebased" / "naive.py").naive_parallel_rebased
    linear: Any = module(ops / "linear_attn" / "naive.py").naive_chunk_linear_attn

    def full() -> Tensor:
        result: Tensor = pattern(q, k, v, scale=1 / D_HEAD, use_norm=False)
        return result

    def chunks() -> Tensor:
        products = ((x[..., None] * x[..., None, :]).flatten(-2) for x in (q, k))
        given = (x.transpose(1, 2) for x in (*products, v))
        result: Tensor = linear(*given, scale=scale).transpose(1, 2)
        return result

    custom = partial(bilinear_attention, q, k, v)
    for name, call in (("naive_parallel_rebased", full), ("naive_chunk_linear_attn", chunks)):
        peer = f"flash-linear-attention, `{name}`"
        rows.append(compare(f"squared attention, {size}", peer, call, custom, relative))
    return rows


def processing() -> list[Row]:
    """Time folding norms and centring of a model with random weights, time and peak of memory."""
    TransformerBridge: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
    special = {f"{name}_token": name for name in ("bos", "eos", "pad", "unk")}
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(special.values())}, "unk"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    grouped: dict[str, Any] = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    }
    llama: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        **grouped,
    }
    rows = []
    for name, config in (
        ("GPT-2 small", transformers.GPT2Config()),
        ("a Llama of its size", transformers.LlamaConfig(**llama)),
    ):
        made = transformers.AutoModelForCausalLM.from_config(config).eval()
        _uneven_norms(made)
        megabytes = sum(part.numel() * part.element_size() for part in made.parameters()) / 2**20
        times, peaks, changes = [], [], []
        with tempfile.TemporaryDirectory() as folder:
            made.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            del made
            for _ in range(TURNS + 1):
                bridge = TransformerBridge.boot_transformers(folder, device="cpu")
                _in_memory(bridge.original_model)
                before = _outputs(bridge)
                theirs = partial(bridge.enable_compatibility_mode, True)
                peak, ((taken,),) = peak_above(partial(by_turns, theirs, turns=1))
                changes.append(float((_outputs(bridge) - before).abs().max()))
                del bridge, theirs
                model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
                _in_memory(model)
                custom = partial(process, model, in_place=True)
                own_peak, ((plain,),) = peak_above(partial(by_turns, custom, turns=1))
                del model, custom
                times.append((taken, plain))
                peaks.append((peak, own_peak))
        most, own_most = (statistics.median(side) for side in zip(*peaks[1:], strict=True))
        memory = f"{most:.0f} and {own_most:.0f} MB above the model's {megabytes:.0f} MB"
        agrees = f"log-probabilities change by {max(changes):.0e}; {memory}"
        peer = "TransformerLens, `enable_compatibility_mode`"
        rows.append(show(f"weight processing of {name}", peer, times[1:], agrees))
    return rows


def _uneven_norms(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if "norm" in name or "ln_" in name:
            weight.data.uniform_(0.5, 1.5)


def _in_memory(model: nn.Module) -> None:
    """Copy the weights from the file that is mapped to memory, for peaks to count alike."""
    for weight in model.parameters():
        weight.data = weight.data.clone()


@torch.no_grad()
def _outputs(model: Any) -> Tensor:
    logits: Tensor = model(torch.arange(16)[None] % 4)
    return logits.log_softmax(-1)


def main() -> None:
    """Print the table, and the missing projects of absent rows, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, where in CLONES.items():
        parser.add_argument(f"--{name}", type=Path, help=f"folder of a clone of {where}")
    parser.add_argument("--write", action="store_true", help="to results/peers.json")
    given = vars(parser.parse_args())
    recording, rows = Recording() if given["write"] else None, []
    folders = {name: given[name.replace("-", "_")] for name in CLONES}
    print(machine())
    print("| what | the peer | its time | bilens | ratio | agreement | wins |")
    print("|---|---|---|---|---|---|---|")
    if folder := folders["bilinear-decomposition"]:
        rows += classifiers(folder)
    with torch.no_grad():
        rows.append(whole_svd())
        if folder := folders["tensor-similarity"]:
            rows += similarity(folder)
        for length in (256, 4096):
            rows += attention(length, folders["flash-linear-attention"])
    if importlib.util.find_spec("transformer_lens"):
        rows += processing()
    else:
        print("without TransformerLens: pip install transformer-lens")
    for name, folder in folders.items():
        if not folder:
            print(f"without {name}: git clone https://{CLONES[name]}, and --{name} FOLDER")
    if recording is not None:
        recording.write(
            "peers",
            title="Beside other projects",
            command="python -m benchmarks.peers --write",
            rows=rows,
            settings={
                **{"images": IMAGES, "pixels": PIXELS, "classes": CLASSES, "layers": [1, 2]},
                **{"batch": [100, 2048], "widths": [48, 100, 256, WIDTH]},
                **{"tokens": [64, 256, 1024, 4096], "heads": HEADS, "d_head": D_HEAD},
                **{"turns": TURNS, "low and high": "least and most of the turns"},
            },
        )


if __name__ == "__main__":
    main()
