"""Engine: parts of a training for the tests: a rank among the others, a pair of loaders."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .. import train
from ..config import Config, find_place
from ..engine.distributed import World, process_group
from ..engine.loader import build_loaders
from ..engine.sampler import Plan
from ..engine.state import Job
from .scenario import set_config
from .toy import Toy


@contextmanager
def joined(init_method: str, toy: Toy | None = None, **changes: Any) -> Iterator[Job]:
    """A job of the toy task, in which this process is one of the ranks, on the CPU."""
    toy = toy or Toy()
    toy.use()
    changes["rendezvous__init_method"] = init_method
    config = set_config(Config(), **{"device": "cpu", "timeout_s": 20.0, **changes})
    launch, config = find_place(config)
    with process_group(launch, config) as world:
        plan = Plan(toy.num_samples, 8, 8, world.world_size)
        state = train.build_state(config, world)
        yield Job(config, world, plan, state, model=state.module)


Rows = list[list[float]]


class Drawn(Dataset[Tensor]):
    """Samples of their index and of what was drawn for them from each generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def build_both(
    dataset: Any,
    world: World | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    **settings: Any,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Both loaders of a run with windows of 8 samples, at most 4 to a forward."""
    changes = {f"data__{name}": value for name, value in settings.items()}
    config = set_config(Config(), seed=5, **changes)
    world = world or World()
    plan = Plan(len(Drawn()), 8, 4, world.world_size)
    return build_loaders((dataset, dataset), collate, config, plan, world)


def rows_of(batches: list[Tensor]) -> Rows:
    """All samples of some batches."""
    return [row for batch in batches for row in batch.tolist()]
