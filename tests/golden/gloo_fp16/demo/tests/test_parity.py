"""Engine: parity finds what makes several processes differ from one, and what is a mistake."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .. import parity, parity_look, parity_ranks, train
from ..config import Config
from ..engine.loader import Batch
from ..parity_report import Result, explanation, table
from .harness import Outcome, outcomes
from .scenario import set_config
from .toy import Toy, ToyNet, loss_sum, num_targets, put

CONFIG = parity.plain(
    set_config(
        Config(),
        device="cpu",
        dtype="float64",
        global_batch_size=16,
        timeout_s=20.0,
    )
)
STEPS = 2


@dataclass(frozen=True)
class Mistaken:
    """The toy task with a mistake in it; `use` puts both in place of yours."""

    toy: Toy = Toy()  # noqa: RUF009 (frozen: no case can change another's)
    mistake: str = ""

    def use(self) -> None:
        """Replace the model, the data and the task in this process."""
        self.toy.use()
        yours: Any = train
        if self.mistake == "a mean":
            put(yours.task, loss_sum=mean_loss)
        elif self.mistake == "targets":
            put(yours.task, num_targets=padded_targets)
        elif self.mistake in MODELS:
            put(train, build_model=lambda _: MODELS[self.mistake](self.toy))
        elif self.mistake == "NaN":
            put(yours.task, loss_sum=lambda *given: loss_sum(*given) * torch.nan)
        elif self.mistake == "samples":
            sets = self.toy.build_datasets()
            sets[0].inputs += os.getpid() % 1000 / 1000
            put(yours.data, build_datasets=lambda _: sets)
        put(parity_ranks, data=yours.data)
        put(parity_look, data=yours.data, task=yours.task)


class Counting(ToyNet):
    """Gives more from forward to forward."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy)
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions, as many times as it was called."""
        self.count += 1
        return super().forward(inputs) * self.count


class Drawing(ToyNet):
    """Adds noise from a generator of its own."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions from other inputs in each forward."""
        noise = torch.randn(inputs.shape, generator=self.generator, dtype=inputs.dtype)
        return super().forward(inputs + noise)


class DrawingInNumPy(ToyNet):
    """Adds noise that no mode of torch sees."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions from inputs that NumPy has changed."""
        return super().forward(inputs + torch.tensor(np.random.rand(*inputs.shape)))


MODELS = {"kept": Counting, "unseeded": Drawing, "NumPy": DrawingInNumPy}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the samples, where the sum is expected."""
    return loss_sum(model, batch) / len(batch["mask"])


def padded_targets(batch: Batch) -> int:
    """One more for each batch."""
    return num_targets(batch) + 1


def prepared(task: Mistaken, function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a process that trains the toy task."""
    task.use()
    return function(*args)


Compare = Callable[..., Result]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`parity.compare`, of a toy task and with some settings changed."""

    def compare(task: Mistaken, **changes: Any) -> Result:
        def outcomes_of_toy(function: Any, *args: Any, **named: Any) -> list[Outcome]:
            return outcomes(partial(prepared, task, function), *args, **{**named, "timeout_s": 60})

        monkeypatch.setattr(parity, "outcomes", outcomes_of_toy)
        return parity.compare(set_config(CONFIG, **changes), 2, STEPS)

    return compare


def said(result: Result) -> str:
    """The explanation in one text."""
    return "\n".join(explanation(result)[0])


def test_equal_trainings_are_equal(compare: Compare) -> None:
    result = compare(Mistaken(Toy(is_ragged=True)))
    assert result.causes == ()
    assert result.configured.one.steps[STEPS].moved > 0
    assert explanation(result) == (["equal within the rounding of float64"], True)
    steps = table(result)
    assert [line.split()[0] for line in steps] == ["step", "0", "1", "2"]


@pytest.mark.parametrize(
    ("toy", "changes", "causes"),
    [
        (Toy(dropout=0.5), {}, ["draws"]),
        (Toy(has_batch_norm=True), {}, ["statistics"]),
        (Toy(), {"ddp__comm_hook": "bf16"}, ["comm_hook"]),
        (Toy(is_masked=True, noise=0.5), {"dtype": "float32"}, ["rounding"]),
    ],
    ids=["dropout", "BatchNorm", "hook", "float32"],
)
def test_cause_is_measured(
    compare: Compare, toy: Toy, changes: dict[str, Any], causes: list[str]
) -> None:
    result = compare(Mistaken(toy), **changes)
    assert list(result.causes) == causes
    assert max(result.bare.largest()) < 1e-9
    assert max(result.alone(causes[0]).largest()) > 1e-8
    assert explanation(result)[1]
    if result.configured.first() is not None:
        # A scale of the loss that is too high costs the first step, in float32 alone.
        assert result.configured.first() in ((1, 2) if causes == ["rounding"] else (1,))
        assert f"  {causes[0]}: " in said(result)


def test_causes_are_told_apart(compare: Compare) -> None:
    result = compare(Mistaken(Toy(dropout=0.5, has_batch_norm=True)))
    assert result.causes == ("draws", "statistics")
    assert max(result.bare.largest()) < 1e-9
    assert min(result.alone(cause).largest()[0] for cause in result.causes) > 1e-3
    assert re.search(r"^  no draws, no statistics  .*e-1\d$", said(result), re.MULTILINE)


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("a mean", r"loss_sum of 16 samples is \S+, of their halves \S+ in all: a mean in place"),
        ("targets", r"num_targets of 16 samples is (\d+), of their halves (?!\1\b)\d+ in all"),
        ("kept", "something is kept from one forward to the next"),
        ("unseeded", r"give a loss of \S+, and then of \S+: drawn where no seed reaches"),
        ("NumPy", r"of their halves .*, or what random and numpy draw, which can't be held still"),
        ("samples", r"data.py: sample \d+ is another one in another process"),
    ],
)
def test_mistake_is_found(compare: Compare, mistake: str, hint: str) -> None:
    result = compare(Mistaken(Toy(dropout=0.5, is_masked=True), mistake))
    lines, is_explained = explanation(result)
    assert not is_explained
    assert re.search(rf"^not explained:\n(.*\n)*.*{hint}", "\n".join(lines), re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--processes", "1"], "processes: expected at least 2, got 1"),
        (["--steps", "0"], "steps: expected at least 1, got 0"),
        (["--global_batch_size", "7"], "global_batch_size: expected a multiple of"),
        (["--devise", "cpu"], "devise: no such setting"),
    ],
)
def test_nonsense_is_refused(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity.main(words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_training_that_stands_still_is_not_called_equal(compare: Compare) -> None:
    result = compare(Mistaken(mistake="NaN"))
    assert result.configured.first() is None
    [line], is_explained = explanation(result)
    assert line.startswith("no weight has moved")
    assert not is_explained


def stand_still(_init_method: str, failing: int) -> None:
    """One rank fails, the others wait for what never comes."""
    if int(os.environ["RANK"]) == failing:
        raise ValueError("as if a file were missing")
    time.sleep(600)


def test_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    began = time.monotonic()
    waiting, failed = outcomes(stand_still, 2, 1, timeout_s=300.0, grace_s=1.0)
    assert time.monotonic() - began < 60
    assert (waiting.exit_code, failed.exit_code) == (None, 1)
    assert "as if a file were missing" in failed.output


def interrupt(_init_method: str, process: int, file: Path) -> None:
    """Press Ctrl-C in a process, and go on."""
    file.write_text(str(os.getpid()))
    os.kill(process, signal.SIGINT)
    time.sleep(600)


def test_interrupt_leaves_no_process_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Any:
        return outcomes(interrupt, 1, os.getpid(), tmp_path / "pid", timeout_s=300.0)

    monkeypatch.setattr(parity, "on_ranks", interrupted)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert parity.main(["--device", "cpu"]) == parity.EXIT_STOPPED
    finally:
        signal.signal(signal.SIGINT, heard)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # until the server of forks has noticed
        if not is_running(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} goes on")


def is_running(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_refusal_of_a_rank_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--device", "abacus", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "device: expected" in said
    assert said.count("\n") == 1
