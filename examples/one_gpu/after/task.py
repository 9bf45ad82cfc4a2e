"""Yours: what is learned, and what is measured. Sums only: means are taken once, over all ranks."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch = tuple[Tensor, Tensor]
"""Images (B, 8, 8) and labels (B,)."""

TARGETS_PER_SAMPLE: int | None = 1
"""Targets of each sample."""


def num_targets(batch: Batch) -> int:
    """How many targets a batch has."""
    return len(batch[1])


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The loss, summed over the targets of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="sum")


def metric_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What evaluation reports, each summed over the targets of a batch."""
    images, labels = batch
    scores = model(images)
    return {
        "loss": cross_entropy(scores, labels, reduction="sum"),
        "accuracy": (scores.argmax(dim=1) == labels).sum(),
    }
