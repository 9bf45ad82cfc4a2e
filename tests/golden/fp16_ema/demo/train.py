"""Shared: the training program. `train` has the order of a run, `train_step` that of a step.

Start it with a script of launch/; without a launcher it is one process, from the same code.
"""

if __name__ == "__main__":
    from .config import parse_or_exit

    CONFIG = parse_or_exit()  # before torch is imported: a wrong setting answers at once

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from . import data, task
from .config import Config, find_place, samples_per_forward
from .engine import attempts, ddp, distributed, gradient, keyed, optim, prepare, report
from .engine.checkpoint import finishing
from .engine.cli import told_how_it_ends
from .engine.distributed import World, process_group
from .engine.failure import told
from .engine.launch import run_to_exit
from .engine.loader import Batch, BatchStream, build_loaders, to_device
from .engine.metrics import Metrics
from .engine.rundir import RunDir
from .engine.sampler import Plan
from .engine.state import Job, TrainState
from .engine.stop import Stop
from .engine.strategy import Checkpointer
from .engine.watchdog import Watchdog
from .model import build_model

logger = logging.getLogger(f"{__package__}.train")  # run as a module, __name__ is __main__


@record  # leaves the traceback of a rank that fails to the launcher
def main(config: Config) -> None:
    """Join the other processes, train, leave. The model lives and dies within `train`."""
    launch, config = find_place(config)
    run = RunDir(config.run_dir, launch)
    group = process_group(launch, config)
    with Stop(run) as stop, told_how_it_ends(run), group as world, told(run, world):
        train(config, world, run, stop)


def train(config: Config, world: World, run: RunDir, stop: Stop) -> None:
    """The order of a run: data, model, resume, wrap, then step after step."""
    datasets = prepare.build_datasets(data, config.data, world)
    size = samples_per_forward(config, world.world_size)
    plan = Plan(len(datasets[0]), config.global_batch_size, size, world.world_size)
    state = build_state(config, world)
    distributed.require_equal(world, report.facts(config, state.module, datasets))
    with distributed.agreed(world):
        run.open()
        run.start_logging()

    checkpointer = Checkpointer(run.checkpoints, world, config.keep_checkpoints)
    checkpoint = checkpointer.restore(attempts.what_to_resume(config, run, world), state, config)
    report.say_start(checkpoint, plan, config, world)
    progress = state.progress
    job = Job(config, world, plan, state, model=state.module, stop=stop)
    if job.is_finished() and progress.evaluated_step == progress.step:
        logger.info("nothing left to do: step %d was the last", progress.step)
        run.status("done", progress.step)
        return

    attempts.begin(run, world, config, progress.step)
    run.write_config(config)
    run.write_environment({"ranks": report.ranks(world)})
    logger.info(report.describe(job))
    collate = getattr(data, "collate", None)
    train_loader, valid_loader = build_loaders(datasets, collate, config, plan, world)
    batches = BatchStream(train_loader, progress.epoch, progress.position, job.pulse)
    with Metrics(run.path, job) as metrics, run.reported(progress, stop), Watchdog(job, run):
        if not job.is_finished():
            batch = batches.peek()  # stays the first one; what it is tried with is thrown away
            forward = partial(forward_loss, job, batch)
            job = replace(job, model=ddp.wrap(state.module, world, config, forward))
        with stop.training(world), finishing(checkpointer):
            run_steps(job, batches, valid_loader, metrics, checkpointer)


def build_state(config: Config, world: World) -> TrainState:
    """The model with fresh weights, equal on all ranks, and what trains it."""
    keyed.seed_init(config.seed, world.device)
    return TrainState.of(build_model(config.model), config, world.device)


def run_steps(
    job: Job,
    batches: BatchStream,
    valid_loader: Iterable[Batch],
    metrics: Metrics,
    checkpointer: Checkpointer,
) -> None:
    """Step after step to the end or a stop; logging, evaluation and saving where they are due."""
    config, progress = job.config, job.state.progress
    metrics.start_clock(batches.waited_s)
    valid_loss, saved_step = None, progress.step
    is_late = progress.step > progress.evaluated_step and job.is_due(config.eval_every)
    # What the run before did not come to; saved, so that the next one need not.
    if is_late and (valid_loss := evaluate_all(job, valid_loader, metrics)) is not None:
        checkpointer.save(job, valid_loss)
    while not job.is_finished() and not job.stop.is_due():
        valid_loss = None
        window = job.plan.window(progress.position)
        is_logged = (progress.step + 1) % config.log_every == 0
        numbers = train_step(job, window, batches, is_logged=is_logged)
        metrics.count(len(window))
        if numbers is None and not job.is_finished():
            continue  # no step was taken, so nothing is due again
        if numbers is not None and is_logged:
            metrics.write_train(progress, numbers, batches.waited_s)
        if job.is_due(config.eval_every):
            valid_loss = evaluate_all(job, valid_loader, metrics)
        if job.is_due(config.save_every):
            job.pulse.at("saving")
            checkpointer.save(job, valid_loss)
            saved_step = progress.step
    if job.stop.is_agreed and saved_step != progress.step:
        checkpointer.save(job, valid_loss)


def train_step(
    job: Job, window: range, batches: BatchStream, *, is_logged: bool
) -> dict[str, float] | None:
    """One optimizer step on the samples of a window; None where it was left out. Collective.

    The gradient is that of the mean loss over the window's targets, on however many ranks and
    micro-batches. Synchronises the device once, after the backward.
    """
    config, state, progress = job.config, job.state, job.state.progress
    peak = optim.peak_lr(config.optim, config.global_batch_size)
    lr = optim.lr_at(progress.step + 1, job.total_steps, config.optim, peak)
    optim.set_lr(state.optimizer, lr)

    sums = torch.zeros(2, dtype=torch.float64, device=job.world.device)  # of losses, of targets
    is_summed = is_logged or task.TARGETS_PER_SAMPLE is None
    shares = job.plan.micro_batches(window, job.world.rank)
    for micro, share in enumerate(shares):
        is_last = micro == len(shares) - 1
        with ddp.sync_only_if(job.model, is_last):
            wait = forward_backward(
                job, next(batches), share, sums, micro, is_summed=is_summed and is_last
            )
    wait()
    job.pulse.at("optimizer")

    state.scaler.unscale_(state.optimizer)  # once, before anything looks at the gradient
    count = len(window) if task.TARGETS_PER_SAMPLE else sums[1]
    gradient.to_mean(state.module, config.global_batch_size / count)
    grad_norm = gradient.clip(state.module, config.optim.grad_clip)
    # Here the host waits for the device, and nowhere else in a step.
    norm, loss, targets = torch.stack((grad_norm.double(), *sums)).tolist()
    if is_stepped := math.isfinite(norm):  # alike on all ranks: the gradient is reduced
        state.optimizer.step()
        state.ema.update_parameters(state.module)
        progress.advance()
    else:
        is_empty = task.TARGETS_PER_SAMPLE is None and targets == 0
        report.leave_out(job, None if is_empty else norm)
    state.scaler.update()
    state.optimizer.zero_grad()
    progress.consume(len(window), job.plan.num_samples)
    return {"loss": loss / max(targets, 1.0), "grad_norm": norm, "lr": lr} if is_stepped else None


def forward_backward(
    job: Job, batch: Batch, share: range, sums: Tensor, micro: int = 0, *, is_summed: bool
) -> Callable[[], object]:
    """Add a micro-batch to the gradient, and its loss and targets to `sums` (2,).

    With `is_summed`, `sums` is added over the ranks beside the backward; the result waits for it.
    """
    loss = forward_loss(job, batch, job.model, micro)
    if not share:
        loss = gradient.left_out(loss)  # this rank only takes part
    sums[0] += loss.detach()
    sums[1] += task.num_targets(batch) if share else 0
    job.pulse.at("backward", micro)
    wait = distributed.start_sum(job.world, sums) if is_summed else distributed.no_wait
    loss = loss / gradient.nominal_count(
        job.config.global_batch_size, job.world.world_size, task.TARGETS_PER_SAMPLE
    )
    job.state.scaler.scale(loss).backward()
    return wait


def forward_loss(job: Job, batch: Batch, model: nn.Module, micro: int = 0) -> Tensor:
    """The loss of a micro-batch, summed; what it draws follows from its place in the run."""
    device = job.world.device
    job.pulse.at("forward", micro)
    batch = to_device(batch, device, job.dtype, job.memory_format)
    step = job.state.progress.step
    keyed.seed_forward(job.config.seed, step, micro, job.world.rank, device)
    with torch.autocast(device.type, dtype=torch.float16):
        return task.loss_sum(model, batch)


def evaluate_all(job: Job, loader: Iterable[Batch], metrics: Metrics) -> float | None:
    """Evaluate, write the results, return the loss by which checkpoints compare. Collective.

    None where a stop came first.
    """
    state = job.state
    results = {"valid": evaluate(job, state.module, loader)}
    results["ema"] = evaluate(job, state.ema.module, loader)
    if job.stop.is_agreed:
        return None
    state.progress.evaluated_step = state.progress.step
    for split, values in results.items():
        metrics.write(split, state.progress, values)
    return list(results.values())[-1]["loss"]


@torch.no_grad()
def evaluate(job: Job, module: nn.Module, loader: Iterable[Batch]) -> dict[str, float]:
    """Means over the targets of all samples, each seen once, with rank 0's buffers. Collective.

    Through the bare module, so that the ranks need not have equally many batches. A stop ends it
    at any batch.
    """
    device = job.world.device
    sums: dict[str, Tensor] = {}
    num_targets = 0
    with ddp.evaluating(module, job.world):
        for number, batch in enumerate(job.pulse.over(loader)):
            if job.stop.is_wanted():
                break
            num_targets += task.num_targets(batch)
            moved = to_device(batch, device, job.dtype, job.memory_format)
            keyed.seed_evaluation(job.config.seed, number, job.world.rank, device)
            with torch.autocast(device.type, dtype=torch.float16):
                values = task.metric_sums(module, moved)
            for name, value in values.items():
                sums[name] = sums.get(name, torch.zeros_like(value).double()) + value.double()
    job.stop.agree()
    return distributed.means_over_ranks(job.world, sums, num_targets)


if __name__ == "__main__":
    run_to_exit(main, CONFIG)
