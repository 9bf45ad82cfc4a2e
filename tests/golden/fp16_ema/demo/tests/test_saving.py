"""Engine: rank 0 writes and reads for all: no other rank needs the disk."""

import os
from pathlib import Path

from ..engine.digest import digest
from ..engine.strategy import Checkpointer
from .harness import values
from .parts import joined
from .test_strategy import KEEP, save_weights
from .toy import Toy


def restore_apart(init_method: str, roots: list[str], resume: str) -> tuple[int, str]:
    """The step and the digest of what a rank has restored; each rank sees a disk of its own."""
    with joined(init_method) as job:
        os.chdir(roots[job.world.rank])
        Checkpointer(Path(), job.world, KEEP).restore(resume, job.state)
        restored = digest([job.state.shared_parts(), job.state.numbers()])
        return job.state.progress.step, restored


def test_rank_0_decides_for_all_and_the_others_need_no_disk(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("disk0", "disk1", "empty")]
    (tmp_path / "empty").mkdir()
    (saved,) = values(save_weights, 1, roots[0], 5, Toy())
    values(save_weights, 1, roots[1], 9, Toy())
    assert values(restore_apart, 3, roots, "auto") == [(5, saved)] * 3
    # Only rank 0 has the directory that is asked for.
    assert values(restore_apart, 2, roots[:2], "step_00000005") == [(5, saved)] * 2
    # Rank 0 sees nothing, so nobody resumes.
    fresh = values(restore_apart, 2, roots[:0:-1], "auto")
    assert fresh[0] == fresh[1]
    assert fresh[0][0] == 0
