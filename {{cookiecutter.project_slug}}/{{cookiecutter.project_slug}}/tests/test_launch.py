"""Engine: a process knows its place from the launcher's variables, and ends with the right code."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
{% if cookiecutter.backend != "mpi" %}
import torch
{% endif %}

from ..engine import launch

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"RANK": "0"}, "RANK set without LOCAL_RANK and WORLD_SIZE and LOCAL_WORLD_SIZE"),
        (dict.fromkeys(NAMES, "one"), "expected whole numbers"),
        (dict.fromkeys(NAMES, "2"), "contradict each other: RANK=2 of 2, LOCAL_RANK=2 of 2"),
    ],
)
def test_place_that_makes_no_sense_is_refused(
    place: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.Refused, match=said):
        launch.launch_from_environment()


{% if cookiecutter.backend == "mpi" %}
def test_place_among_the_processes_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "set and deleted, so that the end of the test deletes it too")
        monkeypatch.delenv(name)
    for name, value in (("RANK", 3), ("SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    several = launch.launch_from_environment()
    assert several == launch.Launch(3, 1, 4, 2)
    with pytest.raises(launch.Refused, match=r"^MASTER_ADDR: expected the address"):
        launch.check_meeting(several)  # the others would look for rank 0 on their own machines


@pytest.mark.parametrize(
    ("rank", "size", "local_rank", "local_size"),
    [
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ],
)
def test_processes_of_mpirun_on_one_machine_meet_there(
    rank: str, size: str, local_rank: str, local_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "set and deleted, so that the end of the test deletes it too")
        monkeypatch.delenv(name)
    monkeypatch.setenv(rank, "1")
    with pytest.raises(launch.Refused, match=r"^RANK set without LOCAL_RANK and WORLD_SIZE"):
        launch.launch_from_environment()
    for name, value in ((size, "2"), (local_rank, "1"), (local_size, "2")):
        monkeypatch.setenv(name, value)
    here = launch.launch_from_environment()
    assert here == launch.Launch(1, 1, 2, 2)
    launch.check_meeting(here)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


{% endif %}
SCRIPTS = Path(launch.__file__).parents[1].glob("launch/*.sh")
{% if cookiecutter.cluster == "slurm" %}
(SCRIPT,) = (path for path in SCRIPTS if path.name != "task.sh")
{% else %}
(SCRIPT,) = SCRIPTS
{% endif %}


def dry_run(*words: str, **environment: str) -> tuple[dict[str, str], list[str]]:
    """What the script of launch/ would do: the variables that it sets, and its command."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    ended = subprocess.run(
        [SCRIPT, "--dry-run", *words],
        env={**own, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == ""
    *variables, command = ended.stderr.splitlines()
    return dict(line.split("=", 1) for line in variables), shlex.split(command)


def test_script_says_what_it_would_run() -> None:
    variables, command = dry_run("--epochs", "3", "--run_dir=a b", NPROC="2")
    assert command[-3:] == ["--epochs", "3", "--run_dir=a b"]
    assert f"{launch.__name__.partition('.')[0]}.train" in command
    {% if cookiecutter.backend == "mpi" %}
    assert command[:3] == ["mpirun", "-np", "2"]
    {% else %}
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("--max-restarts") + 1] == "0"
    assert "--standalone" in command
    assert command[command.index("--local-addr") + 1] == "127.0.0.1", "its name may lead nowhere"
    if torch.__version__ >= "2.10":  # torchrun has no such option before
        assert "SIGUSR1" in command[command.index("--signals-to-handle") + 1].split(",")
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    {% endif %}
    assert "TORCH_DISTRIBUTED_DEBUG" not in variables


def test_what_you_have_set_stays() -> None:
    variables, command = dry_run(OMP_NUM_THREADS="7", MAX_RESTARTS="4")
    assert variables["OMP_NUM_THREADS"] == "7"
    {% if cookiecutter.backend != "mpi" %}
    assert command[command.index("--max-restarts") + 1] == "4"
    {% else %}
    assert command[:3] == ["mpirun", "-np", "1"]
    {% endif %}


def test_debugging_lets_torch_talk() -> None:
    variables, command = dry_run("--debug", TORCH_DISTRIBUTED_DEBUG="INFO")
    assert variables["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert variables["TORCH_CPP_LOG_LEVEL"] == "INFO"
    {% if cookiecutter.backend != "gloo" %}
    assert variables["NCCL_DEBUG"] == "INFO"
    {% endif %}
    assert "--debug" not in command


def test_processes_share_the_cpus_that_the_script_may_use() -> None:
    usable = len(os.sched_getaffinity(0))
    assert dry_run(NPROC="1")[0]["OMP_NUM_THREADS"] == str(usable)
    assert dry_run(NPROC=str(usable))[0]["OMP_NUM_THREADS"] == "1"
    assert dry_run(NPROC=str(2 * usable))[0]["OMP_NUM_THREADS"] == "1"
    whole = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(whole)})
    try:
        assert dry_run(NPROC="1")[0]["OMP_NUM_THREADS"] == "1"
    finally:
        os.sched_setaffinity(0, whole)


def test_processes_are_the_visible_gpus() -> None:
    assert dry_run(CUDA_VISIBLE_DEVICES="0,3,5")[1] == dry_run(NPROC="3")[1]
    assert dry_run(CUDA_VISIBLE_DEVICES="")[1] == dry_run(NPROC="1")[1]


@pytest.mark.parametrize(
    ("body", "code", "output", "error"),
    [
        ("print('body')", 0, "body\nat exit\n", ""),
        ("raise SystemExit(2)", 2, "", ""),
        ("raise SystemExit", 0, "at exit\n", ""),
        ("raise SystemExit('words')", 1, "", "words"),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt"),
    ],
)
def test_end_of_a_process(body: str, code: int, output: str, error: str) -> None:
    program = (
        "import atexit\n"
        f"from {launch.__name__} import run_to_exit\n"
        "atexit.register(print, 'at exit')\n"
        f"def main(argument):\n    {body}\n"
        "run_to_exit(main, None)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, output)
    assert error in ended.stderr
    assert bool(error) == bool(ended.stderr)
