"""Engine: the data sets, after what has to be done for them once on each machine."""

import sys
import time
from typing import Any, Protocol

from .distributed import World, agreed, gather
from .launch import FailedTogether, Refused
from .loader import Samples, check_datasets

_LOOK_S = 0.5  # between two looks into the store, of which each costs a message
_SAY_S = 30.0

_DONE, _FAILED = "done", "failed"


class DataSource(Protocol):
    """Your data.py. It may also have `prepare(config)`."""

    def build_datasets(self, config: Any, /) -> tuple[Samples, Samples]:
        """Build the training and the validation set."""


def build_datasets(source: DataSource, config: Any, world: World) -> tuple[Samples, Samples]:
    """Prepare the data where `source` says how, then build both data sets. Collective.

    Raises:
        Refused: on every rank, what can't be trained on.
    """
    prepare_once(source, config, world)
    with agreed(world):
        datasets = source.build_datasets(config)
        check_datasets(*datasets)
    return datasets


def prepare_once(source: DataSource, config: Any, world: World) -> None:
    """Call `source.prepare(config)`, if there is one, in one process of each machine. Collective.

    The others wait, however long it takes: no collective, so no time-out, is under way meanwhile.

    Raises:
        Refused: on every rank, what a `prepare` refused.
        FailedTogether: on the ranks that have no part in the failure of another one's.
    """
    prepare = getattr(source, "prepare", None)
    if prepare is None:
        return
    local_ranks = gather(world, world.local_rank)
    refusal = None
    if world.local_rank == 0:
        word = _FAILED
        try:
            prepare(config)
            word = _DONE
        except Refused as error:
            word, refusal = _DONE, error
        finally:
            if world.store is not None:
                world.store.set(f"prepared by {world.rank}", word)
    _wait_for([rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0], world)
    with agreed(world):
        if refusal is not None:
            raise refusal


def _wait_for(leaders: list[int], world: World) -> None:
    """Return when all of them have prepared their machines; say now and then who has not."""
    if world.store is None:
        return
    began = said = time.monotonic()
    while leaders:
        if not world.store.check([f"prepared by {leaders[0]}"]):
            if time.monotonic() - said > _SAY_S and world.rank not in leaders:
                said = time.monotonic()
                where = ", ".join(map(str, leaders))
                text = f"rank {world.rank} waits for prepare() of data.py on rank {where}"
                print(f"{text}: {said - began:.0f} s", file=sys.stderr, flush=True)
            time.sleep(_LOOK_S)
            continue
        rank = leaders.pop(0)
        if world.store.get(f"prepared by {rank}").decode() == _FAILED:
            error = FailedTogether(f"prepare() of data.py failed on rank {rank}")
            error.rank = rank
            raise error
