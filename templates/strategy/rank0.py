"""Engine: rank 0 writes one set of files; at resume it reads them and tells the others.

Parameters and optimizer moments are equal on all ranks, for the gradients are; buffers are not,
and rank 0's are saved as the model's. No other rank needs the disk, so no shared one is needed.
"""

import logging
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from .checkpoint import Checkpoint, Keep, choose, commit, describe, retain
from .distributed import World, agreed, broadcast_tensors, from_rank0
from .launch import Refused
from .state import Files, Job, TrainState

logger = logging.getLogger(__name__)


def save(root: Path, job: Job, valid_loss: float | None, keep: Keep) -> None:
    """Write a checkpoint. Collective: a failure on rank 0 is an error on every rank."""
    problem = None
    if job.world.is_main:
        try:
            commit(root, describe(job, valid_loss), lambda path: _write(path, job.state.files()))
            retain(root, keep)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        except RuntimeError as error:  # torch.save reports a full disk so
            problem = str(error).splitlines()[0]
    problem = from_rank0(job.world, problem)
    if problem is not None:
        step = job.state.progress.step
        raise OSError(f"the checkpoint of step {step} was not written: {problem}")


def _write(directory: Path, files: Files) -> list[Path]:
    for name, content in files.items():
        torch.save(content, directory / name)
    return [directory / name for name in files]


def restore(root: Path, resume: str, state: TrainState, world: World) -> Checkpoint | None:
    """Load what `resume` means into the state; none where there is nothing. Collective.

    Raises:
        Refused: on every rank, when the checkpoint is missing or belongs to another model.
    """
    checkpoint, files = None, None
    with agreed(world):
        if world.is_main:
            checkpoint = choose(root, resume)
        if checkpoint is not None:
            files = _read(checkpoint)
    checkpoint = from_rank0(world, checkpoint)
    if checkpoint is None:
        return None
    files = broadcast_tensors(world, files)
    with agreed(world):
        assert files is not None
        state.load(files, checkpoint.manifest.progress)
    return checkpoint


def _read(checkpoint: Checkpoint) -> Files:
    try:
        return {
            # On the CPU: each rank copies to its own device. Tensors and plain numbers only.
            path.name: torch.load(path, map_location="cpu", weights_only=True)
            for path in (checkpoint.path / entry.name for entry in checkpoint.manifest.files)
        }
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise Refused(f"can't read checkpoint {checkpoint.path}: {error}") from None


def read_part(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The tensors of one part of a checkpoint, such as `model`, by their names, on the CPU.

    Raises:
        Refused: it can't be read.
    """
    try:
        part: dict[str, Tensor] = torch.load(
            checkpoint.path / f"{name}.pt", map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise Refused(f"can't read {name} of checkpoint {checkpoint.path}: {error}") from None
    return part
