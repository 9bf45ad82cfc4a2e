"""Engine: where processes meet: the store that all of them reach, whatever its address looks like.

A file (`file://`) is of one run alone. What is left in it, such as addresses, would be taken for
that of the next one, which then waits for processes that are gone.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from urllib.request import url2pathname

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from .launch import Launch, Refused

_FILE = "file://"


def open_store(launch: Launch, limit: timedelta) -> Store:
    """Reach the store of all ranks, which rank 0 may have to open.

    Raises:
        Refused: it is a file that was used before, or that can't be made.
        RuntimeError: there is none within the limit.
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
    return store


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
    return ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))


def _path_of(launch: Launch) -> Path:
    path = launch.init_method.removeprefix(_FILE)
    return Path(url2pathname(path) if sys.platform == "win32" else path)  # as torch takes it
