"""The job script, run by bash with commands that stand in for SLURM's and for torchrun."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest

from tests.rendering import SLUG, all_answers, render, silent, succeed

VARIANTS = list(product(map(str, all_answers()["backend"]), map(str, all_answers()["nodes"])))
TOOLS = (
    *("awk", "bash", "cat", "date", "dirname", "env", "getconf", "grep", "nproc"),
    *("sleep", "touch", "tr"),
)

# Runs its tasks as srun does: each with its number, and a signal goes to all of them.
SRUN = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"$CALLS/srun"
tasks=1 pids=()
while [[ "$1" == -* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
trap 'kill -USR1 "${pids[@]}"' USR1
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_TASKS=$tasks \
    SLURM_STEP_TASKS_PER_NODE="$tasks" "$@" &
  pids+=($!)
done
echo "${pids[@]}" >"$CALLS/task.pid"
code=0
for pid in "${pids[@]}"; do
  while :; do
    wait "$pid" && last=0 || last=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  ((last == 0)) || code=$last
done
exit "$code"
"""
# Ends at once with ENDS=CODE, else waits for a signal and leaves what ENDS="STATE STEP FROM" says.
TORCHRUN = r"""#!/usr/bin/env bash
printf '%s\n' "$@" --- >>"$CALLS/torchrun"
read -r state step from <<<"$ENDS"
[[ -n "$step" ]] || exit "$state"
told=""
trap 'told=yes' TERM
touch "$CALLS/ready"
while [[ -z "$told" ]]; do sleep 0.05; done
echo "{\"state\": \"$state\", \"step\": $step, \"updated\": \"$(date -u +%FT%T+00:00)\"}" \
  >"$RUN_DIR/status.json"
echo "[{\"step\": $from, \"started\": $(date +%s)}]" >"$RUN_DIR/attempts.json"
exit 1
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "$*" >>"$CALLS/scontrol"
[[ "$1" != show ]] || printf '%s\n' gpu01 gpu02 gpu03 cpu7
"""
FAILING = '#!/usr/bin/env bash\necho "$*" >>"$CALLS/scontrol"\nexit 1\n'
# The names of the machines lead nowhere here.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  *engine.agent*) shift 2 && exec torchrun "$@" ;;
  *engine.nodes*) echo "10.0.0.$SLURM_NODEID false eth0" ;;
  *) exec {python} "$@" ;;
esac
"""


@dataclass
class Job:
    """A job that the script thinks it is in: where it runs, and what it is told."""

    project: Path
    root: Path
    scontrol: str | None = SCONTROL
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make a PATH that holds nothing of a SLURM that may be installed here."""
        self.run_dir = self.root / "a run"
        self.run_dir.mkdir()
        commands = self.root / "bin"
        commands.mkdir()
        for name in TOOLS:
            (commands / name).symlink_to(str(shutil.which(name)))
        fakes = {"srun": SRUN, "torchrun": TORCHRUN, "scontrol": self.scontrol}
        fakes["python"] = PYTHON.replace("{python}", sys.executable)
        for name, text in fakes.items():
            if text is not None:
                (commands / name).write_text(text)
                (commands / name).chmod(0o755)
        self.environment = {
            "PATH": str(commands),
            "HOME": str(self.root),
            "CALLS": str(self.root),
            "RUN_DIR": str(self.run_dir),
            "ENDS": "0",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "gpu01",
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_CPUS_PER_TASK": "3",
            **self.variables,
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Run a copy of the script, as SLURM does, in the project's directory."""
        script = shutil.copy(self.project / SLUG / "launch" / "train.sbatch", self.root / "script")
        return subprocess.Popen(
            ["bash", script, *words, "--run_dir", str(self.run_dir)],
            cwd=self.project,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        """Run it to its end: exit code and output."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def run_until(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal to the script, and to nothing else, when the run is under way."""
        process = self.start()
        deadline = time.monotonic() + 60
        while not (self.root / "ready").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        if number == signal.SIGTERM:  # the tasks have it from SLURM
            tasks = (self.root / "task.pid").read_text().split()
            for pid in tasks:
                os.kill(int(pid), number)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self, command: str) -> list[str]:
        """The lines that one of the commands has left."""
        path = self.root / command
        return path.read_text().splitlines() if path.exists() else []

    def requeues(self) -> list[str]:
        """What scontrol was asked to requeue."""
        return [line for line in self.calls("scontrol") if line.startswith("requeue")]


Projects = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Projects:
    """A project of a cluster by backend and nodes, rendered when first asked for."""
    root = tmp_path_factory.mktemp("slurm")

    def project_of(backend: str, nodes: str) -> Path:
        project = root / f"{backend}_{nodes}" / SLUG
        if not project.exists():
            with silent():
                render({"backend": backend, "nodes": nodes, "cluster": "slurm"}, project.parent)
        return project

    return project_of


@pytest.fixture
def gloo(projects: Projects) -> Path:
    """The project that most tests take: several machines, torchrun, no GPU."""
    return projects("gloo", "multi")


FOUR = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[01-03],cpu7"}


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_scripts_are_clean(projects: Projects, variant: tuple[str, str]) -> None:
    scripts = sorted((projects(*variant) / SLUG / "launch").glob("*.s*"))
    assert {"train.sbatch", "task.sh"} < {script.name for script in scripts}
    succeed("shellcheck", *scripts)


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_what_sbatch_reads_stands_before_any_command(
    projects: Projects, variant: tuple[str, str]
) -> None:
    backend, nodes = variant
    text = (projects(*variant) / SLUG / "launch" / "train.sbatch").read_text()
    head, _, rest = text.partition("\nset -")
    assert "#SBATCH" not in rest
    assert all(line.startswith("#") for line in head.splitlines() if line)
    lines = [line for line in head.splitlines() if line.startswith("#SBATCH")]
    parts = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    options = {option: value for option, _, value in parts}
    assert options.pop("job-name") == SLUG
    assert options.pop("gpus-per-node", None) == ("1" if backend == "nccl" else None)
    assert options == {
        "nodes": "2" if nodes == "multi" else "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "4",
        "time": "04:00:00",
        "signal": "B:USR1@300",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
    }


@pytest.mark.parametrize("scontrol", [SCONTROL, FAILING, None], ids=["answers", "fails", "missing"])
def test_all_meet_at_the_first_machine_of_the_list(
    gloo: Path, tmp_path: Path, scontrol: str | None
) -> None:
    job = Job(gloo, tmp_path, scontrol, FOUR)
    code, output = job.run("--dry-run")
    assert code == 0, output
    (step,) = job.calls("srun")
    assert "--nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=1" in step
    launcher = f"python -m {SLUG}.engine.agent "
    commands = [line for line in output.splitlines() if line.startswith(launcher)]
    own = [re.findall(r"--local-addr 10\.0\.0\.(\d)", command) for command in commands]
    assert sorted(own) == [["0"], ["1"], ["2"], ["3"]]
    (same,) = {re.sub(r"--local-addr \S+", "", command) for command in commands}
    assert output.count("OMP_NUM_THREADS=3\n") == 4  # of SLURM_CPUS_PER_TASK, whatever is in sight
    assert "--nnodes 4 --rdzv-id demo-123456.0 " in same
    assert "--rdzv-endpoint gpu01:15456 " in same  # 12000 + the number of the job, modulo 20000
    assert not job.calls("torchrun")


@pytest.mark.parametrize("nodelist", ["gpu[01-", ""])
def test_nowhere_to_meet_is_refused_at_once(gloo: Path, tmp_path: Path, nodelist: str) -> None:
    job = Job(gloo, tmp_path, None, {**FOUR, "SLURM_JOB_NODELIST": nodelist})
    code, output = job.run()
    assert code == 2, output
    assert f"node list: expected something like gpu[01-03],cpu7, got '{nodelist}'" in output
    assert "train.sbatch: no machine to meet at" in output
    assert not job.calls("srun")


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        ("gloo", {"MASTER_ADDR": "localhost"}),
        ("gloo", {"MASTER_ADDR": "127.0.0.1"}),
        ("gloo", {"MASTER_ADDR": "::1"}),
        ("gloo", {"RDZV_ENDPOINT": "localhost:29500"}),
        ("mpi", {"MASTER_ADDR": "127.0.1.1"}),
    ],
)
def test_name_of_every_machine_itself_is_refused(
    projects: Projects, tmp_path: Path, backend: str, place: dict[str, str]
) -> None:
    job = Job(projects(backend, "multi"), tmp_path, variables={**FOUR, **place})
    code, output = job.run()
    assert code == 2, output
    assert "at that name each of 4 machines finds only itself" in output
    assert not job.calls("srun")


@pytest.mark.parametrize(
    ("variant", "variables", "says"),
    [
        (("gloo", "multi"), {"SLURM_NTASKS_PER_NODE": "8"}, "NPROC processes: --ntasks-per-node=1"),
        (("nccl", "single"), {"SLURM_NTASKS": "8"}, "NPROC processes: --ntasks-per-node=1"),
        (("gloo", "single"), {"SLURM_JOB_NUM_NODES": "2"}, "trains on one machine, --nodes=1"),
        (("mpi", "single"), {"SLURM_JOB_NUM_NODES": "2"}, "trains on one machine, --nodes=1"),
        (("gloo", "single"), {"SLURM_JOB_ID": ""}, "not in a job of SLURM"),
    ],
)
def test_job_of_another_shape_is_refused(
    projects: Projects,
    tmp_path: Path,
    variant: tuple[str, str],
    variables: dict[str, str],
    says: str,
) -> None:
    job = Job(projects(*variant), tmp_path, variables=variables)
    code, output = job.run()
    assert code == 2, output
    assert says in output
    assert output.count("\n") == 1
    assert not job.calls("srun")


def test_place_without_the_package_is_refused(gloo: Path, tmp_path: Path) -> None:
    """Above the project, whose directory has the package's name, as well as anywhere else."""
    job = Job(gloo, tmp_path)
    for place in (gloo.parent, tmp_path):
        job.project = place
        (place / SLUG / "launch").mkdir(parents=True, exist_ok=True)
        shutil.copy(gloo / SLUG / "launch" / "train.sbatch", place / SLUG / "launch")
        code, output = job.run()
        shutil.rmtree(place / SLUG / "launch")
        assert code == 2, output
        assert f"no package {SLUG} here: submit from the directory that holds it" in output


@pytest.mark.parametrize("variant", [("gloo", "multi"), ("gloo", "single")], ids="-".join)
@pytest.mark.parametrize("code", [0, 1])
def test_words_arrive_as_they_are_and_the_exit_code_comes_back(
    projects: Projects, tmp_path: Path, variant: tuple[str, str], code: int
) -> None:
    job = Job(projects(*variant), tmp_path, variables={"ENDS": str(code), "NPROC": "2"})
    words = ["--config", "my  config.yaml", "--data.text", 'a "b" $HOME *', ""]
    ended, output = job.run(*words)
    assert ended == code, output
    *launcher, last = job.calls("torchrun")
    assert launcher[-len(words) - 2 :] == [*words, "--run_dir", str(job.run_dir)]
    assert last == "---"
    assert launcher.count("---") == 0, "one torchrun for one machine"
    assert "SRUN_CPUS_PER_TASK=3" in output
    assert not job.requeues()


REQUEUED = ["requeue 123456"]


@pytest.mark.parametrize(
    ("ends", "number", "code", "requeues", "says"),
    [
        ("stopped 50 30", signal.SIGUSR1, 0, REQUEUED, "requeued, and will go on from step 50"),
        ("stopped 50 50", signal.SIGUSR1, 75, [], "not a step was made"),
        ("done 50 30", signal.SIGUSR1, 0, [], "the run is done, at step 50"),
        ("failed 50 30", signal.SIGUSR1, 1, [], "the run is failed, at step 50"),
        ("refused 50 30", signal.SIGUSR1, 2, [], "the run is refused, at step 50"),
        ("running 50 30", signal.SIGUSR1, 1, [], "the run is running, at step 50"),
        ("stopped 50 30", signal.SIGTERM, 75, [], "the run is stopped, at step 50"),
    ],
)
@pytest.mark.parametrize("nodes", ["single", "multi"])
def test_only_a_run_that_was_stopped_is_requeued_and_once(
    projects: Projects,
    tmp_path: Path,
    nodes: str,
    ends: str,
    number: signal.Signals,
    code: int,
    requeues: list[str],
    says: str,
) -> None:
    job = Job(projects("gloo", nodes), tmp_path, variables={"ENDS": ends})
    ended, output = job.run_until(number)
    assert (ended, job.requeues()) == (code, requeues), output
    assert says in output


@pytest.mark.parametrize("scontrol", [FAILING, None], ids=["fails", "missing"])
def test_where_nothing_can_be_requeued_it_says_how_to_go_on(
    gloo: Path, tmp_path: Path, scontrol: str | None
) -> None:
    job = Job(gloo, tmp_path, scontrol, {"ENDS": "stopped 50 30"})
    code, output = job.run_until(signal.SIGUSR1)
    assert code == 75, output
    assert "all is saved, but scontrol could not requeue job 123456; go on with:" in output
    script = gloo / SLUG / "launch" / "train.sbatch"
    blank = str(job.run_dir).replace(" ", "\\ ")
    assert f"\n  sbatch {script} --run_dir {blank} \n" in output


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("has_saved", [True, False])
def test_requeued_job_goes_on_from_its_own_checkpoint(
    gloo: Path, tmp_path: Path, restarts: str, has_saved: bool
) -> None:
    job = Job(gloo, tmp_path, variables={"SLURM_RESTART_COUNT": restarts})
    (job.run_dir / "status.json").write_text(json.dumps({"state": "stopped"}))
    if has_saved:
        (job.run_dir / "checkpoints" / "step_00000050").mkdir(parents=True)
    code, output = job.run("--resume", "elsewhere")
    assert code == 0, output
    words = job.calls("torchrun")
    goes_on = restarts == "1" and has_saved
    assert (words[-3:] == ["--resume", "auto", "---"]) == goes_on, words


@pytest.mark.parametrize(
    ("words", "kind"),
    [([], "pmix"), (["--backend", "gloo"], "none"), (["--backend=nccl"], "none")],
)
def test_each_process_of_mpi_is_a_task_that_knows_its_place(
    projects: Projects, tmp_path: Path, words: list[str], kind: str
) -> None:
    job = Job(projects("mpi", "multi"), tmp_path, variables={"SLURM_NTASKS_PER_NODE": "2"})
    code, output = job.run("--dry-run", *words)
    assert code == 0, output
    (step,) = job.calls("srun")
    assert "--nodes=1 --ntasks=2 --ntasks-per-node=2 --kill-on-bad-exit=1" in step
    lines = output.splitlines()
    for line in ("RANK=0", "RANK=1", "LOCAL_RANK=0", "LOCAL_RANK=1", f"SLURM_MPI_TYPE={kind}"):
        assert lines.count(line) == 1, output
    for line in ("WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "OMP_NUM_THREADS=3"):
        assert lines.count(line) == 2, output
    assert lines.count("MASTER_ADDR=gpu01") == lines.count("MASTER_PORT=15456") == 1
    assert sum(line.startswith(f"python -m {SLUG}.train ") for line in lines) == 2
