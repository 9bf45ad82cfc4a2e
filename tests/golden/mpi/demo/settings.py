"""Yours: the settings of your model and your data. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass

BLOCK_SIZE = 512
"""Bytes of a sample, and the longest context of the model. A constant, no setting: every sample
has as many targets, and `TARGETS_PER_SAMPLE` of task.py says so without asking the other ranks."""

CHANGEABLE = ("model.dropout", "data.train_bytes")
"""Settings of these two that a run may be resumed with another value of; the others are refused,
for with them the weights, or what they were validated on, would mean something else."""


@dataclass(frozen=True)
class ModelConfig:
    """What `build_model` needs to know."""

    layers: int = 2
    """Transformer blocks."""
    heads: int = 2
    """Attention heads of each block."""
    width: int = 32
    """Features of each position; a multiple of 2 x `heads`."""
    dropout: float = 0.0
    """Share of the features that are zeroed in training, in [0, 1)."""

    def __post_init__(self) -> None:
        """Refuse a width that the heads can't share."""
        if min(self.layers, self.heads, self.width) < 1:
            raise ValueError(
                "expected layers, heads and width of at least 1, "
                f"got {self.layers}, {self.heads} and {self.width}"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"expected a width that is a multiple of 2 x heads = {2 * self.heads}, "
                f"got {self.width}"
            )


@dataclass(frozen=True)
class DataConfig:
    """What `build_datasets` needs to know."""

    valid_one_in: int = 10
    """One in so many files is kept for validation, by a hash of its name."""
    train_bytes: int | None = 1_000_000
    """Train on the first so many bytes of the training files; none: on all."""
    valid_bytes: int | None = 50_000
    """Validate on the first so many bytes of the validation files; none: on all."""

    def __post_init__(self) -> None:
        """Refuse what leaves a split empty."""
        if self.valid_one_in < 2:
            raise ValueError(f"expected valid_one_in of at least 2, got {self.valid_one_in}")
        for name in ("train_bytes", "valid_bytes"):
            number = getattr(self, name)
            if number is not None and number <= BLOCK_SIZE:
                raise ValueError(f"expected {name} of more than {BLOCK_SIZE}, got {number}")
