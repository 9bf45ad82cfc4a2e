"""Engine: rank 0 writes one set of files; at resume it reads them and tells the others.

Parameters and optimizer moments are equal on all ranks, for the gradients are; buffers are not,
and rank 0's are saved as the model's. No other rank needs the disk, so no shared one is needed.
"""

from pathlib import Path

import torch

from ..config import Config
from .changes import check_changes
from .checkpoint import Keep, agreed_write, commit, describe, retain
from .choice import choose, go_back
from .distributed import World, agreed, broadcast_tensors, from_rank, patient_group
from .leftovers import sweep
from .manifest import Checkpoint
from .reading import part_names, read_part
from .state import Job, TrainState


class Checkpointer:
    """Writes and reads the checkpoints of a run. Collective: all ranks make one and call it."""

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world = root, world
        self._keep = Keep(keep, resumed_from=None)
        self._group = patient_group(world)
        sweep(root, world, owns=world.is_main)

    def restore(
        self, resume: str, state: TrainState, config: Config | None = None
    ) -> Checkpoint | None:
        """Load what `resume` means into the state; none where there is nothing. Collective.

        With `config`, only what may be resumed with these settings.

        Raises:
            Refused: on every rank, when the checkpoint is missing or belongs to another model.
        """
        checkpoint, parts = None, None
        with agreed(self.world):
            if self.world.is_main:
                checkpoint = choose(self.root, resume)
            if checkpoint is not None and config is not None:
                check_changes(checkpoint, config)
            if checkpoint is not None:
                parts = {name: read_part(checkpoint, name) for name in part_names(checkpoint)}
        checkpoint = from_rank(self.world, checkpoint)
        if checkpoint is None:
            return None
        parts = broadcast_tensors(self.world, parts)
        with agreed(self.world):
            state.load(parts, checkpoint.manifest.numbers, checkpoint.manifest.progress)
        if self.world.is_main:
            go_back(self.root, resume, checkpoint.manifest.step)
        self._keep = Keep(self._keep.newest, checkpoint.path)
        return checkpoint

    def save(self, job: Job, valid_loss: float | None) -> None:
        """Write a checkpoint; training waits for it. Collective.

        Raises:
            OSError: on every rank, when rank 0 could not write.
        """

        def write(directory: Path) -> None:
            for name, tensors in job.state.parts().items():
                torch.save(tensors, directory / f"{name}.pt")

        with agreed_write(self.world, job.state.progress.step, self._group):
            if self.world.is_main:
                commit(self.root, describe(job, valid_loss), write)
                retain(self.root, self._keep)

    def finish(self) -> None:
        """Nothing is under way after `save`."""
