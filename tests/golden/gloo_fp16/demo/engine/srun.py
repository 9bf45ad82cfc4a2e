"""Engine: who this process is among those that one call of srun has started. No torch."""

import os

from .launch import Refused
from .nodelist import counts, hostnames

# SLURM's names for torch's. Those of the step: a job may have more tasks than one of its steps.
_STEP = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
}


def adopt_step(names: tuple[str, ...]) -> None:
    """Give the variables of a step of several tasks the `names` that torch.distributed reads.

    A batch script's own shell, and an interactive one of a single task, are one process. A
    launcher inside the step has told its processes more, and is believed.

    Raises:
        Refused: SLURM does not say all of it.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or all(name in os.environ for name in names):
        return
    if not tasks.isdecimal():
        raise Refused(f"SLURM_STEP_NUM_TASKS: expected a number, got {tasks!r}")
    if missing := [name for name in (*_STEP.values(), "SLURM_JOB_ID") if name not in os.environ]:
        raise Refused(
            f"SLURM_STEP_NUM_TASKS={tasks} set without {' and '.join(missing)}: "
            "start the tasks with srun"
        )
    step = {name: os.environ[source] for name, source in _STEP.items()}
    if any(os.environ.get(name, value) != value for name, value in step.items()):
        return  # a part of another launcher's, who must say the rest
    os.environ.update(step)
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(_tasks_here(int(tasks))))
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_node()
    os.environ.setdefault("MASTER_PORT", str(_port()))


def _tasks_here(num_tasks: int) -> int:
    """How many tasks of the step run on this machine.

    Raises:
        Refused: that is not what SLURM says.
    """
    # Without the step's own, which srun always sets, the job's: no more than the step has.
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if text := os.environ.get(name):
            break
    else:
        return num_tasks
    per_node = counts(text)
    number = os.environ.get("SLURM_NODEID", "0")
    if not number.isdecimal() or int(number) >= len(per_node):
        raise Refused(f"SLURM_NODEID: expected a machine of {name} = {text}, got {number!r}")
    return min(per_node[int(number)], num_tasks)


def _first_node() -> str:
    """The name of the machine that has rank 0.

    Raises:
        Refused: SLURM does not say it.
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := os.environ.get(name):
            return hostnames(text)[0]
    raise Refused("SLURM_STEP_NODELIST: expected the step's machines, got none: set MASTER_ADDR")


def _port() -> int:
    """A port below those that systems give away, another one for each step that may run beside."""
    step = os.environ.get("SLURM_STEP_ID", "0")
    job = os.environ["SLURM_JOB_ID"]
    if not (job.isdecimal() and step.isdecimal()):
        raise Refused(f"SLURM_JOB_ID, SLURM_STEP_ID: expected numbers, got {job!r}, {step!r}")
    return 20000 + (int(job) + 101 * int(step)) % 10000
