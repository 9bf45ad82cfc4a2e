"""Engine: who this process is, from what the launcher says, and how it ends. No torch."""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Refused(ValueError):
    """A mistake that the user can mend: one line on standard error, exit code 2, no traceback."""


class FailedTogether(Exception):
    """An error that all ranks raise, for they agreed on it; one of them tells it for all."""

    rank = 0
    """Where its cause lies, or the one that speaks where it lies nowhere."""


class NotMet(ConnectionError):
    """The ranks did not find each other: one line, exit code 1, no traceback."""


@dataclass(frozen=True)
class Launch:
    """The place of this process among all that train together."""

    rank: int = 0
    """Number of this process, over all machines."""
    local_rank: int = 0
    """Number of this process on its machine."""
    world_size: int = 1
    """Processes on all machines."""
    local_world_size: int = 1
    """Processes on this machine."""


{% if cookiecutter.backend == "mpi" %}
# mpirun (Open MPI, or MPICH's Hydra) tells each process its place in variables of its own.
_MPI_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def _adopt_mpi_names() -> None:
    """Give mpirun's variables the names that torch.distributed reads."""
    for name, sources in _MPI_NAMES.items():
        for source in sources:
            if name not in os.environ and source in os.environ:
                os.environ[name] = os.environ[source]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


{% endif %}
def launch_from_environment() -> Launch:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; one process where none is set.

    Raises:
        Refused: some are set and others are not, or they contradict each other.
    """
    {% if cookiecutter.backend == "mpi" %}
    _adopt_mpi_names()
    {% endif %}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    present = [name for name in names if name in os.environ]
    if not present:
        return Launch()
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise Refused(
            f"{' and '.join(present)} set without {' and '.join(missing)}: "
            "start with a launcher from launch/, or set all four"
        )
    try:
        rank, local_rank, world_size, local_world_size = (int(os.environ[n]) for n in names)
    except ValueError:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in names)
        raise Refused(f"expected whole numbers in the launcher's variables, got {values}") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise Refused(
            f"the launcher's variables contradict each other: RANK={rank} of {world_size}, "
            f"LOCAL_RANK={local_rank} of {local_world_size}"
        )
    return Launch(rank, local_rank, world_size, local_world_size)


def restart_count() -> str:
    """How often the launcher has started this process again: what it leaves may outlive it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def is_restarted() -> bool:
    """Whether the launcher has started this process again, after one that failed."""
    return restart_count() != "0"


def launch_id() -> str:
    """What all processes have in common that one call of the launcher starts on this machine.

    Its own name for a run is not enough: who chooses it may give it to the next run as well.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} by process {os.getppid()} on {socket.gethostname()}"


def run_to_exit(main: Callable[[T], object], argument: T) -> NoReturn:
    """Run a program and end the process: 0 when it returns, 1 after an error, or as it says.

    Python's own teardown is left out. gloo's threads may still hold the last finished work, and
    take Python's lock to free its tensors: in a finalizing interpreter that aborts the process
    (2 of 50 runs, on a loaded machine). After an error nothing else is torn down either: the
    process group would wait for peers that may be dead.
    """
    code = 0
    try:
        main(argument)
    except SystemExit as error:
        if isinstance(error.code, str):  # sys.exit("words"): printed, and 1, as Python does
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except NotMet as error:
        print(error, file=sys.stderr)
        code = 1
    except BaseException:
        logging.getLogger(__name__).critical("failed", exc_info=True)
        code = 1
    if code == 0:
        atexit._run_exitfuncs()  # what libraries want done at the end of a process
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
