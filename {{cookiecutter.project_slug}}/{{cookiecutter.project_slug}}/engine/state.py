"""Engine: all that a training run changes, which is all that a checkpoint holds."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
{% if cookiecutter.amp == "fp16" %}
from torch.amp.grad_scaler import GradScaler
{% endif %}
from torch.optim import Optimizer
{% if cookiecutter.ema %}
from torch.optim.swa_utils import AveragedModel
{% endif %}

from ..config import Config
from .distributed import World
from .launch import Refused
from .levers import memory_format
from .sampler import Plan

logger = logging.getLogger(__name__)

Files = dict[str, dict[str, Any]]
"""What a checkpoint holds, by file: tensors and plain numbers in dicts and lists."""


@dataclass
class Progress:
    """Where the run stands. Counted for all ranks together, so no rank's number comes in."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs completed."""
    position: int = 0
    """Samples consumed in the epoch that runs."""
    samples: int = 0
    """Samples consumed in all."""
    skipped: int = 0
    """Windows that gave no step: no finite gradient, or no targets."""
    evaluated_step: int = 0
    """The last step that was evaluated."""

    def consume(self, num_samples: int, epoch_size: int) -> None:
        """Account for one window, whether it gave a step or not."""
        self.samples += num_samples
        self.position += num_samples
        if self.position >= epoch_size:
            self.epoch, self.position = self.epoch + 1, 0


@dataclass
class TrainState:
    """The parts that training changes, in the form in which they are saved and loaded."""

    module: nn.Module
    """The model itself, never a wrapper: so names in a checkpoint are plain."""
    optimizer: Optimizer
    {% if cookiecutter.amp == "fp16" %}
    scaler: GradScaler
    {% endif %}
    {% if cookiecutter.ema %}
    ema: AveragedModel
    """Averaged weights; its buffers are copies of the model's."""
    {% endif %}
    progress: Progress = field(default_factory=Progress)

    def files(self) -> Files:
        """What rank 0 writes: weights that load with `load_state_dict`, and the rest."""
        training: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            {% if cookiecutter.amp == "fp16" %}
            "scaler": self.scaler.state_dict(),
            {% endif %}
            {% if cookiecutter.ema %}
            "ema_updates": int(self.ema.n_averaged),  # 0 would start the average afresh
            {% endif %}
        }
        return {
            "model.pt": dict(self.module.state_dict()),
            {% if cookiecutter.ema %}
            "ema.pt": dict(self.ema.module.state_dict()),
            {% endif %}
            "training.pt": training,
        }

    def load(self, files: Files, progress: dict[str, int]) -> None:
        """Take over what a checkpoint holds.

        Raises:
            Refused: it belongs to another model.
        """
        training = files["training.pt"]
        try:
            self.module.load_state_dict(files["model.pt"])
            self.optimizer.load_state_dict(training["optimizer"])
        except (RuntimeError, ValueError) as error:
            words = " ".join(str(error).split())
            raise Refused(f"the checkpoint does not fit this model: {words}") from None
        {% if cookiecutter.amp == "fp16" %}
        if training.get("scaler"):
            self.scaler.load_state_dict(training["scaler"])
        else:
            logger.warning("the checkpoint holds no loss scale: starting with the default one")
        {% endif %}
        {% if cookiecutter.ema %}
        if "ema.pt" in files:
            self.ema.module.load_state_dict(files["ema.pt"])
            self.ema.n_averaged.fill_(training["ema_updates"])
        else:
            logger.warning("the checkpoint holds no EMA: the average starts from its weights")
            self.ema.module.load_state_dict(files["model.pt"])
        {% endif %}
        self.progress = Progress(**progress)


@dataclass(frozen=True)
class Job:
    """What the parts of a run share; built once."""

    config: Config
    world: World
    plan: Plan
    state: TrainState
    model: nn.Module
    """`state.module` as wrapped by DDP: training forwards go through it, evaluation does not."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch.float64 if self.config.dtype == "float64" else torch.float32

    @property
    def memory_format(self) -> torch.memory_format:
        """How tensors with four dimensions lie in memory."""
        return memory_format(self.config)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs: what the learning rate's schedule spans."""
        return self.plan.steps_per_epoch * self.config.epochs

    def is_finished(self) -> bool:
        """Whether no step is left."""
        progress, max_steps = self.state.progress, self.config.max_steps
        return progress.epoch >= self.config.epochs or progress.step >= (max_steps or math.inf)

    def is_due(self, every: int | None) -> bool:
        """Whether what happens every so many steps, and at the end, happens now."""
        return self.is_finished() or (every is not None and self.state.progress.step % every == 0)
