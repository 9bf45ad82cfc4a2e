"""Engine: whether several processes train as one does at the same global batch, and why not.

python -m {{ cookiecutter.project_slug }}.parity --config FILE [--processes N] [--steps K]

Each cause of a difference is switched off and on, so that what is said of it is measured.
"""

import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, samples_per_forward
from .engine.cli import EXIT_REFUSED, parse_settings
from .engine.explain import one_line
from .engine.launch import Refused, is_launched
from .engine.processes import outcomes
from .engine.rundir import PACKAGE
from .rules import check_values

if TYPE_CHECKING:
    from .parity_ranks import Findings, Trace

EQUAL = 1e-7
"""Relative difference that float64 does not reach by rounding in a few steps."""
FLOAT32 = 1e-4
"""Relative difference that float32 does not reach by rounding in its first step."""
LONGEST_S = 24 * 3600.0

CAUSES = {
    "rounding": "sums in another order, in few bits: nothing to mend",
    "comm_hook": "ddp.comm_hook sends gradients less exactly",
    "draws": "each forward draws random numbers of its own (dropout): as it should be",
    "statistics": "BatchNorm takes its statistics of what one process forwards at once: GroupNorm "
    "or LayerNorm would not, and SyncBatchNorm takes them over all processes",
}


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
    {% if cookiecutter.backend == "mpi" %}
    config = replace(config, backend="gloo")  # which needs no mpirun
    {% endif %}
    # Samples are loaded where notes of them are taken.
    return replace(config, data=replace(config.data, num_workers=0))


def at_once(config: Config) -> Config:
    """The settings of the one process: it forwards the global batch at once."""
    {% if cookiecutter.accumulation %}
    return replace(config, micro_batch_size=config.global_batch_size)
    {% else %}
    return config
    {% endif %}


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
    """What a function of `parity_ranks` returns on each rank.

    Raises:
        Refused: by a rank, in its words.
        RuntimeError: a rank failed.
    """
    ended = outcomes(function, world_size, *args, timeout_s=LONGEST_S)
    refused = [rank.output for rank in ended if rank.exit_code == EXIT_REFUSED]
    if refused:
        raise Refused(refused[0].strip().splitlines()[-1].removeprefix(f"{PACKAGE}: "))
    if any(rank.exit_code != 0 for rank in ended):
        text = "\n".join(f"--- rank {r}: {e.exit_code}\n{e.output}" for r, e in enumerate(ended))
        raise RuntimeError(f"of {world_size} process(es), not all came to the end\n{text}")
    return [rank.value for rank in ended]


@dataclass
class Comparison:
    """One process beside several."""

    one: "Trace"
    ranks: "list[Trace]"

    def gaps(self) -> list[tuple[float, ...]]:
        """Of each step the relative differences of loss, gradient norm and weights.

        The largest of all ranks; weights relative to how far they have moved.
        """
        return [
            tuple(max(gap) for gap in zip(*(rank.gaps(one) for rank in ranks), strict=True))
            for one, *ranks in zip(self.one.steps, *(r.steps for r in self.ranks), strict=True)
        ]

    def largest(self) -> tuple[float, ...]:
        """The largest of each, over all steps."""
        return tuple(max(gaps) for gaps in zip(*self.gaps(), strict=True))

    def first(self) -> int | None:
        """The first step at which they differ by more than rounding in float64."""
        return next((step for step, gap in enumerate(self.gaps()) if not max(gap) <= EQUAL), None)


@dataclass
class Result:
    """All comparisons, each with some causes switched off."""

    findings: "Findings"
    causes: tuple[str, ...]
    """Those that there may be."""
    by_off: dict[frozenset[str], Comparison]
    again: Comparison
    """One process, and one process once more."""

    @property
    def configured(self) -> Comparison:
        """With nothing switched off."""
        return self.by_off[frozenset()]

    @property
    def bare(self) -> Comparison:
        """With all of them switched off."""
        return self.by_off[frozenset(self.causes)]

    def alone(self, cause: str) -> Comparison:
        """With all others switched off."""
        return self.by_off[frozenset(self.causes) - {cause}]


def compare(config: Config, processes: int, steps: int) -> Result:
    """Train with all causes, with none and with each alone, in one process and in several.

    Raises:
        Refused: what a training would refuse.
        RuntimeError: a process failed.
    """
    from . import parity_ranks as ranks  # torch takes seconds, which a mistake need not wait for

    [findings] = on_ranks(ranks.look, 1, without(at_once(config), frozenset({"rounding"})))
    is_there = {
        "rounding": without(config, frozenset({"rounding"})) != config,
        "comm_hook": config.ddp.comm_hook != "none",
        "draws": findings.draws,
        "statistics": findings.statistics,
    }
    causes = tuple(cause for cause in CAUSES if is_there[cause])
    every = frozenset(causes)
    offs = list(dict.fromkeys([frozenset(), every, *(every - {cause} for cause in causes)]))
    runs = [ranks.Run(without(config, off), off) for off in offs]
    alone = [replace(run, config=at_once(run.config)) for run in runs]
    with tempfile.TemporaryDirectory() as directory:
        kept = partial(ranks.trace_all, is_kept=True)
        compared = partial(ranks.trace_all, is_kept=False)
        [ones] = on_ranks(kept, 1, alone, steps, Path(directory))
        [again] = on_ranks(compared, 1, alone[:1], steps, Path(directory))
        many = on_ranks(compared, processes, runs, steps, Path(directory))
    comparisons = {
        off: Comparison(one, [rank[number] for rank in many])
        for number, (off, one) in enumerate(zip(offs, ones, strict=True))
    }
    return Result(findings, causes, comparisons, Comparison(ones[0], again))


def columns(gaps: Sequence[float]) -> str:
    """The differences of loss, gradient norm and weights as columns of a table."""
    return "".join(f"{gap:>10.1e}" for gap in gaps)


def table(result: Result) -> list[str]:
    """Each step as it is configured: both losses, and how far the two are apart."""
    shown = result.configured
    several = f"{len(shown.ranks)} processes"
    lines = [f"step   one process  {several:>12}      loss  gradient   weights"]
    rows = zip(shown.one.steps, shown.ranks[0].steps, shown.gaps(), strict=True)
    for number, (one, other, gaps) in enumerate(rows):
        losses = f"{one.loss:>12.7g}  {other.loss:>12.7g}" if number else f"{'':>26}"
        lines.append(f"{number:>4}  {losses}{columns(gaps)}")
    return lines


def explanation(result: Result) -> tuple[list[str], bool]:
    """What makes the difference, as measured, and whether that is all of it."""
    parted = result.configured.first()
    if parted is None:
        return ["equal within the rounding of float64"], True
    rows = {"all as it is configured": result.configured}
    if len(result.causes) > 1:
        rows.update({f"{cause} alone": result.alone(cause) for cause in result.causes})
    rows.update({", ".join(f"no {cause}" for cause in result.causes): result.bare})
    rows.update({"one process once more": result.again})
    lines = [f"they part at step {parted}; the largest differences, with"]
    lines += [f"  {name:<30}{columns(one.largest())}" for name, one in rows.items() if name]
    if result.bare.first() is not None:
        return [*lines, "not explained:", *(f"  {hint}" for hint in hints(result))], False
    guilty = [cause for cause in result.causes if result.alone(cause).first() is not None]
    lines.append("explained: without these they are equal within the rounding of float64")
    return [*lines, *(f"  {cause}: {CAUSES[cause]}" for cause in guilty)], True


def hints(result: Result) -> list[str]:
    """Where to look for what no cause explains; what was found to be wrong, if anything was."""
    found = result.findings
    bare = result.bare
    whole, halves, again = found.loss
    lines = []
    samples = bare.one.samples
    other = [i for rank in bare.ranks for i, got in rank.samples.items() if got != samples.get(i)]
    if other:
        lines.append(f"data.py: sample {min(other)} is another one in another process")
    if bare.first() == 0:
        lines.append("model.py: build_model depends on something beside its settings and the seed")
    if found.targets[0] != found.targets[1]:
        lines.append(
            f"task.py: num_targets of {found.size} samples is {found.targets[0]}, of their halves "
            f"{found.targets[1]} in all"
        )
    if not math.isclose(whole, again, rel_tol=EQUAL):
        lines.append(
            f"the same {found.size} samples give a loss of {whole:.7g}, and then of {again:.7g}: "
            "something is kept from one forward to the next, or drawn where no seed reaches"
        )
    elif not math.isclose(whole, halves, rel_tol=EQUAL):
        lines.append(
            f"task.py: loss_sum of {found.size} samples is {whole:.7g}, of their halves "
            f"{halves:.7g} in all: a mean in place of a sum, or samples that see each other"
        )
    if lines:
        return lines
    first = bare.gaps()[1]
    if max(first[:2]) < FLOAT32:
        return [
            "as little as float32 rounds: something in your files computes in it, whatever type "
            "the weights have (.float(), a dtype)"
        ]
    return ["no reason found: look for what depends on the rank, or on the number of processes"]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; the exit code: 0 explained, 1 not explained, 2 refused."""
    try:
        config, processes, steps = parse(sys.argv[1:] if argv is None else argv)
        share = max(1, (os.cpu_count() or 1) // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
        result = compare(config, processes, steps)
    except Refused as error:
        print(f"{PACKAGE}: {one_line(str(error))}", file=sys.stderr)
        return EXIT_REFUSED
    except RuntimeError as error:
        print(f"{PACKAGE}: {error}", file=sys.stderr)
        return 1
    lines, is_explained = explanation(result)
    print("\n".join([*table(result), *lines]))
    return 0 if is_explained else 1


if __name__ == "__main__":
    sys.exit(main())
