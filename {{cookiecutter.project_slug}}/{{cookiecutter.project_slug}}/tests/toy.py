"""Engine: a small task for the tests: exact numbers, and a note of every sample that is used."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from .. import train
{% if cookiecutter.tracker != "none" %}
from ..engine import metrics, optim, rundir
{% else %}
from ..engine import optim, rundir
{% endif %}
from ..engine.loader import Batch
from ..engine.state import Job

NUM_INPUTS, NUM_TARGETS = 6, 3


@dataclass
class Notes:
    """What a rank used in its training, in order."""

    samples: list[tuple[int, int, float]] = field(default_factory=list)
    """Epoch, index and augmentation of each sample that counted in a step."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """The parameters before the first step and after each."""


@dataclass(frozen=True)
class Toy:
    """A regression in place of your task; `use` puts it there."""

    num_samples: int = 64
    num_valid: int = 8
    is_masked: bool = False
    """About 30 % of the targets don't count, so samples differ in how many they have."""
    is_ragged: bool = False
    """Samples have one, two or three targets, and batches are padded."""
    noise: float = 0.0
    """Share of the inputs that augmentation draws, from all three generators."""
    depth: int = 1
    """Hidden layers."""
    dropout: float = 0.0
    has_batch_norm: bool = False
    has_plain_sgd: bool = False
    """AdamW hides a gradient of the wrong size: it divides by it."""
    bad_sample: int = -1
    """Index of a training sample with an infinite target."""
    log: str = ""
    """File that gets the index of each training sample when it is loaded."""
    {% if cookiecutter.tracker != "none" %}
    is_tracked: bool = False
    """Numbers go to the tracker; to start one takes longer than a training."""
    {% endif %}

    def use(self) -> Notes:
        """Replace the model, the data and the task of train.py in this process."""
        put(
            train,
            build_model=lambda _: self.build_model(),
            data=SimpleNamespace(
                build_datasets=lambda _: self.build_datasets(),
                **({"collate": pad} if self.is_ragged else {}),
            ),
            task=SimpleNamespace(
                TARGETS_PER_SAMPLE=None if self.is_masked or self.is_ragged else NUM_TARGETS,
                num_targets=num_targets,
                loss_sum=loss_sum,
                metric_sums=metric_sums,
            ),
        )
        put(rundir, describe_environment=dict)  # it takes longer than the training
        {% if cookiecutter.tracker != "none" %}
        if not self.is_tracked:
            put(metrics, Tracker=Untracked)
        {% endif %}
        if self.has_plain_sgd:
            put(optim, build_optimizer=sgd)
        return take_notes()

    def use_until(self, step: int) -> Notes:
        """As `use`, for a training that fails after a step."""
        notes = self.use()
        train_step = train.train_step

        def crashing(job: Job, *args: Any, **named: Any) -> Any:
            if job.state.progress.step == step:
                raise OSError("as if a disk had gone")
            return train_step(job, *args, **named)

        put(train, train_step=crashing)
        return notes

    def build_model(self) -> "ToyNet":
        """The same weights, in whatever process it is built."""
        torch.manual_seed(0)
        return ToyNet(self)

    def build_datasets(self) -> tuple["ToyData", "ToyData"]:
        """The training set and the validation set."""
        train_set = ToyData(self, self.num_samples)
        if self.bad_sample >= 0:
            train_set.targets[self.bad_sample] = torch.inf
            train_set.mask[self.bad_sample] = True
        valid = Toy(is_masked=self.is_masked, is_ragged=self.is_ragged)
        return train_set, ToyData(valid, self.num_valid)


{% if cookiecutter.tracker != "none" %}
class Untracked:
    """In place of a tracker; metrics.jsonl is written as ever."""

    def __init__(self, *_: object) -> None: ...

    def log(self, *_: object) -> None:
        """Do nothing."""

    def close(self, *_: object) -> None:
        """Do nothing."""


{% endif %}
class ToyNet(nn.Module):
    """Linear layers with tanh between them."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(toy.depth):
            layers.append(nn.Linear(NUM_INPUTS if not layers else 16, 16))
            if toy.has_batch_norm:
                layers.append(nn.BatchNorm1d(16))
            layers += [nn.Tanh(), nn.Dropout(toy.dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(16, NUM_TARGETS))

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions (B, NUM_TARGETS) from inputs (B, NUM_INPUTS)."""
        predictions: Tensor = self.layers(inputs)
        return predictions


class ToyData(Dataset[dict[str, Any]]):
    """Random inputs and targets; `mask` is true where a target counts."""

    def __init__(self, toy: Toy, num_samples: int) -> None:
        self.toy, self.num_samples = toy, num_samples
        generator = torch.Generator().manual_seed(num_samples)
        self.inputs = torch.randn(num_samples, NUM_INPUTS, generator=generator) + 1
        self.targets = torch.randn(num_samples, NUM_TARGETS, generator=generator)
        self.mask = torch.rand(num_samples, NUM_TARGETS, generator=generator) > 0.3 * toy.is_masked
        self.lengths = [NUM_TARGETS] * num_samples
        if toy.is_ragged:
            self.lengths = [1 + index % NUM_TARGETS for index in range(num_samples)]
            self.mask &= torch.arange(NUM_TARGETS) < torch.tensor(self.lengths)[:, None]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.toy.log:
            with open(self.toy.log, "a", encoding="utf-8") as file:
                file.write(f"{index}\n")
        draw = random.random() + np.random.random() + torch.rand(()).item()
        return {
            "index": index,
            "draw": draw,
            "inputs": self.inputs[index] + self.toy.noise * draw,
            "targets": self.targets[index, : self.lengths[index]],
            "mask": self.mask[index, : self.lengths[index]],
        }


def pad(samples: list[dict[str, Any]]) -> Batch:
    """A batch as wide as its longest sample; what fills it up does not count."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    padded = {name: pad_sequence(columns.pop(name), True) for name in ("targets", "mask")}
    index, draw = (torch.tensor(columns.pop(name)) for name in ("index", "draw"))
    return {"index": index, "draw": draw, "inputs": torch.stack(columns["inputs"]), **padded}


def put(owner: object, **parts: Any) -> None:
    """Replace parts of a module or class. A rank is a process of its own: nothing is undone."""
    for name, part in parts.items():
        setattr(owner, name, part)


def take_notes() -> Notes:
    """Have every step of the training that follows noted."""
    notes = Notes()
    forward_backward, train_step = train.forward_backward, train.train_step

    def noted_forward(job: Job, batch: Batch, share: range, *rest: Any, **named: Any) -> Any:
        if share:
            epoch = job.state.progress.epoch
            pairs = zip(batch["index"].tolist(), batch["draw"].tolist(), strict=True)
            notes.samples += [(epoch, index, draw) for index, draw in pairs]
        return forward_backward(job, batch, share, *rest, **named)

    def noted_step(job: Job, *rest: Any, **named: Any) -> Any:
        notes.weights = notes.weights or [copy_weights(job.state.module)]
        numbers = train_step(job, *rest, **named)
        if numbers is not None:
            notes.weights.append(copy_weights(job.state.module))
        return numbers

    put(train, forward_backward=noted_forward, train_step=noted_step)
    return notes


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters as they are now."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def num_targets(batch: Batch) -> int:
    """As in task.py."""
    return int(batch["mask"].sum())


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """As in task.py: squared errors."""
    errors = difference(model, batch)
    return errors.square().where(batch["mask"], 0).sum()


def difference(model: nn.Module, batch: Batch) -> Tensor:
    """Predictions less targets, as wide as the batch."""
    targets: Tensor = batch["targets"]
    predictions: Tensor = model(batch["inputs"])[:, : targets.shape[1]]
    return predictions - targets


def metric_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """As in task.py."""
    is_near = difference(model, batch).abs() < 1
    return {"loss": loss_sum(model, batch), "accuracy": (is_near & batch["mask"]).sum()}


def sgd(module: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """Weights move by the learning rate times the gradient, and by nothing else."""
    return torch.optim.SGD(module.parameters(), lr=settings.lr)
