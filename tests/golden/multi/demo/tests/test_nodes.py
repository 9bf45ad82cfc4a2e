"""Engine: what a machine finds out about itself before it meets the others."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..engine import nodes
from ..engine.launch import NotMet, Refused

RUN_ID = "a run that nobody else has"


def resolve(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let every name have this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def getaddrinfo(_host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(family, socket.SOCK_DGRAM, 17, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port at which this process listens."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("node0:29500", ("node0", 29500)), ("[fd00::1]:80", ("fd00::1", 80))],
)
def test_endpoint_is_split(endpoint: str, parts: tuple[str, int]) -> None:
    assert nodes.split_endpoint(endpoint) == parts


@pytest.mark.parametrize("endpoint", ["node0", "node0:", ":29500", "node0:x", "node0:70000", ""])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(Refused, match="RDZV_ENDPOINT: expected HOST:PORT, got"):
        nodes.look_up(endpoint, RUN_ID)


def test_unknown_name_is_refused_at_once() -> None:
    words = f"RDZV_ENDPOINT: {socket.gethostname()} knows no address of 'node0.invalid'"
    with pytest.raises(Refused, match=words):
        nodes.look_up("node0.invalid:29500", RUN_ID)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_name_of_every_machine_itself_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, address)
    with pytest.raises(Refused, match=f"'node0' is {address}, at which every machine finds only"):
        nodes.look_up("node0:29500", RUN_ID)


class Way:
    """In place of a socket: the way to any other machine begins at an address."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Way":
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, _: object) -> None:
        """Choose the way."""

    def getsockname(self) -> tuple[str, int]:
        """Say where it begins."""
        return "10.0.0.7", 0


def test_machine_at_which_all_meet_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, str]] = []
    monkeypatch.setattr(socket, "socket", Way)
    monkeypatch.setattr(nodes, "check_port", lambda *words: checked.append(words))
    monkeypatch.setattr(nodes, "interface_of", lambda address: f"the one of {address}")
    resolve(monkeypatch, "10.0.0.9")
    assert str(nodes.look_up("node0:29500", RUN_ID)) == "10.0.0.7 false the one of 10.0.0.7"
    assert not checked, "the port is the other machine's"
    resolve(monkeypatch, "10.0.0.7")
    assert str(nodes.look_up("node0:29500", RUN_ID)) == "10.0.0.7 true the one of 10.0.0.7"
    assert checked == [(29500, RUN_ID)]


def test_port_of_another_process_is_refused_with_its_name(listener: int) -> None:
    words = f"port {listener} of {socket.gethostname()} can't be had .*, process {os.getpid()} has"
    with pytest.raises(Refused, match=words):
        nodes.check_port(listener, RUN_ID)


def test_port_of_another_launcher_of_this_run_is_none(listener: int) -> None:
    command = Path("/proc/self/cmdline").read_text().split("\0")
    nodes.check_port(listener, command[0])


def test_host_is_waited_for(listener: int) -> None:
    nodes.wait_for("node0", "127.0.0.1", listener, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    words = f"waits for node0:{closed} = 127.0.0.1 .*refused.*, for 1 s now: start the same"
    start = time.monotonic()
    with pytest.raises(NotMet, match=words):
        nodes.wait_for("node0", "127.0.0.1", closed, 1.0)
    assert time.monotonic() - start < 10


def test_free_port_is_none(listener: int) -> None:
    with socket.create_server(("", 0)) as other:
        free = other.getsockname()[1]
    assert free != listener
    nodes.check_port(free, RUN_ID)


def test_refusal_is_one_line() -> None:
    command = [sys.executable, "-m", nodes.__name__, "node0", RUN_ID]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "RDZV_ENDPOINT: expected HOST:PORT, got 'node0'\n"
