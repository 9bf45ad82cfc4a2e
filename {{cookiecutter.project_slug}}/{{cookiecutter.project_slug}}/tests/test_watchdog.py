"""Engine: a run that stands still ends, and says which rank is behind; one that works goes on."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from .. import train
from ..config import Config
from ..engine.pulse import ALL, Pulse, place, where
from ..engine.signs import is_in_compiler
from ..engine.state import Job
from .harness import Outcome, outcomes, values
from .scenario import run_training, set_config
from .toy import Toy, ToyData, put

LIMIT_S = 2.0
CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    eval_every=2,
    save_every=2,
    data__num_workers=0,
    timeout_s=40.0,
    watchdog_s=LIMIT_S,
    global_batch_size=12,
    {% if cookiecutter.accumulation %}
    micro_batch_size=2,
    {% endif %}
)
STEP = 3
"""The step in which something happens."""


def rank() -> int:
    return int(os.environ["RANK"])


def sleep_in_data(who: int) -> None:
    """Let a rank sleep where it loads the samples of a step, in whatever process."""
    Toy().use()
    get = ToyData.__getitem__
    asked: list[int] = []

    def sleepy(self: ToyData, index: int) -> dict[str, Any]:
        asked.append(index)
        if rank() == who and len(asked) > 24:
            time.sleep(600)
        return get(self, index)

    put(ToyData, __getitem__=sleepy)


def at_step(name: str, who: int, act: Callable[[], object]) -> None:
    """Do something on a rank before a part of train.py runs in a step."""
    Toy().use()
    part = getattr(train, name)

    def disturbed(job: Job, *args: Any, **named: Any) -> Any:
        if rank() == who and job.state.progress.step == STEP - 1 and job.model is not None:
            act()
        return part(job, *args, **named)

    put(train, **{name: disturbed})


def sleep_in_forward(who: int) -> None:
    Toy().use()
    loss_sum = train.task.loss_sum
    calls: list[int] = []

    def sleepy(*args: Any) -> Any:
        calls.append(0)
        if rank() == who and len(calls) > 5:
            time.sleep(600)
        return loss_sum(*args)

    put(train.task, loss_sum=sleepy)


def stop_itself() -> None:
    time.sleep(1.0)  # so that the others hear where it is
    os.kill(os.getpid(), signal.SIGSTOP)


def stand_still(who: int) -> None:
    at_step("train_step", who, stop_itself)



def assert_told(ended: list[Outcome], run_dir: str, told: str, survivors: list[int]) -> str:
    """All survivors ended with 1 and left their stacks; one of them has told it. Its words."""
    outputs = "\n".join(f"--- rank {r}: {e.exit_code}\n{e.output}" for r, e in enumerate(ended))
    assert [ended[r].exit_code for r in survivors] == [1] * len(survivors), outputs
    assert sum("no rank made progress" in e.output.partition("left because")[0] for e in ended) == 1
    report = (Path(run_dir) / "logs/stall.txt").read_text()
    assert told in report, report
    for r in survivors:
        stacks = (Path(run_dir) / f"logs/stall-rank{r}.txt").read_text()
        assert "train.py" in stacks, stacks
    return report


@pytest.mark.parametrize(
    ("prepare", "num_workers", "phase"),
    [
        pytest.param(sleep_in_data, 0, "data", id="data"),
        pytest.param(sleep_in_data, 1, "data", id="worker"),
        pytest.param(sleep_in_forward, 0, "forward", id="forward"),
    ],
)
def test_rank_that_sleeps_is_named(
    run_dir: str, prepare: Callable[[int], None], num_workers: int, phase: str
) -> None:
    config = set_config(CONFIG, run_dir=run_dir, data__num_workers=num_workers)
    ended = outcomes(run_training, 2, config, partial(prepare, 1))
    report = assert_told(ended, run_dir, "rank 1 is behind, at step", [0, 1])
    assert f"in {phase}" in report.splitlines()[0]
    assert '"failed"' in (Path(run_dir) / "status.json").read_text()


@pytest.mark.parametrize("who", [0, 1])
def test_process_that_is_stopped_is_named(run_dir: str, who: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ended = outcomes(run_training, 3, config, partial(stand_still, who), stopped=[who])
    survivors = [r for r in range(3) if r != who]
    assert_told(ended, run_dir, f"rank {who} says nothing any more, last seen at step 3 in", survivors)
