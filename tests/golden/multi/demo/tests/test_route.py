"""Engine: machines find the interface on their way to each other, whatever their names lead to."""

import os
import socket
import time
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ..engine import route
from ..engine.distributed import gather
from ..engine.launch import Launch
from .harness import values
from .parts import joined
from .toy import put

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
FIRST, SECOND = Launch(0, 0, 2, 1), Launch(1, 0, 2, 1)

Ways = dict[str, str]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """From which of its addresses this machine would send to a name or to an address."""
    ways: Ways = {}

    def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (host, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(route, "start_of_way", lambda _, place: ways[place[0]])
    monkeypatch.setattr(route, "interface_of", lambda address: f"the one of {address}")
    for name in VARIABLES:
        # Set and deleted, so that the end of the test deletes it as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    return ways


def chosen() -> set[str | None]:
    """What the variables say."""
    return {os.environ.get(name) for name in VARIABLES}


@pytest.mark.parametrize("init_method", ["env://", "tcp://node0:29500"])
def test_interface_is_that_on_the_way_to_the_first_machine(ways: Ways, init_method: str) -> None:
    ways["node0"] = "10.0.0.7"
    route.choose_interface(Launch(1, 0, 2, 1, init_method), HashStore(), 1.0)
    assert chosen() == {"the one of 10.0.0.7"}


def test_machine_that_is_itself_by_that_name_looks_for_another(ways: Ways) -> None:
    store = HashStore()
    ways.update({"node0": "10.0.0.7"})
    route.choose_interface(SECOND, store, 1.0)
    for name in VARIABLES:
        del os.environ[name]
    ways.update({"node0": "127.0.1.1", "10.0.0.7": "10.0.0.1"})
    route.choose_interface(FIRST, store, 1.0)
    assert chosen() == {"the one of 10.0.0.1"}


def test_what_is_set_stays(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    ways["node0"] = "10.0.0.7"
    for name in VARIABLES:
        monkeypatch.setenv(name, "mine")
    route.choose_interface(SECOND, HashStore(), 1.0)
    assert chosen() == {"mine"}


@pytest.mark.parametrize("init_method", ["env://", "file:///meet"])
def test_machine_that_plays_several_chooses_nothing_and_waits_for_nobody(
    ways: Ways, init_method: str
) -> None:
    store = HashStore()
    if init_method == "env://":
        store.add("have looked", 1)
    ways["node0"] = "127.0.1.1"
    route.choose_interface(Launch(0, 0, 2, 1, init_method), store, 3600.0)
    assert chosen() == {None}


def test_those_who_do_not_come_are_waited_for_in_vain(ways: Ways) -> None:
    ways["node0"] = "127.0.1.1"
    start = time.monotonic()
    route.choose_interface(FIRST, HashStore(), 0.5)
    assert 0.4 < time.monotonic() - start < 10
    assert chosen() == {None}


def test_one_machine_asks_nobody(ways: Ways) -> None:
    store = HashStore()
    ways["node0"] = "10.0.0.7"
    route.choose_interface(Launch(1, 1, 2, 2), store, 1.0)
    assert chosen() == {None}
    assert store.num_keys() == 0


def test_way_begins_at_an_address_of_this_machine() -> None:
    assert route.start_of_way(socket.AF_INET, ("127.0.0.1", 9)) == "127.0.0.1"


def meet(init_method: str) -> list[str]:
    """Play a machine whose way to the others is its loopback, and say what each has chosen."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    put(route, _own_address=lambda _: "127.0.0.1", _is_loopback=lambda _: False)
    with joined(init_method) as job:
        return gather(job.world, os.environ["GLOO_SOCKET_IFNAME"])


def test_it_is_chosen_before_the_group_is_made() -> None:
    assert values(meet, 2) == [["lo", "lo"]] * 2
