"""Engine: saving and loading on several ranks, whoever writes: all agree, in seconds."""

import math
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import DebugLevel, set_debug_level
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..engine import checkpoint as checkpoint_module
from ..engine.checkpoint import describe
from ..engine.choice import newest
from ..engine.digest import digest
from ..engine.launch import Refused
from ..engine.manifest import list_checkpoints, read_checkpoint
from ..engine.strategy import Checkpointer
from .harness import values
from .parts import joined
from .toy import Toy, put

KEEP = 100


def rate(init_method: str, losses: list[float]) -> list[float | None]:
    """What manifests say of validation losses."""
    with joined(init_method) as job:
        return [describe(job, loss).valid_loss for loss in losses]


def test_loss_without_a_number_is_not_recorded() -> None:
    (rated,) = values(rate, 1, [0.5, math.nan, math.inf, -math.inf])
    assert rated == [0.5, None, None, None]


def save_on_full_disk(init_method: str, root: str) -> str:
    """What a rank hears when rank 0's disk is full at the second save."""
    import resource

    with joined(init_method) as job:
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        job.state.progress.step = 1
        checkpointer.save(job, None)
        checkpointer.finish()
        if job.world.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        job.state.progress.step = 2
        try:
            checkpointer.save(job, None)
            checkpointer.finish()
        except OSError as error:
            return str(error)
        finally:
            if job.world.is_main:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return "saved"


@pytest.mark.skipif(sys.platform == "win32", reason="no limits")
def test_full_disk_is_an_error_on_every_rank_and_costs_no_checkpoint(tmp_path: Path) -> None:
    heard = values(save_on_full_disk, 2, str(tmp_path), timeout_s=20)
    assert heard[0].startswith("the checkpoint of step 2 was not written: ")
    assert heard[1] == heard[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert newest(tmp_path) is not None


def save_slowly(init_method: str, root: str) -> int:
    """Save with a disk that takes longer than ranks wait for each other otherwise."""
    with joined(init_method) as job:
        seal = checkpoint_module.seal

        def slow_seal(*arguments: Any) -> None:
            time.sleep(3.0)
            seal(*arguments)

        put(checkpoint_module, seal=slow_seal)
        put(sys.modules[Checkpointer.__module__], seal=slow_seal)
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        _set_pg_timeout(timedelta(seconds=1))  # from here on, of the group of the training
        job.state.progress.step = 1
        checkpointer.save(job, None)
        checkpointer.finish()
        return len(list_checkpoints(Path(root)))


def test_save_may_take_longer_than_the_time_out(tmp_path: Path) -> None:
    assert values(save_slowly, 2, str(tmp_path)) == [1, 1]


def save_weights(init_method: str, root: str, step: int, toy: Toy) -> str:
    """Save a state in which every weight is the number of its step; its digest on this rank."""
    with joined(init_method, toy) as job:
        job.state.progress.step = step
        for parameter in job.state.module.parameters():
            torch.nn.init.constant_(parameter, step)
        for buffer in job.state.module.buffers():
            buffer.fill_(job.world.rank)
        checkpointer = Checkpointer(Path(root), job.world, KEEP)
        checkpointer.save(job, None)
        checkpointer.finish()
        return digest([job.state.shared_parts(), job.state.numbers()])


def restore(init_method: str, root: str, resume: str, toy: Toy) -> tuple[int, str] | str:
    """The step and the digest of what a rank has restored, or why it was refused."""
    with joined(init_method, toy) as job:
        try:
            Checkpointer(Path(root), job.world, KEEP).restore(resume, job.state)
        except Refused as error:
            return str(error)
        restored = digest([job.state.shared_parts(), job.state.numbers()])
        return job.state.progress.step, restored


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, world_size: int) -> None:
    toy = Toy(depth=2, has_batch_norm=True)
    (saved, *_) = values(save_weights, world_size, str(tmp_path), 5, toy)
    for other in (1, 2, 3):
        assert values(restore, other, str(tmp_path), "auto", toy) == [(5, saved)] * other


def test_damaged_one_is_passed_over_by_all(tmp_path: Path) -> None:
    root = str(tmp_path)
    (first, _), _ = (values(save_weights, 2, root, step, Toy()) for step in (5, 9))
    damaged = max((tmp_path / "step_00000009").iterdir(), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert values(restore, 3, root, "auto", Toy()) == [(5, first)] * 3


def test_leftovers_of_a_crash_are_gone_at_the_start(tmp_path: Path) -> None:
    for name in ("step_00000003.tmp", "step_00000002.old", "step_00000001.aside1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".best.txt.tmp").write_text("half")
    values(save_weights, 2, str(tmp_path), 5, Toy())
    names = {path.name for path in tmp_path.iterdir()} - {"best.txt"}
    assert names == {"step_00000001.aside1", "step_00000005"}


def save_watched(init_method: str, root: str) -> list[int]:
    """Save often while torch compares the collectives of the ranks; the steps that are kept."""
    set_debug_level(DebugLevel.DETAIL)
    with joined(init_method) as job:
        checkpointer = Checkpointer(Path(root), job.world, 2)
        for step in range(1, 6):
            job.state.progress.step = step
            checkpointer.save(job, 1.0 / step)
        checkpointer.finish()
        checkpointer.restore("auto", job.state)
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(Path(root))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_part_in_the_same_collectives(tmp_path: Path, world_size: int) -> None:
    assert values(save_watched, world_size, str(tmp_path)) == [[5, 4]] * world_size


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    values(save_weights, 2, str(tmp_path), 5, Toy())
    directory = tmp_path / "step_00000005"
    names = {path.name for path in directory.iterdir()} - {"manifest.json"}
    listed = {entry.name for entry in read_checkpoint(directory, verify=True).manifest.files}
    assert listed == names
    assert len(names) >= 2


def test_refusal_is_everybodys(tmp_path: Path) -> None:
    root = str(tmp_path)
    values(save_weights, 2, root, 5, Toy())
    other_model = values(restore, 2, root, "auto", Toy(depth=2))
    never = values(restore, 2, root, "never", Toy())
    directory = tmp_path / "step_00000005"
    damaged = next(path for path in directory.iterdir() if path.name != "manifest.json")
    damaged.write_bytes(damaged.read_bytes() + b"more")
    incomplete = values(restore, 2, root, str(directory), Toy())
    buried = values(restore, 2, root, "auto", Toy())
    for heard, words in (
        (other_model, "the checkpoint does not fit this model: "),
        (never, "resume: expected a run_dir without checkpoints for never, got "),
        (incomplete, "resume: expected a complete checkpoint, got "),
        (buried, "resume: expected a complete checkpoint in "),
    ):
        assert heard[0].startswith(words)
        assert heard[0] == heard[1]
