"""Engine: a checkpoint is complete or it is not there. Commit and retention.

Everything is written to a temporary directory beside the final place and flushed, the manifest
last; then the directory is renamed, which is atomic on one file system.
"""

import logging
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from .distributed import World, gather
from .gradient import NonFiniteGradient
from .launch import FailedTogether
from .manifest import (
    FileEntry,
    Manifest,
    best,
    file_sha256,
    list_checkpoints,
    manifest_text,
    read_checkpoint,
    step_path,
)
from .pulse import DONE
from .rundir import atomic_write_text, sync_directory
from .sampler import order_digest
from .state import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay, beside the best."""

    newest: int
    resumed_from: Path | None


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
        numbers=job.state.numbers(),
        valid_loss=valid_loss if is_rated else None,
    )


def prepare(root: Path, step: int) -> Path:
    """An empty temporary directory for the checkpoint of a step, beside its final place."""
    temporary = temporary_path(root, step)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a crash
    temporary.mkdir(parents=True)
    return temporary


def temporary_path(root: Path, step: int) -> Path:
    """Where a checkpoint grows; no reader takes this name for a checkpoint's."""
    return step_path(root, step).with_suffix(".tmp")


def seal(temporary: Path, manifest: Manifest) -> None:
    """Flush the files of a checkpoint to the disk, then write the manifest that lists them."""
    entries = [asdict(describe_file(path)) for path in sorted(temporary.iterdir())]
    text = manifest_text({**asdict(manifest), "files": entries})
    with (temporary / "manifest.json").open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(temporary)


def describe_file(path: Path) -> FileEntry:
    """Flush a file to the disk, and note what it holds."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(path.name, path.stat().st_size, file_sha256(path))


def publish(temporary: Path) -> Path:
    """Give a sealed checkpoint its name: from now on it is there.

    One that has the name already goes: it was damaged, and passed over at the start, or its step
    was evaluated late. A crash between the two leaves the new one whole, and `sweep` names it.
    """
    final = temporary.with_suffix("")
    replaced = unname(final) if final.exists() else None
    temporary.rename(final)
    sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)
    return final


def commit(root: Path, manifest: Manifest, write_files: Callable[[Path], object]) -> Path:
    """Write a checkpoint so that a crash at any moment leaves it whole or absent.

    Args:
        root: the directory of all checkpoints.
        manifest: without the list of files, which is filled in here.
        write_files: writes the files into a directory.
    """
    temporary = prepare(root, manifest.step)
    try:
        write_files(temporary)
        seal(temporary, manifest)
        return publish(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class NotWritten(FailedTogether, OSError):
    """A checkpoint could not be written, on one rank or on more."""

    def __init__(self, words: str, rank: int) -> None:
        """Name the first rank that could not write."""
        super().__init__(words)
        self.rank = rank


class _Finishes(Protocol):
    def finish(self) -> None: ...


@contextmanager
def finishing(checkpointer: _Finishes) -> Iterator[None]:
    """At the end of the block the save in flight is waited for. Collective.

    Also where no step can be taken, which is so on all ranks. After any other error the others
    may be gone, and it is left alone.
    """
    try:
        yield
    except NonFiniteGradient:
        checkpointer.finish()
        raise
    checkpointer.finish()


@contextmanager
def agreed_write(world: World, step: int, group: ProcessGroup | None) -> Iterator[None]:
    """What fails to be written on one rank is an error on all. Collective, on `group`."""
    before = world.pulse.phase, world.pulse.number
    world.pulse.at("saving")
    problem: str | None = None
    cause: Exception | None = None
    try:
        yield
    except OSError as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    except RuntimeError as error:  # torch.save reports a full disk so
        problem, cause = str(error).splitlines()[0], error
    world.pulse.at("saving", DONE)
    for rank, text in enumerate(gather(world, problem, group)):
        if text is not None:
            where = f" on rank {rank}" if rank else ""
            words = f"the checkpoint of step {step} was not written{where}: {text}"
            raise NotWritten(words, rank) from cause
    world.pulse.at(*before)  # an error that waited for the save came up there


def unname(path: Path) -> Path:
    """Rename a checkpoint that goes, so that a crash leaves no part under its name."""
    doomed = path.with_name(f"{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    return doomed


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
        shutil.rmtree(unname(checkpoint.path))
    if top is not None:
        atomic_write_text(root / "best.txt", f"{top.path.name}\n")
