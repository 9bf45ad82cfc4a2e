"""Engine: each sample once an epoch, shared out evenly, in an order that no rank changes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..engine.launch import Launch
from ..engine.sampler import EvalSampler, Plan, TrainSampler, epoch_order, order_digest

SEED = 3

PLANS = st.builds(
    Plan,
    num_samples=st.integers(1, 150),
    global_batch_size=st.integers(1, 48),
    samples_per_forward=st.integers(1, 12),
    world_size=st.integers(1, 5),
)
quickly = settings(deadline=None, max_examples=100)

Indices = list[tuple[int, int]]


def walk(
    plan: Plan, rank: int, epoch: int = 0, position: int = 0
) -> Iterator[list[tuple[range, Indices]]]:
    """What a rank does, window by window: its share of each micro-batch, and what it loads."""
    sampler = TrainSampler(plan, SEED, Launch(rank, rank, plan.world_size, plan.world_size))
    sampler.set_position(epoch, position)
    loaded = iter(sampler)
    while window := plan.window(position):
        yield [(share, next(loaded)) for share in plan.micro_batches(window, rank)]
        position += len(window)
    assert next(loaded, None) is None, "more micro-batches than the loop asks for"


def trained(plan: Plan, epoch: int = 0, position: int = 0) -> list[int]:
    """The samples that all ranks train on, window by window and rank by rank."""
    ranks = [walk(plan, rank, epoch, position) for rank in range(plan.world_size)]
    return [
        index
        for window in zip(*ranks, strict=True)
        for micro_batches in window
        for share, indices in micro_batches
        for _, index in indices[: len(share)]
    ]


@given(plan=PLANS, epoch=st.integers(0, 5), data=st.data())
@quickly
def test_each_sample_once_in_an_order_that_ranks_and_position_do_not_change(
    plan: Plan, epoch: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, plan.num_samples - 1))
    order = epoch_order(SEED, epoch, plan.num_samples).tolist()
    assert sorted(order) == list(range(plan.num_samples))
    assert trained(plan, epoch, position) == order[position:]


@given(plan=PLANS)
@quickly
def test_window_is_shared_out_evenly(plan: Plan) -> None:
    for start in range(0, plan.num_samples, plan.global_batch_size):
        window = plan.window(start)
        assert len(window) == min(plan.global_batch_size, plan.num_samples - start)
        by_rank = [plan.micro_batches(window, rank) for rank in range(plan.world_size)]
        sizes = [sum(map(len, shares)) for shares in by_rank]
        assert sum(sizes) == len(window)
        assert max(sizes) - min(sizes) <= 1
        # As many forwards everywhere, and no more than the fullest rank needs.
        needed = -(-max(sizes) // plan.samples_per_forward)
        assert {len(shares) for shares in by_rank} == {needed}
        assert all(len(share) <= plan.samples_per_forward for shares in by_rank for share in shares)


@given(plan=PLANS)
@quickly
def test_rank_without_samples_still_has_something_to_forward(plan: Plan) -> None:
    for rank in range(plan.world_size):
        for micro_batches in walk(plan, rank):
            assert all(len(indices) == max(1, len(share)) for share, indices in micro_batches)


@given(plan=PLANS, data=st.data())
@quickly
def test_resumed_order_is_the_rest_of_the_order(plan: Plan, data: st.DataObject) -> None:
    done = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    for rank in range(plan.world_size):
        whole = list(walk(plan, rank))
        assert list(walk(plan, rank, position=done * plan.global_batch_size)) == whole[done:]


@given(plan=PLANS, data=st.data())
@quickly
def test_other_ranks_can_finish_the_epoch(plan: Plan, data: st.DataObject) -> None:
    """A run that stops and goes on with more or fewer ranks still sees each sample once."""
    stop = data.draw(st.integers(0, plan.steps_per_epoch - 1)) * plan.global_batch_size
    other = replace(plan, world_size=data.draw(st.integers(1, 5)))
    assert sorted(trained(plan)[:stop] + trained(other, position=stop)) == list(
        range(plan.num_samples)
    )


@pytest.mark.parametrize(
    ("num_samples", "steps"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (1003, 32)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("samples_per_forward", [3, 8, 32])
def test_steps_of_an_epoch(
    num_samples: int, steps: int, world_size: int, samples_per_forward: int
) -> None:
    plan = Plan(num_samples, 32, samples_per_forward, world_size)
    assert plan.steps_per_epoch == steps
    assert len(list(walk(plan, world_size - 1))) == steps


def test_seed_and_epoch_are_mixed_by_a_hash() -> None:
    orders = {order_digest(seed, epoch, 100) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36, "a sum would make (seed 0, epoch 5) and (seed 5, epoch 0) equal"
    assert order_digest(0, 0, 100) != order_digest(0, 0, 101)
    assert epoch_order(1, 2, 100).equal(epoch_order(1, 2, 100))


def test_epochs_differ_and_the_sampler_can_be_used_again() -> None:
    sampler = TrainSampler(Plan(40, 8, 8, 1), SEED, Launch())
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_position(epoch, 0)
        batches = list(sampler)
        assert {number for batch in batches for number, _ in batch} == {epoch}
        epochs.append([index for batch in batches for _, index in batch])
    assert epochs[0] == epochs[2] != epochs[1]


@given(st.integers(1, 150), st.integers(1, 16), st.integers(1, 5))
@quickly
def test_evaluation_sees_each_sample_once_without_padding(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    shares = []
    for rank in range(world_size):
        batches = list(EvalSampler(num_samples, batch_size, Launch(rank, rank, world_size)))
        assert all(1 <= len(batch) <= batch_size for batch in batches)
        shares.append([index for batch in batches for _, index in batch])
    assert [index for share in shares for index in share] == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
