"""Engine: what a crash left is tidied at the start, and nothing that is somebody's."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from ..engine.checkpoint import commit
from ..engine.choice import choose
from ..engine.distributed import World
from ..engine.launch import Refused
from ..engine.leftovers import sweep
from ..engine.rundir import PACKAGE
from .harness import values
from .test_checkpoint import cut, die_at_file_operation, manifest, newest_step, save, write


def sweep_alone(root: Path) -> None:
    sweep(root, World(), owns=True)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_a_crash_left_goes_and_what_is_somebodys_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, PACKAGE)
    root = tmp_path / "checkpoints"
    for step in (900, 1000):
        save(root, step)
    others = ["backup_step_9999", "best", "my.tmp", "step_00000900.aside1", "step_9", "step_x.tmp"]
    for name in [*others, "step_00000800.old", "step_00001000.tmp", "step_00001100.tmp"]:
        shutil.copytree(root / "step_00000900", root / name)
    for path in (root / ".best.txt.tmp", tmp_path / ".status.json.tmp"):
        path.write_text("half")
    for name in (".weights.pt.tmp", "status.json"):
        (tmp_path / name).write_text("mine")
    sweep(root, World(), owns=False)
    assert not caplog.records
    sweep_alone(root)
    assert names(root) == sorted([*others, "step_00000900", "step_00001000"])
    assert names(tmp_path) == [".weights.pt.tmp", "checkpoints", "status.json"]
    assert [record.message for record in caplog.records] == [
        "left over from a crash: removed step_00000800.old, step_00001000.tmp, step_00001100.tmp, "
        ".best.txt.tmp, .status.json.tmp"
    ]


def test_newest_by_number_and_why_others_were_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, PACKAGE)
    root = tmp_path / "checkpoints"
    for step in (900, 1000, 1001):
        save(root, step)
    for name in ("step_00001000.tmp", "step_9999", "best", "backup_step_9999"):
        shutil.copytree(root / "step_00000900", root / name)
    cut(root / "step_00001001" / "b.pt")
    sweep_alone(root)
    chosen = choose(root, "auto")
    assert chosen is not None
    assert chosen.path.name == "step_00001000"
    assert [record.message for record in caplog.records] == [
        "left over from a crash: removed step_00001000.tmp",
        "passed over checkpoint step_00001001: b.pt has 14 bytes, expected 15",
    ]


def test_what_cannot_be_removed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    save(tmp_path / "checkpoints", 1).rename(tmp_path / "checkpoints" / "step_00000001.tmp")
    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(Refused, match=r"^run_dir: .* \(Permission denied: .*step_00000001.tmp\)"):
        sweep_alone(tmp_path / "checkpoints")


def crash_while_replacing(_: str, directory: str) -> list[int | None]:
    """Where a run would go on, if it died at each file operation of a second save of its step."""
    root = Path(directory)
    found: list[int | None] = []
    exit_status = -1
    while exit_status != 0:
        shutil.rmtree(root, ignore_errors=True)
        save(root, 1)
        save(root, 2)
        child = os.fork()
        if child == 0:
            die_at_file_operation(len(found), directory)
            commit(root, manifest(2, 0.5), write)
            os._exit(0)
        exit_status = os.waitpid(child, 0)[1]
        sweep_alone(root)
        found.append(newest_step(root))
        assert names(root) == ["step_00000001", "step_00000002"]
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_crash_while_a_step_is_saved_again_loses_nothing(tmp_path: Path) -> None:
    (found,) = values(crash_while_replacing, 1, str(tmp_path))
    assert set(found) == {2}
    assert len(found) > 12
