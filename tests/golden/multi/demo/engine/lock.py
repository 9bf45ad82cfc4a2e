"""Engine: a lock on a file that ends with its process, however that ends. Imports no torch."""

import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path


def lock_file(path: Path) -> int:
    """Lock the file, made where it is missing, write this process into it, return its descriptor.

    Raises:
        BlockingIOError: another process holds it, or this one already does.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock_descriptor(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    os.write(descriptor, json.dumps(owner).encode())
    return descriptor


def unlock_file(descriptor: int) -> None:
    """Give back what `lock_file` returned."""
    with contextlib.suppress(OSError):
        _unlock_descriptor(descriptor)
    os.close(descriptor)


def lock_owner(path: Path) -> str:
    """Say who wrote itself into the lock file; the holder may not have come to that yet."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has only just started"


if sys.platform == "win32":
    import msvcrt

    # Windows forbids reading what is locked: lock a byte far behind the owner's name.
    _BYTE = 1 << 20

    def _lock_descriptor(descriptor: int, path: Path) -> None:
        os.lseek(descriptor, _BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, "locked", str(path)) from None
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)

    def _unlock_descriptor(descriptor: int) -> None:
        os.lseek(descriptor, _BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    _held: set[int] = set()

    def _lock_descriptor(descriptor: int, path: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # The second is NFS's word for it.
            raise BlockingIOError(error.errno, "locked", str(path)) from None
        except OSError as error:
            # Some network file systems have no locks: better to train than not to.
            logging.getLogger(__name__).warning(
                "%s can't be locked (%s): see to it that no other run uses this directory",
                path,
                error.strerror,
            )
        _held.add(descriptor)

    def _unlock_descriptor(descriptor: int) -> None:
        _held.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _close_in_child() -> None:
        # The lock is shared with forked loading processes, and they outlive a killed parent for
        # seconds: without this, a restart would find its own directory in use.
        for descriptor in _held:
            os.close(descriptor)
        _held.clear()

    os.register_at_fork(after_in_child=_close_in_child)
