"""Engine: what a step costs beside its arithmetic: collectives, and waiting for the device."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .. import train
from ..config import Config
from .harness import values
from .scenario import run_training, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    log_every=4,
    data__num_workers=0,
    global_batch_size=16,
    ddp__bucket_cap_mb=1e-6,  # each parameter has a bucket of its own
)
NUM_BUCKETS = 4  # weights and biases of the toy's two layers
LOGGED = [0, 0, 0, 1]  # of the four steps, the last


def count_collectives(toy: Toy) -> list[Counter[str]]:
    """Prepare a training; the collectives of each step, by name."""
    toy.use()
    steps: list[Counter[str]] = []
    train_step = train.train_step

    def counted(*args: Any, **named: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            numbers = train_step(*args, **named)
        names = [event.name for event in recorded.events() or []]
        steps.append(Counter(name for name in names if name.startswith("c10d::")))
        return numbers

    put(train, train_step=counted)
    return steps


def all_reduces(run_dir: str, toy: Toy, **changes: Any) -> list[int]:
    """How many all-reduces each step of a training has; there must be nothing else."""
    config = set_config(CONFIG, run_dir=run_dir, **changes)
    steps = values(run_training, 2, config, partial(count_collectives, toy))[0].notes
    del steps[0]["c10d::broadcast_"]  # once in a run, DDP agrees on the order of its buckets
    assert all(set(step) == {"c10d::allreduce_"} for step in steps)
    return [step["c10d::allreduce_"] for step in steps]


def test_a_step_reduces_each_bucket_once(run_dir: str) -> None:
    counts = all_reduces(run_dir, Toy())
    assert counts == [NUM_BUCKETS + logged for logged in LOGGED]  # a logged loss is a sum


def test_counts_that_vary_cost_one_more(run_dir: str) -> None:
    assert all_reduces(run_dir, Toy(is_masked=True)) == [NUM_BUCKETS + 1] * 4


# Where numbers are read that are on the host anyway.
HOST = ("/torch/optim/", "/torch/utils/data/", "/engine/sampler.py", "/tests/toy.py")


def count_host_reads() -> list[Counter[str]]:
    """Prepare a training; what waits for the device in each step, by the name of the method."""
    Toy().use()
    steps: list[Counter[str]] = []
    train_step = train.train_step

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if steps and not any(place in caller for place in HOST):
                steps[-1][name] += 1
            return method(*args, **named)

        return counted

    def counted_step(*args: Any, **named: Any) -> Any:
        steps.append(Counter())
        return train_step(*args, **named)

    put(train, train_step=counted_step)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        put(Tensor, **{name: counting(name, getattr(Tensor, name))})
    return steps


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_waits_for_the_device_once(run_dir: str, world_size: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    steps = values(run_training, world_size, config, count_host_reads)[0].notes
    assert steps[:3] == [{"tolist": 1}] * 3  # what follows the last step is no part of it
