"""Engine: what a function returns in several processes, as the ranks of one job."""

from collections.abc import Callable
from typing import Any

from ..engine.processes import Outcome, outcomes
from ..engine.rundir import PACKAGE

__all__ = ["PACKAGE", "Outcome", "outcomes", "values"]


def values(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """What the function returned on each rank.

    Raises:
        AssertionError: a rank failed or hung; with the output of all.
    """
    ended = outcomes(function, world_size, *args, timeout_s=timeout_s)
    report = "\n".join(f"--- rank {r}: {e.exit_code}\n{e.output}" for r, e in enumerate(ended))
    assert all(rank.exit_code == 0 for rank in ended), report
    return [rank.value for rank in ended]
