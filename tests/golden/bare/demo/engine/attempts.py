"""Engine: the starts of a run: one that makes no progress is not started for ever."""

import contextlib
import hashlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Config
from .distributed import World, agreed, from_rank
from .launch import Refused, launch_id
from .manifest import list_checkpoints
from .rundir import RunDir, atomic_write_text

LIMIT = 3
"""Starts that may fail without a newer checkpoint."""


@dataclass(frozen=True)
class Attempt:
    """A start that came as far as training."""

    step: int
    """Where it went on from."""
    what: str
    """Digest of the code and the settings that were started."""
    started: float
    """Seconds since 1970."""
    launch: str
    host: str
    pid: int
    ended: str | None = None
    """How, in the words of status.json; none where it was killed, or still runs."""


def what_to_resume(config: Config, run: RunDir, world: World) -> str:
    """`resume` as it is meant now: `auto` once this call of the launcher has begun. Collective.

    A process that the launcher starts again goes on from what the one before has saved: neither
    back to the checkpoint that was named, nor refused for what `never` does not expect. A
    launcher counts those that failed, and not those that begin anew with a machine that has come.
    """
    answer = config.resume
    if world.is_main and "TORCHELASTIC_RUN_ID" in os.environ and answer != "auto":
        mine = [attempt for attempt in _read(run.path) if attempt.launch == launch_id()]
        saved = list_checkpoints(run.checkpoints)
        # A checkpoint that was named may be another run's: it stays the one until there is a newer.
        if mine and (answer == "never" or (saved and _step_of(saved[0]) > mine[0].step)):
            answer = "auto"
    return from_rank(world, answer)


def begin(run: RunDir, world: World, config: Config, step: int) -> None:
    """Note a start that goes on from a step, on rank 0. Collective.

    Raises:
        Refused: on every rank, when the last starts all failed, with this code and these settings,
            before they saved a newer checkpoint: the next one would fail as well.
    """
    with agreed(world):
        if not world.is_main:
            return
        attempts = _with_end(_read(run.path), run.last_status())
        what, last = _digest(config), attempts[-LIMIT:]
        # The first of them may have come here from further back.
        is_same = len(last) == LIMIT and {attempt.step for attempt in last[1:]} == {step}
        is_same = is_same and {attempt.what for attempt in last} == {what}
        if is_same and all(_is_in_vain(attempt, step, run.checkpoints) for attempt in last):
            raise Refused(
                f"no progress since step {step}: {LIMIT} starts failed before they saved a newer "
                f"checkpoint; see {run.logs}, and remove {_file(run.path)} to try the same again"
            )
        host, pid = socket.gethostname(), os.getpid()
        attempts.append(Attempt(step, what, time.time(), launch_id(), host, pid))
        content = [asdict(attempt) for attempt in attempts]
        atomic_write_text(_file(run.path), json.dumps(content, indent=2) + "\n")


def _digest(config: Config) -> str:
    """A name for what would fail in the same way again: this package's code, and the settings."""
    state = hashlib.blake2b(repr(config).encode(), digest_size=8)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


def _with_end(attempts: list[Attempt], status: dict[str, Any]) -> list[Attempt]:
    """The attempts, of which the last ended as status.json says, where that is its own."""
    state = status.get("state")
    if not attempts or state == "running":
        return attempts  # who still runs by its own word was killed
    last = attempts[-1]
    is_its_own = (status.get("pid"), status.get("host")) == (last.pid, last.host)
    return [*attempts[:-1], replace(last, ended=state)] if is_its_own else attempts


def _is_in_vain(attempt: Attempt, step: int, root: Path) -> bool:
    """Whether a start failed, and no checkpoint after this step is its own."""
    if attempt.ended in ("done", "stopped", "refused"):
        return False
    # Only names: where a run goes back, what it had saved is set aside under a longer one.
    saved = (path for path in root.glob("step_*") if _step_of(path) > step)
    return not any(path.stat().st_mtime > attempt.started for path in saved)


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step_").partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _file(run_dir: Path) -> Path:
    return run_dir / "attempts.json"


def _read(run_dir: Path) -> list[Attempt]:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Attempt(**one) for one in json.loads(_file(run_dir).read_text(encoding="utf-8"))]
    return []
