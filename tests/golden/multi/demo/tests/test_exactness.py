"""Engine: a step is that of one process on the whole window, however the window is cut."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ..config import Config
from ..engine.sampler import epoch_order
from .harness import values
from .scenario import read_metrics, run_training, set_config
from .toy import Toy

CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    log_every=1,
    data__num_workers=0,
    global_batch_size=32,
    optim__grad_clip=None,
    optim__min_lr_ratio=0.125,
)
SGD = Toy(num_samples=32, is_masked=True, has_plain_sgd=True)

SPLITS: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (4, {})]  # ranks


def reference(_init_method: str, config: Config, toy: Toy) -> dict[str, Tensor]:
    """The same training in one process and plain torch: a window is one batch with one mean."""
    model = toy.build_model().double()
    data, _ = toy.build_datasets()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer: torch.optim.Optimizer
    if toy.has_plain_sgd:
        optimizer = torch.optim.SGD(model.parameters())
    else:
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=config.optim.weight_decay)
    size, batch, warmup = toy.num_samples, config.global_batch_size, config.optim.warmup_steps
    total_steps = config.epochs * math.ceil(size / batch)
    step = 0
    for epoch in range(config.epochs):
        order = epoch_order(config.seed, epoch, size)
        for chosen in order.split(batch):
            step += 1
            if step <= warmup:
                share = step / warmup
            else:  # half a cosine wave from 1 to 1/8
                done = (step - warmup) / (total_steps - warmup)
                share = 0.125 + 0.875 * (1 + math.cos(done * math.pi)) / 2
            for group in optimizer.param_groups:
                group["lr"] = config.optim.lr * share
            errors = model(data.inputs[chosen].double()) - data.targets[chosen].double()
            errors[data.mask[chosen]].square().mean().backward()
            if config.optim.grad_clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=name)


def test_one_step_does_not_depend_on_how_its_samples_are_split(run_dir: str) -> None:
    [expected] = values(reference, 1, CONFIG, SGD)
    for number, (world_size, changes) in enumerate(SPLITS):
        config = set_config(CONFIG, run_dir=f"{run_dir}{number}", **changes)
        for rank in values(run_training, world_size, config, SGD.use):
            assert rank.progress["step"] == 1
            assert_equal(rank.parameters, expected)


@pytest.mark.parametrize(
    ("toy", "world_size", "batch_size", "grad_clip"),
    [
        # `batch_size` of each rank. The last window has 107 samples; then 43, and 11.
        (Toy(1003, is_masked=True, has_plain_sgd=True), 2, 64, 0.5),
        (Toy(1003, has_plain_sgd=True), 3, 40, None),
        (Toy(1003, is_ragged=True), 4, 8, 0.5),
        (Toy(31, has_plain_sgd=True), 2, 16, None),  # 16 and 15
        (Toy(19, is_masked=True), 4, 2, 0.5),  # 3, so that one rank has none
        (Toy(19, has_plain_sgd=True), 4, 2, None),
    ],
    ids=["2 ranks", "3 ranks", "4 ranks", "one step", "idle rank, masked", "idle rank"],
)
def test_epochs_equal_a_single_process(
    run_dir: str, toy: Toy, world_size: int, batch_size: int, grad_clip: float | None
) -> None:
    config = set_config(
        CONFIG,
        run_dir=run_dir,
        global_batch_size=batch_size * world_size,
        epochs=2,
        optim__grad_clip=grad_clip,
        optim__warmup_steps=1,
    )
    [expected] = values(reference, 1, config, toy)
    for rank in values(run_training, world_size, config, toy.use):
        assert_equal(rank.parameters, expected)


@pytest.mark.parametrize("num_samples", [96, 97, 127])
def test_steps_and_learning_rates_do_not_depend_on_ranks(run_dir: str, num_samples: int) -> None:
    config = set_config(CONFIG, epochs=3, optim__warmup_steps=2)
    tables = []
    for number, (world_size, changes) in enumerate(SPLITS[1:]):
        path = f"{run_dir}{number}"
        toy = Toy(num_samples, is_masked=True)
        values(run_training, world_size, set_config(config, run_dir=path, **changes), toy.use)
        tables.append([(line["step"], line["lr"]) for line in read_metrics(path, "train")])
    steps, rates = zip(*tables[0], strict=True)
    assert list(steps) == list(range(1, 3 * math.ceil(num_samples / 32) + 1))
    assert rates[1] == max(rates) == config.optim.lr
    assert rates[-1] == config.optim.lr * 0.125
    assert all(one == other for one, other in pairwise(tables))
