"""Engine: all ranks write together, beside the training, with torch.distributed.checkpoint.

Training waits only while its tensors are copied. Each tensor is the same on all ranks, for the
gradients are, so each is copied and written by one of them. Buffers are not the same: rank 0's
are saved as the model's. The directory must be one that all ranks share.
"""

import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ..config import Config
from .changes import check_changes
from .checkpoint import Keep, agreed_write, describe, prepare, publish, retain, seal, temporary_path
from .choice import choose, go_back
from .disks import disk_leaders
from .distributed import World, agreed, from_rank, patient_group
from .launch import Refused
from .leftovers import sweep
from .manifest import Checkpoint, Manifest
from .reading import part_names, read_part
from .state import Job, Parts, TrainState


class Checkpointer:
    """Writes and reads the checkpoints of a run. Collective: all ranks make one and call it."""

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world = root, world
        self._keep = Keep(keep, resumed_from=None)
        # Not the default group: its collectives would get between those of the training.
        self._group = patient_group(world)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self._step = 0
        self._copies: dict[tuple[str, str], Tensor] = {}
        if world.world_size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        # Older torch writes in this way itself.
        place = r"torch\.distributed\.checkpoint"
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", module=place)
        for rank, leader in enumerate(disk_leaders(world, root)):
            if leader != 0:
                raise Refused(
                    f"run_dir: expected a directory that all ranks share, got {root}, of which "
                    f"rank {rank} does not see rank 0's files"
                )
        sweep(root, world, owns=world.is_main)

    def restore(
        self, resume: str, state: TrainState, config: Config | None = None
    ) -> Checkpoint | None:
        """Load what `resume` means into the state; none where there is nothing. Collective.

        With `config`, only what may be resumed with these settings.

        Every rank reads all tensors, so it does not matter how many ranks wrote them.

        Raises:
            Refused: on every rank, when the checkpoint is missing or belongs to another model.
        """
        checkpoint = None
        with agreed(self.world):
            if self.world.is_main:
                checkpoint = choose(self.root, resume)
            if checkpoint is not None and config is not None:
                check_changes(checkpoint, config)
        checkpoint = from_rank(self.world, checkpoint)
        if checkpoint is None:
            return None
        with agreed(self.world):
            parts = {name: read_part(checkpoint, name) for name in part_names(checkpoint)}
            state.load(parts, checkpoint.manifest.numbers, checkpoint.manifest.progress)
        if self.world.is_main:
            go_back(self.root, resume, checkpoint.manifest.step)
        self._keep = Keep(self._keep.newest, checkpoint.path)
        return checkpoint

    def save(self, job: Job, valid_loss: float | None) -> None:
        """Copy what is to be saved; it is written while training goes on. Collective.

        Waits for the save before this one; synchronises the device.

        Raises:
            OSError: on every rank, when the save before this one failed, or this can't begin.
        """
        self._wait()
        self._step = job.state.progress.step
        with agreed_write(self.world, self._step, self._group):
            if self.world.is_main:
                prepare(self.root, self._step)
        copies = self._copy(own_share(job.state, self.world))
        manifest = describe(job, valid_loss)
        self._in_flight = self._thread.submit(self._write, copies, manifest)
        if self._group is None:
            self._wait()  # without a group of its own, nothing may run beside it

    def finish(self) -> None:
        """Wait for the save in flight. Collective. After an error leave it alone: it may hang.

        Raises:
            OSError: on every rank, when it failed.
        """
        self._wait()

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        with agreed_write(self.world, self._step, self._group):
            self._in_flight.result()
        self._in_flight = None

    def _copy(self, parts: Parts) -> Parts:
        """Copies in the host's memory, which is used again by the next save."""
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                if (part, name) not in self._copies:
                    self._copies[part, name] = torch.empty_like(
                        tensor, device="cpu", pin_memory=tensor.is_cuda
                    )
                self._copies[part, name].copy_(tensor, non_blocking=True)
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()
        return {part: {n: self._copies[part, n] for n in parts[part]} for part in parts}

    def _write(self, parts: Parts, manifest: Manifest) -> None:
        """Write this rank's share; on rank 0, when all are on the disk, publish. In the thread."""
        temporary = temporary_path(self.root, manifest.step)
        try:
            # Its files are flushed when it returns: on rank 0 after those of all others.
            save(
                parts,
                storage_writer=FileSystemWriter(temporary),
                process_group=self._group,
            )
            if self.world.is_main:
                seal(temporary, manifest)
                publish(temporary)
                retain(self.root, self._keep)
        except CheckpointException as error:
            reasons = (f"rank {rank}: {reason[0]}" for rank, reason in error.failures.items())
            self._discard(temporary)
            raise OSError("; ".join(reasons)) from None
        except BaseException:
            self._discard(temporary)
            raise

    def _discard(self, temporary: Path) -> None:
        if self.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)


def own_share(state: TrainState, world: World) -> Parts:
    """The tensors that this rank saves: over all ranks each once, and about as many bytes.

    A large tensor is not cut. Buffers are rank 0's, which has the other ranks' values as well.
    """
    sizes = {
        (part, name): tensor.nbytes
        for part, tensors in state.shared_parts().items()
        for name, tensor in tensors.items()
    }
    loads = [0] * world.world_size
    owners: dict[tuple[str, str], int] = {}
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        owners[key] = loads.index(min(loads))
        loads[owners[key]] += size
    return {
        part: {n: t for n, t in tensors.items() if owners.get((part, n), 0) == world.rank}
        for part, tensors in state.parts().items()
    }
