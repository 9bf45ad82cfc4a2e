"""Engine: what a launcher must be told of this machine, where several train. No torch.

`python -m PACKAGE.engine.nodes HOST:PORT RUN_ID` prints it for a shell to read, and refuses what
could only end in a time-out.
"""

import contextlib
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from .launch import Refused

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


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


def look_up(endpoint: str, run_id: str) -> Node:
    """Find out how this machine reaches HOST:PORT.

    Raises:
        Refused: it does not, others could not, or somebody else has the port.
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
    return Node(own, interface_of(own), own == address)


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
        for _, local, _, state, *fields in _rows_of(f"/proc/net/{table}")[1:]:
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(fields[5])
    return found


def _rows_of(table: str) -> list[list[str]]:
    """The rows of one of Linux's tables, in words; none on another system."""
    try:
        return [line.split() for line in Path(table).read_text().splitlines()]
    except OSError:
        return []


def interface_of(address: str) -> str:
    """The name of the interface that has an address of this machine; empty where unknown."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        names = {row[0]: row[-1] for row in _rows_of("/proc/net/if_inet6")}
        return names.get(packed, "")
    with socket.socket(type=socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            if _address_of(name, asked) == address:
                return name
    return ""


def _address_of(interface: str, asked: socket.socket) -> str | None:
    """The IPv4 address of an interface; None where it has none, or the system does not say."""
    try:
        import fcntl

        answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])


if __name__ == "__main__":
    try:
        print(look_up(*sys.argv[1:]))
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
