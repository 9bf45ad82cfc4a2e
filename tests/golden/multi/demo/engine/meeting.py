"""Engine: where processes meet: the store that all of them reach, whatever its address looks like.

A file (`file://`) is of one run alone. What is left in it, such as addresses, would be taken for
that of the next one, which then waits for processes that are gone.
"""

import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.request import url2pathname

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from .launch import Launch, Refused

_FILE = "file://"
_LOOK_S = 0.05  # between two looks into the store


class Part(PrefixStore):
    """What of the store is of one start of the run alone: a launcher's store may outlive it."""

    def __init__(self, name: str, store: Store) -> None:
        """Nothing is sent."""
        super().__init__(name, store)
        self.name = name


def open_store(launch: Launch, limit: timedelta) -> Part:
    """Reach the store of all ranks, which rank 0 may have to open. Collective.

    Raises:
        Refused: it is a file that was used before, or that can't be made.
        RuntimeError: there is none within the limit, or not all ranks come to it.
    """
    is_file = launch.init_method.startswith(_FILE)
    if is_file and not _path_of(launch).parent.is_dir():
        raise Refused(
            f"rendezvous.init_method: expected a file in a directory that is there, got "
            f"{launch.init_method!r}"
        )
    # As init_process_group would.
    address = launch.init_method, launch.rank, launch.world_size
    store: Store = next(rendezvous(*address, timeout=limit))[0]
    if is_file and store.add(f"rank {launch.rank}", 1) > 1:
        raise Refused(
            f"rendezvous.init_method: expected a new file, got {_path_of(launch)}, in which a rank "
            f"{launch.rank} has been before: a run that failed has left it, or two processes have "
            "this number; remove it, or give another name"
        )
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Part(f"start {_number(launch, store, limit) if is_kept else 0}", store)


def _number(launch: Launch, store: Store, limit: timedelta) -> int:
    """The number of this start among all that share the store: rank 0 tells it to who asks.

    How often the launcher has started a process is none: a machine that has replaced another one
    counts from 0. And what a rank finds without asking may be of the start before.
    """
    if launch.rank != 0:
        question = store.add("questions", 1)
        store.set(f"question of {launch.rank}", str(question))
        number = int(store.get(f"answer to {question}"))
        store.set(f"rank {launch.rank} knows {number}", "")
        return number
    number = store.add("starts", 1)
    unaware = list(range(1, launch.world_size))
    deadline = time.monotonic() + limit.total_seconds()
    while unaware:
        for rank in unaware:
            # It may be one of a process that is gone: the next one has another number.
            if store.check([f"question of {rank}"]):
                store.set(f"answer to {int(store.get(f'question of {rank}'))}", str(number))
        time.sleep(_LOOK_S)
        unaware = [rank for rank in unaware if not store.check([f"rank {rank} knows {number}"])]
        if unaware and time.monotonic() > deadline:
            raise RuntimeError(f"rank {unaware[0]} did not come")
    return number


def leave_store(launch: Launch, store: Store) -> None:
    """Say that this rank needs it no more; the last one removes the file, if it is one.

    torch would, with the last reference to the store, which no process waits for at its end.
    """
    if launch.init_method.startswith(_FILE) and store.add("left", 1) == launch.world_size:
        _path_of(launch).unlink(missing_ok=True)


def place_of(launch: Launch) -> str:
    """The address in words, for a message."""
    if launch.init_method != "env://":
        return launch.init_method
    address, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    with suppress(OSError):  # it is a name
        address = socket.inet_ntoa(socket.inet_aton(address))  # launchers may spell it oddly
    return f"{address}:{port}"


def _path_of(launch: Launch) -> Path:
    path = launch.init_method.removeprefix(_FILE)
    return Path(url2pathname(path) if sys.platform == "win32" else path)  # as torch takes it
