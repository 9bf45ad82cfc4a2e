"""Engine: processes that nobody launches find each other, or are told in a line why not."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch._C._distributed_c10d import TCPStore
from torch.distributed.launch import parse_args
from torch.distributed.run import config_from_args

from ..config import Config, find_place, parse, parse_or_exit
from ..engine import meeting
from ..engine.beats import claim_failure, find_failure, own_client
from ..engine.distributed import gather
from ..engine.launch import Launch, Refused, check_meeting
from ..engine.rundir import PACKAGE
from .harness import Outcome, outcomes, values
from .parts import joined
from .scenario import Record, run_training, set_config
from .toy import Toy

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")
TCP = "tcp://127.0.0.1:29500"
CONFIG = set_config(Config(), device="cpu", max_steps=2, data__num_workers=0)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*NAMES, *MEETING, "TORCHELASTIC_USE_AGENT_STORE"):
        # Set and deleted, so that the end of the test deletes it as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def place(**settings: Any) -> Launch:
    """Who a process with these settings is."""
    changes = {f"rendezvous__{name}": value for name, value in settings.items()}
    launch, left = find_place(set_config(Config(), **changes))
    assert left == Config(), "what is recorded of a run does not depend on who records it"
    return launch


def test_place_that_settings_give() -> None:
    assert place() == Launch()
    assert place(init_method=TCP, rank=1, world_size=2) == Launch(1, 1, 2, 2, TCP)
    apart = {"local_rank": 0, "local_world_size": 1}
    assert place(init_method=TCP, rank=1, world_size=2, **apart) == Launch(1, 0, 2, 1, TCP)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"init_method": TCP}, "rendezvous.rank and rendezvous.world_size: expected a number"),
        ({"init_method": TCP, "rank": 0}, "rendezvous.world_size: expected a number"),
        ({"world_size": 2}, "rendezvous.rank: expected a number"),
        ({"rank": 0, "world_size": 2, "local_rank": 0}, "rendezvous.local_world_size: expected a"),
        ({"local_rank": 0, "local_world_size": 1}, "rendezvous.rank and rendezvous.world_size: "),
        (
            {"rank": 2, "world_size": 2},
            "rendezvous.rank: expected 0 or more, and less than rendezvous.world_size = 2, got 2",
        ),
        ({"rank": -1, "world_size": 2}, "rendezvous.rank: expected 0 or more, and less than"),
        (
            {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 1},
            "rendezvous.local_rank: expected 0 or more, and less than rendezvous.local_world_size",
        ),
        (
            {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 3},
            "rendezvous.local_world_size: expected at most rendezvous.world_size = 2, got 3",
        ),
        *(
            (
                {"init_method": address, "rank": 0, "world_size": 2},
                "rendezvous.init_method: expected env://, tcp://HOST:PORT or file:///PATH, got ",
            )
            for address in (
                "env", "tcp://node0", "tcp://:29500", "tcp://node0:99999", "tcp://node0:0",
                "node0:29500", "file://relative", "file:///", "file:///a?rank=0", "redis://a:1",
            )
        ),
    ],
)  # fmt: skip
def test_place_that_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        place(**settings)
    assert str(refused.value).startswith(said)


def be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launcher have said that this is rank 1 of 2."""
    for name, value in zip(NAMES, ("1", "1", "2", "2"), strict=True):
        monkeypatch.setenv(name, value)


def test_launcher_and_settings_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    be_launched(monkeypatch)
    assert place(rank=1) == Launch(1, 1, 2, 2)
    assert place(init_method="file:///a", world_size=2) == Launch(1, 1, 2, 2, "file:///a")
    for name, value in (("rank", 0), ("world_size", 1), ("local_rank", 0)):
        with pytest.raises(Refused, match=f"^rendezvous.{name}: expected [12], as the launcher"):
            place(**{name: value})


def test_store_of_the_launcher_is_at_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    be_launched(monkeypatch)
    assert place(init_method=TCP).init_method == TCP
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        Refused, match=r"^rendezvous.init_method: expected env://, for the launcher"
    ):
        place(init_method=TCP)


def test_processes_without_a_meeting_point_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Launch(0, 0, 2, 2)
    with pytest.raises(Refused, match=r"^MASTER_ADDR and MASTER_PORT: expected the address"):
        check_meeting(several)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    with pytest.raises(Refused, match=r"^MASTER_PORT: expected the address"):
        check_meeting(several)
    monkeypatch.setenv("MASTER_PORT", "any")
    with pytest.raises(Refused, match=r"^MASTER_PORT: expected a number, got 'any'"):
        check_meeting(several)
    monkeypatch.setenv("MASTER_PORT", "29500")
    check_meeting(several)
    monkeypatch.delenv("MASTER_PORT")
    check_meeting(Launch())
    check_meeting(Launch(0, 0, 2, 2, TCP))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_each_process_started_by_hand_says_why(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has a terminal of its own; and nothing is written twice."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("nobody is waited for"))
    place = f"--run_dir run --rendezvous.world_size 2 --rendezvous.rank {rank}"
    mistakes = {"--optim.lr x": "optim.lr", "--rendezvous.local_rank 0": "rendezvous.local_world"}
    for mistake, key in mistakes.items():
        with pytest.raises(SystemExit) as left:
            parse_or_exit(f"{place} {mistake}".split())
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(f"{PACKAGE}: {key}")
        assert Path("run", "status.json").exists() == (rank == "0")


def test_argument_that_a_launcher_adds_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m torch.distributed.launch` adds it to each command."""
    _, _, words = config_from_args(parse_args(["-m", f"{PACKAGE}.train", "--seed", "7"]))
    argv = [str(word).replace("${local_rank}", "1") for word in words[words.index("-m") + 2 :]]
    assert sorted(argv) == ["--local-rank=1", "--seed", "7"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse(argv).seed == 7
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(Refused, match=r"^local-rank: no such setting"):
        parse(argv)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train_by_hand(_init_method: str, config: Config, address: str, use_libuv: str = "1") -> Record:
    """Train as one of two processes that no launcher has told anything."""
    rank = int(os.environ["RANK"])
    for name in NAMES:
        del os.environ[name]
    os.environ["USE_LIBUV"] = use_libuv
    settings = {"rank": rank, "world_size": 2}
    changes = {f"rendezvous__{name}": value for name, value in settings.items()}
    return run_training(address, set_config(config, **changes), Toy().use)


@pytest.mark.parametrize("use_libuv", ["0", "1"])
def test_two_processes_train_by_tcp(use_libuv: str, run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    address = f"tcp://127.0.0.1:{free_port()}"
    ranks = values(train_by_hand, 2, config, address, use_libuv)
    assert ranks[0].progress["step"] == 2
    assert ranks[0].digest == ranks[1].digest
    recorded = yaml.safe_load(Path(run_dir, "config.yaml").read_text())
    assert recorded["rendezvous"] == vars(Config().rendezvous)


def test_file_goes_with_the_run(run_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "meet"
    for steps in (1, 2):
        config = set_config(CONFIG, run_dir=run_dir, max_steps=steps)
        ranks = values(train_by_hand, 2, config, f"file://{file}")
        assert ranks[1].progress["step"] == steps
        assert not file.exists()


def fail_together(_init_method: str, address: str) -> None:
    """Meet the others, and end without a farewell."""
    with joined(address):
        os._exit(0)


def test_file_of_an_earlier_run_is_refused(run_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "meet"
    outcomes(fail_together, 2, f"file://{file}")
    assert file.exists()
    config = set_config(CONFIG, run_dir=run_dir)
    start = time.monotonic()
    ended = outcomes(train_by_hand, 2, config, f"file://{file}")
    assert time.monotonic() - start < 15
    for rank, outcome in enumerate(ended):
        assert outcome.exit_code == 2
        assert outcome.output.startswith(
            f"{PACKAGE}: rendezvous.init_method: expected a new file, got {file}, in which a rank "
            f"{rank} has been before: "
        )


def test_file_that_has_been_used_is_refused(tmp_path: Path) -> None:
    ranks = [Launch(rank, rank, 2, 2, f"file://{tmp_path}/meet") for rank in (0, 1)]
    limit = timedelta(seconds=1)
    stores = [meeting.open_store(rank, limit) for rank in ranks]
    with pytest.raises(Refused, match=r"^rendezvous.init_method: expected a new file, got "):
        meeting.open_store(ranks[0], limit)
    del stores  # with which torch removes the file


def start_again(_init_method: str, port: int, counts: list[int]) -> tuple[list[int], str | None]:
    """Meet in the launcher's store; what the ranks told each other, and the failure that is known.

    And leave in it what a rank that fails does.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[rank])
    time.sleep(counts[rank] * 0.3)
    with joined("env://", connect_timeout_s=10.0) as job:
        store = job.world.store
        assert store is not None
        client = own_client(store)
        found = gather(job.world, rank), find_failure(client)
        gather(job.world, rank)
        claim_failure(client, f"rank {rank} failed")
        return found


def test_start_meets_nothing_of_the_one_before() -> None:
    """A launcher that keeps its store has started the machines differently often."""
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for counts in ([0, 0], [1, 0], [0, 2], [1, 1]):
        assert values(start_again, 2, kept.port, counts) == [([0, 1], None)] * 2, counts


@pytest.mark.parametrize(("spelling", "address"), [("0xa.0.0.7", "10.0.0.7"), ("node0", "node0")])
def test_address_is_said_as_people_write_it(
    spelling: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", spelling)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert meeting.place_of(Launch()) == f"{address}:29500"


def test_file_in_no_directory_is_refused() -> None:
    with pytest.raises(Refused, match=r"^rendezvous.init_method: expected a file in a directory"):
        meeting.open_store(Launch(0, 0, 2, 2, "file:///no/such/place"), timedelta(seconds=1))


def be_one_of_two(_init_method: str, config: Config, address: str, rank: int) -> None:
    """Train as one of two processes, where there is no other."""
    place = {"rendezvous__rank": rank, "rendezvous__world_size": 2}
    for name in NAMES:
        del os.environ[name]
    run_training(address, set_config(config, **place), Toy().use)


def test_port_of_another_program_is_told_at_once(run_dir: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = set_config(CONFIG, run_dir=run_dir, connect_timeout_s=2.0)
        (ended,) = outcomes(be_one_of_two, 1, config, address, 0)
    assert ended.exit_code == 1
    assert f"rank 0 of 2 can't listen at {address}, another program does: " in ended.output


def test_nobody_at_the_address_is_told_in_time(run_dir: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    config = set_config(CONFIG, run_dir=run_dir, connect_timeout_s=2.0)
    start = time.monotonic()
    ended: list[Outcome] = outcomes(be_one_of_two, 1, config, address, 1)
    assert time.monotonic() - start < 40
    assert ended[0].exit_code == 1
    assert f"rank 1 of 2 did not find the others at {address} within 2 s: " in ended[0].output
