"""Engine: what a rank does, in places that are in order, and how the others come to know it."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from torch._C._distributed_c10d import FileStore

from ..engine.beats import Beat, FileBoard, StoreBoard
from ..engine.pulse import Pulse, place
from ..engine.rundir import RunDir
from ..engine.signs import bytes_growing, bytes_moved
from ..engine.state import Progress
from ..engine.watchdog import Watchdog
from .harness import values
from .parts import joined


def test_bytes_of_a_save_are_progress(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.tmp").mkdir()
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002/part.bin").write_bytes(bytes(1000))
    assert bytes_growing(tmp_path) == 0
    part = tmp_path / "step_00000001.tmp/part.bin"
    part.write_bytes(bytes(10))
    assert bytes_growing(tmp_path) == 10
    before = bytes_moved(threading.main_thread())
    part.read_bytes()
    moved = bytes_moved(threading.main_thread()) - before
    assert moved >= 10 or not Path("/proc/self/io").exists()


def test_places_are_in_the_order_in_which_a_run_comes_to_them() -> None:
    pulse, progress = Pulse(), Progress()
    pulse.progress = progress
    places, words = [place(pulse.phase, pulse.step, pulse.number)], [str(pulse)]

    def note() -> None:
        places.append(place(pulse.phase, pulse.step, pulse.number))
        words.append(str(pulse))

    for micro in range(2):
        pulse.at_data()
        note()
        pulse.at("forward", micro)
        note()
        pulse.at("backward", micro)
        note()
    pulse.at("optimizer")
    note()
    progress.step = 1
    for _ in pulse.over("ab"):
        note()
    note()
    pulse.at("saving")
    note()
    pulse.at_data()
    note()
    assert places == sorted(set(places))
    assert words == [
        "in start-up",
        "at step 1 in data",
        "at step 1 in forward",
        "at step 1 in backward",
        "at step 1 in data of micro-batch 2",
        "at step 1 in forward of micro-batch 2",
        "at step 1 in backward of micro-batch 2",
        "at step 1 in optimizer",
        "at step 1 in evaluation, batch 1",
        "at step 1 in evaluation, batch 2",
        "at step 1 in evaluation, done with its part",
        "at step 1 in saving",
        "at step 2 in data",
    ]


def test_boards_bring_beats_from_rank_to_rank(tmp_path: Path) -> None:
    mine = Beat(1, "node0", 7, "data", 3, 0, 5, still_s=0.5, changed=1.0, written=1.5)
    store = FileStore(str(tmp_path / "store"), 2)
    for board in (FileBoard(tmp_path / "heartbeats", 2), StoreBoard(store, 2)):
        assert board.read() == {}
        board.post(mine)
        assert board.read() == {1: mine}
        board.post(replace(mine, step=4))
        assert board.read()[1].step == 4


def watch_alone(init_method: str, run_dir: str) -> bool:
    """Stand still, as one of two ranks that share neither a disk nor a store."""
    with joined(init_method, run_dir=run_dir, watchdog_s=0.2) as job:
        pair = replace(job, world=replace(job.world, world_size=2))
        with Watchdog(pair, RunDir(run_dir, pair.world)):
            time.sleep(1.0)
    return True


def test_rank_that_was_never_heard_of_may_well_work(run_dir: str) -> None:
    assert values(watch_alone, 1, run_dir) == [True]


def orphan(init_method: str, run_dir: str) -> str | None:
    """Why a rank wants to stop when its launcher goes."""
    with joined(init_method, run_dir=run_dir, watchdog_s=1.0) as job:
        job.pulse.parent += 1
        with Watchdog(job, RunDir(run_dir, job.world)):
            time.sleep(0.5)
    return job.stop.reason


def test_launcher_that_is_gone_asks_for_a_stop(run_dir: str) -> None:
    assert values(orphan, 1, run_dir) == ["the launcher is gone on rank 0"]
