"""Engine: parity finds what makes several processes differ from one, and what is a mistake."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from .. import parity, parity_ranks, train
from ..config import Config
from ..engine.loader import Batch
from .harness import Outcome, outcomes
from .scenario import set_config
from .toy import Toy, ToyNet, loss_sum, num_targets, put

CONFIG = parity.plain(
    set_config(
        Config(),
        device="cpu",
        dtype="float64",
        global_batch_size=16,
        {% if cookiecutter.accumulation %}
        micro_batch_size=4,
        {% endif %}
        timeout_s=20.0,
    )
)
STEPS = 2


@dataclass(frozen=True)
class Mistaken:
    """The toy task with a mistake in it; `use` puts both in place of yours."""

    toy: Toy = Toy()  # noqa: RUF009
    mistake: str = ""

    def use(self) -> None:
        """Replace the model, the data and the task in this process."""
        self.toy.use()
        yours: Any = train
        if self.mistake == "a mean":
            put(yours.task, loss_sum=mean_loss)
        elif self.mistake == "targets":
            put(yours.task, num_targets=padded_targets)
        elif self.mistake == "kept":
            put(train, build_model=lambda _: Counting(self.toy))
        elif self.mistake == "samples":
            sets = self.toy.build_datasets()
            sets[0].inputs += os.getpid() % 1000 / 1000
            put(yours.data, build_datasets=lambda _: sets)
        put(parity_ranks, data=yours.data, task=yours.task)


class Counting(ToyNet):
    """Gives more from forward to forward."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy)
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Predictions, as many times as it was called."""
        self.count += 1
        return super().forward(inputs) * self.count


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


Compare = Callable[..., parity.Result]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`parity.compare`, of a toy task and with some settings changed."""

    def compare(task: Mistaken, **changes: Any) -> parity.Result:
        def outcomes_of_toy(function: Any, *args: Any, **named: Any) -> list[Outcome]:
            return outcomes(partial(prepared, task, function), *args, **{**named, "timeout_s": 60})

        monkeypatch.setattr(parity, "outcomes", outcomes_of_toy)
        return parity.compare(set_config(CONFIG, **changes), 2, STEPS)

    return compare


def said(result: parity.Result) -> str:
    """The explanation in one text."""
    return "\n".join(parity.explanation(result)[0])


def test_equal_trainings_are_equal(compare: Compare) -> None:
    result = compare(Mistaken(Toy(is_ragged=True)))
    assert result.causes == ()
    assert result.configured.one.steps[STEPS].moved > 0
    assert parity.explanation(result) == (["equal within the rounding of float64"], True)
    steps = parity.table(result)
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
    assert parity.explanation(result)[1]
    if result.configured.first() is not None:
        assert result.configured.first() == 1
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
        ("samples", r"data.py: sample \d+ is another one in another process"),
    ],
)
def test_mistake_is_found(compare: Compare, mistake: str, hint: str) -> None:
    result = compare(Mistaken(Toy(dropout=0.5, is_masked=True), mistake))
    lines, is_explained = parity.explanation(result)
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


def test_refusal_of_a_rank_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--device", "abacus", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "device: expected" in said
    assert said.count("\n") == 1
