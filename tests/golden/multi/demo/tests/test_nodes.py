"""Engine: what a machine finds out about itself before it meets the others."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ..engine import nodes
from ..engine.launch import NotMet, Refused
from ..engine.rundir import PACKAGE

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
    checked: list[tuple[Any, ...]] = []
    free = True

    def is_free(*words: Any) -> bool:
        checked.append(words)
        return free

    monkeypatch.setattr(socket, "socket", Way)
    monkeypatch.setattr(nodes, "is_free", is_free)
    monkeypatch.setattr(nodes, "interface_of", lambda address: f"the one of {address}")
    resolve(monkeypatch, "10.0.0.9")
    assert str(nodes.look_up("node0:29500", RUN_ID)) == "10.0.0.7 false the one of 10.0.0.7"
    assert not checked, "the port is the other machine's"
    resolve(monkeypatch, "10.0.0.7")
    assert str(nodes.look_up("node0:29500", RUN_ID)) == "0xa.0.0.7 true the one of 10.0.0.7"
    assert checked == [(29500, RUN_ID, ())]
    free = False  # another launcher of the same run has opened the store
    assert str(nodes.look_up("node0:29500", RUN_ID)) == "10.0.0.7 false the one of 10.0.0.7"


def test_host_is_the_first_of_all_in_the_order_of_the_launcher() -> None:
    for number in (1, 9, 10, 192, 255):
        own = f"{number}.0.0.7"
        spelling, _, _ = str(nodes.Node(own, "eth0", is_host=True)).split()
        assert socket.inet_ntoa(socket.inet_aton(spelling)) == own
        assert spelling < min(f"{other}.0.0.1" for other in range(1, 256))
    assert str(nodes.Node("fd00::1", "eth0", is_host=True)) == "fd00::1 true eth0"


def test_port_of_another_process_is_refused_with_its_name(listener: int) -> None:
    words = f"port {listener} of {socket.gethostname()} can't be had .*, process {os.getpid()} has"
    with pytest.raises(Refused, match=words):
        nodes.is_free(listener, RUN_ID, [])


def test_launcher_of_this_run_is_known_by_its_settings(
    listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["python", "--rdzv-id", "mine", "-m", f"{PACKAGE}.train", "--epochs", "3"]
    monkeypatch.setattr(nodes, "holder_of", lambda _: (", process 7 has it", command))
    assert not nodes.is_free(listener, "mine", ["--epochs", "3"])
    words = "process 7 has it, for the same RDZV_ID with other settings"
    for settings in ([], ["3"], ["--epochs", "4"], ["--seed", "1", "--epochs", "3"]):
        with pytest.raises(Refused, match=words):
            nodes.is_free(listener, "mine", settings)
    with pytest.raises(Refused, match=r"process 7 has it\): choose another one"):
        nodes.is_free(listener, "yours", ["--epochs", "3"])


def test_name_may_become_known_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo("10.0.0.7", 29500, type=socket.SOCK_DGRAM)
    unknown = [socket.gaierror(socket.EAI_NONAME, "no such name")] * 2

    def getaddrinfo(*_: object, **__: object) -> Any:
        if unknown:
            raise unknown.pop()
        return known

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    _, place = nodes.find_address("node0", 29500, nodes.Patience(20.0))
    assert place == ("10.0.0.7", 29500)
    unknown.extend([socket.gaierror(socket.EAI_NONAME, "no such name")] * 9)
    words = r"knows no address of 'node0' \(no such name\), for 1 s now: give the address itself"
    with pytest.raises(NotMet, match=words):
        nodes.find_address("node0", 29500, nodes.Patience(1.0))


def test_host_is_waited_for(listener: int) -> None:
    nodes.wait_for("node0", "127.0.0.1", listener, nodes.Patience(1.0))
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()[1]
    words = f"waits for node0:{closed} = 127.0.0.1 .*refused.*, for 1 s now: start the same"
    start = time.monotonic()
    with pytest.raises(NotMet, match=words):
        nodes.wait_for("node0", "127.0.0.1", closed, nodes.Patience(1.0))
    assert time.monotonic() - start < 10


def test_free_port_is_none(listener: int) -> None:
    with socket.create_server(("", 0)) as other:
        free = other.getsockname()[1]
    assert free != listener
    assert nodes.is_free(free, RUN_ID, [])


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_kernel_without_ipv6_has_a_free_port(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        taken = server.getsockname()[1]
        real = socket.socket

        def only_ipv4(family: int) -> socket.socket:
            if family == socket.AF_INET6:
                raise OSError(number, "no IPv6")
            return real(family)

        monkeypatch.setattr(socket, "socket", only_ipv4)
        with pytest.raises(OSError, match="in use"):
            nodes.bind(taken)
    nodes.bind(taken)


def test_refusal_is_one_line() -> None:
    command = [sys.executable, "-m", nodes.__name__, "node0", RUN_ID, "1", "--epochs", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "RDZV_ENDPOINT: expected HOST:PORT, got 'node0'\n"
