"""Engine: what a launcher must be told of this machine, where several train. No torch.

`python -m PACKAGE.engine.nodes HOST:PORT RUN_ID LIMIT_S [SETTING …]` prints it for a shell, refuses
what could only end in a time-out, and waits for the machine at which all meet; without a limit (an
empty word) for nothing.
"""

import contextlib
import errno
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .launch import NotMet, Refused
from .reach import interface_of, rows_of
from .route import start_of_way

_SAY_S = 15.0


@dataclass(frozen=True)
class Node:
    """This machine, as those see it that it trains with."""

    address: str
    """Its own, on the way to the machine at which all meet."""
    interface: str
    """Which has that address; empty where the system does not say."""
    is_host: bool
    """Whether all meet at this one, and at this launcher of it."""

    def __str__(self) -> str:
        """Say it in words for a shell to read: address, true or false, interface.

        torchrun deals the ranks out in the order of the addresses, as text. The machine that must
        stay gets rank 0, which saves: its address begins with 0x, an old spelling of the same. (Of
        IPv6 there is none.)
        """
        first, dot, rest = self.address.partition(".")
        spelling = f"{int(first):#x}.{rest}" if self.is_host and dot else self.address
        return f"{spelling} {str(self.is_host).lower()} {self.interface}"


class Patience:
    """How long something is waited for, of which a line tells now and then."""

    def __init__(self, limit_s: float) -> None:
        """It begins now."""
        self.limit_s = limit_s
        self._began = self._said = time.monotonic()

    def wait(self, what: str, advice: str) -> None:
        """Wait a moment.

        Raises:
            NotMet: that was long enough.
        """
        now = time.monotonic()
        if now - self._began > self.limit_s:
            waited = f"for {self.limit_s:g} s now"
            raise NotMet(f"{what}, {waited}: {advice}; JOIN_TIMEOUT_S waits longer")
        if now - self._said > _SAY_S:
            self._said = now
            print(f"{what}: {now - self._began:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.5)


def look_up(
    endpoint: str, run_id: str, limit_s: float | None = None, settings: Sequence[str] = ()
) -> Node:
    """Find out how this machine reaches HOST:PORT; with a limit, wait until it does.

    Raises:
        Refused: it never will, others could not, or somebody else has the port.
        NotMet: it does not, in so many seconds.
    """
    host, port = split_endpoint(endpoint)
    name = socket.gethostname()
    patience = None if limit_s is None else Patience(limit_s)
    family, place = find_address(host, port, patience)
    address = str(place[0])
    if address.startswith("127.") or address == "::1":
        raise Refused(
            f"RDZV_ENDPOINT: for {name}, {host!r} is {address}, at which every machine finds only "
            "itself: give the address of one machine in their network"
        )
    try:
        own = start_of_way(family, place)
    except OSError as error:
        raise Refused(
            f"RDZV_ENDPOINT: {name} has no way to {host} = {address} ({error.strerror}): check the "
            "network, or give another address of that machine"
        ) from None
    if own != address and patience is not None:
        wait_for(host, address, port, patience)
    return Node(own, interface_of(own), own == address and is_free(port, run_id, settings))


def find_address(host: str, port: int, patience: Patience | None) -> tuple[int, tuple[Any, ...]]:
    """The family of addresses, and the address, of a name; a name may become known while one waits.

    Raises:
        Refused: it is not known, and there is nothing to wait for.
        NotMet: it did not become known in time.
    """
    advice = "give the address itself, or a name that every machine knows"
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError as error:
            own = socket.gethostname()
            what = f"RDZV_ENDPOINT: {own} knows no address of {host!r} ({error.strerror})"
            if patience is None:
                raise Refused(f"{what}: {advice}") from None
            patience.wait(what, advice)
            continue
        family, _, _, _, place = found[0]
        return family, place


def wait_for(host: str, address: str, port: int, patience: Patience) -> None:
    """Wait until the machine at which all meet lets this one in; say now and then for what.

    Raises:
        NotMet: it does not, in time.
    """
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
        except OSError as error:
            patience.wait(
                f"{socket.gethostname()} waits for {host}:{port} = {address} ({error})",
                "start the same command there, and open the port",
            )
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


def is_free(port: int, run_id: str, settings: Sequence[str]) -> bool:
    """Whether nobody listens at a port; another launcher of this run, with its settings, may.

    Raises:
        Refused: somebody else does; with the process, where the system tells.
    """
    try:
        bind(port)
    except OSError as error:
        who, words = holder_of(port)
        program = f"{__package__.partition('.')[0]}.train"
        if run_id in words:
            if words[-1 - len(settings) :] == [program, *settings]:
                return False
            who += ", for the same RDZV_ID with other settings"
        raise Refused(
            f"RDZV_ENDPOINT: port {port} of {socket.gethostname()} can't be had "
            f"({error.strerror}{who}): choose another one, the same on all machines"
        ) from None
    return True


def bind(port: int) -> None:
    """Take a port and give it back, as the store takes it: for IPv4 alone where there is no IPv6.

    Raises:
        OSError: it can't be had.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family) as probe:
                # What only lingers is no hindrance.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError as error:
            # Python may know IPv6 where the kernel has it switched off.
            is_unknown = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
            if family != socket.AF_INET6 or not is_unknown:
                raise
        else:
            return


def holder_of(port: int) -> tuple[str, list[str]]:
    """The process that listens at a port, in words, and its command; nothing where hidden."""
    sockets = {f"socket:[{number}]" for number in _listening_at(port)}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(str(link.readlink()) in sockets for link in directory.glob("fd/*")):
                command = (directory / "cmdline").read_text(errors="replace").split("\0")[:-1]
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
        endpoint, run_id, limit, *settings = sys.argv[1:]
        print(look_up(endpoint, run_id, float(limit) if limit else None, settings))
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except NotMet as error:
        sys.exit(str(error))
