"""Engine: the optimizer, and the learning rate as a function of the step."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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
    groups = [group for group in groups if group["params"]]
    devices = {parameter.device.type for parameter in trained}
    fused = devices == {"cuda"} if settings.fused is None else settings.fused
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, fused=fused)
    # A checkpoint holds how the step was taken, and its moments lie as they did.
    optimizer.register_load_state_dict_pre_hook(partial(_keep_fused, fused))
    optimizer.register_load_state_dict_post_hook(_lay_out)
    return optimizer


def _keep_fused(fused: bool, _optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "fused": fused} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def _lay_out(optimizer: Optimizer) -> None:
    """Give each moment its parameter's layout: a fused step takes both as they lie in memory."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


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
