"""Engine: metrics.jsonl has each step of a split once, whatever happened in between."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from ..engine.metrics import Metrics, cut_back
from ..engine.state import Progress
from .harness import values
from .parts import joined
from .scenario import read_metrics


def line(step: int, split: str) -> str:
    """A line as a run writes it."""
    return json.dumps({"step": step, "split": split, "loss": 0.5}) + "\n"


def test_resumed_run_drops_the_lines_that_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train = [line(step, "train") for step in range(1, 7)]
    kept = [*train[:2], line(2, "valid"), *train[2:4]]
    path.write_text("".join([*kept, line(4, "valid"), *train[4:]]))
    # The checkpoint of step 4 was written before step 4 was evaluated.
    cut_back(path, Progress(step=4, evaluated_step=2))
    assert path.read_text() == "".join(kept)


@pytest.mark.parametrize("torn", ['{"step": 2, "spl', '{"step": 2, "split": "train"', "\0\0", "{}"])
def test_torn_line_is_dropped(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, "train") + torn)
    cut_back(path, Progress(step=5, evaluated_step=5))
    assert path.read_text() == line(1, "train")


def test_crash_while_cutting_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, "train") + line(2, "train"))

    def crash(descriptor: int) -> None:
        raise OSError(descriptor)

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match=r"^\d+$"):
        cut_back(path, Progress(step=1))
    assert path.read_text() == line(1, "train") + line(2, "train")


def test_first_run_has_nothing_to_cut(tmp_path: Path) -> None:
    cut_back(tmp_path / "metrics.jsonl", Progress())
    assert not list(tmp_path.iterdir())


def write(init_method: str, directory: str, resumed_at: int, last: int) -> list[str]:
    """Write metrics of some steps; what lies in this rank's directory afterwards."""
    with joined(init_method) as job:
        run_dir = Path(directory, str(job.world.rank))
        run_dir.mkdir(exist_ok=True)
        progress = job.state.progress
        progress.step = progress.evaluated_step = resumed_at
        with Metrics(run_dir, job) as metrics:
            for step in range(resumed_at + 1, last + 1):
                progress.step, progress.epoch, progress.samples = step, 1, 8 * step
                metrics.count(8)
                numbers = {"loss": math.nan if step == 2 else 1 / step, "lr": math.inf}
                metrics.write_train(progress, numbers, waited_s=0.001 * step)
                metrics.write("valid", progress, {"loss": 1 / step})
        return sorted(path.name for path in run_dir.iterdir())


def test_each_step_once_across_a_resume_written_by_rank_0(tmp_path: Path) -> None:
    ranks = values(write, 2, str(tmp_path), 0, 6)
    assert "metrics.jsonl" in ranks[0]
    assert ranks[1] == []
    values(write, 1, str(tmp_path), 4, 8)
    for split in ("train", "valid"):
        lines: list[dict[str, Any]] = read_metrics(str(tmp_path / "0"), split)
        assert [one["step"] for one in lines] == list(range(1, 9))
        assert [one["samples"] for one in lines] == list(range(8, 72, 8))
    first, second = read_metrics(str(tmp_path / "0"), "train")[:2]
    assert first.keys() == {
        *("step", "epoch", "samples", "split"),
        *("loss", "lr", "samples_per_s", "data_wait"),
    }
    assert (first["loss"], second["loss"], second["lr"]) == (1.0, None, None)
    assert first["samples_per_s"] > 0
    assert first["data_wait"] > 0
