"""Yours: the data. Map-style data sets: nothing here knows of ranks, workers or epochs.

Augmentation draws from `random`, `numpy.random` or torch as anyone would: all three are seeded
from (seed, epoch, index) before each sample is loaded, in workers and without them.
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from .settings import DataConfig


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits of scikit-learn (UCI Optical Recognition): 8x8 images, ten classes."""

    def __init__(self, images: Tensor, labels: Tensor, max_shift: int) -> None:
        self.images = images  # (N, 1, 8, 8), values 0 to 1
        self.labels = labels  # (N,)
        self.max_shift = max_shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.max_shift:
            image = shift(image, self.max_shift)
        return image, self.labels[index]


def shift(image: Tensor, most: int) -> Tensor:
    """Move an image (C, H, W) by up to `most` pixels in each direction; zeros come in."""
    height, width = image.shape[-2:]
    padded = torch.nn.functional.pad(image, (most, most, most, most))
    top, left = random.randint(0, 2 * most), random.randint(0, 2 * most)
    return padded[..., top : top + height, left : left + width]


def build_datasets(config: DataConfig) -> tuple[Digits, Digits]:
    """The training set, with augmentation, and the validation set, without."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    is_valid = torch.arange(len(images)) % config.valid_every == 0
    return (
        Digits(images[~is_valid], labels[~is_valid], config.max_shift),
        Digits(images[is_valid], labels[is_valid], max_shift=0),
    )
