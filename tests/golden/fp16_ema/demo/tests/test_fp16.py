"""Engine: 16-bit floats: the loss scale, and the steps that it costs."""

from functools import partial
from typing import Any

import pytest
from torch.amp.grad_scaler import GradScaler

from .. import train
from ..config import Config
from ..engine import state
from ..engine.optim import lr_at
from ..engine.reading import read_part
from ..engine.sampler import epoch_order
from .harness import values
from .parts import joined
from .scenario import read_metrics, run_training, saved, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    log_every=1,
    data__num_workers=0,
    global_batch_size=16,
    micro_batch_size=4,
)


def test_overflow_costs_one_step_and_half_the_scale(run_dir: str) -> None:
    second_window = int(epoch_order(0, 0, 64)[20])
    config = set_config(CONFIG, run_dir=run_dir)
    ranks = values(run_training, 2, config, Toy(bad_sample=second_window).use)
    for rank in ranks:
        assert (rank.progress["step"], rank.progress["skipped"]) == (3, 1)
    assert ranks[0].digest == ranks[1].digest
    checkpoint = saved(run_dir, 3)
    numbers, optimizer = checkpoint.manifest.numbers, read_part(checkpoint, "optimizer")
    assert numbers["scaler"]["scale"] == GradScaler("cpu").get_scale() / 2
    assert {tensor.item() for name, tensor in optimizer.items() if name.endswith(".step")} == {3.0}
    assert numbers["ema_updates"] == 3
    lines = [(line["step"], line["lr"]) for line in read_metrics(run_dir, "train")]
    lr = CONFIG.optim.lr
    assert lines == [(step, lr_at(step, 4, CONFIG.optim, lr)) for step in (1, 2, 3)]


def test_scale_is_gone_before_the_gradient_is_clipped(run_dir: str) -> None:
    toy = Toy(has_plain_sgd=True)
    norms = []
    for dtype in ("float32", "float64"):  # autocast leaves 64-bit floats alone
        path = run_dir + dtype
        config = set_config(CONFIG, run_dir=path, dtype=dtype, max_steps=1, optim__grad_clip=0.1)
        rank, _ = values(run_training, 2, config, toy.use)
        [line] = read_metrics(path, "train")
        norms.append(line["grad_norm"])
        before, after = rank.notes.weights
        moved = sum(float((after[n] - before[n]).double().square().sum()) for n in after) ** 0.5
        assert moved == pytest.approx(line["lr"] * 0.1, rel=1e-3)
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    assert norms[1] > 0.1


def note_scales() -> list[float]:
    """Prepare a training whose scale grows often; the scale after each window."""
    Toy().use()
    scales: list[float] = []
    train_step = train.train_step

    def noted(job: Any, *args: Any, **named: Any) -> Any:
        numbers = train_step(job, *args, **named)
        scales.append(job.state.scaler.get_scale())
        return numbers

    put(train, train_step=noted)
    put(state, GradScaler=partial(GradScaler, growth_interval=3))
    return scales


def test_scale_goes_on_after_a_resume(run_dir: str) -> None:
    config = set_config(CONFIG, epochs=2)
    straight, _ = values(
        run_training, 2, set_config(config, run_dir=run_dir + "-straight"), note_scales
    )
    scales = []
    for stop in (2, None):
        part = set_config(config, run_dir=run_dir, max_steps=stop)
        resumed, _ = values(run_training, 2, part, note_scales)
        scales += resumed.notes
    assert scales == straight.notes
    assert len(set(scales)) > 1
    assert resumed.digest == straight.digest


def test_fewer_micro_batches_than_a_step_may_have(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, epochs=3, global_batch_size=64)
    config = set_config(config, micro_batch_size=4)  # up to 8 a rank, of which an epoch fills 3
    ranks = values(run_training, 2, config, Toy(num_samples=24).use)
    assert [rank.progress["step"] + rank.progress["skipped"] for rank in ranks] == [3, 3]
    assert ranks[0].digest == ranks[1].digest


def load_without_scale(init_method: str) -> float:
    """Load a checkpoint that was written without loss scaling; the scale that is used."""
    with joined(init_method) as job:
        numbers = job.state.numbers()
        del numbers["scaler"]
        job.state.load(job.state.parts(), numbers, {})
        return job.state.scaler.get_scale()


def test_checkpoint_without_a_scale_is_taken_over() -> None:
    assert values(load_without_scale, 1) == [GradScaler("cpu").get_scale()]
