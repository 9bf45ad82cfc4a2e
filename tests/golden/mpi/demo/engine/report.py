"""Engine: what a run says of itself, to people and to the other ranks."""

import logging
import socket
from dataclasses import asdict

import numpy as np
import torch
from torch import nn

from ..config import Config
from . import comm_hook
from .changes import flat, tell_changes
from .digest import digest
from .distributed import World, gather
from .gradient import NonFiniteGradient
from .keyed import seed_sample
from .loader import Samples
from .manifest import Checkpoint
from .optim import peak_lr
from .sampler import Plan, order_digest
from .state import Job

logger = logging.getLogger(__name__)


def facts(
    config: Config, module: nn.Module, datasets: tuple[Samples, Samples]
) -> dict[str, object]:
    """What must be equal on all ranks: packages, settings, the model's shape, the data.

    Loads the first sample of each data set, under a fixed seed.
    """
    found: dict[str, object] = {
        "torch's version": torch.__version__,
        "numpy's version": np.__version__,
    }
    found.update((f"setting {name}", value) for name, value in flat(asdict(config)))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        trained = "trained" if tensor.requires_grad else "not trained"
        found[f"model, {name}"] = f"{tuple(tensor.shape)} {tensor.dtype} {trained}"
    for split, dataset in zip(("training", "validation"), datasets, strict=True):
        found[f"number of {split} samples"] = len(dataset)
        seed_sample(config.seed, split, 0, 0)
        found[f"first {split} sample"] = digest(dataset[0])
    return found


def say_start(checkpoint: Checkpoint | None, plan: Plan, config: Config, world: World) -> None:
    """Say where a run goes on and what of it is not exact, and what is unusual about its data."""
    if not world.is_main:
        return  # all ranks know the same
    if plan.num_samples < plan.global_batch_size:
        logger.warning(
            "%d training samples are fewer than global_batch_size = %d: an epoch is one short step",
            plan.num_samples, plan.global_batch_size,
        )  # fmt: skip
    if checkpoint is None:
        return
    saved = checkpoint.manifest
    epoch, position = saved.progress["epoch"], saved.progress["position"]
    logger.info(
        "resumed from %s: step %d, epoch %d, sample %d",
        checkpoint.path.name, saved.step, epoch, position,
    )  # fmt: skip
    for line in tell_changes(checkpoint, config):
        logger.info(line)
    if saved.world_size != plan.world_size:
        logger.info(
            "saved on %d ranks, resumed on %d: the order of samples and their augmentation are "
            "exact, numbers are equal within rounding, and only without dropout",
            saved.world_size, plan.world_size,
        )  # fmt: skip
    if config.ddp.comm_hook == "powersgd":
        logger.info(
            "powersgd begins anew: what it had not sent yet is in no checkpoint, so numbers differ "
            "from those of a run that did not stop"
        )
    if config.compile == "dynamic":
        logger.info(
            "compile is dynamic: kernels may depend on the shape of the first batch, so numbers "
            "are equal within rounding to those of a run that did not stop"
        )
    if saved.order != order_digest(config.seed, epoch, plan.num_samples):
        logger.warning(
            "the order of samples is not the checkpoint's (another seed or data set): "
            "in epoch %d some samples come twice and some not at all",
            epoch,
        )


def ranks(world: World) -> list[dict[str, str]]:
    """The machine and the device of each rank. Collective."""
    device = str(world.device)
    if world.device.type == "cuda":
        device += f" {torch.cuda.get_device_name(world.device)}"
    return gather(world, {"host": socket.gethostname(), "device": device})


def describe(job: Job) -> str:
    """One block: the batch and how it is made up, the steps, the learning rate and why."""
    config, plan, world = job.config, job.plan, job.world
    peak = peak_lr(config.optim, plan.global_batch_size)
    size = sum(parameter.numel() for parameter in job.state.module.parameters())
    num_forwards = len(plan.micro_batches(range(plan.global_batch_size), world.rank))
    forwards = f" x {num_forwards} micro-batches" if num_forwards > 1 else ""
    tail = plan.num_samples - (plan.steps_per_epoch - 1) * plan.global_batch_size
    origin = f"optim.lr = {config.optim.lr:g}"
    if config.optim.scale_lr != "none":
        origin += (
            f", {config.optim.scale_lr} rule from a batch of {config.optim.base_batch_size} "
            f"to {plan.global_batch_size}"
        )
    lines = (
        f"run directory  {config.run_dir}",
        f"world size     {world.world_size} on {world.device.type}",
        f"model          {size:,} parameters in {config.dtype}",
        f"global batch   {plan.global_batch_size} samples = {plan.samples_per_forward} "
        f"per forward x {world.world_size} ranks{forwards}",
        f"steps          {job.total_steps:,} = {config.epochs} epochs x {plan.steps_per_epoch}; "
        f"the last of an epoch has {tail} of its {plan.num_samples:,} samples",
        f"learning rate  {peak:g} at its peak ({origin}), "
        f"{config.optim.schedule} after {config.optim.warmup_steps} steps of warm-up",
    )
    return "\n".join(lines)


def leave_out(job: Job, norm: float | None) -> None:
    """Account for a window that gives no step, alike on all ranks; `norm` None: no targets.

    Raises:
        NonFiniteGradient: the gradient is not finite, and `on_nonfinite` is `stop`, or so many
            windows in a row had none that no other is to be expected.
    """
    config, progress = job.config, job.state.progress
    reason = "it has no targets" if norm is None else f"the norm of its gradient is {norm}"
    is_fatal = norm is not None and config.on_nonfinite == "stop"
    progress.nonfinite += norm is not None
    if is_fatal:
        raise NonFiniteGradient(f"step {progress.step + 1} can't be taken: {reason}")
    if progress.nonfinite >= config.max_nonfinite_steps:
        raise NonFiniteGradient(
            f"step {progress.step + 1} can't be taken: {progress.nonfinite} windows in a row "
            f"(max_nonfinite_steps) had no finite gradient; in the last one, {reason}"
        )
    progress.skipped += 1
    if norm is not None:
        comm_hook.forget(job.model)
    if job.world.is_main:
        logger.warning("step %d: left out a window, %s", progress.step + 1, reason)
