"""Engine: what ranks tell each other, and which device and backend they use."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..config import Config
from ..engine.digest import digest
from ..engine.distributed import (
    World,
    agreed,
    broadcast_tensors,
    check_own_device,
    choose_backend,
    choose_device,
    from_rank,
    gather,
    means_over_ranks,
    require_equal,
    start_sum,
)
from ..engine.launch import Launch, Refused
from .harness import values
from .parts import joined
from .scenario import set_config


def tree() -> dict[Any, Any]:
    """Nested containers with tensors of several types and shapes, as a checkpoint has."""
    return {
        "weights": [torch.arange(6.0).reshape(2, 3).t(), (torch.tensor(7), torch.tensor([True]))],
        "empty": torch.empty(0, 4, dtype=torch.float64),
        3: {"exp_avg": torch.full((2, 2), 0.5, dtype=torch.float64), "step": torch.tensor(2.0)},
        "plain": [1, 2.5, "text", None, True, ()],
    }


def talk(init_method: str) -> dict[str, Any]:
    """Use everything once; what this rank got."""
    with joined(init_method) as job:
        world = job.world
        is_last = world.rank == world.world_size - 1
        # The last rank had no batch at all, unless it is alone.
        has_batch = not is_last or world.rank == 0
        sums: dict[str, float | torch.Tensor] = {}
        if has_batch:
            sums = {"loss": torch.tensor(0.1 * 3**world.rank), "hits": 2.0}
        total = torch.tensor([1.0, world.rank])
        start_sum(world, total)()
        return {
            "gather": gather(world, {"rank": world.rank}),
            "from_rank": from_rank(world, f"by {world.rank}"),
            "from_last": from_rank(world, f"by {world.rank}", world.world_size - 1),
            "means": means_over_ranks(world, sums, 5 if has_batch else 0),
            "sum": total.tolist(),
            "tree": digest(broadcast_tensors(world, tree() if world.is_main else None)),
            "type": type(broadcast_tensors(world, (torch.zeros(1),) if world.is_main else None)),
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_tell_each_other(world_size: int) -> None:
    ranks = values(talk, world_size)
    assert all(rank == ranks[0] for rank in ranks), "the same bits on every rank"
    (got, *_) = ranks
    assert got["gather"] == [{"rank": rank} for rank in range(world_size)]
    assert (got["from_rank"], got["from_last"]) == ("by 0", f"by {world_size - 1}")
    assert got["sum"] == [world_size, sum(range(world_size))]
    assert (got["tree"], got["type"]) == (digest(tree()), tuple)
    with_batch = max(1, world_size - 1)
    loss = sum(0.1 * 3**rank for rank in range(with_batch)) / (5 * with_batch)
    assert got["means"] == {
        "loss": pytest.approx(loss, rel=1e-7),
        "hits": 2.0 / 5,
        "targets": 5.0 * with_batch,
    }


def test_mean_over_nothing_is_no_number() -> None:
    means = means_over_ranks(World(), {"loss": 0.0}, 0)
    assert str(means) == "{'loss': nan, 'targets': 0.0}"


def refuse_together(world: World, refusing: int | None) -> None:
    """Refuse on one rank, or on none."""
    with agreed(world):
        if world.rank == refusing:
            raise Refused("no such file")


def hear(init_method: str, refusing: int | None) -> str | None:
    """What this rank hears of a refusal."""
    with joined(init_method) as job:
        try:
            refuse_together(job.world, refusing)
        except Refused as error:
            return str(error)
        return None


@pytest.mark.parametrize(
    ("refusing", "words"), [(None, None), (0, "no such file"), (1, "rank 1: no such file")]
)
def test_refusal_of_one_is_refusal_of_all(refusing: int | None, words: str | None) -> None:
    assert values(hear, 2, refusing) == [words, words]


def compare(init_method: str, facts: list[dict[str, object]]) -> str | None:
    """What this rank hears when facts are compared over the ranks."""
    with joined(init_method) as job:
        try:
            require_equal(job.world, facts[job.world.rank])
        except Refused as error:
            return str(error)
        return None


def test_first_difference_between_ranks_is_named() -> None:
    facts: list[dict[str, object]] = [{"a": 1, "b": "x"}, {"a": 1, "b": "x"}]
    assert values(compare, 2, facts) == [None, None]
    words = (
        "rank 2 differs from rank 0 in b: 'y', expected 'x': "
        "start every rank with the same code, settings and packages"
    )
    assert values(compare, 3, [*facts, {"a": 1, "b": "y", "c": 0}]) == [words] * 3


def show_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this machine look as if it had so many CUDA devices."""
    here = SimpleNamespace(type="cuda") if count else None
    accelerator = SimpleNamespace(
        current_accelerator=lambda *, check_available: here if check_available else None,
        device_count=lambda: count,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)


@pytest.mark.parametrize("rank_of_first", [0, 3])
@pytest.mark.parametrize(
    ("count", "local_rank", "local_world_size", "index"),
    [(1, 0, 1, 0), (4, 3, 4, 3), (8, 5, 8, 5), (8, 1, 2, 1), (1, 1, 2, 0), (1, 7, 8, 0)],
)
def test_device_of_each_rank(
    count: int,
    local_rank: int,
    local_world_size: int,
    index: int,
    rank_of_first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_devices(monkeypatch, count)
    world_size = rank_of_first + local_world_size  # those before are on other machines
    launch = Launch(rank_of_first + local_rank, local_rank, world_size, local_world_size)
    assert choose_device("cuda", launch) == torch.device("cuda", index)
    assert choose_device("cpu", launch) == torch.device("cpu")


def test_more_ranks_than_devices_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    show_devices(monkeypatch, 4)
    for local_rank in (0, 5):
        with pytest.raises(Refused, match=r"^device: 8 processes on a machine with 4 device"):
            choose_device("cuda", Launch(local_rank, local_rank, 8, 8))


@pytest.mark.parametrize(("name", "count", "shown"), [("cuda", 0, "none"), ("xpu", 1, "cuda")])
def test_device_that_is_not_there_is_refused(
    name: str, count: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_devices(monkeypatch, count)
    with pytest.raises(Refused) as refused:
        choose_device(name, Launch())
    assert str(refused.value) == (
        f"device: expected {name!r}, but this machine shows {shown}: "
        "check the driver and the visible devices, or pass --device cpu"
    )


@pytest.mark.parametrize(
    ("count", "local_world_size", "visible", "is_refused"),
    [
        (4, 4, None, False),
        (4, 8, None, True),
        (1, 2, None, True),
        (1, 2, "3", False),  # the launcher shows each process a device of its own
        (2, 4, "0,1", True),
    ],
)
def test_ranks_that_would_share_a_device_are_refused(
    count: int,
    local_world_size: int,
    visible: str | None,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_devices(monkeypatch, count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launch = Launch(0, 0, local_world_size, local_world_size)
    if is_refused:
        with pytest.raises(Refused, match=r"^device: \d processes on a machine with \d device"):
            check_own_device(launch)
    else:
        check_own_device(launch)


def test_backend_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gloo", "nccl"):
        assert choose_backend(set_config(Config(), backend=name)) == name
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    assert choose_backend(Config()) == "mpi"
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(Refused) as refused:
        choose_backend(Config())
    assert str(refused.value) == (
        "backend: this torch was built without MPI: pass --backend gloo or --backend nccl "
        "(mpirun still starts the processes)"
    )
