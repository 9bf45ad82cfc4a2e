"""Engine: a run that stands still ends, and says which rank is behind; one that works goes on."""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .. import train
from ..config import Config
from ..engine import checkpoint
from .harness import Outcome, outcomes, values
from .scenario import run_training, set_config
from .toy import Toy, ToyData, put

WATCHDOG_S = 3.0
CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    max_steps=4,
    data__num_workers=0,
    timeout_s=40.0,
    watchdog_s=WATCHDOG_S,
    global_batch_size=12,
    micro_batch_size=2,
)


def is_rank(number: int) -> bool:
    return os.environ["RANK"] == str(number)


class Sleepy(ToyData):
    """A rank sleeps while it loads a sample, in whatever process, however that was started."""

    def __init__(self, number: int) -> None:
        super().__init__(Toy(), Toy.num_samples)
        self.number, self.num_loaded = number, 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_loaded += 1
        if is_rank(self.number) and self.num_loaded > 15:
            print("asleep:", os.getpid(), flush=True)
            time.sleep(600)
        return super().__getitem__(index)


def sleep_in_data(number: int) -> None:
    """Prepare a training on such data."""
    Toy().use()
    put(vars(train)["data"], build_datasets=lambda _: (Sleepy(number), Toy().build_datasets()[1]))


def act_in_forward(act: Callable[[], object], number: int) -> None:
    """Do something on a rank in the forward of a later step."""
    Toy().use()
    task = vars(train)["task"]
    loss_sum = task.loss_sum
    calls: list[int] = []

    def disturbed(*args: Any) -> Any:
        calls.append(0)
        if is_rank(number) and len(calls) == 4:
            act()
        return loss_sum(*args)

    put(task, loss_sum=disturbed)


def sleep() -> None:
    time.sleep(600)


def sleep_in_save(number: int) -> None:
    Toy().use()
    if is_rank(number):
        put(checkpoint, file_sha256=lambda _: sleep())


def stop_the_process() -> None:
    time.sleep(0.7)  # the others hear where it is
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_pythons_lock() -> None:
    time.sleep(0.7)
    ctypes.PyDLL(None).sleep(600)


def give_up_a_collective(number: int) -> None:
    """As gloo does after `timeout_s`, which would take longer; the other rank sleeps."""
    act_in_forward(sleep, number)
    gradient = vars(train)["gradient"]
    nominal_count, calls = gradient.nominal_count, iter(range(9))

    def give_up(*args: Any) -> Any:
        if not is_rank(number) and next(calls) == 2:
            raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:1] Timed out waiting 1ms")
        return nominal_count(*args)

    put(gradient, nominal_count=give_up)


@dataclass(frozen=True)
class Case:
    """A run in which a rank stands still."""

    prepare: Callable[[int], None]
    number: int
    """The rank."""
    phase: str
    world_size: int = 2
    num_workers: int = 0
    can_leave: bool = True
    """Its watchdog can end it; else another one does."""


CASES = {
    "data": Case(sleep_in_data, 1, "data"),
    "loading process": Case(sleep_in_data, 1, "data", num_workers=1),
    "forward": Case(partial(act_in_forward, sleep), 1, "forward"),
    "saving": Case(sleep_in_save, 0, "saving"),
    "collective that is given up": Case(give_up_a_collective, 1, "forward"),
    "Python's lock": Case(
        partial(act_in_forward, keep_pythons_lock), 1, "forward", can_leave=False
    ),
}
if hasattr(signal, "SIGSTOP"):
    stopped = partial(act_in_forward, stop_the_process)
    CASES["rank 0 stopped"] = Case(stopped, 0, "forward", 3, can_leave=False)
    CASES["rank 1 stopped"] = Case(stopped, 1, "forward", 3, can_leave=False)

Ends = dict[str, tuple[Path, list[Outcome]]]

# A loading process that is not forked imports torch first.
IMPORT_S = 0.0 if multiprocessing.get_all_start_methods()[0] == "fork" else 15.0


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How each ended, and its run directory. All at once: what takes long is to do nothing."""
    paths = {name: tmp_path_factory.mktemp("standstill") / "run" for name in CASES}
    with ThreadPoolExecutor(len(CASES)) as pool:
        futures = {
            name: pool.submit(
                outcomes,
                run_training,
                case.world_size,
                set_config(
                    CONFIG,
                    run_dir=str(paths[name]),
                    data__num_workers=case.num_workers,
                    watchdog_s=WATCHDOG_S + IMPORT_S * case.num_workers,
                ),
                partial(case.prepare, case.number),
            )
            for name, case in CASES.items()
        }
        return {name: (paths[name], future.result()) for name, future in futures.items()}


@pytest.mark.parametrize("name", CASES)
def test_rank_that_stands_still_is_named_and_the_run_ends(ends: Ends, name: str) -> None:
    case, (path, ended) = CASES[name], ends[name]
    left = [rank for rank in range(case.world_size) if case.can_leave or rank != case.number]
    codes = [1 if rank in left else -signal.SIGKILL for rank in range(case.world_size)]
    assert [rank.exit_code for rank in ended] == codes, ended
    report = (path / "logs/stall.txt").read_text()
    assert sum(rank.output.count(report) for rank in ended) == 1, ended
    how = "is behind, at step " if case.can_leave else "says nothing any more, last seen at step "
    assert f"rank {case.number} {how}" in report
    assert f" in {case.phase}" in report.splitlines()[0]
    assert len(report.splitlines()) == 3 + case.world_size
    if name != "collective that is given up":  # one rank finds out there, and the other one hears
        assert len(list(path.glob("logs/stall-rank*.txt"))) == len(left)
    for stacks in path.glob("logs/stall-rank*.txt"):
        assert "in run_training" in stacks.read_text()
    assert ("failed" in (path / "status.json").read_text()) == (0 in left)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_loading_process_that_sleeps_is_not_left_behind(ends: Ends) -> None:
    _, ended = ends["loading process"]
    words = ended[1].output.split()
    pid = words[words.index("asleep:") + 1]
    for _ in range(50):
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.1)
                continue
        return
    pytest.fail(f"process {pid} is still there")


def work_slowly() -> None:
    """Let evaluations and saves of a rank last longer than nothing may move."""
    Toy(num_valid=96).use()
    task = vars(train)["task"]
    metric_sums, steps = task.metric_sums, iter(range(8))

    def slow_metrics(*args: Any) -> Any:
        if is_rank(0) and next(steps, None) is not None:
            time.sleep(0.3)
        return metric_sums(*args)

    def slow_checksum(path: Path) -> str:
        with path.with_name("growing").open("ab", buffering=0) as file:
            while file.tell() < 8000:
                file.write(bytes(1000))
                time.sleep(0.3)
        return "0"

    put(task, metric_sums=slow_metrics)
    put(checkpoint, file_sha256=slow_checksum)


def test_long_evaluation_and_long_save_are_no_standstill(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, max_steps=1, watchdog_s=2.0)
    values(run_training, 2, config, work_slowly)
    assert not list((Path(run_dir) / "logs").glob("stall*"))
