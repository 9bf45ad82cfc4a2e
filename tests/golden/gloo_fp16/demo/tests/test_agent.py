"""Engine: a machine's launcher says why the machines do not meet, and waits for none in vain."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from ..engine import agent

ENDED = "the launcher of the machine at node0:29500 has ended, or can't be reached any more: look"
LATE = "not all 2 machines met at node0:29500 within 9 s: start the same command on each"


class Left(Exception):
    """In place of the end of this process."""


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(words: str) -> NoReturn:
        raise Left(words)

    monkeypatch.setattr(agent, "leave", leave)
    monkeypatch.setattr(agent, "_LOOK_S", 0.01)
    for name, value in (("RDZV_ENDPOINT", "node0:29500"), ("NNODES", "2"), ("JOIN_TIMEOUT_S", "9")):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousConnectionError("the store"), ENDED),
        (DistNetworkError("broken pipe"), ENDED),
        (RendezvousTimeoutError(), LATE),
        (DistStoreError("1/2 clients joined"), LATE),
        (RendezvousClosedError(), "the run has ended on the other machines: start it on all"),
        (RendezvousStateError("odd"), "the machines did not meet at node0:29500: odd"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_machines_that_do_not_meet_are_told_why(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchrun() -> None:
        raise error

    monkeypatch.setattr(agent, "torchrun", torchrun)
    monkeypatch.setattr(agent, "leave_when_left", lambda *_: None)
    with pytest.raises(Left) as left:
        agent.main()
    assert str(left.value).startswith(said)


def test_launcher_without_processes_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "has_children", lambda: False)
    start = time.monotonic()
    with pytest.raises(Left, match="left: the machine at node0:29500 does not answer any more"):
        agent.leave_when_left(0.3, "node0:29500")
    assert 0.3 < time.monotonic() - start < 10


def test_launcher_with_processes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True] * 60)  # a hundredth of a second apart
    monkeypatch.setattr(agent, "has_children", lambda: next(looks, False))
    start = time.monotonic()
    with pytest.raises(Left):
        agent.leave_when_left(0.3, "node0:29500")
    assert time.monotonic() - start >= 0.6


def test_process_counts_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first one never asks how its child has ended.
    commands = "sleep 60 & echo $!; exec sleep 60"
    with subprocess.Popen(["sh", "-c", commands], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        monkeypatch.setattr(os, "getpid", lambda: parent.pid)
        try:
            assert agent.has_children()
            os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while ") Z " not in Path(f"/proc/{child}/stat").read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not agent.has_children()
        finally:
            parent.kill()
