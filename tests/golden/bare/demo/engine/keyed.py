"""Engine: randomness as a function of a position, never of what was drawn before.

Whatever is drawn for a sample follows from (seed, epoch, index), whatever is drawn in a forward
from (seed, step, micro-batch, rank). So there is no generator to save, to restore at the right
moment, or to lose when the number of ranks changes.
"""

import hashlib
import random

import numpy as np
import torch


def key(seed: int, purpose: str, *position: int) -> int:
    """Mix a seed, a purpose and a position into 63 bits.

    By a hash and not by a sum: (seed 0, epoch 5) and (seed 5, epoch 0) differ, and so do two
    purposes at the same position.
    """
    text = ":".join((purpose, str(seed), *map(str, position)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(value: int, device: torch.device | None = None) -> None:
    """Seed `random`, `numpy.random`, torch's CPU generator and that of `device`.

    `torch.manual_seed` would do for torch, but visits every kind of device at each call (225 to
    405 µs); the generators themselves take 1.5 µs. Does not synchronise the device.
    """
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device is None or device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if hasattr(module, "default_generators"):
        module.default_generators[device.index or 0].manual_seed(value)
    else:
        module.manual_seed(value)


def seed_init(seed: int, device: torch.device) -> None:
    """Before the model is built: the same on every rank."""
    seed_generators(key(seed, "init"), device)


def seed_sample(seed: int, split: str, epoch: int, index: int) -> None:
    """Before a sample is loaded: the same in every process that may load it."""
    seed_generators(key(seed, f"sample-{split}", epoch, index))


def seed_forward(seed: int, step: int, micro: int, rank: int, device: torch.device) -> None:
    """Before a training forward: other dropout masks on every rank and in every micro-batch."""
    seed_generators(key(seed, "forward", step, micro, rank), device)


def seed_evaluation(seed: int, batch: int, rank: int, device: torch.device) -> None:
    """Before an evaluation forward: the same in every evaluation, so that they compare."""
    seed_generators(key(seed, "evaluation", batch, rank), device)
