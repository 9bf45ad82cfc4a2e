"""Engine: what a step sends: buckets of gradients, or what a hook makes of them."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from .. import train
from ..config import Config
from .harness import values
from .scenario import read_metrics, run_training, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    log_every=1000,  # a logged loss would be a reduction too
    data__num_workers=0,
    global_batch_size=16,
    micro_batch_size=4,
    optim__grad_clip=None,
)
TOY = Toy(num_samples=62, depth=2, has_plain_sgd=True)  # the last of four windows is short
WEIGHTS, BIASES = 16 * 6 + 16 * 16 + 3 * 16, 16 + 16 + 3
THIN = (16 + 6) + (16 + 16) + (3 + 16)  # of rank 1, in place of the weights
SIZES = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2}


def note_sent() -> list[list[int]]:
    """Prepare a training; the bytes of each all-reduce in each of its steps."""
    TOY.use()
    steps: list[list[int]] = []
    train_step = train.train_step

    def noted(*args: Any, **named: Any) -> Any:
        threads = _ExperimentalConfig(profile_all_threads=True)  # hooks go on in gloo's
        with profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=threads
        ) as recorded:
            numbers = train_step(*args, **named)
            time.sleep(0.1)  # gloo's thread notes its end only after the step has the sum
        profiler: Any = recorded.profiler  # its own events: older releases leave types out else
        reduced = [
            (event.shapes()[0], event.dtypes()[0])
            for event in profiler.kineto_results.events()
            if event.name() == "gloo:all_reduce"
        ]
        steps.append([math.prod(shape) * SIZES[kind] for shape, kind in reduced])
        return numbers

    put(train, train_step=noted)
    return steps


@pytest.mark.parametrize(
    ("hook", "sent"),
    [
        ("none", 4 * (WEIGHTS + BIASES)),
        ("fp16", 2 * (WEIGHTS + BIASES)),
        ("bf16", 2 * (WEIGHTS + BIASES)),
        ("powersgd", 4 * (THIN + BIASES)),
    ],
)
def test_bytes_that_a_step_sends(run_dir: str, hook: Any, sent: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__comm_hook=hook)
    ranks = values(run_training, 2, config, note_sent)
    assert ranks[0].digest == ranks[1].digest
    steps = [sum(step) for step in ranks[0].notes]
    assert steps[2:] == [sent, sent]
    # powersgd begins with two steps of whole gradients.
    assert steps[:2] == [4 * (WEIGHTS + BIASES) if hook == "powersgd" else sent] * 2


@pytest.mark.parametrize(("hook", "bits"), [("fp16", 11), ("bf16", 8), ("powersgd", 22)])
def test_gradient_that_was_sent_by_a_hook_is_near(run_dir: str, hook: Any, bits: int) -> None:
    config = set_config(CONFIG, max_steps=1, optim__lr=1.0)
    gradients = []
    for name in ("none", hook):
        changes = {"run_dir": f"{run_dir}-{name}", "ddp__comm_hook": name}
        rank, _ = values(run_training, 2, set_config(config, **changes), TOY.use)
        before, after = rank.notes.weights
        gradients.append({name: before[name] - after[name] for name in before})
    exact, sent = gradients
    for name, expected in exact.items():
        # Each rank's part is rounded, and their sum: parts are seldom larger than twice the sum.
        bound = 4 * 2.0**-bits * expected.abs().max()
        assert (sent[name] - expected).abs().max() <= bound, name
    is_rounded = any(not torch.equal(sent[name], exact[name]) for name in exact)
    assert is_rounded == (hook != "powersgd")  # its first step is that of no hook


def test_powersgd_learns_nearly_as_much(run_dir: str) -> None:
    losses = []
    for hook in ("none", "powersgd"):
        directory = f"{run_dir}-{hook}"
        config = set_config(
            CONFIG, run_dir=directory, epochs=20, eval_every=1, optim__lr=0.05, ddp__comm_hook=hook
        )
        values(run_training, 2, config, Toy(num_samples=62, depth=2).use)
        trained = read_metrics(directory, "valid")
        losses.append((trained[0]["loss"], min(line["loss"] for line in trained)))
    (first, exact), (_, near) = losses
    assert first - near > 0.8 * (first - exact) > 0


def test_powersgd_forgets_a_gradient_that_was_not_finite(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, epochs=3, ddp__comm_hook="powersgd")
    toy = Toy(num_samples=62, depth=2, bad_sample=40)
    for rank in values(run_training, 2, config, toy.use):
        assert (rank.progress["step"], rank.progress["skipped"]) == (3 * 3, 3)


def test_resume_says_what_is_not_exact(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__comm_hook="powersgd")
    log = Path(run_dir, "logs", "rank0.log")
    for stop, is_said in ((3, False), (4, True)):
        values(run_training, 2, set_config(config, max_steps=stop), TOY.use)
        assert ("powersgd begins anew" in log.read_text()) == is_said


@pytest.mark.parametrize(("size", "num_buckets"), [(None, 1), (1e-3, 2), (1e-6, 6)])
def test_size_of_a_bucket(run_dir: str, size: float | None, num_buckets: int) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__bucket_cap_mb=size)
    rank, _ = values(run_training, 2, config, note_sent)
    assert [len(step) for step in rank.notes] == [num_buckets] * 4
