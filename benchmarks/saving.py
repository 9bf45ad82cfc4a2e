"""How long training stands still for a checkpoint: each strategy beside a plain `torch.save`.

    python benchmarks/saving.py [--rounds 5] [--megaparams 100]

Two gloo ranks on the CPU hold one model with Adam's moments, and save it in turns: `torch.save`
and fsync by rank 0 while the others wait, then each strategy through its `Checkpointer`, round
by round in the same processes. "blocked" is how long the slower rank's call takes, "durable" how
long it takes until the checkpoint has its name. Bytes go to the directory of temporary files.
"""

import argparse
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cookiecutter.main import cookiecutter

REPOSITORY = Path(__file__).parents[1]
STRATEGIES = ("rank0", "per_rank", "sharded")
PLAIN = "torch.save"
WIDTH = 4096


def render(directory: str) -> None:
    """Render a project for each strategy, and make them importable."""
    answers = {"amp": "off", "backend": "gloo", "tracker": "none"}
    for strategy in STRATEGIES:
        cookiecutter(
            str(REPOSITORY),
            no_input=True,
            output_dir=directory,
            default_config={"replay_dir": directory},
            extra_context={"project_slug": f"bench_{strategy}", "checkpoint": strategy, **answers},
        )
        sys.path.insert(0, f"{directory}/bench_{strategy}")


def build(num_layers: int) -> tuple[Any, Any]:
    """A model of so many large layers, and an Adam that has taken a step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def plain_saver(module: Any, optimizer: Any, is_main: bool, root: Path) -> Callable[[int], None]:
    """What anyone would write: rank 0 saves and flushes, the others wait."""
    import torch
    import torch.distributed as dist

    root.mkdir(exist_ok=True)

    def save(step: int) -> None:
        if is_main:
            with (root / f"{step}.pt").open("wb") as file:
                torch.save(
                    {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file
                )
                file.flush()
                os.fsync(file.fileno())
            (root / f"{step - 1}.pt").unlink(missing_ok=True)
        dist.barrier()

    return save


def strategy_saver(
    strategy: str, module: Any, optimizer: Any, world: Any, root: Path
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """The calls of a strategy: begin a save, and wait for it."""
    train = importlib.import_module(f"bench_{strategy}.train")
    config = train.Config(device="cpu")
    plan = train.Plan(1000, 64, 16, world.world_size)
    state = train.TrainState(module, optimizer)
    job = train.Job(config, world, plan, state, module)
    checkpointer = train.Checkpointer(root, world, 1)

    def save(step: int) -> None:
        state.progress.step = step
        checkpointer.save(job, None)

    return save, checkpointer.finish


def compare(
    init_method: str, directory: str, rounds: int, num_layers: int
) -> dict[str, list[tuple[float, float]]]:
    """On each rank: seconds blocked and seconds until durable of each way, round by round."""
    import torch.distributed as dist

    train = importlib.import_module("bench_rank0.train")
    launch, config = train.find_place(train.Config(device="cpu", timeout_s=3600.0))
    launch = replace(launch, init_method=init_method)
    times: dict[str, list[tuple[float, float]]] = {}
    with train.distributed.process_group(launch, config) as world:
        module, optimizer = build(num_layers)
        plain = plain_saver(module, optimizer, world.is_main, Path(directory, "plain"))
        ways = {PLAIN: (plain, lambda: None)}
        for strategy in STRATEGIES:
            ways[strategy] = strategy_saver(
                strategy, module, optimizer, world, Path(directory, strategy)
            )
        for step in range(1, rounds + 2):
            for way, (save, finish) in ways.items():
                dist.barrier()
                start = time.perf_counter()
                save(step)
                blocked = time.perf_counter() - start
                finish()
                times.setdefault(way, []).append((blocked, time.perf_counter() - start))
        del ways, save, finish, plain
    return {way: found[1:] for way, found in times.items()}  # the first maps memory


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megaparams", type=int, default=100)
    arguments = parser.parse_args()
    num_layers = max(1, round(arguments.megaparams * 1e6 / WIDTH**2))
    with tempfile.TemporaryDirectory() as directory:
        render(directory)
        importlib.import_module("bench_rank0.tests.conftest")  # sets the environment of the ranks
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[: len(STRATEGIES)])
        harness = importlib.import_module("bench_rank0.tests.harness")
        ranks = harness.values(compare, 2, directory, arguments.rounds, num_layers, timeout_s=3600)
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{num_layers * WIDTH**2 / 1e6:.1f} million parameters with Adam, 2 ranks")
    slower = {
        way: [max(pair) for pair in zip(*(rank[way] for rank in ranks), strict=True)]
        for way in ranks[0]
    }
    for way, found in slower.items():
        ratios = [a[0] / b[0] for a, b in zip(found, slower[PLAIN], strict=True)]
        print(
            f"{way:10s} blocked {statistics.median(pair[0] for pair in found):6.2f} s"
            f" (x{statistics.median(ratios):.3f} of {PLAIN};"
            f" all: {' '.join(f'{pair[0]:.2f}' for pair in found)})"
            f"   durable after {statistics.median(pair[1] for pair in found):6.2f} s"
        )


if __name__ == "__main__":
    main()
