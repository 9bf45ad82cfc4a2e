"""Engine: which ranks see the same directory."""

import secrets
from pathlib import Path

from .distributed import World, agreed, from_rank, gather
from .launch import Refused


def disk_leaders(world: World, root: Path) -> list[int]:
    """For each rank, the lowest rank that sees the same `root`, which is made. Collective.

    Machines with disks of their own have a leader each; on a shared one rank 0 leads all.

    Raises:
        Refused: on every rank, when one can't write there.
    """
    token = from_rank(world, secrets.token_hex(8))
    marks = [root / f".mark-{token}-{rank}" for rank in range(world.world_size)]
    with agreed(world):
        try:
            root.mkdir(parents=True, exist_ok=True)
            marks[world.rank].touch()
        except OSError as error:
            raise Refused(
                f"run_dir: expected a directory that can be written, got {root} ({error.strerror})"
            ) from None
    leader = next(rank for rank, mark in enumerate(marks) if mark.exists())
    leaders = gather(world, leader)
    if leader == world.rank:
        for mark in root.glob(".mark-*"):  # of others too that were killed right here
            mark.unlink()
    return leaders
