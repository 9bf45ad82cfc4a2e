"""Engine: a checkpoint is whole or it is not there, and the right one is found."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from ..engine.checkpoint import Keep, commit, retain
from ..engine.choice import choose, go_back, newest
from ..engine.launch import Refused
from ..engine.manifest import (
    FORMAT_VERSION,
    Checkpoint,
    Manifest,
    best,
    list_checkpoints,
    read_checkpoint,
)
from ..engine.state import Progress
from .harness import values


def manifest(step: int, loss: float | None = None) -> Manifest:
    """The manifest of a step that was evaluated to a loss, or not at all."""
    return Manifest(asdict(Progress(step=step)), 1, "order", {}, {}, {}, loss)


def write(directory: Path) -> list[Path]:
    """Two files in place of a model's."""
    for name in ("a.pt", "b.pt"):
        (directory / name).write_text(f"content of {name}")
    return [directory / "a.pt", directory / "b.pt"]


def save(root: Path, step: int, loss: float | None = None) -> Path:
    """Put a complete checkpoint into a directory of checkpoints."""
    return commit(root, manifest(step, loss), write)


def steps(root: Path) -> list[int]:
    """The steps of the checkpoints, oldest first."""
    return [int(path.name.removeprefix("step_")) for path in reversed(list_checkpoints(root))]


def newest_step(root: Path) -> int | None:
    """The step that a run would go on from."""
    found = newest(root)
    return found.manifest.step if found else None


def test_all_is_on_the_disk_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    rename = Path.rename

    def flush(descriptor: int) -> None:
        there = [tmp_path, *tmp_path.rglob("*")]
        same = (path for path in there if path.stat().st_ino == os.fstat(descriptor).st_ino)
        done.append(f"flush {next(same).name}")

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", noted_rename)
    root = tmp_path / "checkpoints"
    save(root, 7)
    assert done == [
        "flush a.pt",
        "flush b.pt",
        "flush manifest.json",
        "flush step_00000007.tmp",
        "rename step_00000007.tmp to step_00000007",
        "flush checkpoints",
    ]


def test_manifest_lists_the_files_and_reads_back(tmp_path: Path) -> None:
    path = save(tmp_path, 120, loss=0.5)
    assert path == tmp_path / "step_00000120"
    content = json.loads((path / "manifest.json").read_text())
    listed = [(file["name"], file["size"]) for file in content["files"]]
    assert listed == [("a.pt", 15), ("b.pt", 15)]
    assert content["format_version"] == FORMAT_VERSION
    read = read_checkpoint(path, verify=True)
    assert replace(read.manifest, files=()) == manifest(120, loss=0.5)


def die_at_file_operation(number: int, directory: str) -> None:
    """End this process, as a power cut would, at its so-manieth operation in a directory."""
    countdown = iter(range(number))

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        is_ours = bool(arguments) and str(arguments[0]).startswith(directory)
        if event.startswith(("open", "os.")) and is_ours and next(countdown, None) is None:
            os._exit(9)

    sys.addaudithook(watch)


def crash_everywhere(_: str, directory: str) -> list[int | None]:
    """Where a run would go on, if it died at the first, second, … file operation of a save."""
    root = Path(directory)
    found: list[int | None] = []
    exit_status = -1
    while exit_status != 0:
        shutil.rmtree(root / "step_00000002", ignore_errors=True)
        if not list_checkpoints(root):
            save(root, 1)
        child = os.fork()
        if child == 0:
            die_at_file_operation(len(found), directory)
            save(root, 2)
            retain(root, Keep(newest=1, resumed_from=None))
            os._exit(0)
        exit_status = os.waitpid(child, 0)[1]
        found.append(newest_step(root))
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_crash_at_any_moment_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    (found,) = values(crash_everywhere, 1, str(tmp_path))
    before, after = found.count(1), found.count(2)
    assert found == [1] * before + [2] * after
    assert before >= 6
    assert after >= 4


def test_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(directory: Path) -> list[Path]:
        (directory / "a.pt").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        commit(tmp_path, manifest(2), fail)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_newest_by_number_among_strange_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (900, 99_999_999, 100_000_000):  # the last is not the last of the alphabet
        save(tmp_path, step)
    for name in ("step_200000000.tmp", "step_00000900.old", "step_x", "best", "backup_step_9999"):
        shutil.copytree(tmp_path / "step_00000900", tmp_path / name)
    (tmp_path / "step_300000000").write_text("a file")
    assert newest_step(tmp_path) == 100_000_000
    assert not caplog.records


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def rewrite(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("b.pt", cut, "b.pt has 14 bytes, expected 15"),
        ("b.pt", flip, "the checksum of b.pt is wrong"),
        ("a.pt", Path.unlink, "a.pt is missing"),
        ("manifest.json", Path.unlink, "it has no manifest"),
        ("manifest.json", cut, "its manifest is damaged"),
        ("manifest.json", partial(rewrite, files=3), "its manifest is damaged"),
        ("manifest.json", partial(rewrite, world_size=3), "its manifest is damaged"),
        (
            "manifest.json",
            partial(rewrite, format_version=0),
            "its format version is 0, this project reads 1: go on with the version of the project "
            "that wrote it, or give another run_dir",
        ),
    ],
)
def test_incomplete_one_is_passed_over_with_the_reason(
    file: str,
    damage: Callable[[Path], object],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    assert newest_step(tmp_path) == 1
    assert [record.message for record in caplog.records] == [
        f"passed over checkpoint step_00000002: {reason}"
    ]
    with pytest.raises(Refused) as refused:
        choose(tmp_path, str(tmp_path / "step_00000002"))
    assert str(refused.value).endswith(f"step_00000002: {reason}")


def test_newest_one_of_a_newer_format_is_not_left_behind(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    rewrite(tmp_path / "step_00000002" / "manifest.json", format_version=2, new=1)
    assert newest_step(tmp_path) == 3
    cut(tmp_path / "step_00000003" / "a.pt")
    for resume in ("auto", str(tmp_path / "step_00000002")):
        with pytest.raises(Refused, match="its format version is 2, this project reads 1: go on"):
            choose(tmp_path, resume)


def test_fresh_start_does_not_bury_what_is_damaged(tmp_path: Path) -> None:
    cut(save(tmp_path, 2) / "a.pt")
    with pytest.raises(Refused, match=r"got 1 that can't be read \(the log says why\)"):
        choose(tmp_path, "auto")


def test_damaged_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    cut(save(tmp_path, 2) / "a.pt")
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_which_one_resume_means(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose(tmp_path, "auto") is choose(tmp_path, "never") is None
    first, _ = save(tmp_path, 1), save(tmp_path, 2)
    with pytest.raises(Refused, match=r"^resume: expected a run_dir without checkpoints for never"):
        choose(tmp_path, "never")
    assert newest_step(tmp_path) == 2
    # A path goes back: what came after it must not be met again.
    chosen = choose(tmp_path, str(first))
    assert chosen is not None
    assert chosen.path == first
    go_back(tmp_path, "auto", 1)
    assert steps(tmp_path) == [1, 2]
    go_back(tmp_path, str(first), 1)
    assert steps(tmp_path) == [1]
    assert "step_00000002.aside1" in caplog.text


def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {1: 0.9, 2: 0.1, 3: 0.5, 4: math.nan, 5: None, 6: 0.2, 7: 0.3}
    for step, loss in losses.items():
        save(tmp_path, step, loss)
    monkeypatch.chdir(tmp_path)
    resumed_from = Path("step_00000003")  # as somebody may have typed it
    retain(tmp_path, Keep(newest=2, resumed_from=resumed_from))
    assert steps(tmp_path) == [2, 3, 6, 7]
    assert (tmp_path / "best.txt").read_text() == "step_00000002\n"
    save(tmp_path, 8, 0.05)
    retain(tmp_path, Keep(newest=2, resumed_from=None))
    assert steps(tmp_path) == [7, 8]
    assert (tmp_path / "best.txt").read_text() == "step_00000008\n"


def test_incomplete_one_is_left_for_a_person_to_look_at(tmp_path: Path) -> None:
    damaged = save(tmp_path, 1)
    cut(damaged / "a.pt")
    for step in (2, 3):
        save(tmp_path, step)
    retain(tmp_path, Keep(newest=1, resumed_from=None))
    assert steps(tmp_path) == [1, 3]
    cut(save(tmp_path, 4) / "a.pt")
    retain(tmp_path, Keep(newest=1, resumed_from=None))
    assert steps(tmp_path) == [1, 3, 4], "the newest that is complete stays"


def test_best_is_never_one_without_a_number(tmp_path: Path) -> None:
    rated = [
        Checkpoint(tmp_path, manifest(step, loss))
        for step, loss in enumerate([math.nan, 0.5, None, -math.inf, 0.5, math.inf])
    ]
    top = best(rated)
    assert top is not None
    assert top.manifest.step == 1, "the first of two equal ones"
    assert best([rated[0], rated[2], rated[5]]) is None
