"""Yours: the settings of your model and your data. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass

CHANGEABLE: tuple[str, ...] = ()
"""Settings of these two that a run may be resumed with another value of."""


@dataclass(frozen=True)
class ModelConfig:
    """What `build_model` needs to know."""

    channels: int = 16
    """Channels after the first convolution; twice as many after the second."""


@dataclass(frozen=True)
class DataConfig:
    """What `build_datasets` needs to know."""

    valid_every: int = 5
    """Every how many-th sample is kept for validation."""
