"""Engine: what models do that DDP is known to trip over."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from .. import train
from ..config import Config
from .harness import outcomes, values
from .scenario import run_training, set_config
from .toy import NUM_TARGETS, Notes, Toy, ToyNet, loss_sum, put

CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    data__num_workers=0,
    global_batch_size=24,
    timeout_s=20.0,
)
TOY = Toy(depth=3)
NUM_STEPS = 3  # of 64 samples


class Checkpointed(ToyNet):
    """Computes its layers again in the backward instead of keeping what they gave."""

    def forward(self, inputs: Tensor) -> Tensor:
        """As without it."""
        predictions: Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
        return predictions


def use_kind(kind: type[ToyNet]) -> Notes:
    """Prepare a training of such a model, from the same weights."""
    notes = TOY.use()

    def build_model(_: Any) -> ToyNet:
        torch.manual_seed(0)
        return kind(TOY)

    put(train, build_model=build_model)
    return notes


def test_activation_checkpointing_changes_nothing(run_dir: str) -> None:
    plain = values(run_training, 2, set_config(CONFIG, run_dir=f"{run_dir}-plain"), TOY.use)
    config = set_config(CONFIG, run_dir=run_dir)
    saving = values(run_training, 2, config, partial(use_kind, Checkpointed))
    assert saving[0].progress["step"] == NUM_STEPS
    for rank in saving:
        for name, tensor in rank.parameters.items():
            torch.testing.assert_close(tensor, plain[0].parameters[name], rtol=0, atol=1e-12)


class Remembering(ToyNet):
    """Adds a running mean of its inputs, which no gradient reaches, to what it answers."""

    memory: Tensor

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy)
        self.register_buffer("memory", torch.zeros(NUM_TARGETS))

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions that depend on the batches before."""
        if self.training:
            self.memory.mul_(0.5).add_(inputs.detach().mean())
        predictions: Tensor = self.layers(inputs)
        return predictions + self.memory.clone()


def test_buffers_that_act_in_training_resume_exactly(run_dir: str) -> None:
    # DDP sends rank 0's before the first forward of a step, and only then.
    straight_config = set_config(CONFIG, run_dir=f"{run_dir}-straight")
    config = set_config(CONFIG, run_dir=run_dir)
    prepare = partial(use_kind, Remembering)
    straight = values(run_training, 2, straight_config, prepare)
    values(run_training, 2, set_config(config, max_steps=2), prepare)
    resumed = values(run_training, 2, config, prepare)
    assert [rank.digest for rank in resumed] == [rank.digest for rank in straight]
    assert not torch.equal(straight[0].buffers["memory"], straight[1].buffers["memory"])


def use_two_forwards(torch_version: str) -> Notes:
    """Prepare a training whose loss forwards twice, as contrastive ones do."""
    notes = Toy(depth=2, has_batch_norm=True).use()
    put(torch, __version__=TorchVersion(torch_version))

    def loss_of_two(model: nn.Module, batch: Any) -> Tensor:
        return loss_sum(model, batch) + loss_sum(model, {**batch, "inputs": -batch["inputs"]})

    program: Any = train
    put(program.task, loss_sum=loss_of_two)
    return notes


@pytest.mark.parametrize("version", [torch.__version__, "2.11.0"], ids=["this", "older"])
def test_two_forwards_before_a_backward_with_batch_norm(run_dir: str, version: str) -> None:
    prepare = partial(use_two_forwards, version)
    ranks = outcomes(run_training, 2, set_config(CONFIG, run_dir=run_dir), prepare)
    if TorchVersion(version) < "2.12":
        assert [rank.exit_code for rank in ranks] == [2, 2]
        assert f": torch: expected 2.12 or newer, got {version}: " in ranks[0].output
        assert "the loss forwards a model with buffers 2 times" in ranks[0].output
        return
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].output
    assert ranks[0].value.progress["step"] == NUM_STEPS
    for name, tensor in ranks[0].value.parameters.items():
        assert torch.equal(tensor, ranks[1].value.parameters[name]), name
