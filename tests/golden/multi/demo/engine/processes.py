"""Engine: call a function in several processes, as the ranks of one job, and get its results.

A rank takes about 0.3 s this way, where a launcher takes 6 to 10 s to import torch again.
"""

import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from .rundir import PACKAGE


@dataclass
class Outcome:
    """How a rank ended."""

    value: Any
    """What the function returned; None unless the exit code is 0."""
    exit_code: int | None
    """None: it was still running when the time was up, and was killed."""
    output: str
    """Standard output and standard error, in the order of writing."""


def outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = math.inf,
) -> list[Outcome]:
    """Call `function(init_method, *args)` on `world_size` ranks; what became of each, by rank.

    The function must be importable by its name. `init_method` is for `rendezvous`.
    A rank that fails leaves the others `grace_s`. None is left behind, whatever happens.
    """
    context = _forkserver()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(
                target=_rank, args=(Path(directory), rank, world_size, function, args), daemon=False
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, timeout_s, grace_s)
        finally:
            _kill(ranks)
        return [_outcome(Path(directory), rank, process) for rank, process in enumerate(ranks)]


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo: the first DDP imports it, which takes 2.4 s.
    context.set_forkserver_preload(["torch._dynamo", f"{PACKAGE}.train"])
    return context


def _wait(ranks: list[ForkServerProcess], timeout_s: float, grace_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: process for process in ranks}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            assert isinstance(sentinel, int)
            if running.pop(sentinel).exitcode != 0:
                deadline = min(deadline, time.monotonic() + grace_s)


def _kill(ranks: list[ForkServerProcess]) -> None:
    """End those that still run; their exit code stays unknown."""
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            process.kill()


def _outcome(directory: Path, rank: int, process: ForkServerProcess) -> Outcome:
    result, output = directory / f"{rank}.pickle", directory / f"{rank}.txt"
    value = pickle.loads(result.read_bytes()) if result.exists() else None
    lines = output.read_text().splitlines(keepends=True) if output.exists() else []
    # With each group that is made, gloo of older torch says how many ranks it has reached.
    said = "".join(line for line in lines if not line.startswith("[Gloo] Rank "))
    return Outcome(value, process.exitcode, said)


def _rank(
    directory: Path, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    output = os.open(directory / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    # A launched rank would start its workers in the platform's way, not in this server's.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    try:
        value = function(f"file://{directory}/rendezvous", *args)
        (directory / f"{rank}.pickle").write_bytes(pickle.dumps(value))
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        print(error.code, file=sys.stderr, flush=True)
        os._exit(1)  # as below
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # like run_to_exit: peers that are dead must not be waited for
