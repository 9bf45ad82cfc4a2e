"""Several machines with the script that people start: they train, lose one, and go on exactly.

Where they can't meet, each ends in a stated time, with a sentence that names the cause and what to
set.
"""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Count
from tests.endings import end_of
from tests.nodes.machines import DISK, Machine, Machines, Running, install_iptables, why_not
from tests.rendering import SLUG, render, silent

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]

LIMIT_S = 20
"""For meeting, and for each answer."""
END_S = 90
"""In which everything has ended that can't go on."""

SETTINGS = {
    "config": f"{SLUG}/configs/debug.yaml",
    "device": "cpu",
    "run_dir": DISK / "run",
    "epochs": 20,
    "save_every": 5,
    "log_every": 1,
    "data.num_workers": 0,
    "connect_timeout_s": LIMIT_S,
    "timeout_s": LIMIT_S,
    "watchdog_s": LIMIT_S - 5,
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two of them."""
    with Machines(tmp_path) as made:
        yield made.both


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A project for each strategy, rendered once."""
    made: dict[str, Path] = {}

    def project_with(strategy: str) -> Path:
        if strategy not in made:
            with silent():
                made[strategy] = render(
                    {"nodes": "multi", "checkpoint": strategy, "tracker": "none"},
                    tmp_path_factory.mktemp(strategy),
                )
        return made[strategy]

    return project_with


def start(
    machine: Machine, project: Path, *, mode: str = "c10d", nodes: str = "2", **more: str
) -> Running:
    """Start the script on a machine, as its documentation says."""
    settings = {**SETTINGS, **{name: value for name, value in more.items() if name.islower()}}
    variables = {name: value for name, value in more.items() if name.isupper()}
    if mode == "static":
        variables["NODE_RANK"] = str(machine.number)
    words = [f"--{name}={value}" for name, value in settings.items()]
    environment = {
        "NNODES": nodes,
        "RDZV_ENDPOINT": "node0:29500",
        "JOIN_TIMEOUT_S": str(LIMIT_S),
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(project),
        **variables,
    }
    script = str(project / SLUG / "launch" / "node.sh")
    # From the project's directory, where its configuration is.
    return machine.start(["env", "-C", str(project), script, *words], **environment)


def train(machines: list[Machine], project: Path, **more: str) -> None:
    """Train on both to the end."""
    running = [start(machine, project, **more) for machine in machines]
    for one in running:
        assert one.wait(120) == 0, one.text()


def wait_for_step(machine: Machine, step: int, seconds: float = 90) -> None:
    """Wait until a checkpoint of this step, or a later one, is on the machine's disk."""
    deadline = time.monotonic() + seconds
    while newest_step(machine) < step:
        said = "\n".join(path.read_text() for path in sorted(machine.disk.glob("output*")))
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def newest_step(machine: Machine) -> int:
    """The step of the newest checkpoint on a machine's disk."""
    paths = (machine.disk / "run" / "checkpoints").glob("step_????????")
    return max((int(path.name.removeprefix("step_")) for path in paths), default=0)


def status(machine: Machine) -> dict[str, Any]:
    """What status.json says on a machine's disk."""
    text = (machine.disk / "run" / "status.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize(("mode", "strategy"), [("c10d", "rank0"), ("static", "per_rank")])
def test_after_the_loss_of_a_machine_the_next_start_goes_on_exactly(
    machines: list[Machine],
    projects: Callable[[str], Path],
    mode: str,
    strategy: str,
    count: Count,
) -> None:
    project = projects(strategy)
    train(machines, project, mode=mode)
    expected = end_of(project, machines[0].disk / "run")
    for machine in machines:
        shutil.rmtree(machine.disk / "run")
    for lost, step in ((1, 10), (0, 40)):
        running = [start(machine, project, mode=mode) for machine in machines]
        wait_for_step(machines[0], step)
        machines[lost].kill()
        assert running[1 - lost].wait(END_S) != 0
        assert 0 < newest_step(machines[0]) < 400
        said = running[1 - lost].text()
        assert "machines met" not in said, said
        assert ("machine at node0:29500 has ended" in said) == (lost == 0 and mode == "c10d"), said
    train(machines, project, mode=mode)
    assert end_of(project, machines[0].disk / "run") == expected
    assert status(machines[0])["state"] == "done"
    count("losses of a machine after which a run went on exactly", 2)


@pytest.mark.parametrize("mode", ["c10d", "static"])
def test_machine_is_replaced_while_the_other_waits(
    machines: list[Machine], projects: Callable[[str], Path], mode: str, count: Count
) -> None:
    project = projects("rank0")
    train(machines, project, mode=mode)
    expected = end_of(project, machines[0].disk / "run")
    for machine in machines:
        shutil.rmtree(machine.disk / "run")
    running = [start(machine, project, mode=mode, MAX_RESTARTS="10") for machine in machines]
    for step in (10, 60):
        wait_for_step(machines[0], step)
        machines[1].kill()
        shutil.rmtree(machines[1].disk / "run")  # another machine has a disk of its own
        # Its launcher has started nothing yet, where that of the first machine has.
        running[1] = start(machines[1], project, mode=mode, MAX_RESTARTS="10")
    for one in running:
        assert one.wait(120) == 0, one.text()
    assert end_of(project, machines[0].disk / "run") == expected
    # Each start came about: nothing failed but the ranks that lost another one.
    assert running[0].text().count("resumed from") == 2, running[0].text()
    assert running[0].text().count("failed (exitcode") == 2, running[0].text()
    assert "failed (exitcode" not in running[1].text(), running[1].text()
    count("machines replaced in a run that ended exactly", 2)


@pytest.mark.parametrize("host", [0, 1])
def test_machine_that_returns_is_taken_in(
    machines: list[Machine], projects: Callable[[str], Path], host: int
) -> None:
    project, stays, goes = projects("rank0"), machines[host], machines[1 - host]

    def begin(machine: Machine) -> Running:
        meeting = f"{stays.name}:29500"
        return start(machine, project, nodes="1:2", epochs="100000", RDZV_ENDPOINT=meeting)

    first, second = begin(stays), begin(goes)
    # Rank 0 is at the machine that must stay: only its disk has what was saved.
    wait_for_step(stays, 10)
    goes.kill()
    assert wait_for_words(first, "saved on 2 ranks, resumed on 1")
    wait_for_step(stays, newest_step(stays) + 20)
    second = begin(goes)
    assert wait_for_words(first, "saved on 1 ranks, resumed on 2")
    wait_for_step(stays, newest_step(stays) + 20)
    assert "failed (exitcode" not in second.text(), second.text()
    for one in (first, second):
        one.process.send_signal(signal.SIGTERM)
    for one in (first, second):
        one.wait(END_S)
    assert status(stays)["state"] == "stopped", first.text()


def wait_for_words(running: Running, words: str, seconds: float = 90) -> bool:
    """Wait until it has said something."""
    deadline = time.monotonic() + seconds
    while words not in running.text():
        assert time.monotonic() < deadline, running.text()
        assert running.process.poll() is None, running.text()
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("name", ["127.0.1.1", "none"])
def test_own_name_may_lead_nowhere(
    machines: list[Machine], projects: Callable[[str], Path], name: str
) -> None:
    # As Debian's installer has it, and as in a container.
    own = [f"{name} node1"] if name != "none" else []
    machines[1].set_hosts("127.0.0.1 localhost", "10.77.0.1 node0", *own)
    train(machines, projects("rank0"), epochs="1")


@pytest.mark.parametrize("mode", ["c10d", "static"])
@pytest.mark.parametrize("first", [0, 1])
def test_machines_may_start_in_any_order(
    machines: list[Machine], projects: Callable[[str], Path], mode: str, first: int
) -> None:
    project = projects("rank0")
    running = [start(machines[first], project, mode=mode, epochs="1")]
    time.sleep(5)
    running.append(start(machines[1 - first], project, mode=mode, epochs="1"))
    for one in running:
        assert one.wait(END_S) == 0, one.text()
    # Only the static numbers say on which of them rank 0 is.
    kept = [number for number in (0, 1) if (machines[number].disk / "run/status.json").exists()]
    assert len(kept) == 1
    assert kept == [0] or mode == "c10d"
    assert status(machines[kept[0]])["state"] == "done"


def test_machine_alone_need_not_know_its_own_name(
    machines: list[Machine], projects: Callable[[str], Path]
) -> None:
    machines[0].set_hosts("127.0.0.1 localhost")
    alone = start(machines[0], projects("rank0"), nodes="1", NPROC="2", epochs="1")
    assert alone.wait(END_S) == 0, alone.text()
    assert "world size     2 on cpu" in alone.text()


def test_name_of_the_host_may_become_known_later(
    machines: list[Machine], projects: Callable[[str], Path]
) -> None:
    machines[1].set_hosts("127.0.0.1 localhost")  # a pod's name is known once it runs
    running = [start(machine, projects("rank0"), epochs="1") for machine in machines]
    time.sleep(5)
    assert all(one.process.poll() is None for one in running)
    machines[1].set_hosts("127.0.0.1 localhost", "10.77.0.1 node0")
    for one in running:
        assert one.wait(120) == 0, one.text()


def test_second_run_at_the_same_port_is_refused(
    machines: list[Machine], projects: Callable[[str], Path]
) -> None:
    project = projects("rank0")
    running = [start(machine, project, nodes="1:2", epochs="100000") for machine in machines]
    wait_for_step(machines[0], 10)
    second = start(machines[0], project, nodes="1:2", epochs="100000", run_dir=str(DISK / "other"))
    deadline = time.monotonic() + END_S
    while second.process.poll() is None:
        assert time.monotonic() < deadline, second.text()
        time.sleep(0.1)
    assert second.process.returncode == 2, second.text()
    assert re.search("has it: .*for the same RDZV_ID with other settings", second.text())
    before = newest_step(machines[0])
    wait_for_step(machines[0], before + 10)
    for one in running:
        one.process.send_signal(signal.SIGTERM)
    for one in running:
        one.wait(END_S)
    assert "resumed from" not in running[0].text(), "the second one had no part in it"


@dataclass(frozen=True)
class Trouble:
    """What is wrong, and what each machine must say of it."""

    name: str
    says: tuple[str, str]
    """A pattern for each; empty where it is not started."""
    prepare: Callable[[list[Machine]], object] = len
    """What is done to them; the default does nothing."""
    variables: tuple[dict[str, str], dict[str, str]] = ({}, {})


def shield_port(machines: list[Machine]) -> None:
    """Let nobody in at the port where all meet."""
    machines[0].shield("-p", "tcp", "--dport", "29500", "-i", "eth0")


def shield_others(machines: list[Machine]) -> None:
    """Let the other machine in at that port alone."""
    machines[0].shield("-p", "tcp", "--syn", "!", "--dport", "29500", "-i", "eth0")


def debian_hosts(machines: list[Machine]) -> None:
    """Give the first machine's own name the address that Debian's installer gives it."""
    machines[0].set_hosts("127.0.0.1 localhost", "127.0.1.1 node0", "10.77.0.2 node1")


def everywhere(name: str, value: str) -> tuple[dict[str, str], dict[str, str]]:
    """A variable on both machines."""
    return {name: value}, {name: value}


UNREACHED = r"rank \d on node\d at \S+ can't reach rank \d on node\d at \S+ \(.*GLOO_SOCKET_IFNAME"
WAITED = r"node1 waits for node0:29500 = 10.77.0.1 \(.*JOIN_TIMEOUT_S waits longer"
ALONE = rf"not all 2 machines met at node0:29500 within {LIMIT_S} s: .*JOIN_TIMEOUT_S waits longer"
LOOPBACK = "RDZV_ENDPOINT: for node0, 'node0' is 127.0.1.1, at which every machine finds only"
NO_INTERFACE = r"GLOO_SOCKET_IFNAME: expected an interface of node1 with an address \(lo, eth0\)"
TROUBLES = [
    Trouble(
        "unknown name",
        (r"node0 knows no address of 'nodex'", r"node1 knows no address of 'nodex'"),
        variables=everywhere("RDZV_ENDPOINT", "nodex:29500"),
    ),
    Trouble("name is 127.0.1.1", (LOOPBACK, WAITED), debian_hosts),
    Trouble("absent machine", (ALONE, "")),
    Trouble("absent host", ("", WAITED)),
    Trouble("blocked port", (ALONE, WAITED), shield_port),
    Trouble(
        "other ports blocked",
        (rf"{UNREACHED}|did not find the others", rf"{UNREACHED}|did not find the others"),
        shield_others,
    ),
    Trouble(
        "wrong interface",
        (UNREACHED, UNREACHED),
        variables=({}, {"GLOO_SOCKET_IFNAME": "lo"}),
    ),
    Trouble(
        "missing interface",
        (NO_INTERFACE, NO_INTERFACE),
        variables=({}, {"GLOO_SOCKET_IFNAME": "eth9"}),
    ),
]


@pytest.mark.parametrize("mode", ["c10d", "static"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_what_is_wrong_is_named(
    machines: list[Machine],
    projects: Callable[[str], Path],
    trouble: Trouble,
    mode: str,
    count: Count,
) -> None:
    install_iptables()
    trouble.prepare(machines)
    running = [
        (start(machine, projects("rank0"), mode=mode, **variables), says)
        for machine, variables, says in zip(machines, trouble.variables, trouble.says, strict=True)
        if says
    ]
    for one, says in running:
        assert one.wait(END_S - (time.monotonic() - one.began)) != 0, one.text()
        assert re.search(says, one.text()), one.text()
    count("troubles between machines named", 1)


@pytest.mark.parametrize("mode", ["c10d", "static"])
def test_cut_in_the_middle_ends_both(
    machines: list[Machine], projects: Callable[[str], Path], mode: str
) -> None:
    running = [
        start(machine, projects("rank0"), mode=mode, epochs="100000") for machine in machines
    ]
    wait_for_step(machines[0], 10)
    machines[1].cut()
    cut = time.monotonic()
    for one in running:
        assert one.wait(END_S - (time.monotonic() - cut)) != 0, one.text()
        assert re.search("no rank made progress|Timed out|did not answer", one.text()), one.text()
