"""Engine: what gradients are turned into on their way between the ranks.

The mean that comes back is rounded, or an approximation; it is the same on all ranks.
"""

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..config import Config


def register(model: DistributedDataParallel, config: Config) -> None:
    """Use the configured hook from the next backward on. Not for a model that has one.

    PowerSGD (Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization) sends two thin matrices in place of each gradient of two or more dimensions, and
    adds what that loses to the next gradient. It begins after the warm-up, in which gradients
    change too much. What it remembers is each rank's own, and in no checkpoint.
    """
    if config.ddp.comm_hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif config.ddp.comm_hook == "bf16":
        model.register_comm_hook(None, _bf16)
    elif config.ddp.comm_hook == "powersgd":
        state = PowerSGDState(
            None,
            matrix_approximation_rank=config.ddp.powersgd_rank,
            start_powerSGD_iter=max(2, config.optim.warmup_steps),  # 2: the least that is allowed
            orthogonalization_epsilon=1e-8,  # else a gradient of zeros would become NaN
        )
        model.register_comm_hook(state, powerSGD_hook)


def forget(model: nn.Module) -> None:
    """Drop what a hook remembers of past gradients, on all ranks alike.

    One that was not finite would stay in it for ever.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    for _, state in model._comm_hooks:
        if isinstance(state, PowerSGDState):
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()


def _bf16(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of torch. By its own name DDP would refuse it on a torch without CUDA."""
    return bf16_compress_hook(group, bucket)
