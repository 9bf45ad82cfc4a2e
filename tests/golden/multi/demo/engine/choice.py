"""Engine: which checkpoint a run goes on from."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from .launch import Refused
from .manifest import Checkpoint, NewerFormat, list_checkpoints, read_checkpoint

logger = logging.getLogger(__name__)


def readable(root: Path, *, verify: bool) -> Iterator[Checkpoint]:
    """The complete checkpoints, newest first; says which others were passed over, and why.

    Raises:
        Refused: before any of them there is one of a newer format: to go back from it unasked
            would take the same steps again.
    """
    is_newest = True
    for path in list_checkpoints(root):
        try:
            checkpoint = read_checkpoint(path, verify=verify)
        except ValueError as error:
            if is_newest and isinstance(error, NewerFormat):
                raise Refused(f"resume: can't go on from {path}: {error}") from None
            logger.warning("passed over checkpoint %s: %s", path.name, error)
        else:
            is_newest = False
            yield checkpoint


def newest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint; says which newer ones were passed over, and why.

    Raises:
        Refused: there are checkpoints, and none is complete: a fresh start would bury them.
    """
    found = next(readable(root, verify=True), None)
    if found is None:
        refuse_to_bury(root)
    return found


def refuse_to_bury(root: Path) -> None:
    """Stop a run that would start afresh among checkpoints that can't be read.

    Raises:
        Refused: there are some.
    """
    if found := list_checkpoints(root):
        raise Refused(
            f"resume: expected a complete checkpoint in {root}, got {len(found)} that can't be "
            "read (the log says why): give another run_dir, or remove them"
        )


def refuse_any(root: Path) -> None:
    """Stop a run that must not resume where the next start would take old checkpoints for its own.

    Raises:
        Refused: there are some.
    """
    if found := list_checkpoints(root):
        raise Refused(
            f"resume: expected a run_dir without checkpoints for never, got {found[0]} and "
            "maybe more: give another run_dir, or remove them"
        )


def read_named(path: Path) -> Checkpoint:
    """The checkpoint that a path names.

    Raises:
        Refused: it is not complete.
    """
    try:
        return read_checkpoint(path, verify=True)
    except ValueError as error:
        raise Refused(f"resume: expected a complete checkpoint, got {path}: {error}") from None


def choose(root: Path, resume: str) -> Checkpoint | None:
    """The checkpoint that `resume` means: `auto`, `never` or a path. Rank 0 decides for all.

    Raises:
        Refused: no checkpoint there is complete, or `never` where there are checkpoints.
    """
    if resume == "auto":
        return newest(root)
    if resume == "never":
        refuse_any(root)
        return None
    return read_named(Path(resume))


def go_back(root: Path, resume: str, step: int) -> None:
    """Where `resume` is a path, rename checkpoints after its step: the run must not meet them.

    When all else is accepted: who is refused has changed nothing.
    """
    if resume in ("auto", "never"):
        return
    for path in list_checkpoints(root):
        if int(path.name.removeprefix("step_")) > step:
            names = (path.with_name(f"{path.name}.aside{n}") for n in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            logger.warning("set aside as %s: the run goes back to step %d", aside.name, step)
