"""Engine: a signal to one rank lets all ranks save the same step and leave, and nothing is lost."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from .. import train
from ..config import Config
from ..engine import stop as stopping
from ..engine.rundir import PACKAGE
from ..engine.state import Job
from ..engine.stop import Stop
from ..engine.strategy import Checkpointer
from . import toy as toys
from .harness import outcomes, values
from .scenario import Record, read_metrics, run_training, saved, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=2,
    log_every=1,
    eval_every=4,
    save_every=6,
    data__num_workers=0,
    global_batch_size=24,
)
# Five steps an epoch.
TOY = Toy(num_samples=102, num_valid=60, depth=2, dropout=0.2, noise=0.1, has_batch_norm=True)
STOPPED = 75

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows can't send a process a signal")


def status_of(run_dir: str) -> dict[str, Any]:
    """What status.json says of state and step."""
    status = json.loads(Path(run_dir, "status.json").read_text())
    return {name: status[name] for name in ("state", "step")}


def interrupt(name: str) -> None:
    """Send this rank and its loading processes a signal, as a launcher does to a group."""
    number = getattr(signal, name)
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, number)
    os.kill(os.getpid(), number)


def interrupted(place: str, rank: int, names: list[str]) -> Any:
    """Prepare a training in which a rank is sent signals at a place, once."""
    put(stopping, _LOOK_S=0.0)  # trainings here are over in less than a moment
    left = list(names) if int(os.environ["RANK"]) == rank else []
    heard = threading.Event()
    request = Stop.request

    def request_and_note(stop: Stop, reason: str) -> None:
        request(stop, reason)
        heard.set()

    put(Stop, request=request_and_note)

    def wrap(function: Callable[..., Any], number: int) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            while calls == number and left:
                interrupt(left.pop(0))
                assert heard.wait(30)  # on a busy machine the thread may hear of it later
            return function(*args, **named)

        return wrapped

    match place:
        case "step":
            put(train, train_step=wrap(train.train_step, 5))
        case "window":
            put(train, forward_loss=wrap(train.forward_loss, 8))
        case "evaluation":
            put(toys, metric_sums=wrap(toys.metric_sums, 2))
        case "save":
            put(Checkpointer, save=wrap(Checkpointer.save, 1))
    return TOY.use()


def check_goes_on_exactly(run_dir: str, world_size: int, parts: list[list[Record]]) -> None:
    """Train on from where all ranks stopped: the end is that of a training that did not stop."""
    config = set_config(CONFIG, run_dir=run_dir)
    straight_config = set_config(CONFIG, run_dir=run_dir + "-straight")
    straight = values(run_training, world_size, straight_config, TOY.use)
    parts = [*parts, values(run_training, world_size, config, TOY.use)]
    assert [rank.digest for rank in parts[-1]] == [rank.digest for rank in straight]
    for rank, expected in enumerate(straight):
        samples = [sample for part in parts for sample in part[rank].notes.samples]
        assert samples == expected.notes.samples
    valid = [line["loss"] for line in read_metrics(run_dir, "valid")]
    assert valid == [line["loss"] for line in read_metrics(run_dir + "-straight", "valid")]
    assert status_of(run_dir) == {"state": "done", "step": straight[0].progress["step"]}


@pytest.mark.parametrize(
    ("place", "world_size", "rank", "names", "workers"),
    [
        ("step", 1, 0, ["SIGTERM"], 0),
        ("step", 3, 1, ["SIGTERM"], 0),
        ("window", 2, 0, ["SIGUSR1", "SIGUSR1", "SIGTERM"], 0),
        ("evaluation", 2, 1, ["SIGINT"], 2),
        ("save", 2, 0, ["SIGTERM", "SIGTERM"], 2),
    ],
)
def test_all_ranks_save_the_same_step_and_leave(
    run_dir: str, place: str, world_size: int, rank: int, names: list[str], workers: int
) -> None:
    config = set_config(CONFIG, run_dir=run_dir, data__num_workers=workers)
    part = values(
        run_training, world_size, config, partial(interrupted, place, rank, names), timeout_s=90.0
    )
    assert [record.exit_code for record in part] == [STOPPED] * world_size
    [step] = {record.progress["step"] for record in part}
    assert 0 < step < 10  # the steps of the whole training, if none is left out
    assert status_of(run_dir) == {"state": "stopped", "step": step}
    assert saved(run_dir, step).manifest.step == step
    if place == "evaluation":
        assert step == 4  # at once, and what it had is thrown away
        assert not read_metrics(run_dir, "valid")
    check_goes_on_exactly(run_dir, world_size, [part])


def interrupted_while_slow(rank: int) -> Any:
    """Prepare a training with slow steps in which a rank gets a signal, and look as ever."""
    notes = TOY.use()
    train_step = train.train_step

    def slow_step(job: Any, *args: Any, **named: Any) -> Any:
        time.sleep(0.15)
        if job.world.rank == rank and job.state.progress.samples == 48:
            interrupt("SIGTERM")
        return train_step(job, *args, **named)

    put(train, train_step=slow_step)
    return notes


def test_others_look_for_it_twice_a_second(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    part = values(run_training, 2, config, partial(interrupted_while_slow, 1))
    assert [record.exit_code for record in part] == [STOPPED] * 2
    assert status_of(run_dir)["step"] < 10


def note_collectives_of_agreeing(rank: int) -> list[list[str]]:
    """Prepare a training that is stopped; the collectives of each look before a window."""
    interrupted("step", rank, ["SIGTERM"])
    is_due = Stop.is_due
    looks: list[list[str]] = []

    def noted(stop: Stop) -> bool:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            answer = is_due(stop)
        names = [event.name for event in recorded.events() or []]
        looks.append([name for name in names if name.startswith("c10d::")])
        return answer

    put(Stop, is_due=noted)
    return looks


def test_agreement_costs_no_collective(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    part = values(run_training, 2, config, partial(note_collectives_of_agreeing, 1))
    for record in part:
        assert record.exit_code == STOPPED
        assert len(record.notes) >= 4
        assert not any(record.notes)


def interrupted_at_start(ranks: list[int], sleepers: list[int]) -> None:
    """Prepare a training in whose start some ranks get a signal, and some take very long."""
    TOY.use()
    rank = int(os.environ["RANK"])
    if rank in ranks:
        threading.Timer(1.0, interrupt, ["SIGTERM"]).start()
    build_datasets = Toy.build_datasets

    def slow(toy: Toy) -> Any:
        if rank in sleepers:
            time.sleep(60)
        return build_datasets(toy)

    put(Toy, build_datasets=slow)


@pytest.mark.parametrize("sleepers", [[0, 1], [1]], ids=["in Python", "waiting for a rank"])
def test_before_the_training_a_rank_leaves_at_once(run_dir: str, sleepers: list[int]) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    start = time.monotonic()
    ranks = outcomes(run_training, 2, config, partial(interrupted_at_start, [0, 1], sleepers))
    assert time.monotonic() - start < 30
    assert [rank.exit_code for rank in ranks] == [STOPPED] * 2
    assert f"{PACKAGE}: rank 0: left at SIGTERM before the training began" in ranks[0].output
    assert status_of(run_dir) == {"state": "stopped", "step": 0}


def interrupted_twice() -> None:
    """Prepare a training that hangs, and a rank that gets a signal, and much later another."""
    TOY.use()

    def hang(*_: Any, **__: Any) -> None:
        for delay in (0.1, 2.5):
            threading.Timer(delay, interrupt, ["SIGTERM"]).start()
        time.sleep(60)

    put(train, train_step=hang)


def test_a_second_signal_much_later_ends_the_rank_at_once(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    start = time.monotonic()
    [rank] = outcomes(run_training, 1, config, interrupted_twice)
    assert time.monotonic() - start < 30
    assert rank.exit_code == 1
    assert "left at SIGTERM once more: nothing is saved" in rank.output
    assert status_of(run_dir)["state"] == "failed"


def test_stop_right_after_a_resume_keeps_the_checkpoint_as_it_is(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    first = values(run_training, 1, set_config(config, max_steps=4), TOY.use)
    before = saved(run_dir, 4).manifest
    assert before.valid_loss is not None
    [record] = values(run_training, 1, config, stopped_before_the_first_step)
    assert record.exit_code == STOPPED
    assert saved(run_dir, 4).manifest == before
    check_goes_on_exactly(run_dir, 1, [first])


def stopped_before_the_first_step() -> Any:
    """Prepare a training that is asked to stop as soon as it begins."""
    notes = TOY.use()
    run_steps = train.run_steps

    def asked_before(job: Job, *rest: Any) -> None:
        job.stop.request("SIGTERM")
        run_steps(job, *rest)

    put(train, run_steps=asked_before)
    return notes
