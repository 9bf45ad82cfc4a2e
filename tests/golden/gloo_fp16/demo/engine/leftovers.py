"""Engine: what a crash left in a run directory, finished where it can be and else removed."""

import logging
import re
import shutil
from pathlib import Path

from .distributed import World, agreed
from .launch import Refused
from .manifest import read_checkpoint
from .rundir import sync_directory

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"step_\d{8,}\.(tmp|old)")
_RECORD = re.compile(r"\..+\.(json|jsonl|yaml|txt)\.tmp")


def sweep(root: Path, world: World, *, owns: bool) -> None:
    """Tidy the directory of the checkpoints and the run directory above it. Collective.

    One process of each disk `owns` it. At the start, while the run's lock is held: nobody else
    writes there. Only names that saving gives for a moment are touched, so not what was set aside.

    Raises:
        Refused: on every rank, when one can't remove what is there.
    """
    with agreed(world):
        try:
            if owns:
                _sweep(root)
        except OSError as error:
            raise Refused(
                f"run_dir: expected a directory that can be written, got {root.parent} "
                f"({error.strerror}: {error.filename})"
            ) from None


def _sweep(root: Path) -> None:
    # Where the old one of the same step had given its name away already, the new one gets it.
    left = _left_in(root, _CHECKPOINT)
    named = [path.stem for path in left if _lacks_its_name(path)]
    for name in named:
        (root / f"{name}.tmp").rename(root / name)
    if named:
        sync_directory(root)
    removed = [path.name for path in left if path.exists()]
    for name in removed:
        shutil.rmtree(root / name)
    for path in [*_left_in(root, _RECORD), *_left_in(root.parent, _RECORD)]:
        path.unlink()
        removed.append(path.name)
    for word, names in (("completed", named), ("removed", removed)):
        if names:
            logger.info("left over from a crash: %s %s", word, ", ".join(names))


def _left_in(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    is_directory = pattern is _CHECKPOINT
    return [p for p in paths if pattern.fullmatch(p.name) and p.is_dir() == is_directory]


def _lacks_its_name(path: Path) -> bool:
    """Whether this is a checkpoint, every byte of it, for which another one had to go."""
    if path.suffix != ".tmp" or path.with_suffix("").exists():
        return False
    try:
        read_checkpoint(path, verify=True)
    except ValueError:
        return False
    return path.with_suffix(".old").exists()
