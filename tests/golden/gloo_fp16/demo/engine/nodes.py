"""Engine: what a launcher must be told of this machine, where several train. No torch.

`python -m PACKAGE.engine.nodes HOST:PORT RUN_ID [LIMIT_S]` prints it for a shell to read, refuses
what could only end in a time-out, and waits for the machine at which all meet.
"""

import contextlib
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .launch import NotMet, Refused
from .reach import interface_of, rows_of

_SAY_S = 15.0


@dataclass(frozen=True)
class Node:
    """This machine, as those see it that it trains with."""

    address: str
    """Its own, on the way to the machine at which all meet."""
    interface: str
    """Which has that address; empty where the system does not say."""
    is_host: bool
    """Whether all meet at this one."""

    def __str__(self) -> str:
        """Say it in words for a shell to read: address, true or false, interface."""
        return f"{self.address} {str(self.is_host).lower()} {self.interface}"


def look_up(endpoint: str, run_id: str, limit_s: float | None = None) -> Node:
    """Find out how this machine reaches HOST:PORT; with a limit, wait until it does.

    Raises:
        Refused: it never will, others could not, or somebody else has the port.
        NotMet: it does not, in so many seconds.
    """
    host, port = split_endpoint(endpoint)
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise Refused(
            f"RDZV_ENDPOINT: {name} knows no address of {host!r} ({error.strerror}): give the "
            "address itself, or a name that every machine knows"
        ) from None
    family, _, _, _, place = found[0]
    address = str(place[0])
    if address.startswith("127.") or address == "::1":
        raise Refused(
            f"RDZV_ENDPOINT: for {name}, {host!r} is {address}, at which every machine finds only "
            "itself: give the address of one machine in their network"
        )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing, and chooses the way
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise Refused(
            f"RDZV_ENDPOINT: {name} has no way to {host} = {address} ({error.strerror}): check the "
            "network, or give another address of that machine"
        ) from None
    if own == address:
        check_port(port, run_id)
    elif limit_s is not None:
        wait_for(host, address, port, limit_s)
    return Node(own, interface_of(own), own == address)


def wait_for(host: str, address: str, port: int, limit_s: float) -> None:
    """Wait until the machine at which all meet lets this one in; say now and then for what.

    Raises:
        NotMet: it does not, in that time.
    """
    began = said = time.monotonic()
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
        except OSError as error:
            now = time.monotonic()
            waits = f"{socket.gethostname()} waits for {host}:{port} = {address} ({error})"
            if now - began > limit_s:
                raise NotMet(
                    f"{waits}, for {limit_s:g} s now: start the same command there, and open the "
                    "port; JOIN_TIMEOUT_S waits longer"
                ) from None
            if now - said > _SAY_S:
                said = now
                print(f"{waits}: {now - began:.0f} s", file=sys.stderr, flush=True)
            time.sleep(0.5)
            continue
        return


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        Refused: it is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise Refused(f"RDZV_ENDPOINT: expected HOST:PORT, got {endpoint!r}")
    return host.strip("[]"), int(port)


def check_port(port: int, run_id: str) -> None:
    """Refuse a port at which somebody else listens; another launcher of this run may.

    Raises:
        Refused: with the process that listens, where the system tells.
    """
    try:
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
            # As the store does it: what only lingers is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        who, words = holder_of(port)
        if run_id in words:
            return
        raise Refused(
            f"RDZV_ENDPOINT: port {port} of {socket.gethostname()} can't be had "
            f"({error.strerror}{who}): choose another one, the same on all machines"
        ) from None


def holder_of(port: int) -> tuple[str, list[str]]:
    """The process that listens at a port, in words, and its command; nothing where hidden."""
    sockets = {f"socket:[{number}]" for number in _listening_at(port)}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(str(link.readlink()) in sockets for link in directory.glob("fd/*")):
                command = (directory / "cmdline").read_text(errors="replace").split("\0")
                return f", process {directory.name} has it: {' '.join(command)[:80]}", command
    return "", []


def _listening_at(port: int) -> list[str]:
    """The numbers of the sockets that listen at a port, from Linux's tables."""
    found = []
    for table in ("tcp", "tcp6"):
        for _, local, _, state, *fields in rows_of(f"/proc/net/{table}")[1:]:
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(fields[5])
    return found


if __name__ == "__main__":
    try:
        print(look_up(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])))
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except NotMet as error:
        sys.exit(str(error))
