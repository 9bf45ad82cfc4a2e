"""Yours: the contract of your files. What train.py asks of data.py, model.py and task.py."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .. import data, task
from ..config import Config
from ..engine import keyed
from ..engine.digest import digest
from ..engine.loader import Batch, KeyedDataset, Samples, check_datasets, to_device
from ..model import build_model
from .harness import values

CONFIG = Config()
CPU = torch.device("cpu")
LOOKED_AT = 8
"""Samples of each data set that are loaded here."""


class Split(NamedTuple):
    """One of your two data sets."""

    name: str
    samples: Samples


@cache
def splits() -> tuple[Split, Split]:
    """What `build_datasets` gives, built once."""
    if prepare := getattr(data, "prepare", None):
        prepare(CONFIG.data)
    train_set, valid_set = data.build_datasets(CONFIG.data)
    return Split("training", train_set), Split("validation", valid_set)


def load(split: Split, number: int = LOOKED_AT, epoch: int = 0) -> list[Any]:
    """The first samples of a data set, as the loader gets them."""
    keyed_samples = KeyedDataset(split.samples, CONFIG.seed, split.name)
    return [keyed_samples[epoch, index] for index in range(min(number, len(split.samples)))]


def batch_of(samples: list[Any]) -> Batch:
    """What the loader makes of some samples."""
    collate = getattr(data, "collate", None) or default_collate
    return to_device(collate(samples), CPU, torch.float32)


def new_model() -> nn.Module:
    """The model as every rank builds it."""
    keyed.seed_init(CONFIG.seed, CPU)
    return build_model(CONFIG.model)


def digests_of_data(_: str) -> dict[str, list[str]]:
    """What the first samples are in a process of its own."""
    return {split.name: [digest(sample) for sample in load(split)] for split in splits()}


def test_data_sets_have_a_length_and_an_index() -> None:
    check_datasets(*(split.samples for split in splits()))


@pytest.mark.parametrize("number", [0, 1], ids=["training", "validation"])
def test_sample_depends_only_on_seed_epoch_and_index(number: int) -> None:
    split = splits()[number]
    pairs = zip(load(split), load(split), strict=True)
    differing = [index for index, (a, b) in enumerate(pairs) if digest(a) != digest(b)]
    assert not differing, (
        f"the {split.name} data set gives other samples {differing} when they are loaded again: "
        "draw from random, numpy.random or torch, which are seeded before each sample, and give "
        "a generator of your own, as numpy.random.default_rng(), a seed drawn from one of them"
    )


def test_data_is_the_same_in_every_process() -> None:
    elsewhere = values(digests_of_data, 1)
    assert elsewhere == [digests_of_data("")], (
        "build_datasets depends on the process: on the order of a set, the time, its own random …"
    )


@pytest.mark.parametrize("number", [0, 1], ids=["training", "validation"])
def test_targets_are_counted_as_promised(number: int) -> None:
    samples = load(splits()[number])
    count = task.num_targets(batch_of(samples))
    assert isinstance(count, int)
    if task.TARGETS_PER_SAMPLE is not None:
        assert count == task.TARGETS_PER_SAMPLE * len(samples), (
            "TARGETS_PER_SAMPLE: None where samples have different numbers of targets"
        )
    parts = [task.num_targets(batch_of([sample])) for sample in samples]
    assert count == sum(parts), "the targets of a batch are those of its samples"


def measure(model: nn.Module, samples: list[Any]) -> dict[str, Tensor]:
    """All that task.py sums over a batch."""
    batch = batch_of(samples)
    return {"loss_sum": task.loss_sum(model, batch), **task.metric_sums(model, batch)}


@torch.no_grad()
def measure_whole_and_halves(_: str) -> list[tuple[str, Tensor, float]]:
    """Each sum by name: of a batch, and of its halves added up."""
    model = new_model().eval()
    samples = load(splits()[1])
    half = len(samples) // 2
    whole, *halves = (measure(model, some) for some in (samples, samples[:half], samples[half:]))
    return [
        (name, value, sum(float(part.get(name, 0)) for part in halves))
        for name, value in whole.items()
    ]


def test_loss_and_metrics_are_sums() -> None:
    (sums,) = values(measure_whole_and_halves, 1)
    assert "loss" in {name for name, *_ in sums}, "checkpoints compare by metric_sums' `loss`"
    for name, whole, halves in sums:
        assert whole.shape == (), f"{name} is one number"
        assert whole.isfinite(), f"{name} is no finite number at the start"
        assert halves == pytest.approx(whole.item(), rel=1e-4, abs=1e-6), (
            f"{name} is summed over the targets of a batch, not their mean"
        )


def build_and_differentiate(_: str) -> tuple[str, str, list[str]]:
    """Digests of two new models, and the parameters that a loss gives no gradient."""
    model, other = new_model(), new_model()
    digests = digest(dict(model.state_dict())), digest(dict(other.state_dict()))
    task.loss_sum(model, batch_of(load(splits()[0]))).backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return *digests, [name for name, parameter in trained if parameter.grad is None]


def test_model_follows_from_the_seed_and_all_of_it_is_trained() -> None:
    one, other = values(build_and_differentiate, 2)
    assert len({*one[:2], *other[:2]}) == 1, "build_model depends on something beside the seed"
    assert one[2] == [], "no gradient: use it in the loss, or requires_grad_(False)"
