"""Engine: one live run a directory, and records that are whole at any moment."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from ..engine import rundir
from ..engine.launch import Launch, Refused
from ..engine.rundir import PACKAGE, RunDir, atomic_write_text, describe_environment

ROOT = Path(rundir.__file__).parents[PACKAGE.count(".") + 2]
RANK_1 = Launch(rank=1, local_rank=1, world_size=2, local_world_size=2)


def test_second_live_run_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mine"
    with RunDir(path, Launch()), pytest.raises(Refused) as refused:
        RunDir(path, Launch()).open()
    assert str(refused.value).startswith(
        f"run_dir: expected a directory without a live run, got {path} "
        f"(in use by process {os.getpid()} on "
    )


def test_directory_is_free_again_after_a_run(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(tmp_path, Launch()) as run:
            run.status("done", 3)


def test_other_ranks_neither_lock_nor_write(tmp_path: Path) -> None:
    with RunDir(tmp_path, Launch()), RunDir(tmp_path, RANK_1) as other:
        before = sorted(tmp_path.iterdir())
        other.status("running", 1)
        other.write_environment({})
        assert sorted(tmp_path.iterdir()) == before


def test_no_repository_takes_a_run_for_its_own(tmp_path: Path) -> None:
    for name, files in (("new", ["logs"]), ("used", ["logs", "notes.txt"])):
        for file in files:
            (tmp_path / name / file).mkdir(parents=True)
        with RunDir(tmp_path / name, Launch()):
            assert (tmp_path / name / ".gitignore").exists() == (name == "new")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"^run_dir: expected a directory that can be written, got "):
        RunDir(tmp_path / "file", Launch()).open()


KILLED_WITH_A_CHILD = f"""
import os, pathlib, sys, time
from {PACKAGE}.engine.launch import Launch
from {PACKAGE}.engine.rundir import RunDir
run = RunDir(sys.argv[1], Launch()).open()
pid_file = pathlib.Path(sys.argv[1], "child")
if os.fork() == 0:
    pid_file.write_text(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
while not pid_file.exists():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_killed_run_frees_its_directory_though_its_loading_processes_live_on(
    tmp_path: Path,
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_A_CHILD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=60,
    )
    child = int((tmp_path / "child").read_text())
    try:
        assert killed.returncode == -signal.SIGKILL
        os.kill(child, 0)  # It lives.
        RunDir(tmp_path, Launch()).open().close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_status_says_state_and_step(tmp_path: Path) -> None:
    with RunDir(tmp_path, Launch()) as run:
        run.status("running", 12)
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status["step"], status["pid"]) == ("running", 12, os.getpid())
        run.mark("refused")
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status["step"]) == ("refused", 12)


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    atomic_write_text(file, "old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, f"no space for {descriptor}")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        atomic_write_text(file, "new")
    assert file.read_text() == "old"


def test_environment_has_versions_and_more(tmp_path: Path) -> None:
    with RunDir(tmp_path, Launch()) as run:
        run.write_environment({"torch": "2.x", "hosts": ["a", "b"]})
    content = json.loads((tmp_path / "environment.json").read_text())
    assert content["hosts"] == ["a", "b"]
    assert "jsonargparse" in content["packages"]


def test_environment_names_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "__file__", str(tmp_path / "module.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_environment()["git_revision"] is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        try:
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        except FileNotFoundError:
            pytest.skip("no git")
    assert len(describe_environment()["git_revision"]) == 40
    assert describe_environment()["git_dirty"] is False
    (tmp_path / "new.py").write_text("")
    assert describe_environment()["git_dirty"] is True


def test_rank_0_says_all_and_other_ranks_warn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = logging.getLogger(f"{PACKAGE}.train")
    with RunDir(tmp_path, Launch()) as run:
        run.start_logging()
        ours.info("step %d", 3)
        logging.getLogger("somebody.else").info("chatter")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # What captureWarnings put in place, which pytest's own recording hides.
            warnings.warn("careful", stacklevel=1)
    out, err = capsys.readouterr()
    assert out.startswith("step 3\n")
    assert "careful" in out
    assert "chatter" not in out
    assert err == ""
    with RunDir(tmp_path, RANK_1) as run:
        run.start_logging()
        ours.info("step 4")
        ours.warning("slow disk")
    assert capsys.readouterr() == ("", "rank 1: slow disk\n")
    assert "step 3" in (tmp_path / "logs" / "rank0.log").read_text()
    assert "step 4" in (tmp_path / "logs" / "rank1.log").read_text()
    ours.warning("after the run")
    assert "after" not in (tmp_path / "logs" / "rank1.log").read_text()


def test_messages_do_not_tear_a_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tqdm import tqdm

    with RunDir(tmp_path, Launch()) as run, tqdm(total=3, file=sys.stderr) as bar:
        run.start_logging()
        bar.update(1)
        time.sleep(0)
        logging.getLogger(PACKAGE).info("in between")
    out, err = capsys.readouterr()
    assert out == "in between\n"
    assert "in between" not in err
