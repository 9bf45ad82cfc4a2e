"""A job of two nodes in a real SLURM: stopped, requeued once, resumed, as if nothing had been."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.endings import end_of
from tests.rendering import SLUG, Answers, render, silent
from tests.slurm.cluster import NODES, Cluster, require, until

pytestmark = pytest.mark.slurm

SETTINGS = {
    "config": f"{SLUG}/configs/debug.yaml",
    "device": "cpu",
    "epochs": 40,
    "log_every": 5,
    "eval_every": "null",
    "save_every": "null",
}
MPI = ("--backend", "gloo")  # torch without MPI
STEPS = 920  # of 40 epochs
PATIENCE_S = 300


class Job:
    """A training that was submitted."""

    def __init__(
        self, cluster: Cluster, project: Path, run_dir: Path, more: tuple[str, ...] = ()
    ) -> None:
        """Submit it; what the run directory is called must arrive through bash, srun and Python."""
        self.cluster, self.run_dir = cluster, run_dir
        run_dir.parent.mkdir()
        self.output = run_dir.parent / "output.txt"
        words = [f"--{name}={value}" for name, value in SETTINGS.items()]
        said = cluster.ask(
            *("sbatch", "--parsable", f"--chdir={project}", f"--output={self.output}"),
            *("--nodes=2", "--cpus-per-task=1", "--time=60"),
            project / SLUG / "launch" / "train.sbatch",
            *words,
            *more,
            "--run_dir",
            run_dir,
        )
        self.number = said.strip()

    def text(self) -> str:
        """What it has printed, and what SLURM says of it."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return f"{text}\n{self.cluster.job(self.number)}\n{self.cluster.logs()}"

    def wait_for_training(self) -> None:
        """Wait until some steps are done."""
        metrics = self.run_dir / "metrics.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3,
            PATIENCE_S,
            self.text,
        )

    def wait_for_requeue(self) -> None:
        """Wait until it waits again, and let it start: SLURM puts it off for two minutes.

        At once would be too early: a node does not start again what it has ended in that second.
        """

        def is_pending() -> bool:
            job = self.cluster.job(self.number)
            return (job["JobState"], job["Restarts"]) == ("PENDING", "1")

        until(is_pending, PATIENCE_S, self.text)
        status = json.loads((self.run_dir / "status.json").read_text())
        assert status["state"] == "stopped", self.text()
        assert 0 < status["step"] < STEPS, self.text()
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")

    def end(self, seconds: float = PATIENCE_S) -> tuple[str, str, str]:
        """Wait until it is over: its state, its exit code, and how often it was requeued."""
        is_over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.cluster.job(self.number)["JobState"] in is_over, seconds, self.text)
        job = self.cluster.job(self.number)
        return job["JobState"], job["ExitCode"], job["Restarts"]

    def wait_for_success(self) -> None:
        """Wait until it is done, in its second start."""
        assert self.end() == ("COMPLETED", "0:0", "1"), self.text()
        assert json.loads((self.run_dir / "status.json").read_text())["state"] == "done"


Projects = Callable[[str], Path]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Projects:
    """A project for several machines of a cluster, by backend, rendered when first asked for."""
    root = tmp_path_factory.mktemp("projects")

    def project_of(backend: str) -> Path:
        project = root / backend / SLUG
        if not project.exists():
            answers: Answers = {"backend": backend, "nodes": "multi", "cluster": "slurm"}
            with silent():
                render({**answers, "tracker": "none"}, project.parent)
        return project

    return project_of


@pytest.fixture(params=["linuxproc", "cgroup"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """SLURM, with each of its two ways to find the processes of a job."""
    require()
    if request.param == "cgroup" and not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("proctrack/cgroup is set up for cgroup v1, which is not mounted here")
    root = tmp_path / "slurm"
    root.mkdir()
    with Cluster(root, request.param) as running:
        yield running


@pytest.fixture(scope="module")
def straight(projects: Projects, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a run to which nothing happens: two processes on one machine."""
    require()
    project = projects("gloo")
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    words = [f"--{name}={value}" for name, value in SETTINGS.items()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "NPROC": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [project / SLUG / "launch" / "node.sh", *words, f"--run_dir={run_dir}"],
        cwd=project,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=PATIENCE_S,
    )
    return end_of(project, run_dir)


def warn(job: Job) -> None:
    """Do what SLURM does when the end of --time comes near, as `--signal=B:USR1@…` asks for."""
    job.cluster.ask("scancel", "--signal=USR1", "--batch", job.number)


def take_back(job: Job) -> None:
    """Requeue it as a preemption does: TERM to everything, and KILL later."""
    job.cluster.ask("scontrol", "requeue", job.number)


@pytest.mark.parametrize(
    ("backend", "stop"), [("gloo", warn), ("gloo", take_back), ("mpi", warn), ("mpi", take_back)]
)
def test_job_is_stopped_requeued_once_and_goes_on_exactly(
    cluster: Cluster,
    projects: Projects,
    straight: str,
    tmp_path: Path,
    backend: str,
    stop: Callable[[Job], object],
    count: Count,
) -> None:
    project = projects(backend)
    job = Job(cluster, project, tmp_path / "with a blank" / "run", MPI if backend == "mpi" else ())
    job.wait_for_training()
    stop(job)
    job.wait_for_requeue()
    job.wait_for_success()
    text = job.output.read_text()
    assert text.count(f"job {job.number} is requeued") == (stop is warn), text
    assert "resumed from step_" in text
    environment = json.loads((job.run_dir / "environment.json").read_text())
    assert sorted(rank["host"] for rank in environment["ranks"]) == sorted(NODES)
    assert end_of(project, job.run_dir) == straight
    count("jobs requeued by SLURM that went on exactly", 1)


@pytest.mark.parametrize("cluster", ["cgroup"], indirect=True)
def test_machine_that_refuses_ends_the_job_of_all(
    cluster: Cluster, projects: Projects, tmp_path: Path
) -> None:
    """The other one would wait for it for five minutes."""
    listen = "import socket; s = socket.create_server(('', 12345)); print(flush=True); input()"
    listener = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{NODES[0]}", sys.executable, "-c", listen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert listener.stdout is not None
    listener.stdout.readline()
    cluster.environment["MASTER_PORT"] = "12345"
    try:
        job = Job(cluster, projects("gloo"), tmp_path / "it" / "run")
        assert job.end(120) == ("FAILED", "2:0", "0"), job.text()
    finally:
        listener.communicate(b"\n")
    text = job.output.read_text()
    assert f"RDZV_ENDPOINT: port 12345 of {NODES[0]} can't be had" in text
    assert "requeued" not in text
