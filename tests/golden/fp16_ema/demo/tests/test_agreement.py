"""Engine: the window before which a run stops is the same on all ranks, however they meet it."""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from ..engine import stop as stopping
from ..engine.distributed import World
from ..engine.stop import Stop


def window_of_agreement(world: World, barrier: threading.Barrier, asks: int) -> int:
    """The window before which a rank ends; a window ends when all ranks are in it."""
    draws = random.Random(world.rank)
    stop = Stop()
    with stop.training(world):
        for window in range(1, 1000):
            if window == asks:
                stop.request("SIGTERM")
            if stop.is_due():
                stop._hear(signal.SIGTERM)  # as launchers send it to every rank
                return window
            time.sleep(draws.random() * 1e-3)
            try:
                barrier.wait(5.0)
            except threading.BrokenBarrierError:
                return -window  # a rank has left, and this one waits for it in its backward
    return 0


def test_no_rank_leaves_while_another_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_LOOK_S", 0.003)
    left: list[str] = []
    monkeypatch.setattr(Stop, "_leave", lambda _, why, __: left.append(why))
    for number in range(40):
        store, barrier = HashStore(), threading.Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            ranks = [
                pool.submit(
                    window_of_agreement,
                    World(rank=rank, world_size=3, store=store),
                    barrier,
                    1 + number % 7 if rank == number % 3 else 0,
                )
                for rank in range(3)
            ]
        found = [rank.result() for rank in ranks]
        assert len(set(found)) == 1, found
        assert found[0] > 1
    assert not left
