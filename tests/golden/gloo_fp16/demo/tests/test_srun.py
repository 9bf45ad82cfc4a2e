"""Engine: the tasks of a step of SLURM know their places, and no other process takes one."""

import os
import socket

import pytest

from ..engine.distributed import gather
from ..engine.launch import Launch, Refused, launch_from_environment
from .harness import values
from .parts import joined

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
"""What the shell of a batch script sees."""


def step(tasks: str, per_node: str, nodes: str, procid: str, nodeid: str, localid: str) -> None:
    """Be a task of a step."""
    os.environ.update(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": tasks,
            "SLURM_STEP_TASKS_PER_NODE": per_node,
            "SLURM_STEP_NODELIST": nodes,
            "SLURM_PROCID": procid,
            "SLURM_NODEID": nodeid,
            "SLURM_LOCALID": localid,
        }
    )


@pytest.fixture(autouse=True)
def _job(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job of 8 tasks, outside of any step."""
    inherited = [name for name in os.environ if name.startswith(("SLURM_", "PMI", "OMPI_"))]
    steps = ("ID", "NUM_TASKS", "TASKS_PER_NODE", "NODELIST")
    for name in {*NAMES, *inherited, *JOB, *(f"SLURM_STEP_{name}" for name in steps)}:
        # Set and deleted, so that the end of the test deletes it as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("task", "launch", "host"),
    [
        (("2", "2", "n1", "1", "0", "1"), Launch(1, 1, 2, 2), "n1"),
        (("2", "1(x2)", "n[1-2]", "1", "1", "0"), Launch(1, 0, 2, 1), "n1"),
        (("8", "4(x2)", "n[1-2]", "5", "1", "1"), Launch(5, 1, 8, 4), "n1"),
        (("3", "2,1", "gpu[08-09]", "2", "1", "0"), Launch(2, 0, 3, 1), "gpu08"),
        (("3", "2,1", "gpu[08-09]", "1", "0", "1"), Launch(1, 1, 3, 2), "gpu08"),
    ],
)
def test_task_of_a_step(task: tuple[str, ...], launch: Launch, host: str) -> None:
    step(*task)
    assert launch_from_environment() == launch
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (host, "23456")
    assert launch_from_environment() == launch, "asked again"


def test_steps_of_one_job_meet_apart() -> None:
    step("2", "2", "n1", "0", "0", "0")
    os.environ["SLURM_STEP_ID"] = "1"
    launch_from_environment()
    assert os.environ["MASTER_PORT"] == "23557"


def test_shell_of_the_job_is_one_process() -> None:
    assert launch_from_environment() == Launch()
    assert "MASTER_ADDR" not in os.environ


def test_single_task_is_one_process() -> None:
    step("1", "1", "n1", "0", "0", "0")
    assert launch_from_environment() == Launch()


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("MASTER_PORT", "29500")
    step("2", "2", "", "1", "0", "1")
    assert launch_from_environment() == Launch(1, 1, 2, 2)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("elsewhere", "29500")


def test_launcher_inside_a_step_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    step("2", "1(x2)", "n[1-2]", "1", "1", "0")
    for name, value in zip(NAMES[:4], "7384", strict=True):
        monkeypatch.setenv(name, value)
    assert launch_from_environment() == Launch(7, 3, 8, 4)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(Refused, match=r"^RANK and WORLD_SIZE and LOCAL_WORLD_SIZE set without"):
        launch_from_environment()


def test_step_that_says_less_than_srun_would() -> None:
    step("2", "", "", "1", "0", "1")
    assert launch_from_environment() == Launch(1, 1, 2, 2), "no more here than the step has"
    assert os.environ["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_PROCID", None, "SLURM_STEP_NUM_TASKS=8 set without SLURM_PROCID: "),
        ("SLURM_JOB_ID", None, "SLURM_STEP_NUM_TASKS=8 set without SLURM_JOB_ID: "),
        ("SLURM_STEP_NUM_TASKS", "many", "SLURM_STEP_NUM_TASKS: expected a number, got 'many'"),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x", "node list: expected "),
        ("SLURM_NODEID", "2", "SLURM_NODEID: expected a machine of SLURM_STEP_TASKS_PER_NODE = "),
        ("SLURM_STEP_NODELIST", "n[1-", "node list: expected "),
        ("SLURM_STEP_ID", "batch", "SLURM_JOB_ID, SLURM_STEP_ID: expected numbers, got "),
        ("SLURM_PROCID", "first", "expected whole numbers in the launcher's variables, got "),
        ("SLURM_LOCALID", "4", "the launcher's variables contradict each other: "),
    ],
)
def test_step_that_makes_no_sense_is_refused(name: str, value: str | None, said: str) -> None:
    step("8", "4(x2)", "n[1-2]", "5", "1", "1")
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
    with pytest.raises(Refused) as refused:
        launch_from_environment()
    assert str(refused.value).startswith(said)


def free_port() -> int:
    """One of the ports that steps meet at; another one in each process that asks."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise OSError("no port is free")


def meet(_init_method: str, job: str) -> list[int]:
    """Be a task of a step of two, in a job of eight, on this machine."""
    rank = os.environ["RANK"]
    for name in NAMES:
        os.environ.pop(name, None)
    os.environ.update(JOB, SLURM_JOB_ID=job)
    step("2", "2", "localhost", rank, "0", rank)
    with joined("env://") as joint:
        return gather(joint.world, joint.world.local_rank)


def test_tasks_of_a_step_meet() -> None:
    assert values(meet, 2, str(free_port() - 20000)) == [[0, 1]] * 2
