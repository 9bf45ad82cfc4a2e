"""Engine: the interface on the way to the other machines, where nobody has named one. No torch."""

import ipaddress
import os
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from .launch import Launch
from .reach import Store, interface_of

_LOOK_S = 0.05  # between two looks into the store


def choose_interface(launch: Launch, store: Store, timeout_s: float) -> None:
    """Let the group use the interface on the way to the others, unless one is set. Collective.

    By itself gloo takes the address of a machine's own name, which often is 127.0.1.1. On rank 0's
    machine the name at which all meet may be the same: it takes the way to one of the others.
    """
    if launch.local_world_size == launch.world_size:
        return
    own = _own_address(_meeting_host(launch))
    if own and not _is_loopback(own):
        store.set("address", own)
    deadline = time.monotonic() + timeout_s
    came = store.add("have looked", 1)
    if not own:
        return  # they meet at a file
    while not store.check(["address"]):
        if came == launch.world_size or time.monotonic() > deadline:
            return  # a single machine that plays several
        time.sleep(_LOOK_S)
        came = store.add("have looked", 0)
    if _is_loopback(own):
        own = _own_address(store.get("address").decode())
    if interface := interface_of(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def start_of_way(family: int, place: Any) -> str:
    """The address of this machine from which it would send to a place.

    Raises:
        OSError: there is no way.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing, and chooses the way
        return str(probe.getsockname()[0])


def _meeting_host(launch: Launch) -> str:
    if launch.init_method == "env://":
        return os.environ["MASTER_ADDR"]
    return urlsplit(launch.init_method).hostname or ""


def _own_address(host: str) -> str:
    """This machine's address on the way to a host; empty where there is none."""
    found = []
    with suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
    for family, _, _, _, place in found:
        with suppress(OSError):
            return start_of_way(family, place)
    return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
