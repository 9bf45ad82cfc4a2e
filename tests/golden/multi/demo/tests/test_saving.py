"""Engine: every disk has a checkpoint of its own, and any of them serves a disk without one."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from ..engine import strategy
from ..engine.launch import Refused
from ..engine.manifest import list_checkpoints
from ..engine.strategy import Checkpointer
from .harness import outcomes, values
from .parts import joined
from .test_strategy import KEEP
from .toy import Toy, put

TOY = Toy(depth=2, has_batch_norm=True)
BUFFER = "layers.1.running_mean"


def save_apart(init_method: str, roots: list[str], steps: list[int]) -> None:
    """Save on disks of their own: the weights are the step, the buffers the number of the rank."""
    with joined(init_method, TOY) as job:
        os.chdir(roots[job.world.rank])
        checkpointer = Checkpointer(Path(), job.world, KEEP)
        for step in steps:
            job.state.progress.step = step
            for parameter in job.state.module.parameters():
                torch.nn.init.constant_(parameter, step)
            for buffer in job.state.module.buffers():
                buffer.fill_(job.world.rank + 1)
            checkpointer.save(job, None)


def restore_apart(init_method: str, roots: list[str], resume: str) -> list[float] | str:
    """A weight and a buffer of what a rank has restored, or why it was refused."""
    with joined(init_method, TOY) as job:
        os.chdir(roots[job.world.rank])
        try:
            Checkpointer(Path(), job.world, KEEP).restore(resume, job.state)
        except Refused as error:
            return str(error)
        state = job.state.module.state_dict()
        return [job.state.progress.step, state["layers.0.bias"][0].item(), state[BUFFER][0].item()]


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    """Directories for three disks."""
    names = ("disk0", "disk1", "disk2")
    for name in names:
        (tmp_path / name).mkdir()
    return [str(tmp_path / name) for name in names]


def held(disk: str) -> list[str]:
    """The files of the newest checkpoint of a disk."""
    return sorted(path.name for path in list_checkpoints(Path(disk))[0].iterdir())


def test_each_disk_has_the_weights_and_what_is_its_ranks_own(disks: list[str]) -> None:
    # Ranks 0 and 1 share a disk, as on a machine with two of them.
    two = [disks[0], disks[0], disks[1]]
    values(save_apart, 3, two, [4])
    weights = [name for name in held(disks[0]) if not name.startswith("rank")]
    assert {"manifest.json", "model.pt", "optimizer.pt"} <= set(weights)
    assert held(disks[0]) == sorted([*weights, "rank00000.pt", "rank00001.pt"])
    assert held(disks[1]) == sorted([*weights, "rank00002.pt"])
    for disk in disks[:2]:  # the model's buffers are rank 0's, on every disk
        path = Path(disk, "step_00000004", "model.pt")
        assert torch.load(path, weights_only=True)[BUFFER].eq(1).all()
    assert values(restore_apart, 3, two, "auto") == [[4, 4, 1], [4, 4, 2], [4, 4, 3]]


def test_ranks_that_come_or_move_get_rank_0s_buffers_or_their_own(disks: list[str]) -> None:
    values(save_apart, 2, disks[:2], [4])
    assert values(restore_apart, 1, disks[:1], "auto") == [[4, 4, 1]]
    # Rank 2 is new, and its disk is empty.
    assert values(restore_apart, 3, disks, "auto") == [[4, 4, 1], [4, 4, 2], [4, 4, 1]]
    # The machines start in the other order: each rank's own is on the other's disk.
    assert values(restore_apart, 2, disks[1::-1], "auto") == [[4, 4, 1], [4, 4, 2]]


def test_empty_disk_is_served_even_rank_0s(disks: list[str]) -> None:
    values(save_apart, 3, disks, [4])
    shutil.rmtree(disks[0])
    Path(disks[0]).mkdir()
    assert values(restore_apart, 3, disks, "auto") == [[4, 4, 1], [4, 4, 2], [4, 4, 3]]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_newest_step_that_is_whole_on_all_disks(disks: list[str], damage: object) -> None:
    values(save_apart, 2, disks[:2], [10, 20])
    assert callable(damage)
    damage(Path(disks[1], "step_00000020", "rank00001.pt"))
    assert values(restore_apart, 2, disks[:2], "auto") == [[10, 10, 1], [10, 10, 2]]


def test_disks_without_a_common_step_are_refused(disks: list[str]) -> None:
    values(save_apart, 2, disks[:2], [10, 20])
    shutil.rmtree(Path(disks[0], "step_00000010"))
    shutil.rmtree(Path(disks[1], "step_00000020"))
    heard = values(restore_apart, 2, disks[:2], "auto")
    assert heard[0] == heard[1]
    assert "got rank 0 has [20]; rank 1 has [10]" in heard[0]


def test_path_means_each_disks_own(disks: list[str]) -> None:
    values(save_apart, 2, disks[:2], [10, 20])
    shutil.rmtree(Path(disks[1], "step_00000010"))
    assert values(restore_apart, 2, disks[:2], "step_00000010") == [[10, 10, 1], [10, 10, 1]]
    for disk in disks[:2]:
        assert Path(disk, "step_00000020.aside1").is_dir()
    (heard, _) = values(restore_apart, 2, disks[:2], "step_00000099")
    assert heard == "resume: expected auto, never or a checkpoint's directory, got 'step_00000099'"


def crash_at(init_method: str, roots: list[str], name: str, rank: int) -> None:
    """Die on one rank where a function of the strategy is called, at the second save."""
    with joined(init_method, TOY) as job:
        os.chdir(roots[job.world.rank])
        checkpointer = Checkpointer(Path(), job.world, keep=1)
        job.state.progress.step = 10
        checkpointer.save(job, None)
        if job.world.rank == rank:
            put(strategy, **{name: lambda *_: os._exit(9)})
        job.state.progress.step = 20
        checkpointer.save(job, None)


@pytest.mark.parametrize("name", ["prepare", "seal", "publish", "retain"])
@pytest.mark.parametrize("rank", [0, 1])
def test_crash_between_two_disks_goes_back_to_what_both_hold(
    disks: list[str], name: str, rank: int
) -> None:
    ended = outcomes(crash_at, 2, disks[:2], name, rank, timeout_s=20)
    assert ended[rank].exit_code == 9
    (heard, _) = values(restore_apart, 2, disks[:2], "auto")
    assert heard[0] == (20 if name == "retain" else 10)


def drift(init_method: str, root: str) -> str:
    """What a rank hears at a save after one weight was changed on rank 1 alone."""
    with joined(init_method, TOY) as job:
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        if job.world.rank == 1:
            next(job.state.module.parameters()).data.view(-1)[0] += 1
        try:
            checkpointer.save(job, None)
        except RuntimeError as error:
            return str(error)
    return "saved"


def test_ranks_that_drifted_apart_are_not_saved(tmp_path: Path) -> None:
    heard = values(drift, 3, str(tmp_path))
    assert heard[0].startswith("rank 1 has other weights than rank 0 at step 0")
    assert len(set(heard)) == 1
    assert list_checkpoints(tmp_path) == []
