"""Engine: the same training by other kernels, and with other layouts in memory.

Numbers change within rounding, and checkpoints can be used with and without.
"""

from typing import Any

import torch
from torch import nn

from ..config import Config
from .distributed import World, agreed
from .launch import Refused


def memory_format(config: Config) -> torch.memory_format:
    """How tensors with four dimensions lie in memory."""
    return torch.channels_last if config.channels_last else torch.preserve_format


def place(module: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The module on its device, in the configured type and layout. Changes it in place."""
    module = module.to(device, getattr(torch, config.dtype))
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=memory_format(config))
    return module


def compiled(module: nn.Module, config: Config, world: World) -> nn.Module:
    """The module through torch.compile, as configured; itself where nothing is. Collective.

    It shares its parameters and buffers with the module, which stays as it is: evaluation and
    checkpoints use that. To be wrapped by DDP afterwards: torch then cuts the graph at the
    buckets, so that they are reduced while the backward runs, and nothing of DDP is compiled.
    (Around DDP, a model whose class is torch's own would not be compiled at all.)

    Raises:
        Refused: a rank can't compile for its device.
    """
    if config.compile == "none":
        return module
    with agreed(world):
        _check_compiler(world.device)
    # Beyond a limit torch would go on uncompiled, from a moment that depends on the past.
    settings: Any = torch._dynamo.config
    settings.fail_on_recompile_limit_hit = True
    model = torch.compile(module, dynamic=config.compile == "dynamic")
    assert isinstance(model, nn.Module)
    return model


def _check_compiler(device: torch.device) -> None:
    """Refuse a machine on which nothing can be compiled (for a CPU it takes a C++ compiler)."""
    try:
        torch.compile(_double)(torch.ones(8, device=device))
    except RuntimeError as error:  # the compiler's errors are of this class
        words = str(error).splitlines()[0]
        raise Refused(
            f"compile: expected none where nothing can be compiled for {device.type}, got {words}"
        ) from None


def _double(values: torch.Tensor) -> torch.Tensor:
    return values * 2
