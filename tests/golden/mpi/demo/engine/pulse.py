"""Engine: what this rank is doing, noted in passing. No torch, no file, no lock."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")

Phase = Literal["start-up", "evaluation", "saving", "data", "forward", "backward", "optimizer"]

Place = tuple[int, float, int]
"""What is smaller is further behind."""

DONE = 1 << 30
"""In place of a number: this rank has done its part, and waits for the others."""

_STEPLESS = {"start-up": -3.0, "evaluation": -2.0, "saving": -1.0}
_IN_A_MICRO_BATCH = {"data": 0, "forward": 1, "backward": 2}


class _HasStep(Protocol):
    step: int


class _NoStep:
    step = 0


class Pulse:
    """The phase that this rank is in. Written by the main thread, read by any other.

    A mark costs about 0.1 us. `step` is the number of steps that were taken when it was made.
    """

    def __init__(self) -> None:
        """Begin with `start-up`."""
        self.progress: _HasStep = _NoStep()
        """Whose `step` is noted."""
        self.phase: Phase = "start-up"
        self.step = 0
        self.number = 0
        """Of the micro-batch, or of the batch of an evaluation, from 0."""
        self.count = 0
        """Marks so far: it changes, so this rank goes on."""
        self.parent = os.getppid()
        """The process that started this one."""
        self.began = time.time()
        """Seconds since 1970."""

    def at(self, phase: Phase, number: int = 0) -> None:
        """Mark what begins now."""
        self.phase, self.number, self.step = phase, number, self.progress.step
        self.count += 1

    def at_data(self) -> None:
        """Mark that a batch is loaded: the next one of a window, or the first."""
        self.at("data", self.number + 1 if self.phase == "backward" else 0)

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of an evaluation, and mark each before it is loaded."""
        self.at("evaluation")
        for number, batch in enumerate(batches, 1):
            yield batch
            self.at("evaluation", number)
        self.at("evaluation", DONE)

    def __str__(self) -> str:
        """Say where this rank is, such as `at step 5 in forward`."""
        return where(self.phase, self.step, self.number)


def where(phase: str, step: int, number: int) -> str:
    """Say in words where a rank is: the step that it takes, or has taken, and the phase."""
    if phase == "start-up":
        return "in start-up"
    words = f"at step {step + (phase in _IN_A_MICRO_BATCH or phase == 'optimizer')} in {phase}"
    if number == DONE:
        return f"{words}, done with its part"
    if phase == "evaluation":
        return f"{words}, batch {number + 1}"
    return f"{words} of micro-batch {number + 1}" if number else words


def place(phase: str, step: int, number: int) -> Place:
    """Order places by the time at which a run comes to them."""
    if phase in _IN_A_MICRO_BATCH:
        return step, float(number), _IN_A_MICRO_BATCH[phase]
    return step, _STEPLESS.get(phase, float("inf")), number
