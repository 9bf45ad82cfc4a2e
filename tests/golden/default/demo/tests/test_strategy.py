"""Engine: saving and loading on several ranks: all agree, and only rank 0 needs the disk."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

from ..engine import strategy
from ..engine.checkpoint import Keep, describe, newest
from ..engine.digest import digest
from ..engine.launch import Refused
from .harness import values
from .parts import joined
from .toy import Toy

ALL = Keep(newest=100, resumed_from=None)


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
        job.state.progress.step = 1
        strategy.save(Path(root), job, None, ALL)
        if job.world.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        job.state.progress.step = 2
        try:
            strategy.save(Path(root), job, None, ALL)
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


def save_weights(init_method: str, root: str, step: int) -> str:
    """Save a state whose weights are all the number of its step; its digest."""
    with joined(init_method) as job:
        job.state.progress.step = step
        for parameter in job.state.module.parameters():
            torch.nn.init.constant_(parameter, step)
        strategy.save(Path(root), job, None, ALL)
        return digest(job.state.files())


def restore(init_method: str, roots: list[str], resume: str, toy: Toy) -> tuple[int, str] | str:
    """The step and the digest of what a rank has restored, or why it was refused."""
    with joined(init_method, toy) as job:
        os.chdir(roots[job.world.rank])
        try:
            strategy.restore(Path(), resume, job.state, job.world)
        except Refused as error:
            return str(error)
        return job.state.progress.step, digest(job.state.files())


def test_rank_0_decides_for_all_and_the_others_need_no_disk(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("disk0", "disk1", "empty")]
    (tmp_path / "empty").mkdir()
    (saved,) = values(save_weights, 1, roots[0], 5)
    values(save_weights, 1, roots[1], 9)
    assert values(restore, 3, roots, "auto", Toy()) == [(5, saved)] * 3
    # Only rank 0 has the directory that is asked for.
    assert values(restore, 2, roots[:2], "step_00000005", Toy()) == [(5, saved)] * 2
    # Rank 0 sees nothing, so nobody resumes.
    fresh = values(restore, 2, roots[:0:-1], "auto", Toy())
    assert fresh[0] == fresh[1]
    assert fresh[0][0] == 0


def test_refusal_is_everybodys(tmp_path: Path) -> None:
    root = str(tmp_path)
    values(save_weights, 1, root, 5)
    other_model = values(restore, 2, [root] * 2, "auto", Toy(depth=2))
    damaged = tmp_path / "step_00000005"
    with (damaged / "model.pt").open("ab") as file:
        file.write(b"more")
    incomplete = values(restore, 2, [root, root], str(damaged), Toy())
    assert other_model[0].startswith("the checkpoint does not fit this model: ")
    assert incomplete[0].startswith("resume: expected a complete checkpoint, got ")
    assert other_model[0] == other_model[1]
    assert incomplete[0] == incomplete[1]
