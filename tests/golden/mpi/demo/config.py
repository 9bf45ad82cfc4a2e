"""Shared: every setting of a training run, with its unit and its default. Imports no torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from .engine.cli import guess_launch, guess_run_dir, leave_if_refused, parse_settings, refuse
from .engine.launch import (
    Launch,
    Refused,
    check_meeting,
    find_launch,
    is_restarted,
    launch_from_environment,
)
from .engine.rundir import RunDir
from .rules import check_values
from .settings import DataConfig, ModelConfig


@dataclass(frozen=True)
class DataSettings(DataConfig):
    """Your `DataConfig`, and what the DataLoader needs."""

    num_workers: int | None = None
    """Loading processes of each rank; none given: from the CPUs that this rank may use."""
    prefetch_factor: int = 2
    """Batches that each loading process keeps ready (each holds memory)."""
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None
    """How loading processes start; none given: the platform's way."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate. All counts are optimizer steps."""

    lr: float = 3e-3
    """Peak learning rate, before `scale_lr`."""
    weight_decay: float = 0.05
    """Decoupled weight decay of matrices and kernels; vectors (biases, norms) get none."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps from near zero up to the peak."""
    min_lr_ratio: float = 0.0
    """Learning rate of the last step, as a share of the peak."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by global_batch_size / base_batch_size, or by its square root."""
    base_batch_size: int = 64
    """Global batch for which `lr` was found; only `scale_lr` reads it."""
    grad_clip: float | None = 1.0
    """Largest norm of the gradient; none: no clipping."""
    fused: bool | None = None
    """Step in one kernel; none given: where the device is CUDA."""


@dataclass(frozen=True)
class DDPConfig:
    """What DistributedDataParallel is told."""

    bucket_cap_mb: float | None = None
    """Size of a gradient bucket in MiB; none: DDP's own (1 MiB first, then 25 MiB)."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Search the graph for parameters without gradient in every forward (slower)."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets: one copy of them less in memory."""
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """Send gradients as 16-bit floats, or as thin matrices (`powersgd`): less exact."""
    powersgd_rank: int = 1
    """Columns of the matrices that `powersgd` sends; more are more exact."""


@dataclass(frozen=True)
class Rendezvous:
    """Where processes meet that you start yourself, and which of them this one is."""

    init_method: str = "env://"
    """`env://` (MASTER_ADDR and MASTER_PORT), `tcp://HOST:PORT` of rank 0, or `file:///PATH`."""
    rank: int | None = None
    """Number of this process, from 0; none: a launcher says so, or it is alone."""
    world_size: int | None = None
    """Processes on all machines."""
    local_rank: int | None = None
    """Number of this process on its machine; none given: all are on one machine."""
    local_world_size: int | None = None
    """Processes on this machine; none given: all."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    run_dir: str = "runs/demo"
    """Where metrics, logs and checkpoints go."""
    resume: str = "auto"
    """`auto` (newest complete checkpoint of run_dir), `never`, or the path of a checkpoint."""
    seed: int = 0
    """All randomness of the run follows from it."""
    device: str = "cpu"
    """`cuda`, `cpu`, or another type that torch.accelerator knows."""
    backend: Literal["mpi", "gloo", "nccl"] = "mpi"
    """What carries the gradients; `mpi` needs a torch that was built with it."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the weights."""
    compile: Literal["none", "static", "dynamic"] = "none"
    """torch.compile in training: for each shape of a batch (`static`), or once for all shapes."""
    channels_last: bool = False
    """Keep tensors with four dimensions in the order NHWC, which kernels for images may like."""
    tf32: bool = False
    """Round the factors of float32 products to 10 bits of mantissa, on CUDA."""
    epochs: int = 30
    """Passes over the training set; the learning rate's schedule spans them."""
    max_steps: int | None = None
    """Stop after this optimizer step, before `epochs` are done (the schedule stays the same)."""
    global_batch_size: int = 64
    """Samples per optimizer step, over all ranks: what the experiment means."""
    micro_batch_size: int = 16
    """Samples that one rank forwards at once: what fits in its memory."""
    log_every: int = 10
    """Optimizer steps between two lines of training metrics."""
    eval_every: int | None = None
    """Optimizer steps between two evaluations; none: only at the end."""
    save_every: int | None = None
    """Optimizer steps between two checkpoints; none: only at the end."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints stay, beside the best."""
    ema_decay: float = 0.99
    """Share of the averaged weights that stays in each step."""
    peak_tflops: float | None = None
    """TFLOP/s of one device in its data sheet (dense, for the type of the products); for `mfu`."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """What happens when a gradient is NaN or infinite: leave the step out, or end the run."""
    max_nonfinite_steps: int = 100
    """With `skip`, so many windows in a row without a finite gradient end the run as well."""
    connect_timeout_s: float = 120.0
    """Seconds that all ranks have to find each other at the start."""
    timeout_s: float = 600.0
    """Seconds that a rank waits for the others before the run fails."""
    watchdog_s: float | None = 300.0
    """Seconds without progress of any rank before the run ends; none: never. Below `timeout_s`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)


def parse(argv: Sequence[str] | None = None) -> Config:
    """Return the settings that the command line `argv` means (without it, this process's).

    Raises:
        Refused: an unknown setting, or a value of another type, in one line.
    """
    return parse_settings(Config, argv)


def parse_or_exit(argv: Sequence[str] | None = None) -> Config:
    """Parse and check; a mistake is one line on standard error, `refused` in status.json, exit 2.

    Raises:
        SystemExit: after a mistake (2), `--help` or `--print_config` (0).
    """
    leave_if_refused(argv, Config.run_dir)
    try:
        launch_from_environment()  # a launcher that says nonsense is told so first
        config = parse(argv)
        launch, run_config = find_place(config)
        check(run_config, launch)
        check_meeting(launch)
    except Refused as error:
        words = sys.argv[1:] if argv is None else argv
        refuse(error, RunDir(guess_run_dir(words, Config.run_dir), guess_launch(words)))
    return config


def find_place(config: Config) -> tuple[Launch, Config]:
    """Return who this process is, and the settings of the run, of which that is no part.

    Raises:
        Refused: launcher and settings do not say it, or contradict each other.
    """
    check_values(config)
    launch = find_launch(**vars(config.rendezvous))
    return launch, replace(config, rendezvous=Rendezvous())


def samples_per_forward(config: Config, world_size: int) -> int:
    """Return how many samples one rank forwards at once in a full step.

    Raises:
        Refused: `global_batch_size` can't be split like that.
    """
    grad_accum_steps(config, world_size)
    return config.micro_batch_size


def grad_accum_steps(config: Config, world_size: int) -> int:
    """Return how many micro-batches each rank forwards in a full step.

    Raises:
        Refused: `global_batch_size / (micro_batch_size x world_size)` is no whole number.
    """
    batch, micro = config.global_batch_size, config.micro_batch_size
    at_once = micro * world_size
    if batch % at_once == 0:
        return batch // at_once
    other = ""
    if batch % world_size == 0:
        share = batch // world_size
        fitting = next(size for size in range(min(micro, share), 0, -1) if share % size == 0)
        other = f", or micro_batch_size {fitting}"
    raise Refused(
        f"global_batch_size: expected a multiple of micro_batch_size x world_size = "
        f"{micro} x {world_size} = {at_once}, got {batch} "
        f"({_multiples_near(batch, at_once)} would do{other})"
    )


def _multiples_near(number: int, step: int) -> str:
    """Return the multiples of `step` on both sides of `number`, as words."""
    below = number // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def check(config: Config, launch: Launch) -> None:
    """Refuse what can't work, as far as the settings and the number of ranks can tell.

    Raises:
        Refused: the first mistake, in one line: the key, what was expected, what was got.
    """
    check_values(config)
    # Started again, a run goes on by itself, and may have removed the one it was to begin with.
    is_path = config.resume not in ("auto", "never") and not is_restarted()
    # Rank 0 decides which checkpoint it is: the others need not see its disk.
    if is_path and launch.rank == 0 and not Path(config.resume).is_dir():
        raise Refused(
            f"resume: expected auto, never or the directory of a checkpoint, got {config.resume!r}"
        )
    if config.ddp.static_graph and config.ddp.find_unused_parameters:
        raise Refused(
            "ddp.static_graph: expected false where ddp.find_unused_parameters is true, got true "
            "(a static graph finds unused parameters by itself, once)"
        )
    size = config.ddp.bucket_cap_mb
    if config.compile != "none" and size is not None and size < 1:
        raise Refused(
            f"ddp.bucket_cap_mb: expected at least 1 where compile is {config.compile}, got "
            f"{size:g} (the first part of the graph has a bucket of 1 MiB)"
        )
    if config.backend == "mpi" and config.ddp.comm_hook in ("bf16", "fp16"):
        raise Refused(
            "ddp.comm_hook: expected none or powersgd where backend is mpi, got "
            f"{config.ddp.comm_hook!r} (MPI can't add floats of 16 bits)"
        )
    samples_per_forward(config, launch.world_size)
