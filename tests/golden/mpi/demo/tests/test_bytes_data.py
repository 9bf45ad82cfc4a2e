"""Yours: the bytes that are trained on, the settings that choose them, what counting reaches."""

import math
import os
import random
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from .. import baselines, data
from ..config import check, parse
from ..engine.launch import Launch, Refused
from ..settings import BLOCK_SIZE, DataConfig


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of 60 files in place of Python's own, and some that are left out."""
    for number in range(60):
        path = tmp_path / f"package{number % 3}" / f"module{number:02d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"module {number:02d}\n")
    for name in ("site-packages", "test", "package0/tests", "package0/__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "other.py").write_text("left out\n")
    (tmp_path / "package0" / "notes.txt").write_text("left out\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


def lines_of_splits(one_in: int = 3) -> tuple[list[bytes], list[bytes]]:
    """The lines of both splits."""
    train, valid = data.read_splits(DataConfig(valid_one_in=one_in))
    return train.splitlines(), valid.splitlines()


@pytest.mark.usefixtures("library")
def test_every_file_is_in_one_split_and_none_of_other_packages() -> None:
    train, valid = lines_of_splits()
    assert sorted(train + valid) == [f"module {number:02d}".encode() for number in range(60)]
    assert 10 < len(valid) < 30
    assert len(lines_of_splits(10)[1]) < len(valid)


def test_no_other_file_moves_one_to_the_other_split(library: Path) -> None:
    train, valid = lines_of_splits()
    for path in sorted(library.glob("package1/*.py")):
        path.unlink()
    fewer = lines_of_splits()
    assert len(fewer[0]) + len(fewer[1]) == 40
    assert fewer == ([x for x in train if x in fewer[0]], [x for x in valid if x in fewer[1]])


@pytest.mark.usefixtures("library")
def test_order_is_that_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines_of_splits()
    assert before[0] == sorted(before[0], key=lambda line: (int(line[7:]) % 3, line))
    walk = list(os.walk(sysconfig.get_path("stdlib")))
    kept = [one for one in walk if Path(one[0]).name.startswith("package")]
    turned = [(place, below, names[::-1]) for place, below, names in reversed(kept)]
    monkeypatch.setattr(os, "walk", lambda _: turned)
    assert lines_of_splits() == before


def test_blocks_cover_a_text_and_targets_come_one_later() -> None:
    text = bytes(random.Random(0).choices(range(256), k=3 * BLOCK_SIZE + 100))
    whole = data.Blocks(text, is_shifted=False)
    assert len(whole) == 3
    inputs = [byte for index in range(3) for byte in whole[index][0].tolist()]
    targets = [byte for index in range(3) for byte in whole[index][1].tolist()]
    assert bytes(inputs) == text[: 3 * BLOCK_SIZE]
    assert bytes(targets) == text[1 : 3 * BLOCK_SIZE + 1]


def test_shifted_blocks_start_elsewhere_and_stay_in_the_text() -> None:
    text = bytes(random.Random(0).choices(range(256), k=2 * BLOCK_SIZE + 100))
    shifted = data.Blocks(text, is_shifted=True)
    random.seed(0)
    starts: dict[int, set[int]] = {0: set(), 1: set()}
    for index in [0, 1] * 300:
        inputs, targets = (bytes(part.tolist()) for part in shifted[index])
        block = inputs + targets[-1:]
        assert len(block) == BLOCK_SIZE + 1
        assert inputs[1:] == targets[:-1]
        starts[index].add(text.index(block))
    assert min(starts[0]) >= 0
    assert max(starts[0]) < BLOCK_SIZE
    assert len(starts[0]) > 150
    assert min(starts[1]) >= BLOCK_SIZE
    assert max(starts[1]) == len(text) - BLOCK_SIZE - 1, "the end of the text is met as well"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--model.width 66", "model: expected a width that is a multiple of 2 x heads = 4, got 66"),
        ("--model.heads 0", "model: expected layers, heads and width of at least 1, got "),
        ("--data.valid_one_in 1", "data: expected valid_one_in of at least 2, got 1"),
        ("--data.train_bytes 512", "data: expected train_bytes of more than 512, got 512"),
        ("--data.valid_bytes 0", "data: expected valid_bytes of more than 512, got 0"),
        ("--peak_tflops 0", "peak_tflops: expected more than 0, got 0.0"),
    ],
)
def test_wrong_setting_is_one_line(setting: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        check(parse(setting.split()), Launch())
    assert str(refused.value).startswith(message)


# What counting reaches


TRAIN = b"import os\nimport sys\nimport re\n" * 3 + b"def main():\n    return os\n"
VALID = b"import sys\nreturn zzz\n"


def entropy(text: bytes) -> float:
    """Bits per byte that a text needs under its own counts."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def test_unigram_is_the_entropy_of_a_long_text() -> None:
    text = np.frombuffer(TRAIN * 500, np.uint8)
    reached = baselines.bits(baselines.unigram(text)[text])
    assert reached == pytest.approx(entropy(TRAIN), abs=0.01)
    assert reached > entropy(TRAIN), "adding one costs something"


def slow_probability(context: bytes, byte: int) -> float:
    """Witten-Bell by counting in the text itself, from the longest context down."""
    if not context:
        return (TRAIN.count(bytes([byte])) + 1) / (len(TRAIN) + 256)
    places = [i for i in range(len(context), len(TRAIN)) if TRAIN[:i].endswith(context)]
    lower = slow_probability(context[1:], byte)
    if not places:
        return lower
    followers = [TRAIN[i] for i in places]
    different = len(set(followers))
    return (followers.count(byte) + different * lower) / (len(followers) + different)


def test_trigram_equals_slow_counting() -> None:
    slow = [slow_probability(VALID[max(0, i - 2) : i], byte) for i, byte in enumerate(VALID)]
    fast = baselines.trigram(np.frombuffer(TRAIN, np.uint8), np.frombuffer(VALID, np.uint8))
    assert fast.tolist() == pytest.approx(slow, rel=1e-12)
    assert sum(slow_probability(b"im", byte) for byte in range(256)) == pytest.approx(1)


@pytest.mark.usefixtures("library")
def test_baselines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    baselines.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["unigram", "trigram"]
    unigram, trigram = (float(line.split()[1]) for line in lines[1:])
    assert 0 < trigram < unigram < 8
