"""Engine: a run that stops and goes on ends with the same bits as one that did not stop."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ..config import Config
from ..engine.manifest import manifest_text
from .harness import outcomes, values
from .scenario import Record, read_metrics, run_training, set_config
from .toy import Toy

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=2,
    log_every=1,
    eval_every=4,
    data__num_workers=0,
    optim__warmup_steps=2,
    global_batch_size=24,
    micro_batch_size=4,
)
# Five steps an epoch; the last has 6 samples. All that could depend on the past is on.
TOY = Toy(num_samples=102, depth=2, dropout=0.2, noise=0.1, has_batch_norm=True)


def run_in_parts(
    config: Config, toy: Toy, ranks: list[int], stops: list[int], workers: list[int]
) -> list[list[Record]]:
    """Train in one run directory, a process for each part; the records by part and rank."""
    parts = []
    for world_size, stop, num_workers in zip(ranks, [*stops, None], workers, strict=True):
        part = set_config(config, max_steps=stop, data__num_workers=num_workers)
        parts.append(values(run_training, world_size, part, toy.use))
    return parts


def numbers_of(run_dir: str) -> list[dict[str, Any]]:
    """The lines of the training metrics, without what the clock decides."""
    clock = ("samples_per_s", "data_wait")
    return [
        {name: value for name, value in line.items() if name not in clock}
        for line in read_metrics(run_dir, "train")
    ]


@pytest.mark.parametrize(
    ("world_size", "stops", "workers"),
    [
        pytest.param(1, [3], [0, 0], id="1 rank, in an epoch"),
        pytest.param(2, [5], [0, 0], id="2 ranks, between epochs"),
        pytest.param(2, [2, 4, 7], [2, 0, 2, 2], id="2 ranks, often, with and without workers"),
        pytest.param(2, [1, 2, 4], [2, 2, 0, 2], id="2 ranks, at a start and at a last batch"),
        # From three ranks on it matters in which order gradients are added.
        pytest.param(3, [1, 5], [0, 0, 2], id="3 ranks"),
        pytest.param(4, [3, 4], [0, 2, 0], id="4 ranks"),
    ],
)
def test_stopped_and_resumed_is_bit_exact(
    run_dir: str, world_size: int, stops: list[int], workers: list[int]
) -> None:
    config = set_config(CONFIG, run_dir=run_dir, micro_batch_size=3 if world_size == 4 else 4)
    # The last window of an epoch leaves some of four ranks one sample, too few for BatchNorm.
    toy = replace(TOY, has_batch_norm=world_size < 4)
    straight_config = set_config(config, run_dir=run_dir + "-straight")
    straight = values(run_training, world_size, straight_config, toy.use)
    parts = run_in_parts(config, toy, [world_size] * len(workers), stops, workers)
    assert [rank.digest for rank in parts[-1]] == [rank.digest for rank in straight]
    for rank, expected in enumerate(straight):
        samples = [sample for part in parts for sample in part[rank].notes.samples]
        assert samples == expected.notes.samples
    assert numbers_of(run_dir) == numbers_of(run_dir + "-straight")
    for split in ("train", "valid"):
        steps = [line["step"] for line in read_metrics(run_dir, split)]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_of_different_length_are_bit_exact(run_dir: str, world_size: int) -> None:
    toy = Toy(num_samples=102, depth=2, is_ragged=True, is_masked=True, has_batch_norm=True)
    straight_config = set_config(CONFIG, run_dir=run_dir + "-straight")
    straight = values(run_training, world_size, straight_config, toy.use)
    config = set_config(CONFIG, run_dir=run_dir)
    parts = run_in_parts(config, toy, [world_size] * 2, [3], [0, 0])
    assert [rank.digest for rank in parts[-1]] == [rank.digest for rank in straight]
    assert numbers_of(run_dir) == numbers_of(run_dir + "-straight")


def test_crashed_run_goes_on_from_its_last_checkpoint(run_dir: str) -> None:
    straight_config = set_config(CONFIG, run_dir=run_dir + "-straight")
    straight = values(run_training, 2, straight_config, TOY.use)
    config = set_config(CONFIG, run_dir=run_dir, save_every=3)
    crashed = outcomes(run_training, 2, config, partial(TOY.use_until, 5))
    assert [rank.exit_code for rank in crashed] == [1, 1]
    resumed = values(run_training, 2, config, TOY.use)
    assert [rank.digest for rank in resumed] == [rank.digest for rank in straight]
    assert numbers_of(run_dir) == numbers_of(run_dir + "-straight")  # steps 4 and 5 stand once
    assert read_metrics(run_dir, "valid") == read_metrics(run_dir + "-straight", "valid")


def test_static_graph_on_three_ranks_is_bit_exact(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__static_graph=True)
    straight_config = set_config(config, run_dir=run_dir + "-straight")
    straight = values(run_training, 3, straight_config, TOY.use)
    parts = run_in_parts(config, TOY, [3, 3], [3], [0, 0])
    assert [rank.digest for rank in parts[-1]] == [rank.digest for rank in straight]
    usual = set_config(config, run_dir=run_dir + "-usual", ddp__static_graph=False)
    [*_, rank] = values(run_training, 3, usual, TOY.use)
    torch.testing.assert_close(rank.parameters, straight[2].parameters)


def test_your_own_task_is_bit_exact(run_dir: str) -> None:
    config = set_config(Config(), device="cpu", data__num_workers=0, run_dir=run_dir)
    straight_config = set_config(config, max_steps=4, run_dir=run_dir + "-straight")
    straight = values(run_training, 2, straight_config)
    values(run_training, 2, set_config(config, max_steps=2))
    resumed = values(run_training, 2, set_config(config, max_steps=4))
    assert [rank.digest for rank in resumed] == [rank.digest for rank in straight]


def test_other_numbers_of_ranks_go_on_with_the_same_order(run_dir: str) -> None:
    toy = Toy(num_samples=102, noise=0.1)
    config = set_config(CONFIG, dtype="float64", run_dir=run_dir)
    config = set_config(config, micro_batch_size=2)  # so that 4 ranks can share 24 samples
    straight_config = set_config(config, run_dir=run_dir + "-straight")
    [straight] = values(run_training, 1, straight_config, toy.use)
    # The first four in one epoch, the last one in both.
    parts = run_in_parts(config, toy, [2, 1, 3, 4], [1, 3, 4], [0, 0, 0, 2])
    samples = [sample for part in parts for rank in part for sample in rank.notes.samples]
    assert sorted(samples) == sorted(straight.notes.samples)  # with the same augmentation
    assert Counter(index for _, index, _ in samples) == dict.fromkeys(range(102), 2)
    for name, tensor in parts[-1][0].parameters.items():
        torch.testing.assert_close(tensor, straight.parameters[name], rtol=0, atol=1e-12)


def test_ranks_that_cannot_keep_the_batch_are_refused_with_the_arithmetic(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, set_config(config, max_steps=1), TOY.use)
    ranks = outcomes(run_training, 5, config, TOY.use)
    assert [rank.exit_code for rank in ranks] == [2] * 5
    assert (
        "global_batch_size: expected a multiple of micro_batch_size x world_size = 4 x 5 = 20, "
        "got 24 (20 or 40 would do)"
    ) in ranks[0].output


def contents(run_dir: str) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of each file of a run, but for the lock and what the ranks say."""
    paths = [path for path in sorted(Path(run_dir).rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.name != "lock" and path.parent.name != "logs"]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_finished_run_rewrites_nothing(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, config, TOY.use)
    before = contents(run_dir)
    assert {Path(name).name for name in before} > {"metrics.jsonl", "status.json", "manifest.json"}
    ranks = outcomes(run_training, 2, config, TOY.use)
    assert [rank.exit_code for rank in ranks] == [0, 0]
    assert "nothing left to do: step" in ranks[0].output
    assert contents(run_dir) == before


def test_evaluation_that_was_still_due_is_done_once(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, max_steps=7)
    values(run_training, 2, config, TOY.use)
    manifest = Path(run_dir, "checkpoints", "step_00000007", "manifest.json")
    whole = json.loads(manifest.read_text())
    del whole["sha256"]
    # As if it had been stopped before its last evaluation.
    progress = {**whole["progress"], "evaluated_step": 4}
    manifest.write_text(manifest_text({**whole, "progress": progress, "valid_loss": None}))
    [rank, _] = outcomes(run_training, 2, config, TOY.use)
    assert (rank.exit_code, "valid: loss" in rank.output) == (0, True)
    mended = json.loads(manifest.read_text())
    assert (mended["progress"], mended["valid_loss"]) == (whole["progress"], whole["valid_loss"])
    assert [line["step"] for line in read_metrics(run_dir, "valid")] == [4, 7]
    before = contents(run_dir)
    [rank, _] = outcomes(run_training, 2, config, TOY.use)
    assert (rank.exit_code, "valid: loss" in rank.output) == (0, False)
    assert contents(run_dir) == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_were_used_are_not_loaded_again(
    run_dir: str, tmp_path: Path, num_workers: int
) -> None:
    log = tmp_path / "loaded"
    toy = Toy(num_samples=102, log=str(log))
    config = set_config(CONFIG, run_dir=run_dir, epochs=1, data__num_workers=num_workers)
    values(run_training, 2, set_config(config, max_steps=4), toy.use)
    log.unlink()
    ranks = values(run_training, 2, config, toy.use)
    used = Counter(index for rank in ranks for _, index, _ in rank.notes.samples)
    assert len(used) == 6
    used[0] += 2  # each rank looks at the first sample at the start, to compare
    assert Counter(map(int, log.read_text().split())) == used
