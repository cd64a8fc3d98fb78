"""Teach the layers of a model one by one, through the Trainer, on inputs that are kept in files.

Only the weights of one layer learn at a time, so the others need not be in memory. A model opened
with `low_memory` leaves them in its files, and the streams of all texts are in a file too.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from bilens.data import Corpus
from bilens.errors import BilensError, CheckpointError
from bilens.files import UNFINISHED, file_errors, remove_unfinished, write_safetensors
from bilens.hooks import first_call, hooked
from bilens.nn.checkpoint import WEIGHTS_NAME
from bilens.processes import from_main_process, this_process
from bilens.train.run_directory import CHECKPOINTS, TRAINING_NAME, check_free, is_begun, open_run
from bilens.train.settings import Distillation
from bilens.train.trainer import Stage
from bilens.transformer.maps import working_dtype

BATCH = 8
"""Texts that run at once."""
CHUNK = 4096
"""Rows whose hidden units are in memory at once."""
ZEROS = bytes(2**20)


class LayerStreams:
    """Texts that run through a model one layer at a time, so that layers may change in between.

    Positions and masks depend on the size of the batch and not on its texts, so they are recorded
    once for each size. Streams are on the CPU, mapped from files in a folder, whatever the model's
    device is; `stream` is the input of the current layer.
    """

    stream: Float[Tensor, "texts time d_model"]

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        texts: Int[Tensor, "texts time"],
        folder: Path,
    ) -> None:
        self._layers, self._folder = list(layers), folder
        self._shape, self._device = tuple(texts.shape), next(model.parameters()).device
        self._beside: dict[int, list[tuple[Any, Any]]] = {}
        self._number = 0
        for start in range(0, len(texts), BATCH):
            streams = self._enter(model, texts[start : start + BATCH].to(self._device))
            if start == 0:
                self.stream = self._mapped("stream", streams)
            self.stream[start : start + BATCH] = streams

    @torch.no_grad()
    def seen(
        self, module: nn.Module
    ) -> tuple[Float[Tensor, "rows d_in"], Float[Tensor, "rows d_out"]]:
        """Return the inputs and outputs of a module of the current layer, for all tokens."""
        parts: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Tensor, ...], __: Any, output: Tensor) -> None:
            parts.extend([args[0], output])

        with hooked(after=[(module, keep)]):
            for start in range(0, len(self.stream), BATCH):
                parts.clear()
                self._run(self.stream[start : start + BATCH])
                if start == 0:
                    columns = [self._mapped(f"seen{n}", part) for n, part in enumerate(parts)]
                for target, part in zip(columns, parts, strict=True):
                    target[start : start + BATCH] = part
        inputs, outputs = (part.flatten(0, 1) for part in columns)
        return inputs, outputs

    @torch.no_grad()
    def advance(self) -> None:
        """Move the texts past the current layer."""
        for part in self.stream.split(BATCH):
            part.copy_(self._run(part))
        self._number += 1

    def _run(self, stream: Tensor) -> Tensor:
        args, options = self._beside[len(stream)][self._number]
        output = self._layers[self._number](stream.to(self._device), *args, **options)
        return output[0] if isinstance(output, tuple) else output

    def _mapped(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor in a file, for all texts, with the width and type of one for a batch."""
        shape = (*self._shape, like.shape[-1])
        path, size = self._folder / name, math.prod(shape)
        if not path.exists():
            _reserve(path, size * like.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=like.dtype).view(shape)

    def _enter(self, model: PreTrainedModel, texts: Int[Tensor, "texts time"]) -> Tensor:
        """Return the first layer's input stream; record the arguments of layers at a new size."""
        run = partial(model.base_model, texts, use_cache=False)
        if len(texts) not in self._beside:
            self._beside[len(texts)] = arguments = []

            def keep(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
                arguments.append((args[1:], options))

            with hooked(before=[(layer, keep) for layer in self._layers]):
                run()
        return first_call(self._layers[0], run)[0][0]


def _reserve(path: Path, n_bytes: int) -> None:
    """Make a file of some size whose room on the disk is taken.

    Without room a write to a mapped file would end the process.
    """
    with file_errors(path), path.open("wb") as file:
        for start in range(0, n_bytes, len(ZEROS)):
            file.write(ZEROS[: n_bytes - start])


class TrainingRows(Dataset[dict[str, Any]]):
    """Rows of several tensors, read together."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitems__(self, numbers: list[int]) -> dict[str, Any]:
        return {"rows": tuple(column[numbers] for column in self.columns)}

    def chunks(self, device: torch.device) -> Iterator[list[Tensor]]:
        """Yield `CHUNK` rows of each column at a time, on a device and in the last one's dtype."""
        for parts in zip(*(column.split(CHUNK) for column in self.columns), strict=True):
            yield [parts[0].to(device), *(part.to(device, parts[-1].dtype) for part in parts[1:])]


class StudentPart(nn.Module):
    """A part of a model that learns by itself, in the form that the Trainer expects."""

    def __init__(self, module: nn.Module, loss: Callable[..., Float[Tensor, ""]]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, rows: tuple[Tensor, ...], *, return_loss: bool = True) -> dict[str, Tensor]:
        """Return the loss; `return_loss` tells the Trainer that rows need no labels."""
        return {"loss": self.loss(self.module, *rows)}


def teach(
    module: nn.Module,
    loss: Callable[..., Float[Tensor, ""]],
    rows: TrainingRows,
    training: Distillation,
    folder: Path,
    name: str,
    *,
    learned: Callable[[Any], Iterable[nn.Parameter]] = nn.Module.parameters,
) -> float:
    """Teach a module by a loss, through the Trainer, in float32 or float64; return the last loss.

    Args:
        module: the module; its weights change in place.
        loss: function of the module and a batch of each column.
        rows: inputs of the loss, a row for each sample.
        training: settings; without steps nothing is done, and the loss is NaN.
        folder: the run directory. A training that was begun there is resumed.
        name: for the progress display.
        learned: function that returns the weights to train; all by default.

    Raises:
        BilensError: the training diverged.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.
    """
    if not training.steps:
        return math.nan
    weight = next(module.parameters())
    training = replace(training, batch_size=min(training.batch_size, len(rows)))
    student = deepcopy(module).to(working_dtype(weight.dtype)).requires_grad_(False)
    for parameter in learned(student):
        parameter.requires_grad_()
    first = TrainingRows(*(column[: training.batch_size] for column in rows.columns))
    corpus: Any = Corpus(f"inputs of {name}", None, rows, first)  # type: ignore[arg-type]
    stage = Stage(
        name,
        StudentPart(student, loss),
        corpus,
        training,
        training.steps,
        arguments={
            "lr_scheduler_type": "cosine",
            "adam_beta2": 0.99,
            "remove_unused_columns": False,  # a batch has no columns
        },
        options={"data_collator": lambda batch: batch},
    )
    history = stage.run(folder, resume=is_begun(folder), use_cpu=weight.device.type == "cpu")
    with torch.no_grad():
        for own, target in zip(module.parameters(), student.parameters(), strict=True):
            # Under FSDP a process holds a part of each weight.
            own.copy_(target.full_tensor() if isinstance(target, DTensor) else target)
    return next(record["eval_loss"] for record in reversed(history) if "eval_loss" in record)


def sharing_copy(model: Any) -> Any:
    """Return a copy of a model with the same weights in memory, until a layer gets its own."""
    return deepcopy(model, {id(weight): weight for weight in model.parameters()})


def learn_layer(
    run: Path | None,
    folder: Path,
    layer: int,
    module: nn.Module,
    learn: Callable[[Path], dict[str, float]],
) -> dict[str, float]:
    """Let a module of a layer learn on copies of its weights, and return its errors.

    Other models that share the weights stay unchanged. `run` keeps the layer: if it learned there
    before, it is opened. Without it, `learn` trains the module in `folder`.
    """
    place, state = (run or folder) / f"layer-{layer:03}", this_process()
    file = place.with_name(f"{place.name}.safetensors")
    if run is None or not file.is_file():
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                copy = nn.Parameter(weight.detach().clone(), weight.requires_grad)
                part.register_parameter(name, copy)
        errors = learn(place)
        if run is None:
            return errors
        state.wait_for_everyone()  # all have seen that the file is not there yet
        if state.is_main_process:
            texts = {name: str(value) for name, value in errors.items()}
            write_safetensors(file, module.state_dict(), texts)
            shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)
            (place / WEIGHTS_NAME).unlink(missing_ok=True)
        state.wait_for_everyone()
    like = next(module.parameters())
    # On a CPU the weights stay in the file, mapped, so that only one layer takes memory. Learning
    # may have added biases.
    for name, values in load_file(file, str(like.device)).items():
        owner, _, leaf = name.rpartition(".")
        weight = nn.Parameter(values, like.requires_grad)
        module.get_submodule(owner).register_parameter(leaf, weight)
    with safe_open(file, "pt") as tensors:
        return {name: float(value) for name, value in tensors.metadata().items()}


@contextmanager
def open_stages(
    run: Path, settings: Mapping[str, Any], texts: Tensor | None, *, resume: bool
) -> Iterator[Path]:
    """Begin or resume the stages of a run, and yield their folder, locked inside the block.

    Stages have a record as trainings have: a resumed run needs the same settings and texts.

    Raises:
        CheckpointError: as in `open_run`, or the folder is of an earlier version.
    """
    folder = run / "stages"
    content = b"" if texts is None else texts.cpu().contiguous().numpy().data
    digest = sha256(content).hexdigest()
    # The trainings of the stages send their own records to the tracker.
    record = {"data": "texts", "data_digest": digest, **settings, "report_to": "none"}
    with ExitStack() as stack:

        def begin() -> None:
            if not resume:
                check_free(run)
            if not is_begun(folder) and any(folder.rglob("*.safetensors")):
                raise CheckpointError(
                    f"{folder} is of an earlier version and cannot be resumed; delete it, or "
                    "choose another --output"
                )
            stack.enter_context(open_run(folder, record, resume=resume))
            # Of a killed process: streams, and files of layers.
            for stage in filter(Path.is_dir, folder.iterdir()):
                remove_unfinished(stage)

        from_main_process(begin)
        try:
            yield folder
        except BilensError as error:
            # A model or text that is refused before anything was learned: as if it had not begun.
            # A full disk is another matter: there the run is resumed.
            is_refusal = not isinstance(error, CheckpointError)
            if (
                is_refusal
                and this_process().is_main_process
                and not any(folder.rglob("*.safetensors"))
            ):
                (folder / TRAINING_NAME).unlink(missing_ok=True)
            raise


@contextmanager
def working_folder(run: Path | None) -> Iterator[Path]:
    """Yield a temporary folder for streams, on the disk of the run."""
    if run is not None:
        run.mkdir(parents=True, exist_ok=True)
    # Windows does not remove mapped files.
    with TemporaryDirectory(prefix=UNFINISHED, dir=run, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
