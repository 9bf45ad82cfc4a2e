"""Engine: the run directory: its lock, status, configuration, environment and logs. No torch."""

import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import yaml

from .launch import Launch, Refused, launch_id
from .lock import lock_file, lock_owner, unlock_file

PACKAGE = __name__.removesuffix(".engine.rundir")
"""The import name of the package that this directory is a part of."""

State = Literal["running", "done", "stopped", "failed", "refused"]


class RunDir:
    """Where one run keeps what it leaves behind. Only rank 0 locks it and writes its records.

    ```
    config.yaml  environment.json  metrics.jsonl  status.json  lock  checkpoints/  logs/rank<r>.log
    ```
    """

    def __init__(self, path: str | os.PathLike[str], launch: Launch) -> None:
        """Name the directory and this process; nothing is touched before `open`."""
        self.path = Path(path)
        self.launch = launch
        self._lock: int | None = None
        self._handlers: list[logging.Handler] = []

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The directory of the ranks' logs."""
        return self.path / "logs"

    def open(self) -> Self:
        """Make the directory; on rank 0, hold its lock until `close` or the process's end.

        Raises:
            Refused: another run is live in it, or it can't be made or written.
        """
        try:
            _make_writable(self.path)
            _make_writable(self.logs)
            if self.launch.rank == 0:
                _hide_from_git(self.path)
                _make_writable(self.checkpoints)  # not after hours, at the first save
                self._lock = lock_file(self.path / "lock")
        except BlockingIOError:
            raise Refused(
                f"run_dir: expected a directory without a live run, got {self.path} "
                f"(in use by {lock_owner(self.path / 'lock')})"
            ) from None
        except OSError as error:
            raise Refused(
                f"run_dir: expected a directory that can be written, got {error.filename} "
                f"({error.strerror})"
            ) from None
        return self

    def close(self) -> None:
        """Give the lock back and take the log handlers off; both may be absent."""
        if self._handlers:
            logging.captureWarnings(False)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
        self._handlers.clear()
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        """Open it, unless that was done."""
        return self if self._lock is not None else self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def status(self, state: State, step: int) -> None:
        """Replace status.json, on rank 0: what the run does, and the optimizer steps it has done.

        `running` in a directory that nobody locks is a run that crashed. A run that was done stays
        as it is when it is started again.
        """
        if self.launch.rank != 0:
            return
        last = self.last_status()
        if state == "done" and (last.get("state"), last.get("step")) == ("done", step):
            return
        content = {
            "state": state,
            "step": step,
            "launch": launch_id(),
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._write("status.json", json.dumps(content) + "\n")

    def last_status(self) -> dict[str, Any]:
        """What status.json says; nothing where it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
        return {}

    def is_refused(self) -> bool:
        """Whether rank 0 has written down that this call of the launcher is refused."""
        last = self.last_status()
        return last.get("launch") == launch_id() and last.get("state") == "refused"

    @contextlib.contextmanager
    def reported(self, progress: Any, stop: Any) -> Iterator[None]:
        """Say `running` for the time of the block, and at its end how it ended.

        That is `failed` on an error, else `stopped` where `stop.is_agreed`, else `done`.
        `progress.step` is asked for the step at both moments.
        """
        self.status("running", progress.step)
        try:
            yield
        except BaseException:
            self.status("failed", progress.step)
            raise
        self.status("stopped" if stop.is_agreed else "done", progress.step)

    def mark(self, state: Literal["refused", "failed", "stopped"]) -> None:
        """Say in status.json, on rank 0, how the run ended; not where another run is live.

        The step stays what it was. Without a disk to write to, nothing is said.
        """
        step = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            step = int(json.loads((self.path / "status.json").read_text(encoding="utf-8"))["step"])
        with contextlib.suppress(OSError, Refused):
            if self._lock is not None:
                self.status(state, step)
                return
            with self:
                self.status(state, step)

    def write_config(self, config: Any) -> None:
        """Write the dataclass `config` as config.yaml, on rank 0; `--config` reads it back."""
        self._write("config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))

    def write_environment(self, more: Mapping[str, Any]) -> None:
        """Write environment.json, on rank 0: what `describe_environment` finds, and `more`."""
        if self.launch.rank == 0:
            content = {**describe_environment(), **more}
            self._write("environment.json", json.dumps(content, indent=2) + "\n")

    def start_logging(self) -> None:
        """Send log records and Python's warnings to logs/rank<r>.log and to the console.

        On the console rank 0 says all of this package's messages (standard output); other ranks
        and other packages are heard from WARNING up.
        """
        file = logging.FileHandler(self.logs / f"rank{self.launch.rank}.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        console: logging.Handler
        if self.launch.rank == 0:
            console = _BesideProgressBar()
        else:
            console = logging.StreamHandler()
            console.setLevel(logging.WARNING)
            console.setFormatter(logging.Formatter(f"rank {self.launch.rank}: %(message)s"))
        self._handlers += [file, console]
        for handler in (file, console):
            logging.getLogger().addHandler(handler)
        logging.getLogger(PACKAGE).setLevel(logging.INFO)
        logging.captureWarnings(True)

    def _write(self, name: str, text: str) -> None:
        if self.launch.rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self.path / name, text)


class _BesideProgressBar(logging.Handler):
    """Writes messages as they are, above a tqdm bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message to standard output."""
        from tqdm import tqdm

        tqdm.write(self.format(record))


def _make_writable(path: Path) -> None:
    """Make a directory where it is missing.

    Raises:
        OSError: it can't be made, or nothing can be made in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _hide_from_git(path: Path) -> None:
    """Let no repository take a run for its own; not where somebody else has files already."""
    if {entry.name for entry in path.iterdir()} <= {"logs", "status.json"}:
        (path / ".gitignore").write_text("*\n", encoding="utf-8")


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the file: a reader, or a crash at any time, finds the old text or the new one whole.

    The text is on the disk when this returns. One writer at a time.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put the directory's entries on the disk, so that a renamed file outlives a power cut."""
    if sys.platform == "win32":
        return  # Windows can't open a directory for this; it writes renames to its own journal.
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def describe_environment() -> dict[str, Any]:
    """Return the versions of Python, platform and packages, and the code's git revision."""
    packages = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
    }
    changes = _git("status", "--porcelain")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git_revision": _git("rev-parse", "HEAD"),
        "git_dirty": None if changes is None else bool(changes),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _git(*words: str) -> str | None:
    """Return what git says about the checkout that this file is in; None without one."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
