"""What the rendered loop costs beside a bare DDP loop: ratios from one alternating run.

    python benchmarks/loop.py [--rounds 15] [--steps 40]

Two gloo ranks on the CPU train the same model on the same data in turns: some steps of a loop
written by hand (DistributedSampler, DataLoader, autocast off, clipping), then as many of the
rendered `train_step`, and so on. Both live in the same processes, so that a busy machine slows
both alike. A ratio above 1 is what ours costs more; "bare again" is the noise of the machine.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter

REPOSITORY = Path(__file__).parents[1]
SLUG = "bench"
MODELS = ("tiny", "digits")


def render(directory: str) -> None:
    """Render the variant that has the fewest extras, and make it importable."""
    cookiecutter(
        str(REPOSITORY),
        no_input=True,
        output_dir=directory,
        default_config={"replay_dir": directory},
        extra_context={"project_slug": SLUG, "amp": "off", "backend": "gloo", "tracker": "none"},
    )
    sys.path.insert(0, f"{directory}/{SLUG}")


def bare_steps(module: Any, dataset: Any, batch_size: int) -> Iterator[None]:
    """A loop as anyone would write it; one optimizer step for each item."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            cross_entropy(model(images), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def our_steps(world: Any, dataset: Any, module: Any, batch_size: int) -> Iterator[None]:
    """The rendered `train_step`, on the parts that `train` would build."""
    train = importlib.import_module(f"{SLUG}.train")
    loader = importlib.import_module(f"{SLUG}.engine.loader")
    config = train.Config(
        device="cpu",
        epochs=10**6,
        global_batch_size=batch_size * world.world_size,
        micro_batch_size=batch_size,
        data=replace(train.Config().data, num_workers=0),
    )
    size = len(dataset) // config.global_batch_size * config.global_batch_size
    plan = train.Plan(size, config.global_batch_size, batch_size, world.world_size)
    state = train.TrainState(module, train.optim.build_optimizer(module, config.optim))
    job = train.Job(config, world, plan, state, module)
    train_loader, _ = loader.build_loaders((dataset, dataset), None, config, plan, world)
    batches = loader.BatchStream(train_loader, 0, 0)
    batch = batches.peek()
    forward = partial(train.forward_loss, job, batch)
    job = replace(job, model=train.ddp.wrap(module, world, config, forward))
    while True:
        train.train_step(job, plan.window(state.progress.position), batches, is_logged=False)
        yield


def compare(init_method: str, name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """On each rank: seconds per step of each loop, round by round."""
    import torch
    from torch import nn

    train = importlib.import_module(f"{SLUG}.train")
    launch, config = train.find_place(train.Config(device="cpu"))
    launch = replace(launch, init_method=init_method)
    with train.distributed.process_group(launch, config) as world:
        dataset, _ = train.data.build_datasets(config.data)
        batch_size = 32 if name == "digits" else 1

        def build() -> nn.Module:
            torch.manual_seed(0)
            if name == "digits":
                return train.build_model(config.model)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        loops = {
            "bare": bare_steps(build(), dataset, batch_size),
            "ours": our_steps(world, dataset, build(), batch_size),
            "bare again": bare_steps(build(), dataset, batch_size),
        }
        times: dict[str, list[float]] = {loop: [] for loop in loops}
        for _ in range(rounds + 1):
            for loop, iterator in loops.items():
                start = time.perf_counter()
                for _ in range(steps):
                    next(iterator)
                times[loop].append((time.perf_counter() - start) / steps)
        for iterator in loops.values():
            iterator.close()
        del loops, iterator
    return {loop: found[1:] for loop, found in times.items()}


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        render(directory)
        importlib.import_module(f"{SLUG}.tests.conftest")  # sets the environment of the ranks
        harness = importlib.import_module(f"{SLUG}.tests.harness")
        for name in MODELS:
            ranks = harness.values(
                compare, 2, name, arguments.rounds, arguments.steps, timeout_s=900
            )
            times = ranks[0]
            line = [f"{name:7s} bare {1000 * statistics.median(times['bare']):6.2f} ms a step"]
            for loop in ("ours", "bare again"):
                ratios = [a / b for a, b in zip(times[loop], times["bare"], strict=True)]
                line.append(f"{loop} x{statistics.median(ratios):.3f}")
            print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
