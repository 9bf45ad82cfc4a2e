"""Engine: what decays, and the learning rate of each step."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from ..config import OptimConfig
from ..engine.optim import build_optimizer, lr_at, peak_lr, set_lr

PEAK = 0.5
SETTINGS = OptimConfig(warmup_steps=4, min_lr_ratio=0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2))
    decayed, others = build_optimizer(module, OptimConfig(weight_decay=0.25)).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 1, 3, 3), (2, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (4,), (2,)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0.0)


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[0].requires_grad_(False)
    (group,) = build_optimizer(module, OptimConfig()).param_groups
    assert [id(p) for p in group["params"]] == [id(module[1].weight)]


def rates(settings: OptimConfig, total_steps: int) -> list[float]:
    """The learning rates of all steps, as shares of the peak."""
    return [lr_at(step, total_steps, settings, PEAK) / PEAK for step in range(1, total_steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        # A half turn of the cosine between 1 and 0.1: 0.55 in its middle.
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_warm_up_then_schedule(schedule: Any, expected: list[float]) -> None:
    settings = replace(SETTINGS, schedule=schedule)
    assert rates(settings, 8) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 8, 9])
def test_peak_and_floor_are_exact(schedule: Any, warmup_steps: int) -> None:
    settings = replace(SETTINGS, schedule=schedule, warmup_steps=warmup_steps)
    if 0 < warmup_steps <= 8:
        assert lr_at(warmup_steps, 8, settings, PEAK) == PEAK
    if warmup_steps < 8:
        assert lr_at(8, 8, settings, PEAK) == PEAK * 0.1
    # A run that was resumed with a larger global batch may take more steps than planned.
    for step in (10, 1000):
        assert lr_at(step, 8, settings, PEAK) == PEAK * 0.1


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [
        ("none", 256, 0.1),
        ("linear", 256, 0.4),
        ("sqrt", 256, 0.2),
        ("linear", 64, 0.1),
        ("sqrt", 16, 0.05),
    ],
)
def test_scaling_rule(rule: Any, batch: int, expected: float) -> None:
    settings = OptimConfig(lr=0.1, base_batch_size=64, scale_lr=rule)
    assert peak_lr(settings, batch) == pytest.approx(expected, rel=1e-12)


def test_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimConfig(lr=1.0))
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
