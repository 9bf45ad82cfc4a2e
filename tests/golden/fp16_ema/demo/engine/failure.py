"""Engine: what is said when a rank fails: once, by the one that failed first, as the last thing.

An exception ends its rank, and then all others fail too: they lose it. So the first one puts its
name into the store before it leaves, and those that find a name there print a line, no traceback.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .beats import ask, claim_failure, find_failure, own_client
from .distributed import World
from .explain import one_line
from .launch import FailedTogether, Refused
from .rundir import PACKAGE, RunDir

PATIENCE_S = 3.0
"""How long an answer of the store is waited for."""


@contextmanager
def told(run: RunDir, world: World) -> Iterator[None]:
    """Say where an exception ends the block, and on which rank the trouble began.

    The rank that failed first leaves with its exception, which gets a note; a copy goes to
    `logs/failed-rank<r>.txt`. All others leave with one line, and their traceback is in their log.

    Raises:
        SystemExit: with that line, in place of what was raised.
    """
    try:
        yield
    except (Refused, SystemExit):
        raise
    except BaseException as error:
        note = f"rank {world.rank} failed {world.pulse}"
        words = one_line(f"{note}: {type(error).__name__}: {error}")
        cause = cause_of(error, words, world, run)
        if cause is None:
            error.add_note(note)
            write_failure(run, error, words)
            raise
        log_failure(run, error)
        raise SystemExit(f"{PACKAGE}: rank {world.rank} left because {cause}") from error


def cause_of(error: BaseException, words: str, world: World, run: RunDir) -> str | None:
    """Why a rank leaves, where the reason lies with another one; None where it is its own."""
    if world.world_size == 1:
        return None
    if isinstance(error, FailedTogether) and error.rank != world.rank:
        return heard(world, run)[0]  # without an answer everyone tells it, rather than nobody
    if not is_loss_of_a_peer(error):
        return claim(words, world)
    cause, is_known = heard(world, run)
    if cause is None:
        cause = "another rank went away without a word: the launcher tells which, and how"
        if not is_known:
            cause += ". The ranks' store can't be asked: it may have lived in that one"
        cause += f" ({one_line(str(error))})"
    return cause


def is_loss_of_a_peer(error: BaseException) -> bool:
    """Whether an error only says that a collective, or an answer of the store, did not come."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        # gloo names the file that reports it, but for what breaks off after a time-out.
        and any(words in str(error) for words in ("gloo/", "Application timeout"))
    )


def is_timeout(error: BaseException) -> bool:
    """Whether a collective was given up because others did not come."""
    words = ("Timed out waiting", "Application timeout")
    return is_loss_of_a_peer(error) and any(part in str(error) for part in words)


def claim(words: str, world: World) -> str | None:
    """Be the rank that failed first: None where it is, else the words of the one that was.

    Also where the store does not answer: this rank has something of its own to tell.
    """
    with suppress(RuntimeError, OSError):
        first = ask(lambda: claim_failure(own_client(_store(world)), words), PATIENCE_S)
        return None if first == words else first
    return None


def heard(world: World, run: RunDir) -> tuple[str | None, bool]:
    """The words of the rank that failed first, and whether the store could be asked.

    It writes them before it leaves, so they are there or come at once.
    """
    try:
        client = ask(lambda: own_client(_store(world), PATIENCE_S), PATIENCE_S)
        deadline = time.monotonic() + 1.0
        while (found := ask(partial(find_failure, client), PATIENCE_S)) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    except (RuntimeError, OSError):
        return written_failure(world, run), False
    return found, True


def _store(world: World) -> Store:
    if world.store is None:
        raise ConnectionError("there is no store")
    return world.store


def written_failure(world: World, run: RunDir) -> str | None:
    """The words of another rank that failed since this one began, where it left them on a disk."""
    found = []
    for path in run.logs.glob("failed-rank*.txt"):
        with suppress(OSError):
            is_other = path.name != _failure_name(world.rank)
            if is_other and path.stat().st_mtime >= world.pulse.began:
                found.append((path.stat().st_mtime, path))
    if not found:
        return None
    with suppress(OSError):
        return min(found)[1].read_text(encoding="utf-8").splitlines()[0]
    return None


def write_failure(run: RunDir, error: BaseException, words: str) -> None:
    """Leave words and traceback in the run directory, where there is one."""
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    trace = "".join(traceback.format_exception(error))
    with suppress(OSError):
        run.logs.mkdir(parents=True, exist_ok=True)
        path = run.logs / _failure_name(run.launch.rank)
        path.write_text(f"{words}\n{stamp}\n\n{trace}", encoding="utf-8")


def log_failure(run: RunDir, error: BaseException) -> None:
    """Put the traceback into this rank's log, and nowhere else."""
    with suppress(OSError), (run.logs / f"rank{run.launch.rank}.log").open("a") as file:
        file.write("".join(traceback.format_exception(error)))


def _failure_name(rank: int) -> str:
    return f"failed-rank{rank}.txt"
