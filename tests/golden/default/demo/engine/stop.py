"""Engine: a stop that was asked for from outside: all ranks save the same step, then leave.

SIGTERM, SIGINT or SIGUSR1 to any rank is enough. The ranks agree through a store, without a
collective in a step: the rank that was asked leaves a word there, the others look for it now and
then, and when all have seen it, rank 0 names the step at which all end.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

from .distributed import World, gather
from .rundir import PACKAGE, RunDir

logger = logging.getLogger(__name__)

EXIT_STOPPED = 75
"""The exit code of a process that was stopped and has saved."""

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGBREAK")
            if hasattr(signal, name)]  # fmt: skip
_REPEATED_S = 2.0  # launchers send a signal several times
_LOOK_S = 0.5  # between two looks into the store, of which each costs a message

_WANTED, _SEEN, _LAST = "stop wanted", "stop seen", "stop before window"  # keys in the store


class Stop:
    """Whether the run is to end before it is done. A process has one that listens to signals."""

    def __init__(self, run: RunDir | None = None) -> None:
        """Listen to nothing yet; `run` is where an end without training is written down."""
        self.is_agreed = False
        """Whether all ranks know that the run ends here. Alike on all ranks."""
        self.reason: str | None = None
        """Who asked for it, and how; none as long as this rank knows of nobody."""
        self._run = run
        self._world = World()
        self._is_training = self._is_over = False
        self._asked_at = self._looked_at = 0.0
        self._is_told = self._is_counted = self._is_named = False
        self._window = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals. In the main thread."""
        self._reader, self._writer = socket.socketpair()  # Windows has no pipe that does not block
        self._writer.setblocking(False)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, _do_nothing)
        # The thread hears of a signal at once, even while the main thread is held up in C.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the signals back.

        Raises:
            SystemExit: the run was stopped, by which the process says so.
        """
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.send(b"\0")
        self._thread.join()
        self._reader.close()
        self._writer.close()
        if self.is_agreed and error[0] is None:
            raise SystemExit(EXIT_STOPPED)

    @contextlib.contextmanager
    def training(self, world: World) -> Iterator[None]:
        """In the block a signal asks for a stop; before, there is nothing to save.

        When it ends well all is saved, and signals change nothing any more.
        """
        self._world = world
        self._is_training = True
        yield
        self._is_over = True

    def request(self, reason: str) -> None:
        """Ask all ranks for a stop. From any thread; returns at once."""
        if self.reason is None:
            self._asked_at = time.monotonic()
            self.reason = f"{reason} on rank {self._world.rank}"

    def is_wanted(self) -> bool:
        """Whether anybody asked for a stop, as far as this rank knows; takes about no time.

        The first to know tells the others, which look for it twice a second.
        """
        store = self._world.store
        if store is None:
            return self.reason is not None
        if self.reason is None and time.monotonic() - self._looked_at >= _LOOK_S:
            self._looked_at = time.monotonic()
            if store.check([_WANTED]):
                self._asked_at = self._looked_at  # this rank's own signal is the same one
                self.reason = store.get(_WANTED).decode()
                self._is_told = True
        if self.reason is not None and not self._is_told:
            store.set(_WANTED, self.reason)
            self._is_told = True
        return self.reason is not None

    def is_due(self) -> bool:
        """Whether the run ends before the next window: alike on all ranks, in the same window.

        Each rank calls it before each window. When all look each time, rank 0 names the window
        after its next one. No rank can be beyond that: the backward of a window ends on no rank
        before rank 0 has begun with it.
        """
        self._window += 1
        if not self.is_agreed and self.is_wanted():
            self.is_agreed = self._is_named_window()
            if self.is_agreed and self._world.is_main:
                logger.info("stopping: %s", self.reason)
        return self.is_agreed

    def _is_named_window(self) -> bool:
        store = self._world.store
        if store is None:
            return True
        if not self._is_counted:
            store.add(_SEEN, 1)
            self._is_counted = True
        everybody = self._world.world_size
        if self._world.is_main and not self._is_named and store.add(_SEEN, 0) == everybody:
            store.set(_LAST, str(self._window + 1))
            self._is_named = True
        return store.check([_LAST]) and self._window >= int(store.get(_LAST))

    def agree(self) -> bool:
        """Whether any rank knows of a stop, which then is agreed. Collective."""
        self.is_agreed = any(gather(self._world, self.is_wanted()))
        return self.is_agreed

    def _listen(self) -> None:
        """The thread: hear the signals."""
        while number := self._reader.recv(1)[0]:
            if number in _SIGNALS and not self._is_over:
                self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        if not self._is_training:
            self._leave(f"{number.name} before the training began", EXIT_STOPPED)
        elif self.reason is None:
            self.request(number.name)
        elif time.monotonic() - self._asked_at >= _REPEATED_S:
            self._leave(f"{number.name} once more: nothing is saved", 1)

    def _leave(self, why: str, code: int) -> None:
        print(f"{PACKAGE}: rank {self._world.rank}: left at {why}", file=sys.stderr, flush=True)
        if self._run is not None:
            self._run.mark("stopped" if code == EXIT_STOPPED else "failed")
        os._exit(code)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """In place of what a signal does; the thread hears of it."""
