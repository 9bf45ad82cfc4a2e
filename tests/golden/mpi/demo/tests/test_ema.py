"""Engine: the averaged weights, one update for each step that was taken."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from .harness import values
from .parts import joined
from .scenario import run_training, set_config
from .toy import Toy

DECAY = 0.8
CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    data__num_workers=0,
    global_batch_size=16,
    micro_batch_size=2,
    ema_decay=DECAY,
    optim__lr=0.1,
)


def saved(run_dir: str, step: int) -> dict[str, Any]:
    """The files of a checkpoint. Loads tensors, which starts no threads."""
    directory = Path(run_dir, "checkpoints", f"step_{step:08d}")
    return {path.name: torch.load(path) for path in directory.glob("*.pt")}


def closed_form(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average after these steps; it starts with the weights after the first."""
    _, first, *others = weights
    average = {name: tensor * DECAY ** len(others) for name, tensor in first.items()}
    for steps_ago, later in enumerate(reversed(others)):
        for name, tensor in later.items():
            average[name] += (1 - DECAY) * DECAY**steps_ago * tensor
    return average


def assert_is_average(files: dict[str, Any], weights: list[dict[str, Tensor]]) -> None:
    assert files["training.pt"]["ema_updates"] == len(weights) - 1
    for name, tensor in closed_form(weights).items():
        torch.testing.assert_close(files["ema.pt"][name], tensor, rtol=0, atol=1e-12)


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
    files = saved(run_dir, 4)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        averaged, current = (files[file][f"layers.1.{name}"] for file in ("ema.pt", "model.pt"))
        assert torch.equal(averaged, current)
    averaged, current = (files[file]["layers.0.weight"] for file in ("ema.pt", "model.pt"))
    assert not torch.equal(averaged, current)


def compare_storage(init_method: str) -> tuple[bool, bool]:
    """Whether an averaged weight is trained, or shares its memory with the model's."""
    with joined(init_method) as job:
        trained = any(p.requires_grad for p in job.state.ema.parameters())
        pairs = zip(job.state.ema.module.parameters(), job.state.module.parameters(), strict=True)
        return trained, any(one.data_ptr() == other.data_ptr() for one, other in pairs)


def test_average_is_a_copy_that_is_not_trained() -> None:
    assert values(compare_storage, 1) == [(False, False)]
