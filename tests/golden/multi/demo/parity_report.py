"""Engine: what `parity.py` has measured, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parity_look import Findings
    from .parity_ranks import Trace

EQUAL = 1e-7
"""Relative difference that float64 does not reach by rounding in a few steps."""
FLOAT32 = 1e-4
"""Relative difference that float32 does not reach by rounding in its first step."""

CAUSES = {
    "rounding": "sums in another order, in few bits: nothing to mend",
    "comm_hook": "ddp.comm_hook sends gradients less exactly",
    "draws": "each forward draws random numbers of its own (dropout): as it should be",
    "statistics": "BatchNorm takes its statistics of what one process forwards at once: GroupNorm "
    "or LayerNorm would not, and SyncBatchNorm takes them over all processes",
}


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
    if result.configured.one.steps[-1].moved == 0:
        return ["no weight has moved: each gradient was 0, NaN or infinite, or lr 0"], False
    if parted is None:
        return ["equal within the rounding of float64"], True
    rows = {"all as it is configured": result.configured}
    if len(result.causes) > 1:
        rows.update({f"{cause} alone": result.alone(cause) for cause in result.causes})
    rows.update({", ".join(f"no {cause}" for cause in result.causes): result.bare})
    rows.update({"one process once more": result.again})
    lines = [f"they part at step {parted}; the largest differences, with"]
    lines += [f"  {name:<30}{columns(one.largest())}" for name, one in rows.items() if name]
    if result.bare.first() is not None or is_unseeded(result.findings):
        return [*lines, "not explained:", *(f"  {hint}" for hint in hints(result))], False
    guilty = [cause for cause in result.causes if result.alone(cause).first() is not None]
    lines.append("explained: without these they are equal within the rounding of float64")
    return [*lines, *(f"  {cause}: {CAUSES[cause]}" for cause in guilty)], True


def is_close(one: float, other: float) -> bool:
    """Whether two numbers are equal but for rounding, also that of float32."""
    return math.isclose(one, other, rel_tol=FLOAT32)


def is_unseeded(found: "Findings") -> bool:
    """Whether something is drawn that does not follow from the position in the run."""
    return not is_close(*found.twice) and is_close(found.held[0], found.held[-1])


def hints(result: Result) -> list[str]:
    """Where to look for what no cause explains; what was found to be wrong, if anything was."""
    found = result.findings
    bare = result.bare
    whole, halves, _ = found.held
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
    if not is_close(*found.twice):
        first, again = found.twice
        kept = "" if is_unseeded(found) else "something is kept from one forward to the next, or "
        lines.append(
            f"the same {found.size} samples give a loss of {first:.7g}, and then of {again:.7g}: "
            f"{kept}drawn where no seed reaches"
        )
    elif not is_close(whole, halves):
        others = ", or what random and numpy draw, which can't be held still"
        lines.append(
            f"task.py: loss_sum of {found.size} samples is {whole:.7g}, of their halves "
            f"{halves:.7g} in all: a mean in place of a sum, or samples that see each other"
            f"{others if found.others_draw else ''}"
        )
    if lines:
        return lines
    step = bare.gaps()[1]
    if max(step[:2]) < FLOAT32:
        return [
            "as little as float32 rounds: something in your files computes in it, whatever type "
            "the weights have (.float(), a dtype)"
        ]
    return ["no reason found: look for what depends on the rank, or on the number of processes"]
