"""Engine: the averaged weights, one update for each step that was taken."""

import torch
from torch import Tensor

from ..config import Config
from ..engine.manifest import Checkpoint
from ..engine.reading import read_part
from .harness import values
from .parts import joined
from .scenario import run_training, saved, set_config
from .toy import Toy

DECAY = 0.8
CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    data__num_workers=0,
    global_batch_size=16,
    ema_decay=DECAY,
    optim__lr=0.1,
)


def closed_form(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average after these steps; it starts with the weights after the first."""
    _, first, *others = weights
    average = {name: tensor * DECAY ** len(others) for name, tensor in first.items()}
    for steps_ago, later in enumerate(reversed(others)):
        for name, tensor in later.items():
            average[name] += (1 - DECAY) * DECAY**steps_ago * tensor
    return average


def assert_is_average(checkpoint: Checkpoint, weights: list[dict[str, Tensor]]) -> None:
    assert checkpoint.manifest.numbers["ema_updates"] == len(weights) - 1
    averages = read_part(checkpoint, "ema")
    for name, tensor in closed_form(weights).items():
        torch.testing.assert_close(averages[name], tensor, rtol=0, atol=1e-12)


def test_one_update_a_step_also_after_a_resume(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    weights: list[dict[str, Tensor]] = []
    for stop in (2, 4):
        rank, _ = values(run_training, 2, set_config(config, max_steps=stop), Toy().use)
        weights += rank.notes.weights[1 if weights else 0 :]
        assert_is_average(saved(run_dir, stop), weights)


def test_no_update_for_a_step_that_was_not_taken(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    rank, _ = values(run_training, 2, config, Toy(bad_sample=40).use)
    assert len(rank.notes.weights) == 4
    assert_is_average(saved(run_dir, 3), rank.notes.weights)


def test_buffers_are_the_models(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, config, Toy(has_batch_norm=True).use)
    averages, current = (read_part(saved(run_dir, 4), name) for name in ("ema", "model"))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(averages[f"layers.1.{name}"], current[f"layers.1.{name}"])
    assert not torch.equal(averages["layers.0.weight"], current["layers.0.weight"])


def compare_storage(init_method: str) -> tuple[bool, bool]:
    """Whether an averaged weight is trained, or shares its memory with the model's."""
    with joined(init_method) as job:
        trained = any(p.requires_grad for p in job.state.ema.parameters())
        pairs = zip(job.state.ema.module.parameters(), job.state.module.parameters(), strict=True)
        return trained, any(one.data_ptr() == other.data_ptr() for one, other in pairs)


def test_average_is_a_copy_that_is_not_trained() -> None:
    assert values(compare_storage, 1) == [(False, False)]
