"""Engine: from summed losses to the clipped gradient of a window's mean loss."""

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .launch import FailedTogether


class NonFiniteGradient(FailedTogether, FloatingPointError):
    """No step can be taken from here, on any rank: the reduced gradient is everybody's."""


def nominal_count(global_batch_size: int, world_size: int, targets_per_sample: int | None) -> float:
    """What each rank's loss sum is divided by before its backward.

    A constant, so that micro-batches weigh alike, and no sum is too large for a small type;
    `to_mean` brings the true count in once, afterwards.
    """
    return global_batch_size / world_size * (targets_per_sample or 1)


def left_out(loss: Tensor) -> Tensor:
    """Zero with zero gradient, in the loss's own graph: for a rank that only takes part.

    Selected, not multiplied: 0 times NaN is NaN.
    """
    nothing = torch.zeros_like(loss)
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, nothing)


def to_mean(module: nn.Module, factor: Tensor | float) -> None:
    """Multiply the gradient once by what makes it the mean over the window's true count.

    DDP has averaged over the ranks what was divided by `nominal_count`, so the factor is the
    targets of a full window over those of this one; 1 costs nothing.
    """
    gradients = _gradients(module)
    if isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def clip(module: nn.Module, max_norm: float | None) -> Tensor:
    """Scale the gradient down to `max_norm`; its norm before that, on the device.

    Does not synchronise. A norm that is not finite makes every gradient NaN: look before a step.
    """
    norm = get_total_norm(_gradients(module))
    if max_norm is not None:
        clip_grads_with_norm_(module.parameters(), max_norm, norm)
    return norm


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
