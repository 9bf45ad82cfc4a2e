"""Engine: a rank that fails ends the job, and is heard; the others only say that they left."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from .. import train
from ..config import Config
from ..engine import checkpoint, failure
from ..engine.distributed import World
from ..engine.gradient import NonFiniteGradient
from ..engine.launch import Refused
from ..engine.rundir import PACKAGE, RunDir
from ..engine.strategy import Checkpointer
from .harness import outcomes
from .scenario import run_training, set_config
from .toy import Toy, ToyData, ToyNet, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    max_steps=4,
    eval_every=2,
    data__num_workers=0,
    timeout_s=40.0,
    global_batch_size=12,
    micro_batch_size=2,
)


class Broken(Exception):
    """As if something of yours did not work."""


def is_rank(number: int) -> bool:
    return os.environ["RANK"] == str(number)


def disturb(owner: Any, name: str, call: int, number: int, act: Callable[[], object]) -> None:
    """Do something on a rank before a function is called for the n-th time, from 0."""
    part = getattr(owner, name)
    calls: list[int] = []

    def disturbed(*args: Any, **named: Any) -> Any:
        if is_rank(number) and len(calls) == call:
            act()
        calls.append(0)
        return part(*args, **named)

    put(owner, **{name: disturbed})


def fail() -> None:
    raise Broken("on purpose")


# A function that is called there, and how often it was called before, in every variant.
PLACES: dict[str, tuple[Callable[[], Any], str, int]] = {
    "start-up": (lambda: train, "build_state", 0),
    "data": (lambda: ToyData, "__getitem__", 8),
    "model": (lambda: ToyNet, "forward", 2),
    "loss": (lambda: vars(train)["task"], "loss_sum", 2),
    "evaluation": (lambda: vars(train)["task"], "metric_sums", 0),
    "save": (lambda: Checkpointer, "save", 0),
}


def fail_in(place: str, number: int) -> None:
    Toy().use()
    owner, name, call = PLACES[place]
    disturb(owner(), name, call, number, fail)


def texts(run_dir: str, pattern: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in (Path(run_dir) / "logs").glob(pattern)}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("start-up", "in start-up"),
        ("data", "at step 2 in data"),
        ("model", " in forward"),
        ("loss", " in forward"),
        ("evaluation", "at step 2 in evaluation, batch 1"),
        ("save", "at step 4 in saving"),
    ],
)
def test_rank_that_fails_is_heard_and_the_others_say_that_they_left(
    run_dir: str, place: str, words: str, number: int
) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ended = outcomes(run_training, 2, config, partial(fail_in, place, number))
    assert [rank.exit_code for rank in ended] == [1, 1], ended
    failed, other = ended[number], ended[1 - number]
    note = failed.output.splitlines()[-1]
    assert note.startswith(f"rank {number} failed ")
    assert words in note
    assert "Broken: on purpose" in failed.output
    told = f"{note}: Broken: on purpose"
    assert other.output.splitlines()[-1] == f"{PACKAGE}: rank {1 - number} left because {told}"
    assert "Traceback" not in other.output
    [(file, text)] = texts(run_dir, "failed-*").items()
    assert file == f"failed-rank{number}.txt"
    assert text.splitlines()[0] == told
    assert "Traceback" in text
    if place != "start-up":
        assert "Traceback" in texts(run_dir, "rank*.log")[f"rank{1 - number}.log"]
    assert '"failed"' in (Path(run_dir) / "status.json").read_text()


def fill_the_disk(number: int) -> None:
    Toy().use()

    def full(_: Path) -> str:
        raise OSError(28, "No space left on device")

    if is_rank(number):
        put(checkpoint, file_sha256=full)


def have_no_gradient() -> None:
    Toy().use()

    def stop(*_: Any, **__: Any) -> None:
        raise NonFiniteGradient("step 1 can't be taken")

    put(train, train_step=stop)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        pytest.param(partial(fill_the_disk, 0), "No space left on device", id="disk"),
        pytest.param(have_no_gradient, "step 1 can't be taken", id="gradient"),
    ],
)
def test_what_all_ranks_raise_is_told_once(
    run_dir: str, prepare: Callable[[], None], words: str
) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ended = outcomes(run_training, 3, config, prepare)
    assert [rank.exit_code for rank in ended] == [1, 1, 1]
    assert ["Traceback" in rank.output for rank in ended] == [True, False, False]
    assert words in ended[0].output
    for number in (1, 2):
        assert f"rank {number} left because rank 0 failed" in ended[number].output
    assert list(texts(run_dir, "failed-*")) == ["failed-rank0.txt"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_forward(number: int) -> None:
    Toy().use()
    disturb(vars(train)["task"], "loss_sum", 2, number, die)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that kills")
def test_rank_that_is_killed_is_missed_in_one_line(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ended = outcomes(run_training, 3, config, partial(die_in_forward, 1))
    assert [rank.exit_code for rank in ended] == [1, -signal.SIGKILL, 1]
    for number in (0, 2):
        last = ended[number].output.splitlines()[-1]
        assert last.startswith(f"{PACKAGE}: rank {number} left because another rank went away")
        assert "Traceback" not in ended[number].output
    assert not texts(run_dir, "failed-*")


def fail_beside_a_sleeper() -> None:
    """Rank 1 fails while rank 0 is where it can't notice."""
    Toy().use()
    disturb(vars(train)["task"], "loss_sum", 2, 1, fail)
    disturb(vars(train)["task"], "loss_sum", 2, 0, partial(time.sleep, 600))


def test_rank_that_does_not_notice_is_ended_by_its_watchdog(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, watchdog_s=30.0)
    ended = outcomes(run_training, 2, config, fail_beside_a_sleeper)
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert f"{PACKAGE}: rank 0 left because rank 1 failed at step" in ended[0].output
    assert "Traceback" not in ended[0].output


def test_file_tells_what_a_store_that_is_gone_can_not(run_dir: str) -> None:
    world = World(rank=1, world_size=2)
    run = RunDir(run_dir, world)
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    cause = failure.cause_of(lost, "rank 1 failed", world, run)
    assert cause is not None
    assert "without a word" in cause
    assert "can't be asked" in cause
    run.logs.mkdir(parents=True)
    (run.logs / "failed-rank0.txt").write_text("rank 0 failed at step 3 in data\nmore\n")
    assert failure.cause_of(lost, "rank 1 failed", world, run) == "rank 0 failed at step 3 in data"
    os.utime(run.logs / "failed-rank0.txt", (1.0, 1.0))  # of an earlier run
    assert "without a word" in str(failure.cause_of(lost, "rank 1 failed", world, run))


@pytest.mark.parametrize(
    ("error", "is_loss", "is_timeout"),
    [
        (RuntimeError("[…/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True, False),
        (RuntimeError("[…/gloo/transport/tcp/b.cc:7] Timed out waiting 4000ms"), True, True),
        (RuntimeError("Application timeout caused pair closure"), True, True),
        (dist.DistBackendError("an error of the device"), True, False),
        (RuntimeError("DataLoader worker is killed"), False, False),
        (BrokenPipeError(32, "Broken pipe"), False, False),
        (TimeoutError("Timed out waiting for a lock"), False, False),
    ],
)
def test_loss_of_a_peer_is_known_by_its_words(
    error: Exception, is_loss: bool, is_timeout: bool
) -> None:
    assert failure.is_loss_of_a_peer(error) == is_loss
    assert failure.is_timeout(error) == is_timeout


@pytest.mark.parametrize("error", [Refused("a mistake"), SystemExit(75)])
def test_other_ends_are_left_alone(run_dir: str, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, failure.told(RunDir(run_dir, World()), World()):
        raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert not Path(run_dir).exists()
