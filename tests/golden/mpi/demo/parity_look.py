"""Engine: what `parity.py` asks of your files alone: some samples, in one process."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from . import data, task, train
from .config import Config, find_place
from .engine import keyed, prepare
from .engine.digest import digest
from .engine.distributed import World, process_group
from .engine.loader import KeyedDataset
from .engine.sampler import Plan, epoch_order
from .engine.state import Job
from .parity_ranks import answering, hold_statistics, same_draws


@dataclass
class Findings:
    """What your model and task do with some samples in one process, in float64."""

    size: int
    draws: bool
    """A forward draws random numbers."""
    statistics: bool
    """The model has a BatchNorm."""
    others_draw: bool
    """It draws from `random` or NumPy, which nothing holds still."""
    twice: tuple[float, float]
    """`loss_sum` of all samples, and of all of them once more, from the same seed."""
    held: tuple[float, float, float]
    """`loss_sum` of all, of their halves added up, and of all once more; what is drawn is 1."""
    targets: tuple[int, int]
    """`num_targets` of all samples, and of their halves added up."""


def look(_init_method: str, config: Config) -> Findings:
    """Forward the first samples of the training together, in halves, and once more together."""

    def inspect() -> Findings:
        launch, alone = find_place(config)
        with process_group(launch, alone) as world:
            return find(alone, world)

    return answering(inspect)


def find(config: Config, world: World) -> Findings:
    """The findings, in a single process."""
    train_set, _ = prepare.build_datasets(data, config.data, world)
    samples = KeyedDataset(train_set, config.seed, "training")
    order = epoch_order(config.seed, 0, len(train_set))[: config.global_batch_size].tolist()
    loaded = [samples[0, index] for index in order]
    half = len(loaded) // 2
    collate = getattr(data, "collate", None) or default_collate
    whole, *parts = [collate(some) for some in (loaded, loaded[:half], loaded[half:]) if some]
    state = train.build_state(config, world)
    plan = Plan(len(train_set), len(loaded), len(loaded), 1)
    job = Job(config, world, plan, state, model=state.module)
    hold_statistics(state.module)
    keyed.seed_forward(config.seed, 0, 0, 0, world.device)  # as forward_loss does
    before = generators(world.device)
    with torch.no_grad():
        drawn = train.forward_loss(job, whole, job.model).item()
        after = generators(world.device)
        again = train.forward_loss(job, whole, job.model).item()
        with same_draws():
            losses = [train.forward_loss(job, b, job.model).item() for b in (whole, *parts, whole)]
    return Findings(
        size=len(loaded),
        draws=before != after,
        statistics=any(isinstance(part, _BatchNorm) for part in state.module.modules()),
        others_draw=before[1] != after[1],
        twice=(drawn, again),
        held=(losses[0], sum(losses[1:-1]), losses[-1]),
        targets=(task.num_targets(whole), sum(map(task.num_targets, parts))),
    )


def generators(device: torch.device) -> tuple[str, str]:
    """Digests of the states of torch's generators, and of the others."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return digest(states), digest([random.getstate(), np.random.get_state()])
