"""Engine: which samples make an optimizer step, and which of them this rank forwards.

The order of an epoch is a function of (seed, epoch, number of samples); a position in it counts
samples of all ranks. A window is the samples of one optimizer step. Neither depends on how many
ranks there are: they only share the window out.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .keyed import key
from .launch import Launch


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The order in which an epoch visits the samples: (num_samples,), int64."""
    generator = torch.Generator().manual_seed(key(seed, "order", epoch, num_samples))
    return torch.randperm(num_samples, generator=generator)


def order_digest(seed: int, epoch: int, num_samples: int) -> str:
    """A short name of an order, for the manifest: another seed or data set gives another."""
    order = epoch_order(seed, epoch, num_samples)
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


def split_evenly(span: range, parts: int) -> list[range]:
    """Cut a span into so many contiguous parts whose lengths differ by one at most."""
    short, longer = divmod(len(span), parts)
    cuts = [span.start + part * short + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class Plan:
    """How an epoch is cut into windows, ranks and micro-batches: arithmetic, equal on all ranks."""

    num_samples: int
    global_batch_size: int
    samples_per_forward: int
    """The most that one rank forwards at once."""
    world_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch; its last window may be short."""
        return -(-self.num_samples // self.global_batch_size)

    def window(self, position: int) -> range:
        """The window that starts at a position of the epoch's order, as a span of positions."""
        return range(position, min(position + self.global_batch_size, self.num_samples))

    def micro_batches(self, window: range, rank: int) -> list[range]:
        """What a rank forwards of a window: equally many micro-batches on all ranks.

        An empty one is possible in a short window: the rank takes part with weight 0.
        """
        most_on_a_rank = -(-len(window) // self.world_size)
        num_micro_batches = -(-most_on_a_rank // self.samples_per_forward)
        return split_evenly(split_evenly(window, self.world_size)[rank], num_micro_batches)


class TrainSampler(Sampler[list[tuple[int, int]]]):
    """Yields a rank's micro-batches of an epoch, from a position on, as lists of (epoch, index).

    The epoch travels with the index because loading processes that outlive an epoch would not
    see an attribute of the data set change. Samples before the position are never loaded.
    """

    def __init__(self, plan: Plan, seed: int, launch: Launch) -> None:
        self.plan, self.seed, self.rank = plan, seed, launch.rank
        self.epoch, self.position = 0, 0

    def set_position(self, epoch: int, position: int) -> None:
        """Where the next iteration starts: an epoch, and the global samples consumed in it."""
        self.epoch, self.position = epoch, position

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, position = self.epoch, self.position
        order = epoch_order(self.seed, epoch, self.plan.num_samples)
        while window := self.plan.window(position):
            for share in self.plan.micro_batches(window, self.rank):
                # Weight 0 still needs a batch: DDP counts forwards. The window's first sample.
                span = share or window[:1]
                yield [(epoch, index) for index in order[span.start : span.stop].tolist()]
            position += len(window)


class EvalSampler(Sampler[list[tuple[int, int]]]):
    """Yields a rank's share of an evaluation: over all ranks each sample once, no padding."""

    def __init__(self, num_samples: int, batch_size: int, launch: Launch) -> None:
        self.share = split_evenly(range(num_samples), launch.world_size)[launch.rank]
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for start in range(self.share.start, self.share.stop, self.batch_size):
            stop = min(start + self.batch_size, self.share.stop)
            yield [(0, index) for index in range(start, stop)]
