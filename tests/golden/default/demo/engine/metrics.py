"""Engine: metrics.jsonl, one object a line, each step of a split once, also across a resume."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .distributed import agreed
from .rundir import atomic_write_text
from .state import Job, Progress
from .tracker import Tracker

logger = logging.getLogger(__name__)


class Metrics:
    """Rank 0's metrics.jsonl and progress bar; on other ranks it does nothing, so nobody asks."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        """Begin, or go on after the step that was resumed from. Collective.

        Raises:
            Refused: the tracker can't be had, on all ranks.
        """
        progress = job.state.progress
        self.is_main = job.world.is_main
        with agreed(job.world):
            if self.is_main:
                self._tracker = Tracker(run_dir, progress.step, asdict(job.config))
        self._samples = 0
        self.start_clock(0.0)
        if not self.is_main:
            return
        path = run_dir / "metrics.jsonl"
        cut_back(path, progress)
        self._file = path.open("a", encoding="utf-8")
        # disable=None: no bar where standard error is no terminal, as in a log file.
        self._bar = tqdm(total=job.total_steps, initial=progress.step, unit="step", disable=None)

    def start_clock(self, waited_s: float) -> None:
        """Rates count from here on; before it, the model was tried and perhaps compiled."""
        self._start, self._waited_s = time.perf_counter(), waited_s

    def count(self, num_samples: int) -> None:
        """Account for the samples of one window."""
        self._samples += num_samples

    def write_train(self, progress: Progress, numbers: dict[str, float], waited_s: float) -> None:
        """Write a line of training metrics, with the rates since the line before.

        Adds `samples_per_s`, over all ranks, and `data_wait`, the share of the time that was
        spent waiting for data. `waited_s`: seconds waited since the start of the run.
        """
        if not self.is_main:
            return
        now = time.perf_counter()
        elapsed_s = now - self._start
        numbers["samples_per_s"] = self._samples / elapsed_s
        numbers["data_wait"] = (waited_s - self._waited_s) / elapsed_s
        self._start, self._samples, self._waited_s = now, 0, waited_s
        self.write("train", progress, numbers)
        self._bar.set_postfix({name: f"{value:.3g}" for name, value in numbers.items()})
        self._bar.update(progress.step - self._bar.n)

    def write(self, split: str, progress: Progress, values: Mapping[str, float]) -> None:
        """Append a line, and flush it. What is no finite number becomes null."""
        if not self.is_main:
            return
        record = {
            "step": progress.step,
            "epoch": progress.epoch,
            "samples": progress.samples,
            "split": split,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._tracker.log(split, progress.step, values)
        if split != "train":
            words = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            logger.info("step %d  epoch %d  %s: %s", progress.step, progress.epoch, split, words)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.is_main:
            return
        self._file.close()
        self._bar.close()
        self._tracker.close(error)


def cut_back(path: Path, progress: Progress) -> None:
    """Drop the lines that a resumed run will write again, and a last line that is torn.

    Atomic: a crash leaves the old file or the new one.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = _parse(line)
        last = progress.step if record.get("split") == "train" else progress.evaluated_step
        if record.get("step", math.inf) <= last:
            kept.append(f"{line}\n")
    atomic_write_text(path, "".join(kept))


def _parse(line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return record
