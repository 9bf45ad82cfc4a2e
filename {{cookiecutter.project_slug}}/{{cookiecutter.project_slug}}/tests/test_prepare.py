"""Engine: the data are prepared once on each machine, however long it takes."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .. import train
from ..config import Config
from ..engine import prepare
from ..engine.launch import Refused
from ..engine.rundir import PACKAGE
from .harness import outcomes, values
from .scenario import run_training, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    max_steps=1,
    data__num_workers=0,
    timeout_s=3.0,
    global_batch_size=16,
    {% if cookiecutter.accumulation %}
    micro_batch_size=2,
    {% endif %}
)


def use_toy(act: Callable[[int], object], notes: str = "", machines: int = 1) -> None:
    """Prepare the data by `act(rank)`, as on so many machines, and note who did."""
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    local_world_size = world_size // machines
    os.environ["LOCAL_RANK"] = str(rank % local_world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    Toy().use()

    def prepare_data(_: Any) -> None:
        act(rank)
        if notes:
            Path(notes, f"prepared by {rank}").touch()

    vars(train)["data"].prepare = prepare_data
    put(prepare, _SAY_S=1.0)


def sleep_longer_than_the_timeout(rank: int) -> None:
    time.sleep(6.0 if rank == 0 else 0.0)


def fail_on(number: int, error: Exception, rank: int) -> None:
    if rank == number:
        raise error


def test_others_wait_longer_than_the_timeout(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    ranks = outcomes(run_training, 2, config, partial(use_toy, sleep_longer_than_the_timeout))
    assert [rank.exit_code for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert "rank 1 waits for prepare() of data.py on rank 0: " in ranks[1].output
    assert "waits" not in ranks[0].output


@pytest.mark.parametrize(("machines", "by"), [(1, [0]), (2, [0, 2])])
def test_once_on_each_machine(run_dir: str, tmp_path: Path, machines: int, by: list[int]) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    use = partial(use_toy, int, str(tmp_path), machines)
    values(run_training, 2 * machines, config, use)
    names = sorted(path.name for path in tmp_path.glob("prepared*"))
    assert names == [f"prepared by {rank}" for rank in by]


def test_one_process_prepares_as_well(run_dir: str, tmp_path: Path) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 1, config, partial(use_toy, int, str(tmp_path)))
    assert (tmp_path / "prepared by 0").exists()


def test_failure_ends_all_ranks_at_once(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, timeout_s=60.0)
    act = partial(fail_on, 2, OSError("no such host"))
    start = time.monotonic()
    ranks = outcomes(run_training, 4, config, partial(use_toy, act, machines=2))
    assert time.monotonic() - start < 30
    assert [rank.exit_code for rank in ranks] == [1] * 4
    words = "rank 2 failed in start-up: OSError: no such host"
    for number in (0, 1, 3):
        assert f"{PACKAGE}: rank {number} left because {words}" in ranks[number].output
        assert "Traceback" not in ranks[number].output
    assert "Traceback" in ranks[2].output


def test_refusal_is_one_of_all_ranks(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    act = partial(fail_on, 2, Refused("data.url: expected an archive, got a page"))
    ranks = outcomes(run_training, 4, config, partial(use_toy, act, machines=2))
    words = "rank 2: data.url: expected an archive, got a page"
    assert [rank.exit_code for rank in ranks] == [2] * 4, [rank.output for rank in ranks]
    assert sum(words in rank.output for rank in ranks) == 2, "one rank of each machine speaks"
