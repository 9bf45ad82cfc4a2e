"""Engine: every disk gets a checkpoint of its own, for machines that share none.

The first rank that sees a disk writes weights and optimizer there; parameters and moments are
equal on all ranks, which each save checks, and rank 0's buffers are saved as the model's. What is
a rank's own, its buffers, it writes itself. At resume each rank reads its own disk.
"""

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from ..config import Config
from .changes import check_changes
from .checkpoint import Keep, agreed_write, describe, prepare, publish, retain, seal, temporary_path
from .choice import go_back, read_named, readable, refuse_any, refuse_to_bury
from .ddp import rank0_buffers
from .digest import digest
from .disks import disk_leaders
from .distributed import World, agreed, broadcast_tensors, from_rank, gather, patient_group
from .launch import Refused
from .leftovers import sweep
from .manifest import Checkpoint, read_checkpoint
from .reading import part_names, read_part
from .state import Job, TrainState

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes and reads the checkpoints of a run. Collective: all ranks make one and call it."""

    def __init__(self, root: Path, world: World, keep: int) -> None:
        self.root, self.world = root, world
        self._keep = Keep(keep, resumed_from=None)
        self._group = patient_group(world)
        self._leaders = disk_leaders(world, root)
        self._leads = self._leaders[world.rank] == world.rank
        sweep(root, world, owns=self._leads)

    def restore(
        self, resume: str, state: TrainState, config: Config | None = None
    ) -> Checkpoint | None:
        """Load what `resume` means into the state; none where there is nothing. Collective.

        With `config`, only what may be resumed with these settings.

        A rank whose disk holds nothing gets what another one has read.

        Raises:
            Refused: on every rank, when there is none that all disks hold which hold any, or it
                belongs to another model.
        """
        held = self._choose(resume)
        holders = [rank for rank, one in enumerate(gather(self.world, held)) if one is not None]
        if not holders:
            return None
        parts = None
        with agreed(self.world):
            if held is not None and config is not None:
                check_changes(held, config)
            if held is not None:
                parts = {name: read_part(held, name) for name in part_names(held)}
        checkpoint = from_rank(self.world, held, holders[0])
        assert checkpoint is not None
        if len(holders) < self.world.world_size:
            served = sorted(set(range(self.world.world_size)) - set(holders))
            logger.info("rank %d reads for ranks %s, whose disks hold none", holders[0], served)
            parts = broadcast_tensors(self.world, parts, holders[0])
        with agreed(self.world):
            assert parts is not None
            state.load(parts, checkpoint.manifest.numbers, checkpoint.manifest.progress)
        self._restore_buffers(held, state)
        if self._leads:
            go_back(self.root, resume, checkpoint.manifest.step)
        self._keep = Keep(self._keep.newest, held.path if held else None)
        return checkpoint

    def save(self, job: Job, valid_loss: float | None) -> None:
        """Write a checkpoint to every disk; training waits for it. Collective.

        Raises:
            OSError: on every rank, when one could not write.
            RuntimeError: on every rank, when their weights are not the same.
        """
        step, state = job.state.progress.step, job.state
        require_same_weights(job)
        own = {name: buffer.clone() for name, buffer in state.module.named_buffers()}
        temporary = temporary_path(self.root, step)
        with ExitStack() as stack:
            # After a failure nothing is left; a checkpoint that has its name is no longer there.
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            for module in state.modules():
                stack.enter_context(rank0_buffers(module, self.world))
            self._by_leaders(step, lambda: prepare(self.root, step))
            with self._agreed(step):
                if own:
                    torch.save(own, temporary / rank_file(self.world.rank))
            self._by_leaders(step, lambda: write_parts(state, temporary))
            self._by_leaders(step, lambda: seal(temporary, describe(job, valid_loss)))
            # All is on the disks: none is lost if one fails from here on.
            self._by_leaders(step, lambda: publish(temporary))
        self._by_leaders(step, lambda: retain(self.root, self._keep))

    def finish(self) -> None:
        """Nothing is under way after `save`."""

    def _agreed(self, step: int) -> AbstractContextManager[None]:
        return agreed_write(self.world, step, self._group)

    def _by_leaders(self, step: int, act: Callable[[], object]) -> None:
        """Do something once on each disk; all ranks go on when it is done on all. Collective."""
        with self._agreed(step):
            if self._leads:
                act()

    def _choose(self, resume: str) -> Checkpoint | None:
        """What this rank reads from its own disk; none where its disk does not hold it."""
        found: dict[int, Path] = {}
        with agreed(self.world):
            if self._leads:
                found = find(self.root, resume)
        everywhere = gather(self.world, sorted(found))
        filled = {rank: steps for rank, steps in enumerate(everywhere) if steps}
        if not filled:
            with agreed(self.world):
                refuse_nothing(self.root, resume)
            return None
        for step in sorted(set.intersection(*map(set, filled.values())), reverse=True):
            path = found.get(step)
            paths = gather(self.world, path if path and is_whole(path) else None)
            if all(paths[rank] for rank in filled):
                taken = paths[self._leaders[self.world.rank]]
                return read_checkpoint(taken, verify=False) if taken else None
        words = "; ".join(f"rank {rank} has {steps}" for rank, steps in filled.items())
        raise Refused(f"resume: expected a step that is whole on every disk with any, got {words}")

    def _restore_buffers(self, held: Checkpoint | None, state: TrainState) -> None:
        """Each rank's own buffers, wherever they lie; where nobody saved them, rank 0's stay."""
        names = [entry.name for entry in held.manifest.files] if held else []
        on_disks = gather(self.world, names if self._leads else [])
        for rank, leader in enumerate(self._leaders):
            name = rank_file(rank)
            holders = [disk for disk, files in enumerate(on_disks) if name in files]
            if not holders:
                continue
            is_near = leader in holders
            reads = self.world.rank == (rank if is_near else holders[0])
            buffers = None
            with agreed(self.world):
                if reads:
                    assert held is not None
                    buffers = read_part(held, name.removesuffix(".pt"))
            if not is_near:
                buffers = broadcast_tensors(self.world, buffers, holders[0])
            if self.world.rank == rank:
                assert buffers is not None
                for key, buffer in state.module.named_buffers():
                    buffer.copy_(buffers[key])


def rank_file(rank: int) -> str:
    """The file of what is a rank's own."""
    return f"rank{rank:05d}.pt"


def write_parts(state: TrainState, directory: Path) -> None:
    """Write what is equal on all ranks, and the buffers as they are now."""
    for name, tensors in state.parts().items():
        torch.save(tensors, directory / f"{name}.pt")


def require_same_weights(job: Job) -> None:
    """Stop a run whose ranks have drifted apart. Collective; copies all weights to the host.

    Raises:
        RuntimeError: on every rank, naming the first that differs from rank 0.
    """
    state = job.state
    mine = digest([state.shared_parts(), state.numbers(), vars(state.progress)])
    digests = gather(job.world, mine)
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise RuntimeError(
                f"rank {rank} has other weights than rank 0 at step {state.progress.step}: "
                "they were changed on one rank alone, outside of the step that all take"
            )


def find(root: Path, resume: str) -> dict[int, Path]:
    """The checkpoints of this disk that `resume` may mean, by step.

    Raises:
        Refused: the one that is named is damaged, or `never` where there are some.
    """
    if resume == "auto":
        return {found.manifest.step: found.path for found in readable(root, verify=False)}
    if resume == "never":
        refuse_any(root)
        return {}
    path = Path(resume)
    return {read_named(path).manifest.step: path} if path.is_dir() else {}


def refuse_nothing(root: Path, resume: str) -> None:
    """Refuse a fresh start where no disk holds what was asked for.

    Raises:
        Refused: a checkpoint was named, or there are some that can't be read.
    """
    if resume not in ("auto", "never"):
        raise Refused(f"resume: expected auto, never or a checkpoint's directory, got {resume!r}")
    refuse_to_bury(root)


def is_whole(path: Path) -> bool:
    """Whether every byte of a checkpoint is what it was; says so where it is not."""
    try:
        read_checkpoint(path, verify=True)
    except ValueError as error:
        logger.warning("passed over checkpoint %s: %s", path.name, error)
        return False
    return True
