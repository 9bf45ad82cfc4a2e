"""Yours: the data. Map-style data sets: nothing here knows of ranks, workers or epochs.

Augmentation draws from `random`, `numpy.random` or torch as anyone would: all three are seeded
from (seed, epoch, index) before each sample is loaded, in workers and without them.
"""

import hashlib
import os
import random
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .settings import BLOCK_SIZE, DataConfig

# Installed packages differ between machines, and so does whether Python came with its tests.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into blocks: the bytes of each, and the byte that follows each of them.

    With `is_shifted` a block starts up to its own length later, elsewhere in every epoch: else the
    model would meet each byte only at one position, after one and the same context.
    """

    def __init__(self, text: bytes, *, is_shifted: bool) -> None:
        self.text = torch.from_numpy(np.frombuffer(text, np.uint8).copy())  # (N,)
        self.is_shifted = is_shifted

    def __len__(self) -> int:
        return max(0, len(self.text) - 1) // BLOCK_SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * BLOCK_SIZE
        if self.is_shifted:
            last = len(self.text) - BLOCK_SIZE - 1
            start = min(start + random.randrange(BLOCK_SIZE), last)
        block = self.text[start : start + BLOCK_SIZE + 1].long()
        return block[:-1], block[1:]


def source_files(root: Path) -> list[Path]:
    """The sources of Python's own library below `root`, in one order on every machine."""
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in LEFT_OUT]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def is_valid(name: str, one_in: int) -> bool:
    """Whether the file of this name is kept for validation; no other file has a say in it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % one_in == 0


def read_splits(config: DataConfig) -> tuple[bytes, bytes]:
    """The bytes for training and those for validation: whole files, one after the other.

    They are those of the Python that runs, so every machine needs the same release of it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    splits: tuple[list[Path], list[Path]] = [], []
    for path in source_files(root):
        splits[is_valid(path.relative_to(root).as_posix(), config.valid_one_in)].append(path)
    train, valid = (b"".join(path.read_bytes() for path in paths) for paths in splits)
    return train[: config.train_bytes], valid[: config.valid_bytes]


def build_datasets(config: DataConfig) -> tuple[Blocks, Blocks]:
    """The training set, whose blocks are shifted, and the validation set, where they are not."""
    train, valid = read_splits(config)
    return Blocks(train, is_shifted=True), Blocks(valid, is_shifted=False)
