"""Engine: whatever a disk or a kill does to a run, it goes on as if nothing had happened.

FAULT_ROUNDS=30 kills a run as often; the default is what an everyday test can afford.
"""

import os
import random
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..config import Config
from ..engine import distributed
from ..engine.manifest import list_checkpoints, read_checkpoint
from ..engine.strategy import Checkpointer
from .harness import outcomes, values
from .scenario import run_training, set_config
from .toy import Toy, put

ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=2,
    log_every=1,
    eval_every=4,
    save_every=1,
    keep_checkpoints=2,
    data__num_workers=0,
    global_batch_size=24,
    micro_batch_size=4,
)
# Five steps an epoch. Files are larger than what a run logs.
TOY = Toy(num_samples=102, depth=8, dropout=0.2, noise=0.1, has_batch_norm=True)


def end_of(config: Config, toy: Toy = TOY) -> list[str]:
    """Train to the end; the digest of each rank."""
    return [rank.digest for rank in values(run_training, 2, config, toy.use, timeout_s=120.0)]


def expected(run_dir: str, config: Config = CONFIG, toy: Toy = TOY) -> list[str]:
    """The digests of a run to which nothing happens."""
    return end_of(set_config(config, run_dir=run_dir + "-straight"), toy)


def newest_step(run_dir: str) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    for path in list_checkpoints(Path(run_dir, "checkpoints")):
        try:
            return read_checkpoint(path, verify=True).manifest.step
        except ValueError:
            continue
    return 0


def killed(toy: Toy, seed: int, ranks: list[int]) -> Any:
    """Prepare a training in which some ranks are killed at or soon after a save."""
    notes = toy.use()
    draws = random.Random(f"{seed} {os.environ['RANK']}")
    save = Checkpointer.save
    calls = 0

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(checkpointer: Checkpointer, *args: Any) -> None:
        nonlocal calls
        calls += 1
        # The second save has returned, so the first is complete, also where a thread writes it.
        if calls == 3 and int(os.environ["RANK"]) in ranks:
            threading.Timer(draws.random() * 0.06, kill).start()
        save(checkpointer, *args)

    put(Checkpointer, save=killing)
    return notes


def test_kill_at_any_moment_costs_a_few_steps_at_most(run_dir: str) -> None:
    toy = Toy(num_samples=102 + 24 * 12 * ROUNDS)  # it must not end by itself before the last kill
    config = set_config(CONFIG, run_dir=run_dir)
    straight = expected(run_dir, config, toy)
    before = 0
    for number in range(ROUNDS):
        victims = [[0], [1], [0, 1]][number % 3]
        ended = outcomes(run_training, 2, config, partial(killed, toy, number, victims))
        exit_codes = [rank.exit_code for rank in ended]
        assert -signal.SIGKILL in [exit_codes[rank] for rank in victims], ended
        assert None not in exit_codes  # who was not killed has left by itself
        step = newest_step(run_dir)
        assert step >= before  # a step was complete, and is
        before = step
    assert before > 0
    assert end_of(config, toy) == straight


def damages() -> list[Any]:
    """What may happen to a file."""

    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return [cut, flip, Path.unlink]


def test_any_damage_to_the_newest_goes_back_to_the_one_before(run_dir: str, tmp_path: Path) -> None:
    straight = expected(run_dir)
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, set_config(config, max_steps=6), TOY.use)
    files = [path.name for path in list_checkpoints(Path(run_dir, "checkpoints"))[0].iterdir()]
    assert len(files) > 2
    for number, name in enumerate(files):
        damaged = str(tmp_path / f"damaged{number}")
        shutil.copytree(run_dir, damaged)
        [newest, previous] = list_checkpoints(Path(damaged, "checkpoints"))[:2]
        damages()[number % 3](newest / name)
        assert end_of(set_config(config, run_dir=damaged)) == straight, name
        log = Path(damaged, "logs", "rank0.log").read_text()
        assert f"passed over checkpoint {newest.name}: " in log
        assert f"resumed from {previous.name}: " in log


def disk_is_full_after(saves: int, num_bytes: int) -> Any:
    """Prepare a training in which, after some saves, no file can grow beyond a size."""
    notes = TOY.use()
    save = Checkpointer.save
    calls = 0

    def limited(checkpointer: Checkpointer, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > saves:
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
        save(checkpointer, *args)

    put(Checkpointer, save=limited)
    return notes


def test_full_disk_ends_all_ranks_and_costs_no_checkpoint(run_dir: str) -> None:
    straight = expected(run_dir)
    config = set_config(CONFIG, run_dir=run_dir)
    largest = max(
        file.size
        for path in list_checkpoints(Path(run_dir + "-straight", "checkpoints"))
        for file in read_checkpoint(path, verify=False).manifest.files
    )
    prepare = partial(disk_is_full_after, 3, largest // 2)
    ended = outcomes(run_training, 2, config, prepare, timeout_s=60.0)
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert "the checkpoint of step 4 was not written" in ended[0].output
    assert newest_step(run_dir) == 3
    assert not list(Path(run_dir, "checkpoints").glob("*.tmp"))
    assert end_of(config) == straight


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A directory into which any user may look."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def may_not_write(uid: int) -> Any:
    """Prepare a training of a user who may read everything, and write nothing."""
    build_model = Toy.build_model

    def build_without_rights(toy: Toy) -> Any:
        if os.geteuid() == 0:  # who may write anywhere
            os.setresuid(uid, uid, uid)
        return build_model(toy)

    put(Toy, build_model=build_without_rights)
    put(distributed, leave_store=lambda *_: None)  # the file in which ranks meet is root's here
    return TOY.use()


def test_directory_that_can_only_be_read_is_refused_by_all(anybodys: Path) -> None:
    config = set_config(CONFIG, run_dir=str(anybodys / "run"))
    values(run_training, 2, set_config(config, max_steps=2), TOY.use)
    inside = [path for path in anybodys.rglob("*") if path.is_dir()]
    for path in inside:
        path.chmod(0o555)
    before = newest_step(config.run_dir)
    ended = outcomes(run_training, 2, config, partial(may_not_write, 65534))
    for path in inside:
        path.chmod(0o755)
    assert [rank.exit_code for rank in ended] == [2, 2], ended
    assert "run_dir: expected a directory that can be written" in ended[0].output
    assert newest_step(config.run_dir) == before == 2
