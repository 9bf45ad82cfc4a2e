"""Engine: a thread of every rank that finds out when nothing moves any more, and ends the run.

Progress is any change of phase, step, batch or bytes saved, on any rank: who waits for one that
works does not stand still. Compiling counts as progress.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .beats import Beat, Exchange, FileBoard, StoreBoard
from .failure import claim, is_timeout
from .rundir import PACKAGE, RunDir
from .signs import bytes_growing, bytes_moved, is_in_compiler, main_stack
from .state import Job


class Watchdog:
    """Watches this rank and, when it stands still, the others; from entering to leaving it.

    Everything happens in threads of its own. They end the process, without waiting for anybody:
    after `watchdog_s` without progress of any rank, or when another rank has failed and this one
    does not notice. When the launcher is gone, a stop is asked for.
    """

    def __init__(self, job: Job, run: RunDir) -> None:
        """Nothing runs before it is entered."""
        self.world, self.run, self.pulse = job.world, run, job.world.pulse
        self.pulse.progress = job.state.progress
        self.limit_s = job.config.watchdog_s
        self.tick_s = min(1.0, (self.limit_s or 10.0) / 10)
        self.every_s = min(5.0, max(self.tick_s, (self.limit_s or 300.0) / 60))
        self.stop = job.stop
        self._main = threading.main_thread()
        self._store_board: StoreBoard | None = None
        self._exchanges = [
            Exchange(FileBoard(run.path / "heartbeats", self.world.world_size), self.every_s)
        ]
        if self.world.store is not None:
            self._store_board = StoreBoard(self.world.store, self.world.world_size)
            self._exchanges.append(Exchange(self._store_board, self.every_s))
        self._signs: tuple[object, ...] = ()
        self._count = 0
        self._changed = time.monotonic()
        self._arrivals: dict[int, tuple[float, float]] = {}
        self._failed_at: float | None = None
        self._ended = threading.Event()
        self._is_leaving = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        """Begin to watch."""
        self._take_beat()
        for thread in (*self._exchanges, self._thread):
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; where it is ending the process, this does not return."""
        if error is not None and self.limit_s and is_timeout(error):
            self.limit_s = 0.0  # a collective was given up before: report who is behind
        else:
            self._ended.set()
        self._thread.join(None if self.limit_s == 0.0 else 2.0)
        if self._is_leaving:
            self._thread.join()
        for exchange in self._exchanges:
            exchange.end()

    def _watch(self) -> None:
        is_launched = "LOCAL_RANK" in os.environ
        while not self._ended.wait(self.tick_s):
            if is_launched and os.getppid() != self.pulse.parent:
                is_launched = False
                self.stop.request("the launcher is gone")
            self._take_beat()
            self._follow_failure()
            if self.limit_s is not None and self.still_s() >= self.limit_s:
                self._end()

    def _take_beat(self) -> None:
        """Notice what has changed in this rank, and hand it on to be posted."""
        now = time.monotonic()
        signs: tuple[object, ...] = (self.pulse.count, self.pulse.step)
        if self.pulse.phase == "saving":
            signs += (bytes_moved(self._main), bytes_growing(self.run.checkpoints))
        is_compiling = signs == self._signs and is_in_compiler(main_stack(self._main))
        if signs != self._signs or is_compiling:
            self._signs, self._changed = signs, now
            self._count += 1
        still_s = now - self._changed
        is_curious = still_s > 2 * self.every_s or self._is_leaving or not self._heard_all()
        pulse = self.pulse
        for exchange in self._exchanges:
            exchange.mine = Beat(
                rank=self.world.rank,
                host=socket.gethostname(),
                pid=os.getpid(),
                phase=pulse.phase,
                step=pulse.step,
                number=pulse.number,
                count=self._count,
                still_s=still_s,
                changed=time.time() - still_s,
                written=time.time(),
                is_leaving=self._is_leaving,
            )
            exchange.others_matter = is_curious

    def beats(self) -> dict[int, Beat]:
        """The latest beat of each rank, from wherever it came."""
        latest: dict[int, Beat] = {}
        for exchange in self._exchanges:
            for rank, beat in exchange.beats.items():
                if rank not in latest or beat.written > latest[rank].written:
                    latest[rank] = beat
        mine = self._exchanges[0].mine
        if mine is not None:
            latest[self.world.rank] = mine
        return latest

    def silent_s(self, beat: Beat) -> float:
        """Seconds since a rank was last heard of: its thread, not its work."""
        now = time.monotonic()
        written, arrived = self._arrivals.get(beat.rank, (0.0, now))
        if beat.written != written:
            self._arrivals[beat.rank] = beat.written, now
            return 0.0
        return now - arrived

    def still_s(self) -> float:
        """Seconds since any rank was seen to change; one that was never heard of may well do so."""
        own = time.monotonic() - self._changed
        if not self._heard_all():
            return 0.0
        others = [
            beat.still_s + self.silent_s(beat)
            for rank, beat in self.beats().items()
            if rank != self.world.rank
        ]
        return min([own, *others])

    def _heard_all(self) -> bool:
        return len(self.beats()) == self.world.world_size

    def _follow_failure(self) -> None:
        """End this rank some seconds after another one failed: it may wait for it for minutes."""
        words = self._store_board.failed if self._store_board else ""
        if not words:
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > 2.0:
            self._leave(f"{PACKAGE}: rank {self.world.rank} left because {words}")

    def _end(self) -> NoReturn:
        """Leave stacks and report, and end this process."""
        self._is_leaving, stood_s = True, self.still_s()
        self._leave_anyway_after(60.0)  # a disk that hangs must not keep it
        with suppress(OSError):
            self._dump()
        self._take_beat()
        deadline = time.monotonic() + 1.0 + 2 * self.every_s
        while time.monotonic() < deadline:  # the others find it out, too, and write their stacks
            time.sleep(self.tick_s)
            self._take_beat()
            self.still_s()  # notes which beats still arrive
        beats = self.beats()
        if self.world.rank == min(rank for rank, beat in beats.items() if beat.is_leaving):
            first, text = self._report(beats, stood_s)
            print(text, file=sys.stderr, flush=True)
            with suppress(OSError):
                (self.run.logs / "stall.txt").write_text(text + "\n", encoding="utf-8")
            claim(first, self.world)
        else:
            deadline = time.monotonic() + 5.0 + 3 * self.every_s
            while not self._is_told() and time.monotonic() < deadline:
                time.sleep(self.tick_s)  # a launcher ends all ranks as soon as one has left
        for rank in self._silent(beats):
            kill_sibling(beats[rank])
        self._leave("")

    def _silent(self, beats: dict[int, Beat]) -> list[int]:
        """The ranks whose watchdogs say nothing: stopped, or Python's lock is held."""
        quiet_s = max(0.7 * (self.limit_s or 0.0), 3 * self.every_s)
        return [rank for rank, beat in sorted(beats.items()) if self.silent_s(beat) > quiet_s]

    def _is_told(self) -> bool:
        """Whether another rank has written the report."""
        if self._store_board is not None and self._store_board.failed:
            return True
        with suppress(OSError):
            return (self.run.logs / "stall.txt").stat().st_mtime >= self.pulse.began
        return False

    def _dump(self) -> None:
        """Write what all threads are doing."""
        rank = self.world.rank
        self.run.logs.mkdir(parents=True, exist_ok=True)
        with (self.run.logs / f"stall-rank{rank}.txt").open("w", encoding="utf-8") as file:
            file.write(f"rank {rank} {self.pulse}, {datetime.now(UTC).isoformat()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if dump_collectives := flight_recorder():
            (self.run.logs / f"nccl_rank{rank}").write_bytes(dump_collectives())

    def _report(self, beats: dict[int, Beat], stood_s: float) -> tuple[str, str]:
        """Who is behind, in one line, and the table of all ranks."""
        dead = self._silent(beats)
        behind = dead or behind_all(beats)
        how = "says nothing any more, last seen" if dead else "is behind,"
        words = "; ".join(f"rank {rank} {how} {beats[rank]}" for rank in behind)
        if len(behind) == self.world.world_size > 1:
            words = f"all ranks are equally far, {beats[behind[0]]}"
        first = f"no rank made progress for {stood_s:.0f} s: {words}"
        lines = [f"{PACKAGE}: {first}", "rank  host                  unchanged  place"]
        for rank, beat in sorted(beats.items()):
            still_s = beat.still_s + self.silent_s(beat)
            line = f"{rank:4}  {beat.host:20.20}  {still_s:7.1f} s  {beat}"
            if rank in dead:
                line += f" (process {beat.pid} says nothing: stopped, or Python's lock is held)"
            lines.append(line)
        lines.append(f"stacks of all threads: {self.run.logs}/stall-rank*.txt")
        if flight_recorder():
            lines.append(
                f"the latest collectives of NCCL: {self.run.logs}/nccl_rank*; compare them with "
                f"`torchfrtrace --prefix nccl_rank {self.run.logs}`"
            )
        return first, "\n".join(lines)

    def _leave(self, line: str) -> NoReturn:
        """End this process at once, and what it would leave behind."""
        self._is_leaving = True
        self._leave_anyway_after(60.0)
        if line:
            print(line, file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()  # loading processes, which ignore SIGTERM
        if self.world.is_main:
            self.run.mark("failed")
        os._exit(1)

    def _leave_anyway_after(self, delay_s: float) -> None:
        timer = threading.Timer(delay_s, os._exit, (1,))
        timer.daemon = True
        timer.start()


def flight_recorder() -> Callable[[], bytes] | None:
    """What gives PyTorch's record of the latest collectives; None where NCCL carries none."""
    if not (dist.is_initialized() and dist.get_backend() == "nccl"):
        return None
    dump: Callable[[], bytes] | None = getattr(c10d, "_dump_nccl_trace", None)
    return dump


def kill_sibling(beat: Beat) -> None:
    """Kill a rank of the same launcher on this machine: stopped, it would hold the launcher up."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{beat.pid}/stat").read_text(encoding="utf-8")
        parent = int(stat.rpartition(")")[2].split()[1])
        if beat.host == socket.gethostname() and parent == os.getppid():
            os.kill(beat.pid, signal.SIGKILL)


def behind_all(beats: dict[int, Beat]) -> list[int]:
    """The ranks that have come least far."""
    least = min(beat.place for beat in beats.values())
    return [rank for rank, beat in sorted(beats.items()) if beat.place == least]
