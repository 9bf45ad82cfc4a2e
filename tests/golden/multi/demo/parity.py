"""Engine: whether several processes train as one does at the same global batch, and why not.

python -m demo.parity --config FILE [--processes N] [--steps K]

Each cause of a difference is switched off and on, so that what is said of it is measured.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from .config import Config, samples_per_forward
from .engine.cli import EXIT_REFUSED, parse_settings
from .engine.explain import one_line
from .engine.launch import Refused, is_launched
from .engine.processes import outcomes
from .engine.rundir import PACKAGE
from .parity_report import CAUSES, Comparison, Result, explanation, table
from .rules import check_values

EXIT_STOPPED = 128 + signal.SIGINT
LONGEST_S = 24 * 3600.0
GRACE_S = 10.0
"""What the others have, to say why, when a process has failed."""


@dataclass(frozen=True)
class Options(Config):
    """Train a few steps in one process and in several, and compare."""

    processes: int = 2
    """How many processes are compared with one."""
    steps: int = 5
    """Windows that each of them trains."""


def parse(argv: Sequence[str]) -> tuple[Config, int, int]:
    """Return the settings, the number of processes and that of steps.

    Raises:
        Refused: something is wrong with them, in one line.
    """
    options = parse_settings(Options, argv, program="parity")
    check_values(options)
    for name, least, got in (("processes", 2, options.processes), ("steps", 1, options.steps)):
        if got < least:
            raise Refused(f"{name}: expected at least {least}, got {got}")
    if is_launched():
        raise Refused("expected no launcher: parity starts its processes itself")
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise Refused("platform: expected Linux or macOS, where processes can be forked")
    config = Config(**{one.name: getattr(options, one.name) for one in fields(Config)})
    samples_per_forward(config, options.processes)
    return plain(config), options.processes, options.steps


def plain(config: Config) -> Config:
    """The settings without what has no part in the numbers here."""
    # Samples are loaded where notes of them are taken.
    return replace(config, data=replace(config.data, num_workers=0))


def at_once(config: Config) -> Config:
    """The settings of the one process: it forwards the global batch at once."""
    return config


def without(config: Config, off: frozenset[str]) -> Config:
    """The settings with some causes switched off."""
    if "rounding" in off:
        config = replace(config, dtype="float64", tf32=False)
    if "comm_hook" in off:
        config = replace(config, ddp=replace(config.ddp, comm_hook="none"))
    if off:
        config = replace(config, compile="none")  # a kernel is not to be held still
    return config


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What a function returns on each rank.

    Raises:
        Refused: by a rank, in its words.
        RuntimeError: a rank failed.
    """
    ended = outcomes(function, world_size, *args, timeout_s=LONGEST_S, grace_s=GRACE_S)
    refused = [rank.output for rank in ended if rank.exit_code == EXIT_REFUSED]
    if refused:
        raise Refused(refused[0].strip().splitlines()[-1].removeprefix(f"{PACKAGE}: "))
    if any(rank.exit_code != 0 for rank in ended):
        ends = ["killed" if e.exit_code is None else f"exit code {e.exit_code}" for e in ended]
        text = "\n".join(f"--- rank {r}: {ends[r]}\n{e.output}" for r, e in enumerate(ended))
        raise RuntimeError(f"of {world_size} process(es), not all came to the end\n{text}")
    return [rank.value for rank in ended]


def compare(config: Config, processes: int, steps: int) -> Result:
    """Train with all causes, with none and with each alone, in one process and in several.

    Raises:
        Refused: what a training would refuse.
        RuntimeError: a process failed.
    """
    # torch takes seconds, which a mistake need not wait for.
    from . import parity_look, parity_ranks

    on_ranks(parity_ranks.meet, processes, config)  # or be refused before time is spent
    exact = without(at_once(config), frozenset({"rounding"}))
    [findings] = on_ranks(parity_look.look, 1, exact)
    is_there = {
        "rounding": without(config, frozenset({"rounding"})) != config,
        "comm_hook": config.ddp.comm_hook != "none",
        "draws": findings.draws,
        "statistics": findings.statistics,
    }
    causes = tuple(cause for cause in CAUSES if is_there[cause])
    every = frozenset(causes)
    offs = list(dict.fromkeys([frozenset(), every, *(every - {cause} for cause in causes)]))
    runs = [parity_ranks.Run(without(config, off), off) for off in offs]
    alone = [replace(run, config=at_once(run.config)) for run in runs]
    with tempfile.TemporaryDirectory() as directory:
        kept = partial(parity_ranks.trace_all, is_kept=True)
        compared = partial(parity_ranks.trace_all, is_kept=False)
        say(f"one process: {len(runs) + 1} trainings of {steps} steps")
        [ones] = on_ranks(kept, 1, alone, steps, Path(directory))
        [again] = on_ranks(compared, 1, alone[:1], steps, Path(directory))
        say(f"{processes} processes: {len(runs)} trainings of {steps} steps")
        many = on_ranks(compared, processes, runs, steps, Path(directory))
    comparisons = {
        off: Comparison(one, [rank[number] for rank in many])
        for number, (off, one) in enumerate(zip(offs, ones, strict=True))
    }
    return Result(findings, causes, comparisons, Comparison(ones[0], again))


def say(text: str) -> None:
    """Say something that is no result."""
    print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; the exit code: 0 explained, 1 not or failed, 2 refused, 130 stopped."""
    try:
        config, processes, steps = parse(sys.argv[1:] if argv is None else argv)
        share = max(1, (os.cpu_count() or 1) // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        result = compare(config, processes, steps)
    except Refused as error:
        say(one_line(str(error)))
        return EXIT_REFUSED
    except RuntimeError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return EXIT_STOPPED
    lines, is_explained = explanation(result)
    print("\n".join([*table(result), *lines]))
    return 0 if is_explained else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leaves nothing behind
    sys.exit(main())
