"""A job of two nodes in a real SLURM: stopped, requeued once, resumed, as if nothing had been."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.faults.test_launched import end_of
from tests.rendering import SLUG, render, silent
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
STEPS = 920  # of 40 epochs
PATIENCE_S = 300


class Job:
    """A training that was submitted."""

    def __init__(self, cluster: Cluster, project: Path, run_dir: Path) -> None:
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
        """Wait until it waits again, and let it: SLURM puts it off for two minutes."""

        def is_pending() -> bool:
            job = self.cluster.job(self.number)
            return (job["JobState"], job["Restarts"]) == ("PENDING", "1")

        until(is_pending, PATIENCE_S, self.text)
        status = json.loads((self.run_dir / "status.json").read_text())
        assert status["state"] == "stopped", self.text()
        assert 0 < status["step"] < STEPS, self.text()
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait_for_end(self) -> None:
        """Wait until it is done, in its second start."""
        is_over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.cluster.job(self.number)["JobState"] in is_over, PATIENCE_S, self.text)
        job = self.cluster.job(self.number)
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1")
        assert json.loads((self.run_dir / "status.json").read_text())["state"] == "done"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for several machines of a cluster, on CPUs."""
    require()
    with silent():
        return render(
            {"backend": "gloo", "nodes": "multi", "cluster": "slurm", "tracker": "none"},
            tmp_path_factory.mktemp("project"),
        )


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
def straight(project: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of a run to which nothing happens: two processes on one machine."""
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


@pytest.mark.parametrize("stop", [warn, take_back])
def test_job_is_stopped_requeued_once_and_goes_on_exactly(
    cluster: Cluster,
    project: Path,
    straight: str,
    tmp_path: Path,
    stop: Callable[[Job], object],
    count: Count,
) -> None:
    job = Job(cluster, project, tmp_path / "with a blank" / "run")
    job.wait_for_training()
    stop(job)
    job.wait_for_requeue()
    job.wait_for_end()
    text = job.output.read_text()
    assert text.count(f"job {job.number} is requeued") == (stop is warn), text
    assert "resumed from step_" in text
    environment = json.loads((job.run_dir / "environment.json").read_text())
    assert sorted(rank["host"] for rank in environment["ranks"]) == sorted(NODES)
    assert end_of(project, job.run_dir) == straight
    count("jobs requeued by SLURM that went on exactly", 1)
