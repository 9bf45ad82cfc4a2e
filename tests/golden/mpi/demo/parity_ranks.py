"""Engine: what each process of `parity.py` does: some steps of your training, and notes of them."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import data, train
from .config import Config, find_place, samples_per_forward
from .engine import ddp, keyed, prepare
from .engine.cli import EXIT_REFUSED
from .engine.digest import digest
from .engine.distributed import World, agreed, process_group
from .engine.explain import one_line
from .engine.launch import Refused
from .engine.loader import BatchStream, Samples, build_loaders
from .engine.rundir import PACKAGE
from .engine.sampler import Plan
from .engine.state import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A training of a few steps: its settings, and what is held still in it."""

    config: Config
    still: frozenset[str] = frozenset()
    """`draws`: random numbers are the same in every forward; `statistics`: BatchNorm takes none."""


class Step(NamedTuple):
    """What a step gave; NaN where it was left out."""

    loss: float
    grad_norm: float
    apart: float = 0.0
    """The largest difference of a weight from that of the one process."""
    moved: float = 0.0
    """The furthest that a weight of the one process has come from where it began."""

    def gaps(self, one: "Step") -> tuple[float, float, float]:
        """The relative differences of loss, gradient norm and weights from the one process."""
        weights = self.apart / self.moved if self.moved else self.apart and math.inf
        return relative(self.loss, one.loss), relative(self.grad_norm, one.grad_norm), weights


def relative(one: float, other: float) -> float:
    """The difference of two numbers, over the larger one; two that are not finite are equal."""
    if one == other or not (math.isfinite(one) or math.isfinite(other)):
        return 0.0
    gap = abs(one - other) / max(abs(one), abs(other))
    return gap if math.isfinite(gap) else math.inf


@dataclass
class Trace:
    """What a rank notes of a run."""

    steps: list[Step] = field(default_factory=list)
    """The first one is the state before any step."""
    samples: dict[int, str] = field(default_factory=dict)
    """Digests of the samples that it loaded, by their index."""


class SameDraws(TorchDispatchMode):
    """What torch draws is 1, so it does not depend on how the samples are cut into batches."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation of torch, or fill its result."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            return args[0] / (1 - args[1]), torch.ones_like(args[0], dtype=torch.bool)
        return tree_map_only(Tensor, lambda drawn: drawn.fill_(1), func(*args, **(kwargs or {})))


class Noted:
    """A data set, and the digests of what it gave."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.digests: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        self.digests.setdefault(index, digest(sample))
        return sample


def answering(function: Callable[[], T]) -> T:
    """Call it; a refusal is one line and ends this process.

    Raises:
        SystemExit: what was refused is told.
    """
    try:
        return function()
    except Refused as error:
        print(f"{PACKAGE}: {one_line(str(error))}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


def trace_all(
    init_method: str, runs: list[Run], steps: int, directory: Path, *, is_kept: bool
) -> list[Trace]:
    """Train each of the runs for some steps. Collective.

    With `is_kept` the weights go into the directory, else they are compared with those there.
    """
    traces = []
    for number, run in enumerate(runs):
        met = replace(run, config=meeting_at(run.config, f"{init_method}-{number}"))
        file = partial(weights_file, directory, number)
        traces.append(answering(partial(trace, met, steps, file, is_kept=is_kept)))
    return traces


def weights_file(directory: Path, run: int, step: int) -> Path:
    """Where the weights of a run's one process are, after a step."""
    return directory / f"{run}-{step}.pt"


def trace(run: Run, steps: int, file: Callable[[int], Path], *, is_kept: bool) -> Trace:
    """Train one of them. Collective; the group is left when the model is gone."""
    launch, config = find_place(run.config)
    with process_group(launch, config) as world, holding(run.still):
        return take_steps(replace(run, config=config), world, steps, file, is_kept=is_kept)


def take_steps(
    run: Run, world: World, steps: int, file: Callable[[int], Path], *, is_kept: bool
) -> Trace:
    """As `train.train` begins, without evaluation, checkpoints and run directory. Collective."""
    config = run.config
    train_set, valid_set = prepare.build_datasets(data, config.data, world)
    noted = Noted(train_set)
    size = samples_per_forward(config, world.world_size)
    plan = Plan(len(noted), config.global_batch_size, size, world.world_size)
    state = train.build_state(config, world)
    if "statistics" in run.still:
        hold_statistics(state.module)
    job = Job(config, world, plan, state, model=state.module)
    collate = getattr(data, "collate", None)
    loader, _ = build_loaders((noted, valid_set), collate, config, plan, world)
    batches = BatchStream(loader, 0, 0, job.pulse)
    forward = partial(train.forward_loss, job, batches.peek())
    job = replace(job, model=ddp.wrap(state.module, world, config, forward))
    result = Trace(samples=noted.digests)
    origin: list[Tensor] = []
    for number in range(steps + 1):
        numbers: dict[str, float] | None = {}
        if number:
            window = plan.window(state.progress.position)
            numbers = train.train_step(job, window, batches, is_logged=True)
        weights = [parameter.detach().cpu() for parameter in state.module.parameters()]
        if is_kept:
            torch.save(weights, file(number))
        kept = torch.load(file(number), weights_only=True)
        origin = origin or kept
        loss, norm = (0.0, 0.0) if number == 0 else (torch.nan, torch.nan)
        if numbers:
            loss, norm = numbers["loss"], numbers["grad_norm"]
        result.steps.append(Step(loss, norm, furthest(weights, kept), furthest(kept, origin)))
    return result


def furthest(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference of two numbers at the same place."""
    pairs = zip(some, others, strict=True)
    gaps = [(a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()]
    return max(gaps, default=0.0)


@contextmanager
def same_draws() -> Iterator[None]:
    """In the block random numbers are the same in every forward, whatever it forwards."""
    seed_forward = keyed.seed_forward

    def seed_alike(seed: int, step: int, _micro: int, _rank: int, device: torch.device) -> None:
        seed_forward(seed, step, 0, 0, device)

    # Other kernels of attention drop in ways of their own.
    math_only = sdpa_kernel(SDPBackend.MATH)
    mode = SameDraws()  # type: ignore[no-untyped-call]  # torch's __init__ has no annotations
    with patch.object(keyed, "seed_forward", seed_alike), math_only, mode:
        yield


@contextmanager
def holding(still: frozenset[str]) -> Iterator[None]:
    """In the block, forwards and backwards have the same draws where `still` has `draws`."""
    if "draws" in still:
        alike = same_draws()(train.forward_backward)
        with patch.object(train, "forward_backward", alike):
            yield
    else:
        yield


def hold_statistics(module: nn.Module) -> None:
    """Let BatchNorm use its running statistics in place of the batch's."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.eval()


def meet(init_method: str, config: Config) -> None:
    """Meet as in a training, and leave; what stands against it is refused. Collective."""

    def join() -> None:
        launch, run_config = find_place(meeting_at(config, init_method))
        # Whoever left at once would be missed by those that are still connecting.
        with process_group(launch, run_config) as world, agreed(world):
            pass

    answering(join)


def meeting_at(config: Config, init_method: str) -> Config:
    """The settings of processes that find each other there."""
    return replace(config, rendezvous=replace(config.rendezvous, init_method=init_method))
