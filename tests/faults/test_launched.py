"""Trainings as people start them, and what may happen to them: the next start goes on exactly.

Each case: two processes train with the script of launch/; something happens at a moment; all must
have ended in a stated time, without a process left; the same command again trains to the end, which
must be bit for bit that of a run to which nothing happened. `make test` runs the cases marked
`short`, `make test-faults` all of them, for every strategy.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.conftest import Count
from tests.endings import end_of
from tests.rendering import SLUG, Answers, all_answers, render, silent

STRATEGIES = [str(answer) for answer in all_answers()["checkpoint"]]
STOPPED, FAILED = "stopped", "failed"

SETTINGS = {
    "config": f"{SLUG}/configs/debug.yaml",
    "device": "cpu",
    "epochs": 4,
    "max_steps": "null",
    "global_batch_size": 64,
    "micro_batch_size": 16,
    "log_every": 1,
    "eval_every": 10,
    "save_every": 3,
    "watchdog_s": 6,
    "timeout_s": 60,
}


@dataclass(frozen=True)
class Case:
    """What happens, and what must come of it."""

    name: str
    fault: str
    """PLACE KIND RANK CALL, as tests/faults/task.py.txt reads it."""
    state: str
    """Of status.json at the end; empty: whatever is left there."""
    send: Callable[["Run"], object] | None = None
    """What is done from outside when the place is reached."""
    within_s: float = 60.0
    """Seconds from the fault to the end of the last process."""
    says: str = ""
    """A pattern in what is printed."""
    workers: int = 0
    patience_s: int = 10
    """Seconds after a signal that the launcher gives its processes."""
    short: str = ""
    """The strategy with which it belongs to `make test`."""


class Run:
    """A launched training."""

    def __init__(
        self, project: Path, run_dir: Path, workers: int, fault: str = "", patience_s: int = 10
    ) -> None:
        """Start it."""
        self.project, self.run_dir = project, run_dir
        self.marks = run_dir.parent
        words = [f"--{name}={value}" for name, value in SETTINGS.items()]
        words += [f"--run_dir={run_dir}", f"--data.num_workers={workers}"]
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "NPROC": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(patience_s),
            **({"FAULT": fault, "FAULT_MARKS": str(self.marks)} if fault else {}),
        }
        self.output = self.marks / ("output of the fault" if fault else "output")
        with self.output.open("w") as output:
            self.launcher = subprocess.Popen(
                [project / SLUG / "launch" / "train.sh", *words],
                cwd=project,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> dict[int, dict[str, str]]:
        """The environment of each process of this run that lives, by its pid."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                words = (directory / "cmdline").read_bytes()
                state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
                entries = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has just ended
            if str(self.run_dir).encode() in words and state != "Z":
                pairs = (entry.partition("=") for entry in entries)
                found[int(directory.name)] = {name: value for name, _, value in pairs}
        return found

    def rank(self, number: int) -> int:
        """The process that is a rank: the oldest with its number, not one that loads for it."""
        pids = [pid for pid, env in self.processes().items() if env.get("RANK") == str(number)]
        return min(pids)

    def wait_for_fault(self) -> None:
        """Wait until the place is reached."""
        deadline = time.monotonic() + 120
        while not (self.marks / "fault").exists():
            assert self.launcher.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def wait(self, seconds: float) -> int:
        """Wait for the end of all its processes; the launcher's exit code."""
        deadline = time.monotonic() + seconds
        while self.launcher.poll() is None or self.processes():
            if time.monotonic() > deadline:
                left = self.processes()
                self.kill()
                pytest.fail(f"processes {sorted(left)} were left\n{self.text()}")
            time.sleep(0.05)
        return self.launcher.returncode

    def kill(self) -> None:
        """End what is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text()

    def status(self) -> dict[str, Any]:
        """What status.json says."""
        status: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
        return status


def to_launcher(number: signal.Signals) -> Callable[[Run], object]:
    """Send the launcher a signal."""
    return lambda run: os.kill(run.launcher.pid, number)


def to_rank(rank: int, number: signal.Signals) -> Callable[[Run], object]:
    """Send one rank a signal."""
    return lambda run: os.kill(run.rank(rank), number)


def to_all(number: signal.Signals) -> Callable[[Run], object]:
    """Send all processes a signal, as a terminal does."""
    return lambda run: os.killpg(run.launcher.pid, number)


TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL
CASES = [
    # Preemption, in every phase.
    Case("SIGTERM in start-up", "start-up wait 1 1", STOPPED, to_launcher(TERM), 30),
    Case("SIGTERM in loading", "data wait 0 700", STOPPED, to_launcher(TERM), 30),
    Case("SIGTERM in a window", "loss wait 1 31", STOPPED, to_launcher(TERM), 30, short="rank0"),
    Case("SIGTERM in evaluation", "evaluation wait 0 2", STOPPED, to_launcher(TERM), 30),
    Case("SIGTERM in a save", "saving wait 0 4", STOPPED, to_launcher(TERM), 30, short="sharded"),
    Case("SIGTERM with workers", "data wait 1 150", STOPPED, to_all(TERM), 30, workers=2),
    Case("SIGTERM to one rank", "loss wait 0 31", STOPPED, to_rank(1, TERM), 30),
    Case(
        "SIGTERM in a save of 35 s",
        "saving last 0 4",
        STOPPED,
        to_launcher(TERM),
        70,
        patience_s=60,
    ),
    Case("SIGUSR1 in start-up", "start-up wait 0 1", STOPPED, to_launcher(USR1), 30),
    Case("SIGUSR1 in loading", "data wait 1 700", STOPPED, to_launcher(USR1), 30),
    Case("SIGUSR1 in a window", "loss wait 1 31", STOPPED, to_launcher(USR1), 30),
    Case("SIGUSR1 in evaluation", "evaluation wait 1 2", STOPPED, to_launcher(USR1), 30),
    Case("SIGUSR1 in a save", "saving wait 0 4", STOPPED, to_launcher(USR1), 30),
    Case("Ctrl-C", "loss wait 1 31", STOPPED, to_all(INT), 30, workers=1),
    Case("launcher killed", "loss wait 1 31", STOPPED, to_launcher(KILL), 30, short="sharded"),
    # Failures of one rank. Rank 0 can't say how it ended when it was killed.
    Case("rank 1 killed", "loss kill 1 31", FAILED),
    Case("rank 0 killed", "loss kill 0 31", "", short="per_rank"),
    Case("worker killed", "data kill 1 150", FAILED, says="rank 1", workers=1),
    Case("start-up raises", "start-up raise 1 1", FAILED, says=r"rank 1.* in start-up"),
    Case("data set raises", "data raise 1 700", FAILED, says=r"rank 1.* in data"),
    Case("worker's data set raises", "data raise 1 150", FAILED, says="rank 1", workers=1),
    Case("model raises", "model raise 1 15", FAILED, says=r"rank 1.* in forward"),
    Case("loss raises", "loss raise 0 31", FAILED, says=r"rank 0.* in forward"),
    Case("evaluation raises", "evaluation raise 1 2", FAILED, says=r"rank 1.* in evaluation"),
    Case("a save raises", "saving raise 0 4", FAILED, says="rank 0"),
    # Standing still.
    Case("rank 1 frozen", "loss freeze 1 31", FAILED, says="rank 1 says nothing"),
    Case("rank 0 frozen", "loss freeze 0 31", "", says="rank 0 says nothing", short="sharded"),
    Case("rank 1 hangs", "loss hang 1 31", FAILED, says=r"rank 1.* in forward"),
    Case("loading hangs", "data hang 1 700", FAILED, says=r"rank 1.* in data"),
    Case("a worker hangs", "data hang 1 150", FAILED, says=r"rank 1.* in data", workers=1),
]


def parameters() -> list[Any]:
    """Every case with every strategy; those that belong to `make test` without the marker."""
    return [
        pytest.param(
            strategy,
            case,
            id=f"{strategy}: {case.name}",
            marks=() if case.short == strategy else pytest.mark.faults,
        )
        for case in CASES
        for strategy in STRATEGIES
    ]


@pytest.fixture(scope="session")
def projects(shared: Path) -> Callable[[str], Path]:
    """A project for each strategy, with the faulty task; rendered once in a run."""

    def project_with(strategy: str) -> Path:
        project = shared / "faults" / strategy / SLUG
        with FileLock(shared / "faults.lock"):
            if not project.exists():
                answers: Answers = {
                    "checkpoint": strategy,
                    "ema": True,
                    "amp": "off",
                    "tracker": "none",
                }
                with silent():
                    render(answers, project.parent)
                task = project / SLUG / "task.py"
                task.rename(task.with_name("digits_task.py"))
                task.write_text(Path(__file__).with_name("task.py.txt").read_text())
        return project

    return project_with


@pytest.fixture(scope="session")
def straight(shared: Path, projects: Callable[[str], Path]) -> Callable[[str], str]:
    """The end of a run to which nothing happens, by strategy; trained once in a run."""

    def end_with(strategy: str) -> str:
        record = shared / "faults" / f"{strategy}.txt"
        project = projects(strategy)
        with FileLock(shared / f"faults_{strategy}.lock"):
            if not record.exists():
                directory = shared / "faults" / f"straight_{strategy}"
                directory.mkdir()
                run = Run(project, directory / "run", workers=0)
                assert run.wait(180) == 0, run.text()
                record.write_text(end_of(project, directory / "run"))
        return record.read_text()

    return end_with


@pytest.mark.faults
def test_two_runs_share_a_machine(
    projects: Callable[[str], Path], straight: Callable[[str], str], tmp_path: Path
) -> None:
    expected = straight(STRATEGIES[0])
    run_dirs = [tmp_path / name / "run" for name in ("one", "other")]
    for run_dir in run_dirs:
        run_dir.parent.mkdir()
    runs = [Run(projects(STRATEGIES[0]), run_dir, workers=0) for run_dir in run_dirs]
    for run in runs:
        assert run.wait(180) == 0, run.text()
        assert end_of(run.project, run.run_dir) == expected


@pytest.mark.parametrize(("strategy", "case"), parameters())
def test_goes_on_as_if_nothing_had_happened(
    projects: Callable[[str], Path],
    straight: Callable[[str], str],
    tmp_path: Path,
    strategy: str,
    case: Case,
    count: Count,
) -> None:
    expected = straight(strategy)
    project = projects(strategy)
    faulty = Run(project, tmp_path / "run", case.workers, case.fault, case.patience_s)
    faulty.wait_for_fault()
    if case.send is not None:
        case.send(faulty)
    code = faulty.wait(case.within_s)
    assert code != 0, faulty.text()
    if case.state:
        assert faulty.status()["state"] == case.state, faulty.text()
    assert re.search(case.says, faulty.text()), faulty.text()
    again = Run(project, tmp_path / "run", case.workers)
    assert again.wait(180) == 0, again.text()
    assert again.status()["state"] == "done"
    assert end_of(project, tmp_path / "run") == expected
    count("faults after which a run went on exactly", 1)
