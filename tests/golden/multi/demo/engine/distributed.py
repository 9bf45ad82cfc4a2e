"""Engine: the process group, and what ranks tell each other.

Everything here works in a single process as well, where there is no group.
"Collective" means: call it on every rank, or the others wait until the time-out.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..config import Config
from . import platforms
from .explain import one_line
from .launch import Launch, NotMet, Refused
from .meeting import leave_store, open_store, place_of
from .pulse import Pulse
from .reach import check_reachable
from .route import choose_interface

T = TypeVar("T")


@dataclass(frozen=True)
class World(Launch):
    """This process among all that train together, and the device that is its own."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pulse: Pulse = field(default_factory=Pulse, compare=False)
    """What this process is doing."""
    store: Store | None = field(default=None, compare=False)
    """Where ranks leave short messages; none in a single process."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and reports. It does the same work otherwise."""
        return self.rank == 0


def choose_device(name: str, launch: Launch) -> torch.device:
    """The device of this rank. One that is the only one to be seen may be shared.

    Raises:
        Refused: there is no such device here, or there are several, and too few.
    """
    if name == "cpu":
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != name:
        raise Refused(
            f"device: expected {name!r}, but this machine shows {here.type if here else 'none'}: "
            "check the driver and the visible devices, or pass --device cpu"
        )
    count = torch.accelerator.device_count()
    if 1 < count < launch.local_world_size:
        raise Refused(
            f"device: {launch.local_world_size} processes on a machine with {count} device(s): "
            "start fewer processes"
        )
    return torch.device(name, launch.local_rank % count)


def check_own_device(launch: Launch) -> None:
    """Refuse ranks that would share a device: NCCL deadlocks or fails when two use the same.

    Raises:
        Refused: this machine has more ranks than devices.
    """
    count = torch.accelerator.device_count()
    # A launcher that binds one device to each process leaves every process with index 0.
    is_bound = count == 1 and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if count < launch.local_world_size and not is_bound:
        raise Refused(
            f"device: {launch.local_world_size} processes on a machine with {count} device(s), "
            "and NCCL needs one for each: start fewer processes"
        )


def choose_backend(config: Config) -> str:
    """NCCL on CUDA; gloo elsewhere, so that every project can be tried on a CPU."""
    return "nccl" if config.device == "cuda" else "gloo"


def set_matmul_precision(config: Config) -> None:
    """Let float32 matrix products and convolutions round their factors to TensorFloat-32, or not.

    With torch's older names: asked about a mixture of the two generations of names, it fails, and
    its own compiler asks for the older one.
    """
    with warnings.catch_warnings():  # torch 2.9 announces other names for these, and no later one
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32  # torch's default: on, unlike for products


@contextmanager
def process_group(launch: Launch, config: Config) -> Iterator[World]:
    """Join the others, and leave at the end. Collective. A single process joins nobody.

    The caller's DDP model and optimizer must be gone before this ends: destroying a group that a
    model still uses deadlocks now and then on gloo. After an error the group is left alone, for
    the peers may be dead and would be waited for.
    """
    backend = choose_backend(config)
    platforms.prepare(launch, backend)
    device = choose_device(config.device, launch)
    if backend == "nccl":
        check_own_device(launch)
    set_matmul_precision(config)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if launch.world_size == 1:
        yield World(**vars(launch), device=device)
        return
    timeout = timedelta(seconds=config.timeout_s)
    limit = timedelta(seconds=config.connect_timeout_s)
    try:
        store = open_store(launch, limit)  # the ranks' own messages go through it as well
        meeting = PrefixStore("meeting", store)
        choose_interface(launch, meeting, config.connect_timeout_s)
        check_reachable(launch, meeting, config.connect_timeout_s)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,  # else NCCL guesses the device
        )
    except RuntimeError as error:
        raise _not_met(launch, config.connect_timeout_s, one_line(str(error))[:200]) from error
    try:
        yield World(**vars(launch), device=device, store=store)
    except Refused:
        _leave(launch, store)  # all ranks refuse together, and before DDP
        raise
    _leave(launch, store)


def _not_met(launch: Launch, limit_s: float, words: str) -> NotMet:
    """What to do where there is no group; the words are torch's."""
    rank, place = f"rank {launch.rank} of {launch.world_size}", place_of(launch)
    if "EADDRINUSE" in words:
        return NotMet(
            f"{rank} can't listen at {place}, another program does: start again, or with another "
            f"port ({words})"
        )
    return NotMet(
        f"{rank} did not find the others at {place} within {limit_s:g} s: are all started, with "
        f"the same address, and is it reachable? ({words})"
    )


def _leave(launch: Launch, store: Store) -> None:
    dist.destroy_process_group()
    leave_store(launch, store)


def patient_group(world: World) -> dist.ProcessGroup | None:
    """A group of all ranks on the CPU, for what may take longer than `timeout_s`. Collective.

    Ranks wait in it while another one writes to a slow disk, and a thread may use it beside the
    training. None in a single process.
    """
    if world.world_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def gather(world: World, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank. Collective; synchronises the device."""
    if world.world_size == 1:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank(world: World, value: T, source: int = 0) -> T:
    """A rank's value, everywhere. Collective; synchronises the device."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, device=world.device)
    return box[0]


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Where the block is refused on one rank, all ranks refuse, in its words. Collective."""
    problem = None
    try:
        yield
    except Refused as error:
        problem = str(error)
    for rank, text in enumerate(gather(world, problem)):
        if text is not None:
            raise Refused(text if rank == 0 else f"rank {rank}: {text}")


def require_equal(world: World, facts: Mapping[str, object]) -> None:
    """Refuse ranks that differ, naming the first difference from rank 0. Collective."""
    everywhere = gather(world, dict(facts))
    for rank, theirs in enumerate(everywhere):
        for name in sorted({*everywhere[0], *theirs}):
            expected, got = everywhere[0].get(name), theirs.get(name)
            if expected != got:
                raise Refused(
                    f"rank {rank} differs from rank 0 in {name}: {got!r}, expected {expected!r}: "
                    "start every rank with the same code, settings and packages"
                )


def means_over_ranks(
    world: World, sums: Mapping[str, float | Tensor], count: int
) -> dict[str, float]:
    """Add named sums and a count over the ranks, and divide once. Collective; synchronises.

    In the order of the ranks and in float64, so that every rank gets the same bits. A rank that
    had nothing to add has no names. The total count is returned as `targets`.
    """
    totals: dict[str, float] = {}
    local = {name: float(value) for name, value in sums.items()}
    for theirs in gather(world, {**local, "targets": float(count)}):
        for name, value in theirs.items():
            totals[name] = totals.get(name, 0.0) + value
    targets = totals.pop("targets")
    means = {name: total / targets if targets else math.nan for name, total in totals.items()}
    return {**means, "targets": targets}


def start_sum(world: World, values: Tensor) -> Callable[[], object]:
    """Begin to add a tensor over the ranks in place; call the result to wait. Collective."""
    if world.world_size == 1:
        return no_wait
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    wait: Callable[[], object] = work.wait
    return wait


def no_wait() -> None:
    """In place of a wait, where nothing was started."""


def broadcast_tensors(world: World, tree: Any, source: int = 0) -> Any:
    """A rank's nesting of dicts, lists, tuples, numbers and CPU tensors, everywhere. Collective.

    Its shape goes first, then one tensor after the other: no rank holds more than one copy.
    """
    if world.world_size == 1:
        return tree
    tensors: list[Tensor] = []

    def hollow(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors.append(node)
            return torch.empty_like(node, device="meta")
        if isinstance(node, dict):
            return {name: hollow(value) for name, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(hollow(value) for value in node)
        return node

    def fill(node: Any) -> Any:
        if isinstance(node, Tensor):
            is_here = world.rank == source
            moved = tensors.pop(0) if is_here else torch.empty_like(node, device="cpu")
            moved = moved.contiguous().to(world.device)
            dist.broadcast(moved, src=source)
            return moved.cpu()
        if isinstance(node, dict):
            return {name: fill(value) for name, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(fill(value) for value in node)
        return node

    return fill(from_rank(world, hollow(tree), source))
