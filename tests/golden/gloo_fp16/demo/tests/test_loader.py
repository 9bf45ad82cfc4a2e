"""Engine: batches as the loader makes them: which data, in which types, and when."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from ..config import Config
from ..engine.distributed import World
from ..engine.launch import Refused
from ..engine.loader import BatchStream, build_loaders, check_datasets, to_device
from ..engine.sampler import Plan, epoch_order
from .parts import Drawn, build_both, rows_of
from .scenario import set_config


class Slow(Drawn):
    """Samples that take their time, and are counted."""

    loads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.loads += 1
        time.sleep(0.01)
        return super().__getitem__(index)


def test_evaluations_see_the_same_data_each_time_and_not_that_of_the_training() -> None:
    train_loader, valid_loader = build_both(Drawn(), num_workers=0)
    first, second = (sorted(rows_of(list(valid_loader))) for _ in range(2))
    assert first == second
    trained = sorted(rows_of(list(train_loader)))
    assert all(a[0] == b[0] and a[1:] != b[1:] for a, b in zip(first, trained, strict=True))


class Counted(Drawn):
    """A million samples, which are counted."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([index])


def time_to_first_batch(position: int) -> float:
    """Seconds to the first batch of an epoch of a million samples, from a position in it."""
    data = Counted()
    config = set_config(Config(), data__num_workers=0)
    plan = Plan(len(data), 64, 16, 1)
    train_loader, _ = build_loaders((data, data), None, config, plan, World())
    start = time.perf_counter()
    batch = next(BatchStream(train_loader, 3, position))
    elapsed_s = time.perf_counter() - start
    order = epoch_order(config.seed, 3, len(data))[position : position + 16].tolist()
    assert batch.flatten().tolist() == data.loaded == order, "no other sample was loaded"
    return elapsed_s


def test_first_batch_comes_as_soon_late_in_an_epoch() -> None:
    pairs = [(time_to_first_batch(0), time_to_first_batch(900_000)) for _ in range(5)]
    early, late = (median(times) for times in zip(*pairs, strict=True))
    assert late < 5 * early  # reading what is passed over would take hundreds of times as long


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_pinned_only_for_an_accelerator(device: str) -> None:
    for one in build_both(Drawn(), World(device=torch.device(device)), num_workers=0):
        assert one.pin_memory == (device == "cuda")


class Stream(IterableDataset[int]):
    """A data set without an order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class StreamOfKnownLength(Stream):
    """The same, and it tells its length."""

    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize("stream", [Stream(), StreamOfKnownLength()])
def test_stream_is_refused(stream: Any) -> None:
    with pytest.raises(
        Refused, match=r"^training data: expected a map-style data set .*, got Stream"
    ):
        check_datasets(stream, [1])


def test_empty_data_set_is_refused() -> None:
    check_datasets([1], [1])
    with pytest.raises(Refused, match=r"^validation data: expected at least one sample, got an "):
        check_datasets([1], [])


def test_batched_access_is_passed_by_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Subset(Drawn(), range(24))
    for rank in range(2):
        build_both(dataset, World(rank=rank, world_size=2), num_workers=0)
    assert [record.message for record in caplog.records] == [
        "data: __getitems__ is passed by, for each sample is seeded on its own"
    ]


def test_your_collate_is_used() -> None:
    for one in build_both(Drawn(), collate=len, num_workers=0):
        assert list(one) == [4] * 6


def test_peeked_batch_stays_the_next_and_is_loaded_once() -> None:
    dataset = Slow()
    stream = BatchStream(build_both(dataset, num_workers=0)[0], 0, 0)
    peeked = stream.peek()
    assert stream.peek() is peeked
    assert next(stream) is peeked
    assert dataset.loads == 4
    assert not next(stream).equal(peeked)


def test_stream_starts_at_a_position_and_never_loads_what_lies_before() -> None:
    dataset = Slow()
    whole = BatchStream(build_both(Drawn(), num_workers=0)[0], 0, 0)
    rest = BatchStream(build_both(dataset, num_workers=0)[0], 0, 16)
    batches = [next(whole) for _ in range(8)]
    assert rows_of([next(rest) for _ in range(4)]) == rows_of(batches[4:])
    assert dataset.loads == 16


def test_time_spent_waiting_is_measured() -> None:
    stream = BatchStream(build_both(Slow(), num_workers=0)[0], 0, 0)
    next(stream)
    assert stream.waited_s >= 0.04
    before = stream.waited_s
    time.sleep(0.05)  # a computation
    assert stream.waited_s == before
    next(stream)
    assert stream.waited_s >= before + 0.04


class Pair(NamedTuple):
    """A batch may be a named tuple."""

    inputs: Tensor
    name: str


def test_any_nesting_moves_and_only_numbers_with_a_point_change_their_type() -> None:
    ones, labels, mask = torch.ones(2), torch.tensor([1, 2]), torch.tensor([True, False])
    batch = {"a": [ones, (labels, "text")], "b": Pair(ones, "x"), "c": mask, "d": 3, "e": None}
    moved = to_device(batch, torch.device("meta"), torch.float64)
    assert moved["a"][0].device.type == moved["c"].device.type == "meta"
    assert moved["a"][0].dtype == moved["b"].inputs.dtype == torch.float64
    assert (moved["a"][1][0].dtype, moved["c"].dtype) == (torch.int64, torch.bool)
    assert type(moved["a"]) is list
    assert type(moved["a"][1]) is tuple
    assert type(moved["b"]) is Pair
    assert (moved["a"][1][1], moved["b"].name, moved["d"], moved["e"]) == ("text", "x", 3, None)
