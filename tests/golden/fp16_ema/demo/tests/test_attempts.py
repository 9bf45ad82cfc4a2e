"""Engine: a run that is started again goes on, and one that makes no progress is not."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..config import Config
from ..engine import attempts
from ..engine.distributed import World
from ..engine.launch import Launch, Refused
from ..engine.rundir import PACKAGE, RunDir
from ..engine.state import Job
from ..engine.strategy import Checkpointer
from .harness import Outcome, outcomes, values
from .scenario import Record, run_training, set_config
from .test_checkpoint import save
from .toy import Notes, Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    save_every=2,
    data__num_workers=0,
    global_batch_size=8,
    micro_batch_size=4,
)  # 8 steps of the 64 samples


def use_restarted(count: int, toy: Toy, fault: int) -> Notes:
    """Prepare the so-manieth start of one call of a launcher; it fails after a step."""
    os.environ.update(TORCHELASTIC_RESTART_COUNT=str(count), TORCHELASTIC_RUN_ID="mine")
    save_begun = Checkpointer.save

    def save_whole(checkpointer: Checkpointer, job: Job, loss: float | None) -> None:
        save_begun(checkpointer, job, loss)
        checkpointer.finish()  # a crash may cost what is under way

    put(Checkpointer, save=save_whole)
    return toy.use_until(fault)


def start(config: Config, count: int, fault: int = -1) -> list[Outcome]:
    """One start of two ranks."""
    return outcomes(run_training, 2, config, partial(use_restarted, count, Toy(), fault))


def codes(ranks: list[Outcome]) -> list[int | None]:
    return [rank.exit_code for rank in ranks]


def test_starts_without_progress_come_to_an_end(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    for count in range(3):
        assert codes(start(config, count, fault=5)) == [1, 1]
    ranks = start(config, 3, fault=5)
    assert codes(ranks) == [2, 2]
    file = Path(run_dir, "attempts.json")
    assert ranks[0].output.splitlines()[-1] == (
        f"{PACKAGE}: no progress since step 4: 3 starts failed before they saved a newer "
        f"checkpoint; see {run_dir}/logs, and remove {file} to try the same again"
    )
    assert [one["step"] for one in json.loads(file.read_text())] == [0, 4, 4]
    file.unlink()
    assert codes(start(config, 4)) == [0, 0]


def test_starts_with_progress_go_on(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    for count, fault in enumerate((3, 4, 5, 6)):  # they go on from 0, 2, 4 and 4
        assert codes(start(config, count, fault)) == [1, 1]
    assert codes(start(config, 4)) == [0, 0]


def begin(run: RunDir, step: int, ended: str | None, config: Config = CONFIG) -> None:
    """Note a start of this process, and how it ended; none: it was killed."""
    attempts.begin(run, World(), config, step)
    run.status("running", step)
    if ended == "stopped":
        run.status("stopped", step)
    elif ended == "failed":
        run.mark("failed")


@pytest.mark.parametrize("ended", ["failed", None])
def test_killed_and_failed_starts_count(tmp_path: Path, ended: str | None) -> None:
    with RunDir(tmp_path, Launch()) as run:
        save(run.checkpoints, 9).rename(old := run.checkpoints / "step_00000009.aside1")
        os.utime(old, (0, 0))  # no start of these has saved it
        for step in (3, 7, 7):
            begin(run, step, ended)
        with pytest.raises(Refused, match="no progress since step 7"):
            begin(run, 7, ended)
        begin(run, 8, ended)


def test_starts_that_were_stopped_do_not_count(tmp_path: Path) -> None:
    with RunDir(tmp_path, Launch()) as run:
        for ended in ("failed", "failed", "stopped", "failed", "failed", "stopped", "failed"):
            begin(run, 7, ended)


def test_starts_with_other_settings_or_code_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "package" / "engine" / "attempts.py"
    code.parent.mkdir(parents=True)
    monkeypatch.setattr(attempts, "__file__", str(code))
    with RunDir(tmp_path / "run", Launch()) as run:
        for text in ("", "", "", "mended"):
            code.write_text(text)
            begin(run, 7, "failed")
        for lr in (0.1, 0.1, 0.1, 0.2):
            begin(run, 7, "failed", set_config(CONFIG, optim__lr=lr))


def test_starts_that_saved_something_do_not_count_where_a_person_went_back(tmp_path: Path) -> None:
    with RunDir(tmp_path, Launch()) as run:
        for number in range(5):
            begin(run, 7, "failed")
            path = save(run.checkpoints, 9)
            os.utime(path, (time.time() + 0.1,) * 2)  # a disk's clock may be a coarse one
            path.rename(path.with_name(f"{path.name}.aside{number}"))


def test_damaged_file_of_starts_begins_anew(tmp_path: Path) -> None:
    for text in ("half", "[1]", '[{"step": 3}]'):
        (tmp_path / "attempts.json").write_text(text)
        with RunDir(tmp_path, Launch()) as run:
            begin(run, 7, None)
        assert len(json.loads((tmp_path / "attempts.json").read_text())) == 1


@pytest.mark.parametrize("counts", [(0, 1, 2), (0, 0, 0)], ids=["failures", "machines that come"])
@pytest.mark.parametrize("resume", ["never", "path"])
def test_restart_does_not_go_back_again(
    run_dir: str, resume: str, counts: tuple[int, int, int]
) -> None:
    straight: list[Record]
    config = set_config(CONFIG, run_dir=run_dir)
    first = 0
    if resume == "path":
        first = 2
        values(run_training, 2, set_config(config, max_steps=4), Toy().use)
        resume = f"{run_dir}/checkpoints/step_00000002"
    straight_config = set_config(CONFIG, run_dir=run_dir + "-straight")
    straight = values(run_training, 2, straight_config, Toy().use)
    config = set_config(config, resume=resume)
    assert codes(start(config, counts[0], fault=first + 1)) == [1, 1]  # before it has saved
    assert codes(start(config, counts[1], fault=first + 3)) == [1, 1]
    ranks = start(config, counts[2])
    assert codes(ranks) == [0, 0], ranks[0].output
    assert f"resumed from step_{first + 2:08d}" in ranks[0].output
    assert ranks[0].value.digest == straight[0].digest
    noted = json.loads(Path(run_dir, "attempts.json").read_text())
    assert [one["step"] for one in noted][-3:] == [first, first, first + 2]


def test_first_start_takes_resume_at_its_word(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, config, Toy().use)
    assert codes(start(set_config(config, resume="never"), 0)) == [2, 2]
    # Started again, but not after one of this launcher's that had begun.
    assert codes(start(set_config(config, resume="never"), 1)) == [2, 2]


REFUSED = f"""
import sys
from {PACKAGE}.config import parse_or_exit
sys.modules["torch"] = None
parse_or_exit(sys.argv[1:])
print("parsed")
"""


def ask(run_dir: str, count: int, *settings: str) -> tuple[int, str, str]:
    """Parse settings in a process that one launcher, this one, starts."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    place = dict(zip(names, ("0", "0", "2", "2"), strict=True))
    launcher = {"TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_RUN_ID": "mine"}
    launcher.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED, "--run_dir", run_dir, *settings],
        env={**os.environ, **place, **launcher},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_named_checkpoint_need_not_be_there_any_more(run_dir: str) -> None:
    nowhere = ("--resume", f"{run_dir}/checkpoints/step_00000002")
    assert ask(run_dir, 1, *nowhere) == (0, "parsed\n", "")
    code, _, said = ask(run_dir, 0, *nowhere)
    assert code == 2
    assert "resume: expected auto, never or the directory of a checkpoint" in said


def test_refusal_is_not_asked_again(run_dir: str) -> None:
    wrong = ("--optim.lr", "abc")
    code, _, said = ask(run_dir, 0, *wrong)
    assert (code, said.count("\n")) == (2, 1)
    for count in (1, 2):
        assert ask(run_dir, count, *wrong) == (2, "", "")
        # Also where it was the device or the data: that is asked after torch is there.
        assert ask(run_dir, count) == (2, "", "")
    assert ask(run_dir, 0) == (0, "parsed\n", "")  # another call of the launcher
    status: dict[str, Any] = json.loads(Path(run_dir, "status.json").read_text())
    Path(run_dir, "status.json").write_text(json.dumps({**status, "launch": "of yesterday"}))
    assert ask(run_dir, 1) == (0, "parsed\n", "")
