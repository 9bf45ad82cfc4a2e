"""Engine: who this process is, from what the launcher says, and how it ends. No torch."""

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    init_method: str = "env://"
    """Where the processes meet, in torch.distributed's words."""


_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether a launcher has told this process its place, or a part of it."""
    return any(name in os.environ for name in _NAMES)


def launch_from_environment() -> Launch:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; one process where none is set.

    Raises:
        Refused: some are set and others are not, or they contradict each other.
    """
    if not is_launched():
        return Launch()
    present = [name for name in _NAMES if name in os.environ]
    missing = [name for name in _NAMES if name not in os.environ]
    if missing:
        raise Refused(
            f"{' and '.join(present)} set without {' and '.join(missing)}: "
            "start with a launcher from launch/, or set all four"
        )
    try:
        rank, local_rank, world_size, local_world_size = (int(os.environ[n]) for n in _NAMES)
    except ValueError:
        values = ", ".join(f"{name}={os.environ[name]!r}" for name in _NAMES)
        raise Refused(f"expected whole numbers in the launcher's variables, got {values}") from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise Refused(
            f"the launcher's variables contradict each other: RANK={rank} of {world_size}, "
            f"LOCAL_RANK={local_rank} of {local_world_size}"
        )
    return Launch(rank, local_rank, world_size, local_world_size)


def find_launch(init_method: str, **given: int | None) -> Launch:
    """Who this process is: what the launcher says, or, without one, the settings `rendezvous`.

    Raises:
        Refused: neither says all of it, or they contradict each other.
    """
    launch = launch_from_environment()
    said = {name: value for name, value in given.items() if value is not None}
    if not is_launched():
        return _launch_by_hand(init_method, said)
    for name, value in said.items():
        if value != getattr(launch, name):
            raise Refused(
                f"rendezvous.{name}: expected {getattr(launch, name)}, as the launcher has it in "
                f"{name.upper()}, got {value}"
            )
    if init_method.startswith("tcp:") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise Refused(
            f"rendezvous.init_method: expected env://, for the launcher has prepared where the "
            f"processes meet, got {init_method!r}"
        )
    return replace(launch, init_method=init_method)


def _launch_by_hand(init_method: str, said: dict[str, int]) -> Launch:
    """The place that settings alone give to a process; one process where they give none.

    Raises:
        Refused: it is not all there, or makes no sense.
    """
    needed = [("rank", "world_size")] if said or init_method != "env://" else []
    if "local_rank" in said or "local_world_size" in said:
        needed.append(("local_rank", "local_world_size"))
    missing = [f"rendezvous.{name}" for names in needed for name in names if name not in said]
    if missing:
        raise Refused(
            f"{' and '.join(missing)}: expected a number beside the other settings of rendezvous, "
            "got none: without a launcher, each process is told who it is"
        )
    if not said:
        return Launch()
    # On one machine, unless the contrary is said.
    places = {"local_rank": said["rank"], "local_world_size": said["world_size"], **said}
    launch = Launch(**places, init_method=init_method)
    for name, below, limit in (
        ("rank", "world_size", launch.world_size),
        ("local_rank", "local_world_size", launch.local_world_size),
    ):
        if not 0 <= places[name] < limit:
            raise Refused(
                f"rendezvous.{name}: expected 0 or more, and less than rendezvous.{below} = "
                f"{limit}, got {places[name]}"
            )
    if launch.local_world_size > launch.world_size:
        raise Refused(
            f"rendezvous.local_world_size: expected at most rendezvous.world_size = "
            f"{launch.world_size}, got {launch.local_world_size}"
        )
    return launch


def check_meeting(launch: Launch) -> None:
    """Refuse several processes that are not told where they meet.

    Raises:
        Refused: with what is missing.
    """
    if launch.world_size == 1 or launch.init_method != "env://":
        return
    if missing := [name for name in _MEETING if not os.environ.get(name)]:
        raise Refused(
            f"{' and '.join(missing)}: expected the address and a free port of rank 0's machine, "
            "got none: set both, or give rendezvous.init_method"
        )
    if not os.environ["MASTER_PORT"].isdecimal():
        raise Refused(f"MASTER_PORT: expected a number, got {os.environ['MASTER_PORT']!r}")


def is_restarted() -> bool:
    """Whether the launcher has started this process again, after one that failed."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


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
