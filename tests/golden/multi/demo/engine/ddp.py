"""Engine: DistributedDataParallel, and the buffers that it leaves different between ranks.

Everything here works in a single process as well, where there is no wrapper.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Config
from . import comm_hook
from .distributed import World, agreed
from .launch import Refused
from .levers import compiled


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Whatever the block does to the module's buffers is undone at its end."""
    saved = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])


@contextmanager
def rank0_buffers(module: nn.Module, world: World) -> Iterator[None]:
    """In the block every rank has rank 0's buffers; its own are back afterwards. Collective.

    Buffers (running statistics) differ between ranks, so without this the result of an
    evaluation would depend on which rank looked at which sample.
    """
    with unchanged_buffers(module):
        if world.world_size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)
        yield


@contextmanager
def evaluating(module: nn.Module, world: World) -> Iterator[None]:
    """In the block the module is in evaluation mode, with rank 0's buffers. Collective."""
    was_training = module.training
    module.eval()
    with rank0_buffers(module, world):
        yield
    module.train(was_training)


def wrap(
    module: nn.Module, world: World, config: Config, loss_of: Callable[[nn.Module], Tensor]
) -> nn.Module:
    """The module, compiled and in DistributedDataParallel, ready for its first step. Collective.

    Rank 0's weights and buffers go to the others. A single process has no DDP.
    `loss_of` forwards the first batch that will be trained on through what it is given.

    Raises:
        Refused: a parameter gets no gradient, torch is too old for a model with buffers that the
            loss forwards several times, or a rank can't compile.
    """
    inner = compiled(module, config, world)
    if world.world_size == 1:
        return inner
    settings = config.ddp
    _check_pass(module, world, config, loss_of)
    # 25 given by hand is not the default: it takes the first, small bucket away.
    size: dict[str, Any] = {}
    if settings.bucket_cap_mb is not None:
        size["bucket_cap_mb"] = settings.bucket_cap_mb
    model = DistributedDataParallel(
        inner,
        device_ids=None if world.device.type == "cpu" else [world.device.index],
        static_graph=settings.static_graph,
        find_unused_parameters=settings.find_unused_parameters,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        **size,
    )
    _settle_buckets(model, loss_of)
    comm_hook.register(model, config)  # afterwards: what is thrown away is not remembered
    return model


def _check_pass(
    module: nn.Module, world: World, config: Config, loss_of: Callable[[nn.Module], Tensor]
) -> None:
    """Refuse what DDP would stumble over, after a pass of the bare module. Collective.

    Gradients and buffers are put back. A parameter that is unused on some ranks only would be
    waited for in vain. DDP sends buffers before each forward: before torch 2.12, autograd takes
    that for a change of what the forward before has kept for its backward.
    """
    forwards: list[None] = []
    counting = module.register_forward_hook(lambda *_: forwards.append(None))
    with agreed(world), unchanged_buffers(module):
        loss_of(module).backward()
        unused = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        module.zero_grad()
        has_buffers = next(module.buffers(), None) is not None
        if len(forwards) > 1 and has_buffers and torch.__version__ < "2.12":
            raise Refused(
                f"torch: expected 2.12 or newer, got {torch.__version__}: the loss forwards a "
                f"model with buffers {len(forwards)} times; or forward all as one batch"
            )
        if unused and not (config.ddp.find_unused_parameters or config.ddp.static_graph):
            raise Refused(
                f"no gradient reaches {', '.join(unused)}: use them in the loss, freeze them with "
                "requires_grad_(False), or pass --ddp.find_unused_parameters true"
            )
    counting.remove()


def _settle_buckets(model: DistributedDataParallel, loss_of: Callable[[nn.Module], Tensor]) -> None:
    """Throw away one synchronised pass, two with static_graph, before the first step. Collective.

    DDP lays its buckets out anew after its first synchronised backward, which changes the order
    in which three or more ranks add: without this pass a resumed run would differ from an
    uninterrupted one in its last bits. With static_graph the first pass only records, and must
    come before a backward that is not synchronised. Gradients and buffers are put back.
    """
    with unchanged_buffers(model.module):
        for _ in range(2 if model.static_graph else 1):
            loss_of(model).backward()
            model.zero_grad()
