"""Yours: what counting bytes can do, to read the model's bits per byte beside it.

    python -m demo.baselines [--config FILE]

All settings of a training are taken; only those of the data matter. Counts of the training files,
measured on the validation files.
"""

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .config import parse
from .data import read_splits
from .engine.cli import EXIT_REFUSED
from .engine.explain import one_line
from .engine.launch import Refused
from .engine.rundir import PACKAGE

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


def counts_of(text: Bytes, order: int) -> NDArray[np.int64]:
    """How often each run of `order` bytes is in a text: an axis of 256 for each byte."""
    codes = np.zeros(max(0, len(text) - order + 1), np.int64)
    for place in range(order):
        codes = codes * 256 + text[place : len(text) - order + 1 + place]
    counts = np.bincount(codes, minlength=256**order)
    return counts.reshape((256,) * order)


def unigram(train: Bytes) -> Floats:
    """Probability of each byte (256,): its count and one more (Laplace's rule)."""
    counts = counts_of(train, 1)
    result: Floats = (counts + 1) / (counts.sum() + 256)
    return result


def interpolated(counts: NDArray[np.int64], contexts: NDArray[np.intp], lower: Floats) -> Floats:
    """Witten-Bell: the context's own counts, and `lower` as often as it had different successors.

    Args:
        counts: of each context and successor (contexts, 256).
        contexts: the context of each place, and its successor (2, N).
        lower: the probability of each place in the shorter context (N,).
    """
    context, successor = contexts
    total = counts.sum(axis=1)[context]
    different = np.count_nonzero(counts, axis=1)[context]
    known = (counts[context, successor] + different * lower) / np.maximum(total + different, 1)
    # Where the context is new, only the shorter one knows anything.
    result: Floats = np.where(total == 0, lower, known)
    return result


def trigram(train: Bytes, valid: Bytes) -> Floats:
    """Probability of each byte of `valid` after the two before it; the first two have fewer."""
    single = unigram(train)[valid]
    places = valid.astype(np.intp)
    first, second = places[:-1], places[1:]
    double = interpolated(counts_of(train, 2), np.stack([first, second]), single[1:])
    contexts = np.stack([first[:-1] * 256 + second[:-1], places[2:]])
    triple = interpolated(counts_of(train, 3).reshape(256**2, 256), contexts, double[1:])
    return np.concatenate([single[:1], double[:1], triple])


def bits(probabilities: Floats) -> float:
    """Bits per byte of a text whose bytes had these probabilities."""
    return float(-np.log2(probabilities).mean())


def main(argv: Sequence[str]) -> None:
    """Print both baselines."""
    train, valid = (np.frombuffer(text, np.uint8) for text in read_splits(parse(argv).data))
    if min(len(train), len(valid)) == 0:
        raise Refused("data: expected bytes in both splits, got none")
    print(f"{len(train):,} training bytes, {len(valid):,} validation bytes")
    print(f"unigram  {bits(unigram(train)[valid]):.3f} bits per byte (add-one)")
    print(f"trigram  {bits(trigram(train, valid)):.3f} bits per byte (Witten-Bell)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        print(f"{PACKAGE}: {one_line(str(error))}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
