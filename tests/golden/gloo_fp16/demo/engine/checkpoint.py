"""Engine: a checkpoint is complete or it is not there. Manifest, commit, choice, retention.

    checkpoints/step_00000120/manifest.json and the files that it lists

Everything is written to a temporary directory beside the final place and flushed, the manifest
last; then the directory is renamed, which is atomic on one file system.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .launch import Refused
from .rundir import sync_directory
from .sampler import order_digest
from .state import Job

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_NAME = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint, as the manifest lists it."""

    name: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, in numbers and words that a person can read."""

    progress: dict[str, int]
    world_size: int
    order: str
    """Digest of the order in which the epoch visits its samples."""
    versions: dict[str, str]
    config: dict[str, Any]
    valid_loss: float | None
    """What makes it the best; none where its step was not evaluated, or not to a number."""
    files: tuple[FileEntry, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def step(self) -> int:
        """Optimizer steps that the run had taken."""
        return self.progress["step"]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay, beside the best."""

    newest: int
    resumed_from: Path | None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def valid_loss(self) -> float:
        """The validation loss of its step; infinite where there is none."""
        loss = self.manifest.valid_loss
        return math.inf if loss is None else loss


def describe(job: Job, valid_loss: float | None) -> Manifest:
    """The manifest of a run as it stands; `valid_loss` where this very step was evaluated."""
    progress = job.state.progress
    is_rated = valid_loss is not None and math.isfinite(valid_loss)
    return Manifest(
        progress=asdict(progress),
        world_size=job.world.world_size,
        order=order_digest(job.config.seed, progress.epoch, job.plan.num_samples),
        versions={"torch": torch.__version__, "python": platform.python_version()},
        config=asdict(job.config),
        valid_loss=valid_loss if is_rated else None,
    )


def file_sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> FileEntry:
    """Flush a file to the disk, and note what it holds."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(path.name, path.stat().st_size, file_sha256(path))


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step_{step:08d}"


def commit(root: Path, manifest: Manifest, write_files: Callable[[Path], list[Path]]) -> Path:
    """Write a checkpoint so that a crash at any moment leaves it whole or absent.

    Args:
        root: the directory of all checkpoints.
        manifest: without the list of files, which is filled in here.
        write_files: writes the files into a directory and returns their paths.
    """
    final = step_path(root, manifest.step)
    temporary = root / f"{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a crash
    temporary.mkdir(parents=True)
    try:
        entries = [asdict(describe_file(path)) for path in write_files(temporary)]
        text = json.dumps({**asdict(manifest), "files": entries}, indent=2)
        with (temporary / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(temporary)
        if final.exists():  # damaged, and therefore passed over at the start
            remove(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(root)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint. Renamed first, so that a crash leaves no part under its name."""
    doomed = path.with_name(f"{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def read_checkpoint(path: Path, *, verify: bool) -> Checkpoint:
    """Read a checkpoint's manifest and check its files: their sizes, with `verify` all their bytes.

    Raises:
        ValueError: it is not complete, with the reason.
    """
    try:
        numbers = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except ValueError:
        raise ValueError("its manifest is damaged") from None
    version = numbers.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"its format version is {version}, this project reads {FORMAT_VERSION}")
    entries = tuple(FileEntry(**entry) for entry in numbers["files"])
    for entry in entries:
        file = path / entry.name
        if not file.is_file():
            raise ValueError(f"{entry.name} is missing")
        if file.stat().st_size != entry.size:
            raise ValueError(f"{entry.name} has {file.stat().st_size} bytes, expected {entry.size}")
        if verify and file_sha256(file) != entry.sha256:
            raise ValueError(f"the checksum of {entry.name} is wrong")
    return Checkpoint(path, Manifest(**{**numbers, "files": entries}))


def list_checkpoints(root: Path) -> list[Path]:
    """The directories that are named as checkpoints, newest first (by number, not by letters)."""
    named = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def newest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint; says which newer ones were passed over, and why.

    Raises:
        Refused: there are checkpoints, and none is complete: a fresh start would bury them.
    """
    found = list_checkpoints(root)
    for path in found:
        try:
            return read_checkpoint(path, verify=True)
        except ValueError as error:
            logger.warning("passed over checkpoint %s: %s", path.name, error)
    if found:
        raise Refused(
            f"resume: expected a complete checkpoint in {root}, got {len(found)} that can't be "
            "read (the log says why): give another run_dir, or remove them"
        )
    return None


def choose(root: Path, resume: str) -> Checkpoint | None:
    """The checkpoint that `resume` means: `auto`, `never` or a path. Rank 0 decides for all.

    Raises:
        Refused: no checkpoint there is complete, or `never` where there are checkpoints: the
            next start would take one of them for the new run's.
    """
    if resume == "auto":
        return newest(root)
    if resume == "never":
        if found := list_checkpoints(root):
            raise Refused(
                f"resume: expected a run_dir without checkpoints for never, got {found[0]} and "
                "maybe more: give another run_dir, or remove them"
            )
        return None
    try:
        chosen = read_checkpoint(Path(resume), verify=True)
    except ValueError as error:
        raise Refused(f"resume: expected a complete checkpoint, got {resume}: {error}") from None
    _set_aside(root, chosen.manifest.step)
    return chosen


def _set_aside(root: Path, step: int) -> None:
    """Rename checkpoints after a step: a run that goes back to it must not meet them again."""
    for path in list_checkpoints(root):
        if int(path.name.removeprefix("step_")) > step:
            names = (path.with_name(f"{path.name}.aside{n}") for n in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            logger.warning("set aside as %s: the run goes back to step %d", aside.name, step)


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest validation loss; never one whose loss is not a finite number."""
    rated = [checkpoint for checkpoint in checkpoints if math.isfinite(checkpoint.valid_loss)]
    return min(rated, key=lambda checkpoint: checkpoint.valid_loss, default=None)


def retain(root: Path, keep: Keep) -> None:
    """Remove old checkpoints: not the newest, the best, or the one resumed from.

    Runs after a commit, so the newest complete one is never removed. What is incomplete is left
    for a person to look at. `best.txt` names the best.
    """
    complete = []
    for path in list_checkpoints(root):
        try:
            complete.append(read_checkpoint(path, verify=False))
        except ValueError as error:
            logger.debug("kept aside %s: %s", path.name, error)
    top = best(complete)
    resumed_from = keep.resumed_from and keep.resumed_from.resolve()  # written in any way
    for checkpoint in complete[keep.newest :]:
        if checkpoint is top or checkpoint.path.resolve() == resumed_from:
            continue
        remove(checkpoint.path)
    if top is not None:
        (root / "best.txt").write_text(f"{top.path.name}\n", encoding="utf-8")
