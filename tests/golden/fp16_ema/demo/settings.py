"""Yours: the settings of your model and your data. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass

CHANGEABLE = ("model.dropout", "data.max_shift")
"""Settings of these two that a run may be resumed with another value of; the others are refused,
for with them the weights, or what they were validated on, would mean something else."""


@dataclass(frozen=True)
class ModelConfig:
    """What `build_model` needs to know."""

    channels: int = 32
    """Channels after the first convolution; twice as many after the second."""
    dropout: float = 0.1
    """Share of the features that are zeroed in training, in [0, 1)."""


@dataclass(frozen=True)
class DataConfig:
    """What `build_datasets` needs to know."""

    valid_every: int = 5
    """Every how many-th sample is kept for validation."""
    max_shift: int = 1
    """Training images are shifted by up to so many pixels, in each direction."""
