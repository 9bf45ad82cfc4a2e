"""Engine: numbers that are not finite change nothing, and do not go on without end."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.amp.grad_scaler import GradScaler

from .. import train
from ..config import Config
from ..engine import state
from ..engine.manifest import list_checkpoints
from ..engine.reading import part_names, read_part
from ..engine.sampler import epoch_order
from ..engine.state import Job
from .harness import outcomes, values
from .scenario import run_training, saved, set_config
from .toy import Notes, Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    log_every=1,
    data__num_workers=0,
    global_batch_size=24,
    timeout_s=20.0,
)  # 3 steps of the 64 samples


def use_bad_from(position: int = 24) -> Notes:
    """Prepare a training in which each window from a position on has an infinite target."""
    notes = Toy().use()
    train_set, valid_set = Toy().build_datasets()
    train_set.targets[epoch_order(0, 0, 64)[position:]] = math.inf
    put(train, data=SimpleNamespace(build_datasets=lambda _: (train_set, valid_set)))
    return notes


def use_scale(exponent: int, use: Callable[[], Notes] = use_bad_from) -> Notes:
    """Prepare that training, whose loss scale begins with 2 to this power."""
    put(state, GradScaler=partial(GradScaler, init_scale=2.0**exponent))
    return use()


# Between 2 and 2 to the power of 30 the scale is searched for; beyond, it was long right.
PREPARE = {exponent: partial(use_scale, exponent) for exponent in (0, 4, 32)}
CASES = [(2, PREPARE[0], 0), (3, PREPARE[4], 4), (2, PREPARE[32], 30)]


@pytest.mark.parametrize(("world_size", "prepare", "searches"), CASES)
def test_too_many_windows_in_a_row_end_the_run(
    run_dir: str, world_size: int, prepare: Callable[[], Notes], searches: int
) -> None:
    config = set_config(CONFIG, run_dir=run_dir, save_every=1, epochs=99, max_nonfinite_steps=5)
    ranks = outcomes(run_training, world_size, config, prepare)
    assert [rank.exit_code for rank in ranks] == [1] * world_size
    said = "step 2 can't be taken: 5 windows in a row (max_nonfinite_steps) had no finite gradient"
    assert all(said in rank.output for rank in ranks)
    assert ranks[0].output.count("left out a window") == 4 + searches
    newest = saved(run_dir, 1)
    assert list_checkpoints(newest.path.parent) == [newest.path]
    for part in part_names(newest):
        assert all(tensor.isfinite().all() for tensor in read_part(newest, part).values())


def test_windows_are_counted_on_after_a_resume(run_dir: str) -> None:
    prepare = partial(use_scale, 0, partial(use_bad_from, 48))
    config = set_config(CONFIG, run_dir=run_dir, max_nonfinite_steps=3)
    [rank, _] = values(run_training, 2, config, prepare)
    assert (rank.progress["step"], rank.progress["nonfinite"]) == (2, 1)
    ranks = outcomes(run_training, 2, set_config(config, epochs=9), prepare)
    assert [rank.exit_code for rank in ranks] == [1, 1]
    assert ranks[0].output.count("left out a window") == 1


def test_windows_are_counted_afresh_after_a_step(run_dir: str) -> None:
    prepare = partial(use_scale, 0, Toy(bad_sample=40).use)
    # At most two of them meet, at the end of an epoch and the beginning of the next.
    config = set_config(CONFIG, run_dir=run_dir, epochs=9, max_nonfinite_steps=3)
    [rank, _] = values(run_training, 2, config, prepare)
    assert (rank.progress["step"], rank.progress["skipped"]) == (2 * 9, 9)


def use_bad_evaluation() -> Notes:
    """Prepare a training whose evaluation after the second step is no number."""
    notes = Toy().use()
    evaluate = train.evaluate

    def spoiled(job: Job, *rest: Any) -> dict[str, float]:
        results = evaluate(job, *rest)
        return {**results, "loss": math.nan} if job.state.progress.step == 2 else results

    put(train, evaluate=spoiled)
    return notes


def test_evaluation_that_is_not_finite_is_never_the_best(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, eval_every=1, save_every=1)
    values(run_training, 2, config, use_bad_evaluation)
    losses = {step: saved(run_dir, step).manifest.valid_loss for step in (1, 2, 3)}
    assert losses[2] is None
    rated = {step: loss for step, loss in losses.items() if loss is not None}
    best = Path(run_dir, "checkpoints", "best.txt").read_text()
    assert best == f"step_{min(rated, key=rated.__getitem__):08d}\n"
