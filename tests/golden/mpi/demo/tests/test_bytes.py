"""Yours: the byte model, its weights that have two names, and the operations it needs."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import task
from ..config import Config
from ..engine import keyed
from ..engine.choice import newest
from ..engine.metrics import Metrics
from ..engine.reading import read_part
from ..model import Block, ByteGPT, build_model
from ..settings import BLOCK_SIZE, ModelConfig
from .harness import values
from .parts import joined
from .scenario import read_metrics, run_training, set_config

SMALL = ModelConfig(layers=2, heads=2, width=32, dropout=0.5)
TIED = {"embedding.weight", "head.weight"}
CPU = torch.device("cpu")
PARTS = ("model", "ema")
"""Weights in a checkpoint."""


def new_model(config: ModelConfig = SMALL) -> ByteGPT:
    """A fresh model, as every rank builds it."""
    keyed.seed_init(0, CPU)
    model = build_model(config)
    assert isinstance(model, ByteGPT)
    return model


def random_batch(samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes of no text at all, and those that follow them (samples, length)."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(256, (samples, length + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


# The model


@torch.no_grad()
def changed_places(_: str, place: int) -> list[bool]:
    """At which places the scores change when the byte at `place` does."""
    model = new_model().eval()
    inputs = random_batch(1, 24)[0]
    other = inputs.clone()
    other[0, place] = (other[0, place] + 1) % 256
    differences = (model(inputs) - model(other)).abs().amax(dim=-1)[0]
    return [difference > 1e-6 for difference in differences.tolist()]


@pytest.mark.parametrize("place", [0, 11, 23])
def test_no_score_depends_on_a_later_byte(place: int) -> None:
    (changed,) = values(changed_places, 1, place)
    assert changed == [False] * place + [True] * (24 - place)


@torch.no_grad()
def repeated(_: str, is_training: bool) -> bool:
    """Whether two forwards of the same bytes give the same scores."""
    model = new_model().train(is_training)
    inputs = random_batch(2, 16)[0]
    return torch.equal(model(inputs), model(inputs))


def test_dropout_acts_in_training_alone() -> None:
    assert values(repeated, 1, False) == [True]
    assert values(repeated, 1, True) == [False]


def attention_repeated(_: str, is_training: bool) -> bool:
    """The same of attention by itself, whose dropout is a number and no module."""
    block = new_model().blocks[0].train(is_training)
    assert isinstance(block, Block)
    torch.manual_seed(0)
    x = torch.randn(2, 16, SMALL.width)
    return torch.equal(block.attend(x), block.attend(x))


def test_dropout_of_attention_acts_in_training_alone() -> None:
    assert values(attention_repeated, 1, False) == [True]
    assert values(attention_repeated, 1, True) == [False]


def first_losses(_: str) -> list[float]:
    """The loss of new models, small and deep, per byte."""
    configs = (SMALL, ModelConfig(layers=8, heads=4, width=256))
    losses = []
    with torch.no_grad():
        for config in configs:
            total = task.loss_sum(new_model(config).eval(), random_batch(2, 256))
            losses.append(float(total) / 512)
    return losses


def test_new_model_takes_all_bytes_for_equally_likely() -> None:
    (losses,) = values(first_losses, 1)
    assert losses == pytest.approx([math.log(256)] * 2, abs=0.15)


def overfit(_: str) -> tuple[float, float]:
    """The loss per byte of one small batch, before and after some steps on it."""
    model = new_model(ModelConfig(layers=1, heads=2, width=64, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = random_batch(2, 32)
    losses = []
    for _step in range(60):
        loss = task.loss_sum(model, batch) / task.num_targets(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_model_learns_a_batch_by_heart() -> None:
    ((first, last),) = values(overfit, 1)
    assert first > 5
    assert last < 0.1


def count_flops(_: str, config: ModelConfig) -> tuple[float, float]:
    """A sample's operations: as PyTorch counts them, and as task.py does."""
    model, batch = new_model(config), random_batch(1, BLOCK_SIZE)
    # The counter knows no fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        task.loss_sum(model, batch).backward()
    return counter.get_total_flops(), task.flops_per_sample(config)


@pytest.mark.parametrize(
    "config", [ModelConfig(1, 2, 32, 0.0), ModelConfig(3, 4, 128, 0.0)], ids=["small", "large"]
)
def test_operations_are_those_that_pytorch_counts(config: ModelConfig) -> None:
    ((counted, promised),) = values(count_flops, 1, config)
    assert promised == pytest.approx(counted, rel=0.02)


def write_rates(init_method: str, run_dir: str, peak: float | None) -> tuple[float, int]:
    """Write a line of a run with `peak_tflops`; the operations of a sample, and the ranks."""
    with joined(init_method, peak_tflops=peak) as job:
        directory = Path(run_dir, str(job.world.rank))
        directory.mkdir(parents=True)
        with Metrics(directory, job, task) as metrics:
            metrics.count(8)
            metrics.write_train(job.state.progress, {"loss": 1.0}, waited_s=0.0)
        return task.flops_per_sample(job.config.model), job.world.world_size


def test_rates_follow_from_samples_per_second(run_dir: str) -> None:
    ((flops, ranks), _) = values(write_rates, 2, f"{run_dir}/peak", 0.5)
    (line,) = read_metrics(f"{run_dir}/peak/0", "train")
    assert line["targets_per_s"] == pytest.approx(line["samples_per_s"] * BLOCK_SIZE)
    assert line["tflops"] == pytest.approx(line["samples_per_s"] * flops / 1e12)
    assert line["mfu"] == pytest.approx(line["tflops"] / (0.5 * ranks))
    values(write_rates, 1, f"{run_dir}/none", None)
    (line,) = read_metrics(f"{run_dir}/none/0", "train")
    assert "tflops" in line
    assert "mfu" not in line


# One parameter under two names


CONFIG = set_config(
    Config(),
    device="cpu",
    dtype="float64",
    epochs=1,
    global_batch_size=8,
    micro_batch_size=2,
    model__layers=1,
    model__width=16,
    model__dropout=0.1,
    data__train_bytes=32 * BLOCK_SIZE + 1,
    data__valid_bytes=2 * BLOCK_SIZE + 1,
    data__num_workers=0,
    optim__lr=0.01,
)


def test_one_parameter_has_two_names() -> None:
    model = ByteGPT(SMALL)
    assert TIED & dict(model.named_parameters()).keys() == {"embedding.weight"}
    assert model.state_dict().keys() >= TIED


def test_it_stays_one_on_two_ranks_and_through_a_checkpoint(run_dir: str) -> None:
    whole = set_config(CONFIG, run_dir=f"{run_dir}/whole")
    parts = set_config(CONFIG, run_dir=f"{run_dir}/parts")
    one, other = values(run_training, 2, whole)
    assert TIED & one.parameters.keys() == {"embedding.weight"}
    assert torch.equal(one.parameters["embedding.weight"], other.parameters["embedding.weight"])
    values(run_training, 2, set_config(parts, max_steps=2))
    rest, _ = values(run_training, 2, parts)
    assert rest.progress["samples"] == 32
    assert rest.digest == one.digest, "embedding and head went different ways"
    saved = newest(Path(run_dir, "parts", "checkpoints"))
    assert saved is not None
    current, averaged = (read_part(saved, name) for name in ("model", "ema"))
    assert not torch.equal(current["head.weight"], averaged["head.weight"])
    for name in PARTS:
        weights = read_part(saved, name)
        assert torch.equal(weights["embedding.weight"], weights["head.weight"])
