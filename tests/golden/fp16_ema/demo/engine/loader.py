"""Engine: DataLoader settings that hold for any number of workers, and the stream of batches."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sized
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..config import Config, DataSettings
from .distributed import World
from .keyed import seed_sample
from .launch import Launch, Refused
from .pulse import Pulse
from .sampler import EvalSampler, Plan, TrainSampler

logger = logging.getLogger(__name__)

Batch = Any
"""Any nesting of tensors, dicts, lists and tuples."""


class Samples(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class KeyedDataset(Dataset[Any]):
    """Seeds `random`, `numpy.random` and torch from (seed, epoch, index) before each sample.

    So augmentation written with any of the three depends neither on workers nor on ranks nor on
    what was loaded before.
    """

    def __init__(self, dataset: Samples, seed: int, split: str) -> None:
        self.dataset, self.seed, self.split = dataset, seed, split

    def __getitem__(self, position: tuple[int, int]) -> Any:
        epoch, index = position
        seed_sample(self.seed, self.split, epoch, index)
        return self.dataset[index]


def check_datasets(train_set: Samples, valid_set: Samples) -> None:
    """Refuse what can't be trained on.

    Raises:
        Refused: a data set is empty, or has no length and index, as an IterableDataset.
    """
    for split, dataset in (("training", train_set), ("validation", valid_set)):
        is_map_style = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
        # A stream inherits a __getitem__ that only raises, and may have a length.
        if not is_map_style or isinstance(dataset, IterableDataset):
            raise Refused(
                f"{split} data: expected a map-style data set (__len__ and __getitem__), got "
                f"{type(dataset).__name__}: a stream has no order to share out or to resume in"
            )
        if len(dataset) == 0:
            raise Refused(f"{split} data: expected at least one sample, got an empty data set")


def ignore_stop_signals(_worker_id: int) -> None:
    """Leave a stop to the rank: a worker killed first would fail it before it can save."""
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def end_workers() -> None:
    """Kill the loading processes that this process would leave behind.

    At its end Python sends them SIGTERM, which they ignore, and waits for them without end.
    """
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's would report their death
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and the container's quota where one is set."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "max 100000" or "200000 100000"
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


def workers_per_rank(settings: DataSettings, launch: Launch) -> int:
    """Loading processes of one rank: as configured, else its CPUs less one, at most 8."""
    share = max(1, usable_cpus() // launch.local_world_size)
    if settings.num_workers is None:
        return min(share - 1, 8)
    return settings.num_workers


def build_loader(
    dataset: KeyedDataset,
    sampler: Sampler[list[tuple[int, int]]],
    collate: Callable[[list[Any]], Batch] | None,
    settings: DataSettings,
    world: World,
) -> DataLoader[Batch]:
    """A DataLoader over a batch sampler; what needs workers is only set where there are some."""
    num_workers = workers_per_rank(settings, world)
    with_workers: dict[str, Any] = {}
    if num_workers > 0:
        with_workers = {
            "persistent_workers": True,
            "prefetch_factor": settings.prefetch_factor,
            "multiprocessing_context": settings.multiprocessing_context,
            "worker_init_fn": ignore_stop_signals,
        }
        # Runs before Python ends the workers in its own way, unlike what atexit knows of.
        Finalize(None, end_workers, exitpriority=0)
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=world.device.type == "cuda",  # pinning without an accelerator only warns
        generator=torch.Generator(),  # else every iter() draws from the global generator
        **with_workers,
    )


def _endless(loader: DataLoader[Batch], epoch: int, position: int) -> Iterator[Batch]:
    # No method of BatchStream: a cycle of the two would keep the loader's workers alive until the
    # interpreter ends.
    sampler = loader.batch_sampler
    assert isinstance(sampler, TrainSampler)
    while True:
        sampler.set_position(epoch, position)
        yield from loader
        epoch, position = epoch + 1, 0


class BatchStream(Iterator[Batch]):
    """A rank's micro-batches, epoch after epoch; knows how long it was waited for."""

    def __init__(
        self, loader: DataLoader[Batch], epoch: int, position: int, pulse: Pulse | None = None
    ) -> None:
        self._pulse = pulse or Pulse()
        self.waited_s = 0.0
        """Seconds spent waiting for data since the start."""
        self._batches = _endless(loader, epoch, position)
        self._peeked: list[Batch] = []

    def __next__(self) -> Batch:
        self._pulse.at_data()
        if self._peeked:
            return self._peeked.pop()
        start = time.perf_counter()
        batch = next(self._batches)
        self.waited_s += time.perf_counter() - start
        return batch

    def peek(self) -> Batch:
        """The next batch, which stays the next one; it is loaded once."""
        if not self._peeked:
            self._peeked.append(next(self))
        return self._peeked[0]


def build_loaders(
    datasets: tuple[Samples, Samples],
    collate: Callable[[list[Any]], Batch] | None,
    config: Config,
    plan: Plan,
    world: World,
) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """The training and the validation loader of this rank."""
    train_set, valid_set = datasets
    if world.is_main and any(hasattr(dataset, "__getitems__") for dataset in datasets):
        logger.warning("data: __getitems__ is passed by, for each sample is seeded on its own")
    train_sampler = TrainSampler(plan, config.seed, world)
    valid_sampler = EvalSampler(len(valid_set), plan.samples_per_forward, world)
    train_keyed = KeyedDataset(train_set, config.seed, "training")
    valid_keyed = KeyedDataset(valid_set, config.seed, "validation")
    return (
        build_loader(train_keyed, train_sampler, collate, config.data, world),
        build_loader(valid_keyed, valid_sampler, collate, config.data, world),
    )


def to_device(
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Batch:
    """Move a batch to the device, floating-point tensors in the weights' type.

    Tensors with four dimensions get the memory format, on the device.
    Does not synchronise: copies from pinned memory run beside the computation.
    """
    move = partial(to_device, device=device, dtype=dtype, memory_format=memory_format)
    if isinstance(batch, torch.Tensor):
        wanted = dtype if batch.is_floating_point() else None
        moved = batch.to(device=device, dtype=wanted, non_blocking=True)
        return moved.to(memory_format=memory_format) if moved.ndim == 4 else moved
    if isinstance(batch, dict):
        return {name: move(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*map(move, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(move, batch))
    return batch
