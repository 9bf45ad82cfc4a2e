"""Engine: TensorBoard shows each step once, also where a run went back to a checkpoint."""

from pathlib import Path

import pytest

from ..engine.tracker import Tracker
from .harness import values


def log(_: str, run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """Log six steps, go back to step 4, log four; what TensorBoard then shows of each name."""
    for resumed_at, last in ((0, 6), (4, 8)):
        tracker = Tracker(Path(run_dir), resumed_at, {"lr": 0.5})
        for step in range(resumed_at + 1, last + 1):
            tracker.log("train", step, {"loss": step + resumed_at / 10, "lr": 0.5})
            if step % 2 == 0:
                tracker.log("valid", step, {"loss": -step})
        tracker.close(None)
    module = pytest.importorskip("tensorboard.backend.event_processing.event_multiplexer")
    shown = module.EventMultiplexer({"run": f"{run_dir}/tensorboard"}).Reload()
    return {
        name: [(event.step, round(event.value, 3)) for event in shown.Scalars("run", name)]
        for name in shown.Runs()["run"]["scalars"]
    }


def test_no_step_is_repeated_or_missing_after_a_resume(run_dir: str) -> None:
    (shown,) = values(log, 1, run_dir)
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.4), (6, 6.4), (7, 7.4), (8, 8.4)]
    assert shown["train/loss"] == losses
    assert shown["train/lr"] == [(step, 0.5) for step in range(1, 9)]
    assert shown["valid/loss"] == [(2, -2.0), (4, -4.0), (6, -6.0), (8, -8.0)]
