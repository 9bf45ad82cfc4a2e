"""Engine: how ranks see each other live, when no collective comes about any more.

Each leaves its beat in a file, which needs no process that answers, and in the store, which needs
no common disk. Both may hang: the disk may be gone, and the store may live in the rank that stands
still. So each is served by a thread that nobody waits for.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .meeting import Part
from .pulse import Place, place, where

T = TypeVar("T")

FAILED = "failed"
"""Key of the store: the first failure, in the words of its rank."""


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    """Optimizer steps taken."""
    number: int
    """Of the micro-batch, or of the batch of an evaluation, from 0."""
    count: int
    """Changes seen so far."""
    still_s: float
    """Seconds since the last of them, when this was written."""
    changed: float
    """Time of the last change, in seconds since 1970."""
    written: float
    """Time of writing, in seconds since 1970."""
    is_leaving: bool = False
    """The rank has found the run at a standstill, and is about to end."""

    @property
    def place(self) -> Place:
        """How far the rank has come."""
        return place(self.phase, self.step, self.number)

    def __str__(self) -> str:
        """Say where the rank is."""
        return where(self.phase, self.step, self.number)


class Board(Protocol):
    """Where beats are left and found."""

    def post(self, beat: Beat) -> None:
        """Leave the beat of this rank."""

    def read(self) -> dict[int, Beat]:
        """Find the beats of all ranks; those that are not there are left out."""


class FileBoard:
    """A directory with a file for each rank."""

    def __init__(self, directory: Path, world_size: int) -> None:
        """Make it."""
        self.directory, self.world_size = directory, world_size

    def post(self, beat: Beat) -> None:
        """Replace the file; not flushed to the disk, for a crash makes it worthless."""
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".rank{beat.rank:05d}.json.tmp"
        temporary.write_text(json.dumps(asdict(beat)), encoding="utf-8")
        temporary.replace(self.directory / f"rank{beat.rank:05d}.json")

    def read(self) -> dict[int, Beat]:
        """Read the files that are there."""
        beats = {}
        for rank in range(self.world_size):
            with suppress(OSError, ValueError, TypeError):
                text = (self.directory / f"rank{rank:05d}.json").read_text(encoding="utf-8")
                beats[rank] = Beat(**json.loads(text))
        return beats


class StoreBoard:
    """The store of the ranks, through a connection of its own."""

    def __init__(self, store: Store, world_size: int) -> None:
        """Nothing is sent yet."""
        self.world_size = world_size
        self._shared = store
        self._store: Store | None = None
        self.failed = ""
        """The first failure of a rank; empty while there is none."""

    def post(self, beat: Beat) -> None:
        """Replace the beat of this rank, and look whether one has failed."""
        if self._store is None:
            self._store = own_client(self._shared)
        self._store.set(f"beat{beat.rank}", json.dumps(asdict(beat)))
        if not self.failed:
            self.failed = find_failure(self._store) or ""

    def read(self) -> dict[int, Beat]:
        """Ask for one beat after the other."""
        beats: dict[int, Beat] = {}
        for rank in range(self.world_size):
            if self._store is not None and self._store.check([f"beat{rank}"]):
                beats[rank] = Beat(**json.loads(self._store.get(f"beat{rank}")))
        return beats


class Exchange(threading.Thread):
    """Posts the latest beat of this rank every so often, and reads those of the others."""

    def __init__(self, board: Board, every_s: float) -> None:
        """Begin with `start`."""
        super().__init__(name=f"{type(board).__name__} of the watchdog", daemon=True)
        self.board, self.every_s = board, every_s
        self.mine: Beat | None = None
        self.others_matter = False
        """While this rank goes on, nobody's beat but its own is touched."""
        self.beats: dict[int, Beat] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        """Until `end`. What fails is tried again: the disk or the store may come back."""
        while True:
            with suppress(OSError, RuntimeError, ValueError, TypeError):
                if self.mine is not None:
                    self.board.post(self.mine)
                if self.others_matter:
                    self.beats = self.board.read()
            if self._ended.wait(self.every_s):
                return

    def end(self) -> None:
        """Let it end by itself: it may hang."""
        self._ended.set()


def own_client(store: Store, patience_s: float = 10.0) -> Store:
    """A connection of its own to the ranks' store: an answer that never comes holds up no other.

    What it writes is of this start of the run alone, as in the store that it is given.
    """
    start = store.name if isinstance(store, Part) else ""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    timeout = timedelta(seconds=patience_s)
    if hasattr(store, "clone"):
        client = store.clone()  # older releases of torch have none
        client.set_timeout(timeout)
    elif isinstance(store, TCPStore):
        client = TCPStore(store.host, store.port, is_master=False, timeout=timeout)
    else:
        client = store
    return PrefixStore(f"{start}/faults", client)


def claim_failure(store: Store, words: str) -> str:
    """Be the rank that failed first; the words of the one that was."""
    return store.compare_set(FAILED, "", words).decode()


def find_failure(store: Store) -> str | None:
    """The words of the rank that failed first; none where nobody said so."""
    return store.get(FAILED).decode() if store.check([FAILED]) else None


def ask(call: Callable[[], T], patience_s: float) -> T:
    """Call what may never return.

    Raises:
        TimeoutError: it did not, in that time.
        RuntimeError, OSError: it failed.
    """
    answers: list[T] = []
    problems: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(call())
        except (RuntimeError, OSError, ValueError) as error:
            problems.append(error)

    thread = threading.Thread(target=answer, name="question to the store", daemon=True)
    thread.start()
    thread.join(patience_s)
    if problems:
        raise problems[0]
    if not answers:
        raise TimeoutError(f"no answer within {patience_s:g} s")
    return answers[0]
