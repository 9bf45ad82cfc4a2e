"""Engine: bfloat16 in the forward, and nowhere else."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from .. import train
from ..config import Config
from ..engine.loader import Batch
from .harness import values
from .scenario import run_training, saved, set_config
from .toy import NUM_TARGETS, Toy, num_targets, put

CONFIG = set_config(Config(), device="cpu", max_steps=1, data__num_workers=0)


def note_types() -> set[torch.dtype]:
    """Prepare a training; the types of what the model answers, in training and evaluation."""
    Toy().use()
    types: set[torch.dtype] = set()

    def looked_at(model: nn.Module, batch: Batch) -> Tensor:
        answers: Tensor = model(batch["inputs"])
        types.add(answers.dtype)
        return answers.sum()

    parts = {
        "TARGETS_PER_SAMPLE": NUM_TARGETS,
        "num_targets": num_targets,
        "loss_sum": looked_at,
        "metric_sums": lambda model, batch: {"loss": looked_at(model, batch)},
    }
    put(train, task=SimpleNamespace(**parts))
    return types


def test_forward_is_bfloat16_and_weights_are_not(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    for rank in values(run_training, 2, config, note_types):
        assert rank.notes == {torch.bfloat16}
        assert {tensor.dtype for tensor in rank.parameters.values()} == {torch.float32}
    expected = {"optimizer", "optimizer_groups"}
    assert set(saved(run_dir, 1).manifest.numbers) == expected
