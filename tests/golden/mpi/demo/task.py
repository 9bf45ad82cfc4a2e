"""Yours: what is learned, and what is measured. Sums only: means are taken once, over all ranks.

A target is what the loss is a mean over: here the byte that follows each byte of a block.
"""

import math

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .settings import BLOCK_SIZE, ModelConfig

Batch = tuple[Tensor, Tensor]
"""Bytes (B, T) and the byte after each (B, T)."""

TARGETS_PER_SAMPLE: int | None = BLOCK_SIZE
"""Targets of each sample; None where samples differ (padding, masks), which costs one
all-reduce per step."""


def num_targets(batch: Batch) -> int:
    """How many targets a batch has. Called before the batch moves to the device."""
    return batch[1].numel()


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """The loss in nats, summed over the targets of a batch: a scalar."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def metric_sums(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What evaluation reports, each summed over the targets of a batch; `loss` is one of them.

    `bits` is the same loss in bits: their mean is bits per byte.
    """
    inputs, targets = batch
    scores = model(inputs)
    loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    return {
        "loss": loss,
        "bits": loss / math.log(2),
        "accuracy": (scores.argmax(dim=-1) == targets).sum(),
    }


def flops_per_sample(config: ModelConfig) -> float:
    """Operations that a sample needs in forward and backward, for `tflops` and `mfu`. Optional.

    6 for each weight of a matrix product and target, and 12 x width for each layer and pair of
    positions (Chowdhery et al., PaLM, appendix B). Pairs are counted as if attention were not
    causal, and nothing that a kernel computes twice, as there.
    """
    weights = config.layers * 12 * config.width**2 + 256 * config.width
    pairs = config.layers * config.width * BLOCK_SIZE
    return float(BLOCK_SIZE * (6 * weights + 12 * pairs))
