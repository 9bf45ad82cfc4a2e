"""Engine: what is drawn follows from a position, whatever was drawn before."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ..engine import keyed

CPU = torch.device("cpu")

POSITIONS = st.tuples(
    st.integers(0, 2**40),
    st.sampled_from(["init", "order", "sample-training", "forward", "evaluation"]),
    st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
)
Position = tuple[int, str, tuple[int, ...]]


def draws() -> list[float]:
    """Numbers from each generator that a user's code may draw from."""
    return [random.random(), np.random.random(), *torch.rand(2).tolist()]


@given(POSITIONS, POSITIONS)
@settings(deadline=None)
def test_keys_are_equal_only_at_equal_positions(one: Position, other: Position) -> None:
    keys = [keyed.key(seed, purpose, *position) for seed, purpose, position in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert all(0 <= key < 2**63 for key in keys)


def test_numbers_of_a_position_are_not_run_together() -> None:
    neighbours = [(1, 23), (12, 3), (123,), (0, 5), (5, 0), (0, 0, 5)]
    assert len({keyed.key(1, "forward", *position) for position in neighbours}) == 6
    assert keyed.key(0, "forward", 5) != keyed.key(5, "forward", 0)


def test_key_stays_what_it_is() -> None:
    """Else a run that was stopped before an update would not go on exactly after it."""
    assert keyed.key(0, "order", 1, 1003) == 2893306794364194045


@pytest.mark.parametrize("device", [None, CPU])
def test_same_seed_gives_the_same_draws_from_all_three_generators(
    device: torch.device | None,
) -> None:
    seen = []
    for before in range(2):
        for _ in range(before):
            draws()  # what was drawn before does not matter
        keyed.seed_generators(2**62 + 5, device)
        seen.append(draws())
    assert seen[0] == seen[1]
    keyed.seed_generators(2**62 + 6, device)
    assert all(new != old for new, old in zip(draws(), seen[0], strict=True))


SEEDINGS: dict[str, Callable[[], None]] = {
    "the model's start": lambda: keyed.seed_init(0, CPU),
    "the same, another seed": lambda: keyed.seed_init(1, CPU),
    "a sample": lambda: keyed.seed_sample(0, "training", 0, 0),
    "another sample": lambda: keyed.seed_sample(0, "training", 0, 1),
    "the sample in another epoch": lambda: keyed.seed_sample(0, "training", 1, 0),
    "a sample for validation": lambda: keyed.seed_sample(0, "validation", 0, 0),
    "a forward": lambda: keyed.seed_forward(0, 0, 0, 0, CPU),
    "the next step": lambda: keyed.seed_forward(0, 1, 0, 0, CPU),
    "its next forward": lambda: keyed.seed_forward(0, 0, 1, 0, CPU),
    "another rank": lambda: keyed.seed_forward(0, 0, 0, 1, CPU),
    "an evaluation": lambda: keyed.seed_evaluation(0, 0, 0, CPU),
    "its next batch": lambda: keyed.seed_evaluation(0, 1, 0, CPU),
    "the evaluation of another rank": lambda: keyed.seed_evaluation(0, 0, 1, CPU),
}


def test_each_place_of_a_run_draws_numbers_of_its_own() -> None:
    drawn: dict[str, list[float]] = {}
    for name, seeding in SEEDINGS.items():
        seeding()
        drawn[name] = draws()
        seeding()
        assert draws() == drawn[name]
    for numbers in zip(*drawn.values(), strict=True):
        assert len(set(numbers)) == len(SEEDINGS)
