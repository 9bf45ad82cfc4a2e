"""Yours: the data."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from .settings import DataConfig


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images of 8x8 pixels and their labels; every so many-th one is for validation."""

    def __init__(self, is_train: bool, valid_every: int) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.images)) % valid_every == 0) != is_train
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen] / 16
        self.labels = torch.tensor(digits.target, dtype=torch.int64)[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def build_datasets(config: DataConfig) -> tuple[Digits, Digits]:
    """The training set and the validation set."""
    return Digits(True, config.valid_every), Digits(False, config.valid_every)
