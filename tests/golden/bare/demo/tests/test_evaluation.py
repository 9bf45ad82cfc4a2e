"""Engine: evaluation sees each sample once, on any number of ranks, and changes nothing."""

import pytest
import torch

from ..config import Config
from ..engine.reading import read_part
from .harness import values
from .scenario import read_metrics, run_training, saved, set_config
from .toy import Toy, metric_sums, num_targets

CONFIG = set_config(
    Config(), device="cpu", dtype="float64", epochs=1, data__num_workers=0, timeout_s=10.0
)


def with_batches(config: Config, world_size: int, batch_size: int) -> Config:
    """A configuration in which each rank evaluates batches of so many samples."""
    return set_config(config, global_batch_size=batch_size * world_size)


def reference(_init_method: str, run_dir: str, step: int, toy: Toy) -> dict[str, float]:
    """What one process finds with the saved weights, in one batch."""
    model = toy.build_model().double().eval()
    model.load_state_dict(read_part(saved(run_dir, step), "model"))
    _, data = toy.build_datasets()
    batch = {"inputs": data.inputs.double(), "targets": data.targets.double(), "mask": data.mask}
    count = num_targets(batch)
    sums = metric_sums(model, batch)
    return {**{name: value.item() / count for name, value in sums.items()}, "targets": count}


@pytest.mark.parametrize(
    ("num_valid", "world_size", "batch_size"),
    [(1003, 1, 64), (1003, 2, 7), (1003, 3, 16), (1003, 4, 50), (40, 2, 1), (2, 3, 4)],
)
def test_result_is_that_of_one_process(
    run_dir: str, num_valid: int, world_size: int, batch_size: int
) -> None:
    toy = Toy(num_valid=num_valid, is_masked=True)
    config = with_batches(CONFIG, world_size, batch_size)
    values(run_training, world_size, set_config(config, run_dir=run_dir, max_steps=1), toy.use)
    [expected] = values(reference, 1, run_dir, 1, toy)
    [line] = read_metrics(run_dir, "valid")
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("num_valid", [9, 1])
def test_buffers_are_those_of_rank_0(run_dir: str, num_valid: int) -> None:
    # Rank 1 has a batch less or even none: through DDP, which sends buffers, it would hang.
    toy = Toy(num_valid=num_valid, has_batch_norm=True)
    config = set_config(with_batches(CONFIG, 2, 2), run_dir=run_dir, max_steps=3)
    ranks = values(run_training, 2, config, toy.use)
    mean_0, mean_1 = (rank.buffers["layers.1.running_mean"] for rank in ranks)
    assert not torch.equal(mean_0, mean_1)  # evaluation has left rank 1 its own
    [expected] = values(reference, 1, run_dir, 3, toy)
    [line] = read_metrics(run_dir, "valid")
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=0, abs=1e-12)


def test_training_does_not_see_evaluations(run_dir: str) -> None:
    toy = Toy(dropout=0.2, noise=0.1, has_batch_norm=True)
    digests = []
    for eval_every in (1, None):
        config = set_config(CONFIG, run_dir=f"{run_dir}{eval_every}", eval_every=eval_every)
        ranks = values(run_training, 2, with_batches(config, 2, 8), toy.use)
        digests.append([rank.digest for rank in ranks])
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]  # the buffers
