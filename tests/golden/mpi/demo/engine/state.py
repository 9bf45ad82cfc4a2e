"""Engine: all that a training run changes, which is all that a checkpoint holds."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..config import Config, OptimConfig
from . import optim
from .distributed import World
from .launch import Refused
from .levers import memory_format, place
from .pulse import Pulse
from .sampler import Plan
from .stop import Stop

logger = logging.getLogger(__name__)

Parts = dict[str, dict[str, Tensor]]
"""The tensors of a checkpoint by part (`model`, `optimizer`, …), in each by name."""


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
    nonfinite: int = 0
    """Windows without a finite gradient since the last step."""
    evaluated_step: int = 0
    """The last step that was evaluated."""

    def advance(self) -> None:
        """Count an optimizer step that was taken."""
        self.step += 1
        self.nonfinite = 0

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
    ema: AveragedModel
    """Averaged weights; its buffers are copies of the model's."""
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def of(cls, module: nn.Module, config: Config, device: torch.device) -> "TrainState":
        """What trains a new model, which moves to the device in the configured type."""
        module = place(module, config, device)
        return cls(
            module=module,
            optimizer=optim.build_optimizer(module, config.optim),
            ema=AveragedModel(
                module, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay)
            ).requires_grad_(False),
        )

    def parts(self) -> Parts:
        """The tensors, under plain names: `model` loads strictly with `load_state_dict`."""
        return {
            "model": dict(self.module.state_dict()),
            "ema": dict(self.ema.module.state_dict()),
            "optimizer": {
                f"{name}.{key}": value
                for name, key, value in self._optimizer_values()
                if isinstance(value, Tensor)
            },
        }

    def shared_parts(self) -> Parts:
        """The tensors that are equal on all ranks: all but the buffers."""
        buffers = {name for name, _ in self.module.named_buffers()}
        return {
            part: {n: t for n, t in tensors.items() if part == "optimizer" or n not in buffers}
            for part, tensors in self.parts().items()
        }

    def modules(self) -> list[nn.Module]:
        """The model, and what has buffers like it."""
        return [self.module, self.ema.module]

    def numbers(self) -> dict[str, Any]:
        """What is no tensor: it stands in the manifest, and JSON can hold it."""
        groups = self.optimizer.state_dict()["param_groups"]
        return {
            "optimizer": {
                f"{name}.{key}": value
                for name, key, value in self._optimizer_values()
                if not isinstance(value, Tensor)
            },
            "optimizer_groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in groups
            ],
            "ema_updates": int(self.ema.n_averaged),  # 0 would start the average afresh
        }

    def load(self, parts: Parts, numbers: dict[str, Any], progress: dict[str, int]) -> None:
        """Take over what a checkpoint holds.

        Raises:
            Refused: it belongs to another model.
        """
        try:
            self.module.load_state_dict(parts["model"])
            self._load_optimizer(parts.get("optimizer", {}), numbers)  # some optimizers keep none
        except (RuntimeError, ValueError) as error:
            words = " ".join(str(error).split())
            raise Refused(f"the checkpoint does not fit this model: {words}") from None
        if "ema" in parts:
            self.ema.module.load_state_dict(parts["ema"])
            self.ema.n_averaged.fill_(numbers["ema_updates"])
        else:
            logger.warning("the checkpoint holds no EMA: the average starts from its weights")
            self.ema.module.load_state_dict(parts["model"])
            self.ema.n_averaged.fill_(1)  # at 0 the next update would forget them
        self.progress = Progress(**progress)

    def _optimizer_values(self) -> Iterator[tuple[str, str, Any]]:
        """Each value of the optimizer's state, by the name of its parameter and its own."""
        state = self.optimizer.state_dict()["state"]
        for index, name in enumerate(self._optimized()):
            for key, value in sorted(state.get(index, {}).items()):
                yield name, key, value

    def _optimized(self) -> list[str]:
        """The names of the parameters, in the order in which the optimizer numbers them."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def _load_optimizer(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Fill the optimizer. What `OptimConfig` has a field for stays as it is configured now.

        Raises:
            ValueError: it belongs to other parameters, or to another number of groups.
        """
        indices = {name: index for index, name in enumerate(self._optimized())}
        state: dict[int, dict[str, Any]] = {}
        for path, value in {**tensors, **numbers["optimizer"]}.items():
            name, _, key = path.rpartition(".")
            if name not in indices:
                raise ValueError(f"the optimizer has no parameter {name}")
            state.setdefault(indices[name], {})[key] = value
        configured = {setting.name for setting in fields(OptimConfig)} - {"lr"}  # set at each step
        groups = self.optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, numbers["optimizer_groups"], strict=True):
            kept = {key: value for key, value in saved.items() if key not in configured}
            for key, value in kept.items():
                # JSON knows no tuples, such as Adam's betas.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


@dataclass(frozen=True)
class Job:
    """What the parts of a run share; built once."""

    config: Config
    world: World
    plan: Plan
    state: TrainState
    model: nn.Module
    """`state.module` as wrapped by DDP: training forwards go through it, evaluation does not."""
    stop: Stop = field(default_factory=Stop)

    @property
    def pulse(self) -> Pulse:
        """What this process is doing."""
        return self.world.pulse

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
