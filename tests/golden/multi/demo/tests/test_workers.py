"""Engine: the same samples whoever loads them, and workers that a stop does not kill."""

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ..config import DataSettings
from ..engine import loader
from ..engine.distributed import World
from ..engine.launch import Launch
from ..engine.loader import BatchStream, usable_cpus, workers_per_rank
from .harness import outcomes, values
from .parts import Drawn, Rows, build_both, rows_of


def load(_: str, ways: list[dict[str, Any]], world_size: int = 1) -> list[Rows]:
    """The samples of two epochs. Each process loads in a way of its own."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*suggested max number of worker")
    number = int(os.environ["RANK"])
    world = World(rank=number % world_size, world_size=world_size)
    stream = BatchStream(build_both(Drawn(), world, **ways[number])[0], 0, 0)
    forwards = 24 // 4 // world_size
    return [rows_of([next(stream) for _ in range(forwards)]) for _ in range(2)]


WAYS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 0, "prefetch_factor": 4, "multiprocessing_context": "spawn"},
    {"num_workers": 2},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
]


def test_samples_and_draws_do_not_depend_on_workers() -> None:
    ranks = outcomes(load, len(WAYS), WAYS)
    for way, rank in zip(WAYS, ranks, strict=True):
        assert (rank.exit_code, rank.output) == (0, ""), way
        assert rank.value == ranks[0].value, way
    first, second = ranks[0].value
    indices = [float(index) for index in range(24)]
    assert sorted(row[0] for row in first) == sorted(row[0] for row in second) == indices
    later = {row[0]: row for row in second}
    for index, *drawn in first:  # other augmentation in the next epoch, from each generator
        assert all(a != b for a, b in zip(drawn, later[index][1:], strict=True))


def test_draws_do_not_depend_on_ranks() -> None:
    (alone,) = values(load, 1, [{"num_workers": 0}])
    both = values(load, 2, [{"num_workers": 0}, {"num_workers": 1}], 2)
    for number, rows in enumerate(alone):
        assert sorted(rows) == sorted(both[0][number] + both[1][number])


def test_workers_get_what_needs_workers() -> None:
    without, _ = build_both(Drawn(), num_workers=0, prefetch_factor=3)
    assert (without.persistent_workers, without.prefetch_factor) == (False, None)
    some, _ = build_both(Drawn(), num_workers=1, prefetch_factor=3, multiprocessing_context="spawn")
    assert (some.persistent_workers, some.prefetch_factor) == (True, 3)


def states() -> tuple[object, ...]:
    """How the generators of this process stand."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def is_undisturbed(_: str, num_workers: int) -> bool:
    """Whether the generators of this process are as before, once workers have loaded."""
    before = states()
    stream = iter(build_both(Drawn(), num_workers=num_workers)[0])
    if num_workers:
        next(stream)
    return states() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starting_an_epoch_draws_from_no_generator(num_workers: int) -> None:
    assert values(is_undisturbed, 1, num_workers) == [True]


def load_while_signalled(_: str) -> list[str]:
    """Send the workers what a launcher sends to stop a job; which of them live on."""
    stream = BatchStream(build_both(Drawn(), num_workers=2, prefetch_factor=1)[0], 0, 0)
    for _batch in range(2):  # one from each: both have started
        next(stream)
    workers = multiprocessing.active_children()
    for worker in workers:
        assert worker.pid is not None
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            os.kill(worker.pid, getattr(signal, name))
    for _batch in range(20):
        next(stream)
    time.sleep(0.1)
    return ["alive" if worker.is_alive() else f"exit {worker.exitcode}" for worker in workers]


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_workers_leave_a_stop_to_their_rank() -> None:
    (ended,) = outcomes(load_while_signalled, 1)
    assert (ended.value, ended.output) == (["alive", "alive"], "")


left_open: list[BatchStream] = []


def leave_workers(_: str) -> list[int]:
    """Count the workers after a stream is gone, and leave with another stream still open."""
    counts = []
    for keep in (False, True):
        stream = BatchStream(build_both(Drawn(), num_workers=2)[0], 0, 0)
        next(stream)
        left_open.extend([stream] * keep)
        del stream
        counts.append(len(multiprocessing.active_children()))
    return counts


def test_process_ends_though_workers_ignore_the_signal_to_end() -> None:
    (ended,) = outcomes(leave_workers, 1, timeout_s=20)
    assert (ended.value, ended.exit_code, ended.output) == ([0, 2], 0, "")


def cpus_of_a_bound_process(_: str) -> int:
    """CPUs of a process that was bound to one."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return usable_cpus()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes can't be bound")
def test_affinity_limits_the_cpus() -> None:
    assert values(cpus_of_a_bound_process, 1) == [1]


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1), ("9900000 100000", 16)],
)
def test_quota_of_a_container_limits_the_cpus(
    quota: str, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(loader, "Path", lambda _: file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert usable_cpus() == cpus
    file.unlink()
    assert usable_cpus() == 16


@pytest.mark.parametrize(
    ("cpus", "local_world_size", "workers"),
    [(16, 1, 8), (16, 2, 7), (16, 4, 3), (8, 8, 0), (2, 8, 0), (1, 1, 0)],
)
def test_ranks_of_a_machine_share_its_cpus(
    cpus: int, local_world_size: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "usable_cpus", lambda: cpus)
    launch = Launch(world_size=8, local_world_size=local_world_size)
    assert workers_per_rank(DataSettings(), launch) == workers
    assert workers_per_rank(DataSettings(num_workers=5), launch) == 5
