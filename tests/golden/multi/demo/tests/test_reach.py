"""Engine: machines that do not reach each other say so at the start, on all ranks, in seconds."""

import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..config import Config
from ..engine import reach
from .harness import Outcome, outcomes
from .scenario import run_training, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(),
    device="cpu",
    max_steps=1,
    data__num_workers=0,
    connect_timeout_s=3.0,
    global_batch_size=16,
)


class Closed:
    """In place of a server: nobody listens at its port."""

    def __init__(self, place: tuple[str, int]) -> None:
        with socket.create_server(place) as server:
            self.place = server.getsockname()

    def __enter__(self) -> "Closed":
        return self

    def __exit__(self, *_: object) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        """Where it would be."""
        place: tuple[str, int] = self.place
        return place


def use_toy(notes: str, fault: str) -> None:
    """Prepare a training on two machines of two ranks; note who knocks where."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    Toy().use()
    knock = reach._knock

    def noted(door: reach.Door) -> str:
        Path(notes, f"{rank} knocks at {door.rank}").touch()
        return knock(door)

    put(reach, _knock=noted)
    if rank == 2:
        match fault:
            case "closed":
                put(reach, socket=_socket_with(create_server=Closed))
            case "interface":
                os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
            case "late":
                time.sleep(8)


def _socket_with(**parts: Any) -> Any:
    """The module `socket` with other parts."""
    module = type(socket)("socket")
    vars(module).update({**vars(socket), **parts})
    return module


def train(tmp_path: Path, fault: str) -> list[Outcome]:
    config = set_config(CONFIG, run_dir=str(tmp_path / "run"))
    return outcomes(run_training, 4, config, partial(use_toy, str(tmp_path), fault))


def test_each_machine_is_tried_once_by_another(tmp_path: Path) -> None:
    ranks = train(tmp_path, "")
    assert [rank.exit_code for rank in ranks] == [0] * 4, [rank.output for rank in ranks]
    notes = sorted(path.name for path in tmp_path.glob("* knocks at *"))
    assert notes == ["0 knocks at 2", "2 knocks at 0"]


def test_unreachable_machine_is_named_by_all_ranks(tmp_path: Path) -> None:
    start = time.monotonic()
    ranks = train(tmp_path, "closed")
    assert time.monotonic() - start < 30
    host = socket.gethostname()
    words = f"rank 0 on {host} at 127.0.0.1 can't reach rank 2 on {host} at 127.0.0.1 (Connection"
    assert [rank.exit_code for rank in ranks] == [1] * 4
    for rank in ranks:
        assert words in rank.output
        assert "set GLOO_SOCKET_IFNAME on every machine" in rank.output


def test_interface_that_is_not_there_ends_all_ranks(tmp_path: Path) -> None:
    ranks = train(tmp_path, "interface")
    words = f"GLOO_SOCKET_IFNAME: expected an interface of {socket.gethostname()} with an address ("
    assert [rank.exit_code for rank in ranks] == [1, 1, 2, 1]
    for number in (0, 1, 3):
        assert words in ranks[number].output, number
        assert "got 'eth99'" in ranks[number].output


def test_ranks_that_do_not_come_are_waited_for_in_vain(tmp_path: Path) -> None:
    ranks = train(tmp_path, "late")
    assert [rank.exit_code for rank in ranks] == [1] * 4
    assert "rank 2 did not come: look at its output" in ranks[0].output


@pytest.mark.parametrize("variable", ["lo", "lo,eth99"])
def test_address_is_that_of_the_interface(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    monkeypatch.setattr(socket, "gethostname", lambda: "198.51.100.1")  # its name leads elsewhere
    assert reach.own_address() == "127.0.0.1"


def test_address_without_an_interface_is_that_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert reach.own_address() in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "name.invalid")
    assert reach.own_address() == "127.0.0.1", "as gloo does, with a warning"


def test_interfaces_are_found_by_their_addresses() -> None:
    assert reach.interface_of("127.0.0.1") == "lo"
    assert reach.interface_of("198.51.100.1") == ""  # an address for documents
    has_ipv6 = "lo" in Path("/proc/net/if_inet6").read_text().split()
    assert reach.interface_of("::1") == ("lo" if has_ipv6 else "")
