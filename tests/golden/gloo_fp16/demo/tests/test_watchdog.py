"""Engine: what the watchdog takes for progress; how ranks see each other without a collective."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, HashStore

from ..engine import watchdog
from ..engine.beats import Beat, FileBoard, StoreBoard
from ..engine.pulse import Pulse, place
from ..engine.rundir import RunDir
from ..engine.signs import bytes_growing, bytes_moved, is_in_compiler
from ..engine.state import Progress
from ..engine.watchdog import Watchdog
from .harness import outcomes, values
from .parts import joined
from .toy import put


def stacks_of_a_compiler(_: str) -> tuple[list[bool], list[bool]]:
    """What the check says while a graph is compiled, and while it runs."""
    compiling, running = [], []

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiling.append(is_in_compiler(sys._getframe()))

        def run(*args: Any) -> Any:
            running.append(is_in_compiler(sys._getframe()))
            return graph.forward(*args)

        return run

    function = torch.compile(lambda x: x + 1, backend=compiler)
    for _number in range(2):
        function(torch.ones(2))
    return compiling, running


def test_compiling_is_progress_and_running_what_was_compiled_is_not() -> None:
    [(compiling, running)] = values(stacks_of_a_compiler, 1)
    assert (compiling, running) == ([True], [False, False])


def compile_for_long(init_method: str, run_dir: str) -> bool:
    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(4.0)
        return graph.forward

    with (
        joined(init_method, run_dir=run_dir, watchdog_s=2.0) as job,
        Watchdog(job, RunDir(run_dir, job.world)),
    ):
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    return True


def test_compiling_for_long_is_no_standstill(run_dir: str) -> None:
    assert values(compile_for_long, 1, run_dir) == [True]


class Mute(StoreBoard):
    """As if the store lived in a process that is stopped."""

    def post(self, beat: Beat) -> None:
        """Come back too late."""
        time.sleep(600)
        super().post(beat)


def watch_without_a_store(init_method: str, run_dir: str) -> None:
    put(watchdog, StoreBoard=Mute)
    with joined(init_method, run_dir=run_dir, watchdog_s=0.5) as job:
        alone = replace(job, world=replace(job.world, store=HashStore()))
        with Watchdog(alone, RunDir(run_dir, alone.world)):
            time.sleep(600)


def test_store_that_does_not_answer_holds_nobody_up(run_dir: str) -> None:
    [ended] = outcomes(watch_without_a_store, 1, run_dir, timeout_s=30)
    assert ended.exit_code == 1
    assert "no rank made progress" in ended.output


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
