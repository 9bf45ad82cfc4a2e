"""Engine: the optimizer, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from ..config import OptimConfig


def build_optimizer(module: nn.Module, settings: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization), in two groups.

    Matrices and kernels decay; vectors (biases, the scales of norms) do not.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr)


def peak_lr(settings: OptimConfig, global_batch_size: int) -> float:
    """The learning rate after the scaling rule.

    `linear` keeps the sum of the steps of an epoch (Goyal et al., Accurate, Large Minibatch SGD);
    `sqrt` is the usual choice for Adam. Both are starting points, to be tried.
    """
    factor = global_batch_size / settings.base_batch_size
    rules = {"none": 1.0, "linear": factor, "sqrt": math.sqrt(factor)}
    return settings.lr * rules[settings.scale_lr]


def lr_at(step: int, total_steps: int, settings: OptimConfig, peak: float) -> float:
    """The learning rate of an optimizer step, counted from 1: warm-up, then the schedule.

    A pure function: there is no scheduler to save, or to step at the wrong moment. Step
    `warmup_steps` has the peak, step `total_steps` has peak * min_lr_ratio.
    """
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    # More steps than planned are possible: a run may be resumed with a larger global batch.
    if step >= total_steps:
        return peak * settings.min_lr_ratio
    done = (step - settings.warmup_steps) / (total_steps - settings.warmup_steps)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1.0 - done
    return peak * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use a learning rate in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
