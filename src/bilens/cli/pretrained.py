"""Commands on pretrained models: to process, anneal, export, linearise, tensorise, and spectra."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import bilens
from bilens.cli.console import (
    DataDir,
    Device,
    ModelName,
    RunDir,
    check_own,
    choose_device,
    out,
    show_table,
)
from bilens.errors import BilensError
from bilens.options import StepName, layer_of, token_list
from bilens.sections import signed
from bilens.settings import CheckedSettings, Count, Size
from bilens.train.settings import AnnealTraining, Distillation, TensoriseTraining

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class OnPretrained(CheckedSettings):
    """Settings of every command that changes a pretrained model.

    Attributes:
        model: folder of a Hugging Face or bilens model, the name of a repository, or a .gguf file.
        data_dir: folder that holds tinystories; by default the environment variable BILENS_DATA,
            and without that the Hugging Face hub.
    """

    model: ModelName
    data_dir: DataDir = None
    output: Path | None = None
    kind: ClassVar[str]

    def open(self, **options: Any) -> tuple[Any, Any]:
        model = bilens.convert.open_model(self.model, **options)
        return model, bilens.convert.open_tokenizer(self.model, model)

    @property
    def place(self) -> Path:
        return Path("runs") / f"{self.kind}-{Path(self.model).stem}"

    def texts(self, name: str, tokenizer: Any, length: int, **options: Any) -> "bilens.data.Corpus":
        """Load texts in the model's tokens; one process fills the cache, and the others open it."""
        from bilens.processes import this_process

        with this_process().main_process_first():
            corpus = bilens.data.load_documents(
                name, tokenizer, n_ctx=length, data_dir=self.data_dir, **options
            )
            len(corpus.train)  # tokenized on this first use
            return corpus


@dataclass(frozen=True)
class Process:
    """Fold norms and biases into the weights and centre them, so that they are easier to read.

    The model's function stays the same; the largest change of a log-probability on random
    tokens is measured and printed. For bilens transformers, GPT-2, GPT-NeoX (Pythia), Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3, Granite, OLMo 2, Helium, GLM and Cohere 2.
    Mixtures of experts may be Mixtral, OLMoE or Qwen 3 MoE.

        bilens process runs/grammar
        bilens process gpt2 --steps fold_norms --output gpt2-folded

    Attributes:
        model: folder of a Hugging Face or bilens model, the name of a repository, or a .gguf file.
        steps: which to apply; by default every step that leaves the model's function unchanged.
        output: folder for the processed model and processing.json; by default
            runs/processed-NAME.
    """

    model: ModelName
    steps: tuple[StepName, ...] = ()
    output: Path | None = None
    device: Device = "auto"

    @property
    def place(self) -> Path:
        return Path("runs") / f"processed-{Path(self.model).stem}"

    def run(self) -> dict[str, Any]:
        from bilens.files import write_json

        model: Any = bilens.convert.open_model(self.model).to(choose_device(self.device))  # type: ignore[arg-type]
        tokenizer = bilens.convert.find_tokenizer(self.model, model)
        # In place: two copies of a large model may not fit.
        model, report = bilens.convert.process(model, self.steps or None, in_place=True)
        output = self.output or self.place
        bilens.convert.save_model(output, model, tokenizer)
        write_json(output / "processing.json", report.record())
        done = {step: f"{len(folded)} times" for step, folded in report.folded.items()}
        refused = {step: f"no: {reason}" for step, reason in report.refused.items()}
        show_table(("step", "applied"), {**done, **refused}.items(), words=2)
        if report.untied:
            out.print("embedding and unembedding were one matrix and are two now")
        if not report.loads_in_transformers:
            out.print(
                f"{len(report.added_biases)} maps have a bias that plain transformers has no room "
                "for; open the model with bilens.load, or choose other --steps"
            )
        out.print(f"largest change of a log-probability: {report.change:.1e}")
        out.print(f"model: {output}")
        return {"model": output, **report.record()}


@dataclass(frozen=True, kw_only=True)
class Anneal(OnPretrained):
    """Train a pretrained gated model further while its activation becomes a straight line.

    The activation becomes Swish, whose beta falls from the model's (1 for SiLU, 1.702 for
    GELU) to 0; the model is then bilinear. The run directory holds the model with its beta,
    training.json, metrics.jsonl and checkpoints. For several processes write `torchrun
    --nproc-per-node=N -m bilens` instead of `bilens`, or `accelerate launch` for FSDP.

        bilens anneal HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/annealed

    Attributes:
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        output: run directory; by default runs/annealed-NAME.
        shortest: keep only texts of this many tokens up to length, each on its own (384 in the
            paper); by default all are joined and cut.
        resume: continue an earlier annealing in output.
        device: auto takes a GPU if the machine has one; cpu ignores it.
    """

    data: str
    shortest: Count | None = None
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"
    training: AnnealTraining = field(default_factory=AnnealTraining)
    kind = "annealed"

    def run(self) -> dict[str, Any] | None:
        from bilens.processes import this_process
        from bilens.train import linearise

        cpu, output = self.device == "cpu", self.output or self.place
        state = this_process(cpu=cpu)
        model, tokenizer = self.open()
        corpus = self.texts(self.data, tokenizer, self.training.length, shortest=self.shortest)
        history = linearise.anneal(
            model, corpus, self.training, output, resume=self.resume, use_cpu=cpu
        )
        if not state.is_main_process:
            return None
        # Not every record of the history is of a validation.
        last = next(record for record in reversed(history) if "eval_loss" in record)
        beta, loss = last["beta"], last["eval_loss"]
        out.print(f"{output}: beta {beta:.4g}, validation loss {loss:.4f} nats a token")
        return {"run": output, "beta": beta, "validation_loss": loss}


@dataclass(frozen=True)
class Export:
    """Save an annealed model as an ordinary Hugging Face checkpoint with hidden_act "linear".

    Plain transformers loads and runs it, without bilens.

        bilens export runs/annealed --output bilinear

    Attributes:
        run_dir: directory that `bilens anneal` wrote.
        output: folder for the model; by default RUN/bilinear.
    """

    run_dir: RunDir
    output: Path | None = None

    @property
    def place(self) -> Path:
        return self.run_dir / "bilinear"

    def run(self) -> dict[str, Any]:
        model = bilens.convert.open_model(self.run_dir)
        tokenizer = bilens.convert.open_tokenizer(self.run_dir, model)
        bilens.convert.make_bilinear(model)
        output = self.output or self.place
        bilens.convert.save_model(output, model, tokenizer)
        out.print(f"model: {output}")
        return {"model": output}


@dataclass(frozen=True, kw_only=True)
class InStages(OnPretrained):
    """Settings of commands that change a model in stages and compare it with the original.

    Attributes:
        data: tinystories, or a text, parquet or jsonl file, or a folder of them.
        held_out: tokens of other texts of each name to measure on.
        resume: continue from the last finished layer or checkpoint in output.
        device: auto takes a GPU if the machine has one; cpu ignores it.
        low_memory: leave weights and streams in files, except for those of one layer.
    """

    data: tuple[str, ...] = ()
    held_out: Count = 16_384
    resume: bool = False
    device: Literal["auto", "cpu"] = "auto"
    low_memory: bool = False

    def begin(self, length: int) -> tuple[Any, Any, list[Any], "dict[str, torch.Tensor]"]:
        """Return the model, its tokenizer, texts to learn from, and texts to measure on."""
        from bilens.processes import this_process

        this_process(cpu=self.device == "cpu")
        model, tokenizer = self.open(low_memory=self.low_memory)
        corpora = [self.texts(name, tokenizer, length) for name in self.data]
        # At least one text, however long texts are.
        n_texts = max(1, self.held_out // length)
        names = [Path(c.name).name for c in corpora]  # a card shows no folder of this machine
        if len(set(names)) < len(names):
            raise BilensError(f"--data has names {names}, expected each once")
        validated = [c.validation[:n_texts]["input_ids"] for c in corpora]
        learned = [c.train[:]["input_ids"] for c in corpora]
        held_out = dict(zip(names, validated, strict=True))
        return model.to(choose_device(self.device)), tokenizer, learned, held_out

    def show(self, tensorised: Any, output: Path) -> Any:
        """Print the agreement with the original after each stage, and return it."""
        frame = tensorised.frame()
        rows = [
            (stage, text, f"{loss:.4f}", f"{rise:+.4f}", f"{kl:.4f}", f"{top1:.1%}")
            for stage, text, loss, rise, kl, top1 in frame.itertuples(index=False)
        ]
        show_table(("stage", "text", "loss", "rise", "KL", "same top token"), rows, words=2)
        out.print(f"model: {output}")
        return frame


@dataclass(frozen=True, kw_only=True)
class Linearise(InStages):
    """Make the gates of a pretrained gated model linear, so that its layers are bilinear.

    Each gate becomes the line nearest to it on a text, and each down map is fitted to the
    layer's output. This is done in closed form, layer by layer. Prints the loss with only one layer
    linear at a time and with all of them. It is the first stage of `bilens tensorise`.

        bilens linearise HuggingFaceTB/SmolLM2-135M --data stories.txt --budget 0.1

    Attributes:
        output: folder for the model; by default runs/linear-NAME. Layers that have learned are in
            its folder stages.
        layers: which layers, by their numbers; all by default.
        budget: most nats a token that the loss may rise; layers that cost most are left gated.
        steps: of Adam, by which each layer then learns, by itself, to return its former output.
        tokens: to fit on, as 8192, 32K or 1M.
        length: tokens of a text.
    """

    data: tuple[str, ...] = field()  # the commands on own text need none
    held_out: Count = 8192
    layers: tuple[int, ...] | None = None
    budget: float | None = None
    steps: int = 0
    tokens: Count = 8192
    length: Size = 256
    kind = "linear"

    def run(self) -> dict[str, Any] | None:
        import torch

        from bilens.processes import this_process
        from bilens.train import layers, linearise, tensorise
        from bilens.train.trainer import shape_of

        how, output = Distillation(steps=self.steps), self.output or self.place
        model, tokenizer, learned, held_out = self.begin(self.length)
        if self.tokens < self.length:
            raise BilensError(f"--tokens={self.tokens}, expected at least --length={self.length}")
        texts = tensorise.interleaved(learned)[: self.tokens // self.length]
        record = {**asdict(how), "layers": self.layers, "budget": self.budget}
        record["model"] = shape_of(model.config)
        measurements = tensorise.Measurements(output, layers.sharing_copy(model), held_out)
        with layers.open_stages(output, record, texts, resume=self.resume) as folder:
            measurements.add("original", model)
            linearised = linearise.linearise(
                model,
                texts,
                torch.cat(list(held_out.values())),
                self.layers,
                budget=self.budget,
                distillation=how,
                run=folder / "gates",
            )
        measurements.add("gates", model)
        if not this_process().is_main_process:
            return None
        bilens.convert.save_model(output, model, tokenizer)
        rows = []
        for layer, loss in linearised.alone.items():
            fit = linearised.fits.get(layer)
            distance = "" if fit is None else f"{fit.distance:.3f}"
            rise = signed(loss - linearised.before, ".4f")
            rows.append((str(layer), "yes" if fit else "no", f"{loss:.4f}", rise, distance))
        header = ("layer", "linear", "loss alone", "rise", "distance of the MLP's output")
        show_table(header, rows, words=2)
        worst = sorted(linearised.alone, key=lambda layer: -linearised.alone[layer])[:5]
        out.print(f"layers that suffer most: {', '.join(map(str, worst))}")
        out.print(
            f"{len(linearised.layers)} layers linear: {linearised.after:.4f} nats a token, "
            f"{linearised.before:.4f} before"
        )
        return {
            "model": output,
            "layers": linearised.layers,
            "loss_before": linearised.before,
            "loss": linearised.after,
            "loss_alone": linearised.alone,
            "distances": {layer: fit.distance for layer, fit in linearised.fits.items()},
            "stages": self.show(measurements.finish(model), output),
        }


@dataclass(frozen=True, kw_only=True)
class Tensorise(InStages):
    """Turn a pretrained Llama-like model into a tensor: linear gates, attention without softmax.

    Gates become lines, attention becomes squared with rows divided by their sum, and then all
    weights learn the next-token distribution of the original. The text is drawn from the model
    itself. Each stage is saved in the folder stages of the run directory, and its loss is printed.

        bilens tensorise HuggingFaceTB/SmolLM2-135M --data stories.txt --output runs/tensor

    Attributes:
        data: texts to measure on, and to learn from besides own text: tinystories, or a text,
            parquet or jsonl file, or a folder of them. Without any, held-out own text is measured.
        output: run directory; by default runs/tensor-NAME.
    """

    training: TensoriseTraining = field(default_factory=TensoriseTraining)
    kind = "tensor"

    def run(self) -> dict[str, Any] | None:
        from bilens.processes import this_process
        from bilens.train import tensorise

        output = self.output or self.place
        model, tokenizer, learned, held_out = self.begin(self.training.length)
        tensorised = tensorise.tensorise(
            model,
            tokenizer,
            held_out,
            self.training,
            output,
            texts=tensorise.interleaved(learned) if learned else None,
            resume=self.resume,
            use_cpu=self.device == "cpu",
        )
        if not this_process().is_main_process:
            return None
        return {"model": output, "stages": self.show(tensorised, output)}


@dataclass(frozen=True)
class Spectra:
    """Find the top eigenpairs of a bilinear layer along the logit of every token, and save them.

    Writes spectra.json and spectra-NNNNN.safetensors, each the spectra of some tokens; what is
    there already is kept. For several devices write `torchrun --nproc-per-node=N -m bilens`
    instead of `bilens`.

        bilens spectra runs/annealed --layer 3
        bilens spectra runs/annealed --layer 3 --tokens cat,dog --top 4 --json

    Attributes:
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

    model: ModelName
    layer: int | None = None
    tokens: str = "all"
    top: int = 8
    batch: int = 256
    tolerance: float = 1e-4
    output: Path | None = None
    device: Device = "auto"
    low_memory: bool = False

    def run(self) -> dict[str, Any] | None:
        from bilens.processes import this_process
        from bilens.read.language import token_names

        model: Any = bilens.load(
            self.model, device=choose_device(self.device), low_memory=self.low_memory
        )
        if not isinstance(model, bilens.ResidualModel):
            raise BilensError(
                f"{self.model} holds {type(model).__name__}, and this command reads language "
                "models; `bilens eigenvectors` reads classifiers"
            )
        layer = layer_of(model, self.layer)
        numbers = self._numbers(model)
        output = self.output or Path("runs") / f"spectra-{Path(self.model).stem}-{layer}"
        if self.output is None:
            check_own(output)
        bilens.convert.write_spectra(
            model.mlp(layer),
            model.parts.logit_weights(numbers)[0].T,
            output,
            names=numbers,
            k=self.top,
            batch_size=self.batch,
            tolerance=self.tolerance,
        )
        state = this_process()
        if state.num_processes > 1:
            out.print(f"{output}: the part of process {state.process_index} is done")
            return None
        # Read back from the files: some may be of an earlier run.
        names, spectrum = bilens.convert.read_spectra(output)
        values, residuals = spectrum.values.tolist(), spectrum.residuals.amax(-1).tolist()
        rows = list(zip(map(int, names), token_names(model, names), values, residuals, strict=True))
        cells = [(name, "  ".join(map(signed, v)), f"{r:.1e}") for _, name, v, r in rows[:10]]
        show_table(("token", "eigenvalues", "largest residual"), cells, words=2)
        out.print(f"{len(names):,} tokens: {output}")
        keys = ("number", "token", "eigenvalues", "largest_residual")
        return {"output": output, "tokens": [dict(zip(keys, row, strict=True)) for row in rows]}

    def _numbers(self, model: "bilens.ResidualModel") -> list[int]:
        """Return the tokens' numbers: all, or those of names or numbers."""
        from bilens.checks import check_index

        if self.tokens == "all":
            return list(range(model.parts.unembed.n_out))
        words = token_list(self.tokens)
        known = model.tokenizer.get_vocab() if model.tokenizer is not None else {}
        return [
            # Python refuses to read numbers of thousands of digits.
            check_index("tokens", int(name[:20]), model.vocab_size, "the model's tokens")
            if name.isdecimal() and name not in known
            else model.token(name)
            for name in words
        ]
