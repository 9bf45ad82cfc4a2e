"""Engine: whether the machines reach each other, found out at the start. No torch.

A group that can't connect says so late, or never: gloo after five times the time-out, and without
the address that it has given to the others.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .launch import Launch, NotMet, Refused

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ONE_S = 10.0  # for one connection, and for one word
_LOOK_S = 0.05  # between two looks into the store

_UNREACHED = "unreached"
"""Key of the store: the first problem."""


class Store(Protocol):
    """Of a store of torch, what is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a word."""

    def get(self, key: str, /) -> bytes:
        """Wait for a word."""

    def add(self, key: str, amount: int, /) -> int:
        """Count."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Leave a word where another one is."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""


@dataclass(frozen=True)
class Door:
    """Where a machine lets the others in, for this check."""

    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        """Say which it is."""
        return f"rank {self.rank} on {self.host} at {self.address}"


def check_reachable(launch: Launch, store: Store, timeout_s: float) -> None:
    """Let the first rank of each machine connect to that of the next one. Collective.

    Takes some milliseconds; the open ports are closed again.

    Raises:
        NotMet: on every rank, who can't reach whom; or not all have come in time.
        Refused: `GLOO_SOCKET_IFNAME` names no interface of this machine.
    """
    if launch.local_world_size == launch.world_size:
        return
    deadline = time.monotonic() + timeout_s
    with _door_of(launch, store) as own:
        if own is not None:
            following = _next_door(launch, store, deadline)
            if not store.check([_UNREACHED]) and (problem := _knock(following)):
                _claim(
                    store,
                    f"{own} can't reach {following} ({problem}): set GLOO_SOCKET_IFNAME on every "
                    "machine to the interface in the network of all, and open the ports between "
                    "the machines",
                )
        came = store.add("has knocked", 1)
        while came < launch.world_size and not store.check([_UNREACHED]):
            if time.monotonic() > deadline:
                _claim(
                    store,
                    _absence(launch, store)
                    or f"{came} of {launch.world_size} ranks came within {timeout_s:g} s: look at "
                    "the output of the other machines, or give more connect_timeout_s",
                )
            time.sleep(_LOOK_S)
            came = store.add("has knocked", 0)
        if store.check([_UNREACHED]):
            raise NotMet(_heard(launch, store))


def _heard(launch: Launch, store: Store) -> str:
    """The first problem. Rank 0, where the store may live, returns after all have heard it."""
    problem = store.get(_UNREACHED).decode()
    deadline = time.monotonic() + _ONE_S
    have_heard = store.add("have heard", 1)
    while launch.rank == 0 and have_heard < launch.world_size and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        have_heard = store.add("have heard", 0)
    return problem


def _claim(store: Store, problem: str) -> None:
    """Be heard by all ranks, unless another one was first: it has shut its door since."""
    store.compare_set(_UNREACHED, "", problem)


def _absence(launch: Launch, store: Store) -> str:
    """The first rank that has not come, in words; empty where all have."""
    for rank in range(launch.world_size):
        if not store.check([f"door {rank}"]):
            return f"rank {rank} did not come: look at its output, on another machine"
    return ""


@contextmanager
def _door_of(launch: Launch, store: Store) -> Iterator[Door | None]:
    """Let others in at the address that gloo will use, on the first rank of a machine."""
    key = f"door {launch.rank}"
    if launch.local_rank != 0:
        store.set(key, "")
        yield None
        return
    try:
        own = own_address()
    except Refused as error:
        _claim(store, str(error))
        store.set(key, "")
        raise
    with socket.create_server((own, 0)) as server:
        address, port = server.getsockname()[:2]
        door = Door(launch.rank, socket.gethostname(), address, port)
        store.set(key, f"{door.host} {address} {port}")
        yield door


def _next_door(launch: Launch, store: Store, deadline: float) -> Door:
    """The door of the next machine, in the order of the ranks.

    Raises:
        NotMet: a rank before it did not come in time.
    """
    rank, words = launch.rank, ""
    while not words:
        rank = (rank + 1) % launch.world_size
        while not store.check([f"door {rank}"]):
            if time.monotonic() > deadline:
                _claim(store, _absence(launch, store))
                raise NotMet(_heard(launch, store))
            time.sleep(_LOOK_S)
        words = store.get(f"door {rank}").decode()
    host, address, port = words.split()
    return Door(rank, host, address, int(port))


def _knock(door: Door) -> str:
    """Why a door can't be reached; empty where it can."""
    try:
        with socket.create_connection((door.address, door.port), timeout=_ONE_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def own_address() -> str:
    """The address under which gloo will let the others in, by its own rules.

    Raises:
        Refused: `GLOO_SOCKET_IFNAME` names no interface of this machine.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = names.split(",")[0]
        if address := address_of(name):
            return address
        known = ", ".join(known for _, known in socket.if_nameindex() if address_of(known))
        raise Refused(
            f"GLOO_SOCKET_IFNAME: expected an interface of {socket.gethostname()} with an address "
            f"({known}), got {name!r}"
        )
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return "127.0.0.1"


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this machine; empty where unknown."""
    for _, name in socket.if_nameindex():
        if address in (_ipv4_of(name), _ipv6_of(name)):
            return name
    return ""


def address_of(interface: str) -> str | None:
    """The address of an interface; None where it has none, or the system does not say."""
    return _ipv4_of(interface) or _ipv6_of(interface)


def _ipv4_of(interface: str) -> str | None:
    try:
        import fcntl

        with socket.socket(type=socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str | None:
    for row in rows_of("/proc/net/if_inet6"):
        if row[-1] == interface:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
    return None


def rows_of(table: str) -> list[list[str]]:
    """The rows of one of Linux's tables, in words; none on another system."""
    try:
        return [line.split() for line in Path(table).read_text().splitlines()]
    except OSError:
        return []
