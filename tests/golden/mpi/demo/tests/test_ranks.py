"""Engine: ranks stay alike where they must, differ where they should, and refuse together."""

import os
import random
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .. import train
from ..config import Config
from ..engine.sampler import epoch_order
from .harness import outcomes, values
from .scenario import Record, run_training, set_config
from .toy import Notes, Toy, ToyNet, put

CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    log_every=1,
    data__num_workers=0,
    global_batch_size=24,
    micro_batch_size=4,
    timeout_s=20.0,
)
NUM_STEPS = 3  # of 64 samples


def assert_same_weights(ranks: list[Record]) -> None:
    for rank in ranks[1:]:
        for name, tensor in rank.parameters.items():
            assert torch.equal(tensor, ranks[0].parameters[name]), name


def test_weights_are_equal_bit_for_bit(run_dir: str) -> None:
    toy = Toy(is_masked=True, depth=2, dropout=0.2, noise=0.1, has_batch_norm=True)
    ranks = values(run_training, 3, set_config(CONFIG, run_dir=run_dir), toy.use)
    assert_same_weights(ranks)
    assert ranks[0].progress["step"] == NUM_STEPS


def note_draws() -> list[tuple[float, ...]]:
    """Prepare a training; what each forward of a step would draw, from all three generators."""
    Toy().use()
    draws: list[tuple[float, ...]] = []
    forward_loss = train.forward_loss

    def noted(*args: Any) -> Tensor:
        loss = forward_loss(*args)
        draws.append((random.random(), np.random.random(), torch.rand(()).item()))
        return loss

    put(train, forward_loss=noted)
    return draws


def test_no_two_forwards_draw_the_same(run_dir: str) -> None:
    ranks = values(run_training, 2, set_config(CONFIG, run_dir=run_dir), note_draws)
    # At the start, the first forward is tried twice.
    tried, taken = zip(*((rank.notes[:2], rank.notes[2:]) for rank in ranks), strict=True)
    assert [pair[0] for pair in tried] == [pair[1] for pair in tried]
    for draws in zip(*chain(*taken), strict=True):
        assert len(set(draws)) == len(draws) >= 2 * NUM_STEPS


def test_no_two_samples_are_augmented_alike(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, epochs=2)
    ranks = values(run_training, 2, config, Toy(noise=0.1).use)
    draws = [draw for rank in ranks for _, _, draw in rank.notes.samples]
    assert len(set(draws)) == len(draws) == 2 * 64


def run_unlike(init_method: str, config: Config, what: str) -> Record:
    """A training on whose rank 1 something is not as on the others."""
    toy = Toy()
    if os.environ["RANK"] == "1":
        if what == "setting":
            config = set_config(config, optim__lr=0.5)
        elif what == "model":
            toy = Toy(depth=2)
        elif what == "data":
            toy = Toy(noise=0.5)
        elif what == "package":
            put(torch, __version__="1.0")
    return run_training(init_method, config, toy.use)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("setting", "setting optim.lr: 0.5, expected 0.003"),
        ("model", "model, layers.3.bias: '(16,) torch.float64 trained', expected '(3,) torch."),
        ("data", "first training sample: "),
        ("package", "torch's version: '1.0', expected '2."),
    ],
)
def test_ranks_that_differ_are_refused(run_dir: str, what: str, said: str) -> None:
    ranks = outcomes(run_unlike, 2, set_config(CONFIG, run_dir=run_dir), what)
    assert [rank.exit_code for rank in ranks] == [2, 2]
    assert f"rank 1 differs from rank 0 in {said}" in ranks[0].output
    assert ranks[1].output == ""


class ToyNetWithExtra(ToyNet):
    """With a layer that may be frozen, or unused on some ranks."""

    def __init__(self, is_used: bool, is_frozen: bool) -> None:
        super().__init__(Toy())
        self.extra = nn.Linear(6, 3).requires_grad_(not is_frozen)
        self.is_used = is_used

    def forward(self, inputs: Tensor) -> Tensor:
        """As without it, or with the layer's answer added."""
        predictions = super().forward(inputs)
        return predictions + self.extra(inputs) if self.is_used else predictions


def use_extra(kind: str) -> Notes:
    """Prepare a training of a model with such a layer."""
    notes = Toy().use()
    is_used = {"unused": False, "unused on rank 1": os.environ["RANK"] != "1"}.get(kind, True)
    put(train, build_model=lambda _: ToyNetWithExtra(is_used, is_frozen=kind == "frozen"))
    return notes


@pytest.mark.parametrize(("kind", "who"), [("unused", ""), ("unused on rank 1", "rank 1: ")])
def test_parameter_without_gradient_is_refused_by_name(run_dir: str, kind: str, who: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, data__num_workers=1)
    ranks = outcomes(run_training, 2, config, partial(use_extra, kind), timeout_s=30)
    assert [rank.exit_code for rank in ranks] == [2, 2]
    assert f": {who}no gradient reaches extra.weight, extra.bias: " in ranks[0].output
    assert "--ddp.find_unused_parameters true" in ranks[0].output


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("unused", {"ddp__find_unused_parameters": True}),
        ("unused on rank 1", {"ddp__find_unused_parameters": True}),
        ("unused", {"ddp__static_graph": True}),
        ("frozen", {}),
    ],
)
def test_parameter_without_gradient_where_that_is_meant(
    run_dir: str, kind: str, changes: dict[str, bool]
) -> None:
    config = set_config(CONFIG, run_dir=run_dir, **changes)
    ranks = values(run_training, 2, config, partial(use_extra, kind))
    assert_same_weights(ranks)
    assert ranks[0].progress["step"] == NUM_STEPS
    if kind == "frozen":
        before = ranks[0].notes.weights[0]["extra.weight"]
        assert torch.equal(ranks[0].parameters["extra.weight"], before)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_that_is_not_finite_is_skipped_alike(run_dir: str, world_size: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ranks = values(run_training, world_size, config, Toy(bad_sample=40).use)
    assert_same_weights(ranks)
    for rank in ranks:
        assert (rank.progress["step"], rank.progress["skipped"]) == (NUM_STEPS - 1, 1)
        assert rank.progress["samples"] == 64
        assert all(tensor.isfinite().all() for tensor in rank.parameters.values())
    assert ranks[0].digest == ranks[1].digest


def use_bad_end() -> Notes:
    """Prepare a training whose third and last window has an infinite target."""
    return Toy(bad_sample=int(epoch_order(0, 0, 64)[-1])).use()


def test_gradient_that_is_not_finite_can_end_the_run(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, on_nonfinite="stop", save_every=1)
    ranks = outcomes(run_training, 2, config, use_bad_end)
    assert [rank.exit_code for rank in ranks] == [1, 1]
    assert "step 3 can't be taken: the norm of its gradient is" in ranks[0].output
    assert "rank 1 left because rank 0 failed at step 3 in optimizer" in ranks[1].output
    checkpoints = os.listdir(f"{run_dir}/checkpoints")
    assert sorted(checkpoints)[-1] == "step_00000002"


def use_window_without_targets() -> Notes:
    """Prepare a training in whose second window no target counts."""
    toy = Toy(is_masked=True)
    notes = toy.use()
    train_set, valid_set = toy.build_datasets()
    train_set.mask[epoch_order(0, 0, 64)[24:48]] = False
    put(train, data=SimpleNamespace(build_datasets=lambda _: (train_set, valid_set)))
    return notes


def test_window_without_targets_is_left_out(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ranks = outcomes(run_training, 2, config, use_window_without_targets)
    assert [rank.exit_code for rank in ranks] == [0, 0]
    assert "step 2: left out a window, it has no targets" in ranks[0].output
    for rank in ranks:
        assert (rank.value.progress["step"], rank.value.progress["skipped"]) == (2, 1)
    assert ranks[0].value.digest == ranks[1].value.digest
