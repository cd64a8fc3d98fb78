"""Anneal a pretrained gated model into a bilinear one, through the Hugging Face Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from bilens.checks import check_weights
from bilens.convert import Swish, give_swish
from bilens.data import Corpus
from bilens.train.settings import SCHEDULES, AnnealTraining
from bilens.train.trainer import Stage, check_vocabulary

DECAYS = {"none": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def anneal(
    model: PreTrainedModel,
    corpus: Corpus,
    training: AnnealTraining,
    run: Path,
    *,
    schedule: Callable[[float], float] | None = None,
    resume: bool = False,
    use_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Train a gated model in place while the beta of its Swish falls to 0, and save it in `run`.

        beta(step) = beta_0 schedule(step / (annealing * steps)),  beta_0 = 1 (SiLU), 1.702 (GELU)

    The beta depends only on the number of the step, so a resumed training has the same values.
    Processes, ctrl-C and finished runs are as in `train_language`.

    Args:
        model: any causal language model whose MLPs are up(x) * activation(gate(x)).
        corpus: texts in its tokens.
        training: settings of the training.
        run: the directory to write to; checkpoints go below it.
        schedule: function from the finished share of the annealing to the remaining share of beta;
            used in place of `training.schedule`.
        resume: resume from the newest intact checkpoint in `run`.
        use_cpu: ignore GPUs.

    Returns:
        The metrics as they were logged: the losses, each with the beta.

    Raises:
        BilensError: the model is not gated, the corpus does not fit it, the batch cannot be shared
            out evenly, or the training diverged.
        CheckpointError: a weight is NaN or infinite; or as `train_language`.
        KeyboardInterrupt: ctrl-C, after a checkpoint was saved.

    Source: Pearce et al. 2024, section 6.3 and appendix D.
    """
    check_weights(model)
    check_vocabulary(corpus, model.config.vocab_size)
    shape = model.config.to_diff_dict()
    shape.pop("transformers_version", None)
    settings: dict[str, Any] = {"model": shape}
    if schedule is not None:
        settings["schedule"] = getattr(schedule, "__name__", repr(schedule))
    fall = _Fall(give_swish(model), schedule or SCHEDULES[training.schedule], training)
    stage = Stage(
        "annealing",
        model,
        corpus,
        training,
        training.steps,
        arguments={
            "lr_scheduler_type": DECAYS[training.decay],
            "activation_checkpointing": training.checkpointing,
        },
        settings=settings,
        # The fall of beta comes first, so that whatever follows a step has the next beta.
        options={"extra": lambda: {"beta": fall.swish.beta}, "callbacks": [fall]},
    )
    history = stage.run(run, resume=resume, use_cpu=use_cpu)
    fall.set(training.steps)
    model.eval()
    return history


class _Fall(TrainerCallback):
    """Callback that sets beta for the next step."""

    def __init__(
        self, swish: Swish, schedule: Callable[[float], float], training: AnnealTraining
    ) -> None:
        self.swish, self.schedule = swish, schedule
        self.start, self.steps = swish.beta, training.annealing * training.steps

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.set(state.global_step)

    on_step_end = on_train_begin

    def set(self, step: int) -> None:
        self.swish.beta = self.start * self.schedule(min(1.0, step / self.steps))
