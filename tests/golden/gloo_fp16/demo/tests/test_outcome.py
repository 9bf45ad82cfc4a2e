"""Engine: how a run has ended, as the job script reads it from its directory."""

import json
import time
from pathlib import Path

import pytest

from ..engine import outcome
from ..engine.launch import Launch
from ..engine.outcome import Outcome, outcome_of
from ..engine.rundir import RunDir

YESTERDAY = time.time() - 86400


def leave(run_dir: Path, started_at: int, step: int, started: float) -> None:
    """Leave what a start leaves that went on from a step, and was stopped."""
    with RunDir(run_dir, Launch()) as run:
        run.status("stopped", step)
    attempts = [{"step": 0, "started": 0.0}, {"step": started_at, "started": started}]
    (run_dir / "attempts.json").write_text(json.dumps(attempts))


def test_stopped_run_says_how_far_it_came(tmp_path: Path) -> None:
    leave(tmp_path, 30, 50, time.time())
    assert outcome_of(tmp_path, YESTERDAY) == Outcome("stopped", 50, steps=20)


def test_start_that_did_not_come_to_training_made_no_step(tmp_path: Path) -> None:
    leave(tmp_path, 30, 50, YESTERDAY - 1)
    assert outcome_of(tmp_path, YESTERDAY) == Outcome("stopped", 50)


def test_earlier_end_is_none(tmp_path: Path) -> None:
    leave(tmp_path, 30, 50, time.time())
    (tmp_path / "checkpoints" / "step_00000050").mkdir()
    assert outcome_of(tmp_path, time.time() + 60) == Outcome(checkpoints=1)


@pytest.mark.parametrize("content", ["", "[]", '"words"', '{"state": "stopped"}'])
def test_what_is_missing_or_damaged_is_no_end(tmp_path: Path, content: str) -> None:
    assert outcome_of(tmp_path, 0) == Outcome()
    (tmp_path / "status.json").write_text(content)
    assert outcome_of(tmp_path, 0) == Outcome()
    leave(tmp_path, 30, 50, time.time())
    (tmp_path / "attempts.json").write_text(content)
    assert outcome_of(tmp_path, 0) == Outcome("stopped", 50)


def test_directory_is_found_as_the_program_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path / "a run", 30, 50, time.time())
    config = tmp_path / "config.yaml"
    config.write_text(f"run_dir: {tmp_path / 'a run'}\n")
    outcome.main(["0", f"--config={config}"])
    outcome.main(["0", "--config", str(config), "--run_dir", str(tmp_path)])
    assert capsys.readouterr().out == "stopped 50 20 0\nnone 0 0 0\n"
