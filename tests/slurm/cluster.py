"""A SLURM of two nodes on this machine, each in a network and under a name of its own.

From Debian's packages. Needs root, for networks and for SLURM's own daemons.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = ("slurmd", "slurmctld", "slurm-client", "munge")
NODES = ("slurm-node0", "slurm-node1")
NETWORK = "10.88.77"
BRIDGE = "slurm-test"

CONF = """
ClusterName=test
SlurmctldHost={host}({network}.254)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ReturnToService=2
KillWait=60
JobRequeue=1
"""
NODE = (
    "NodeName={name} NodeAddr={address} NodeHostname={name} Port=16818 CPUs={cpus} State=UNKNOWN\n"
)
PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
"""
# `ip netns exec` would hide /sys/fs/cgroup, without which slurmd does not start.
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


def require() -> None:
    """Skip the test where there can be no SLURM; install its packages where they are missing."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("a SLURM of our own needs Linux, and root for its networks")
    if all(shutil.which(name, path=daemons()) for name in ("slurmd", "slurmctld", "munged")):
        return
    if not Path("/etc/debian_version").exists():
        pytest.skip(f"SLURM is not installed, and Debian's packages are {' '.join(PACKAGES)}")
    for words in (("update",), ("install", "--yes", "--no-install-recommends", *PACKAGES)):
        subprocess.run(
            ["apt-get", "--quiet", *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdout=subprocess.DEVNULL,
            check=True,
        )


def daemons() -> str:
    """Where SLURM's daemons are looked for, which need not be in everybody's PATH."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])


def until(what: Callable[[], object], seconds: float, says: Callable[[], str]) -> None:
    """Wait until something is so; fail with words after some seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s\n{says()}")
        time.sleep(0.3)


class Cluster:
    """Two nodes and what rules them, for the time of a `with` block."""

    def __init__(self, root: Path, tracking: str) -> None:
        """`tracking` is `linuxproc` or `cgroup`: how SLURM finds the processes of a job."""
        self.root, self.tracking = root, tracking
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{daemons()}"

    def __enter__(self) -> "Cluster":
        """Start it; what has come up is taken down where the rest does not."""
        try:
            self._clear()
            self._connect()
            self._configure()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def ask(self, *words: str | Path) -> str:
        """Run one of SLURM's commands, which must succeed; what it says."""
        answer = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert answer.returncode == 0, f"{words}\n{answer.stdout}{answer.stderr}{self.logs()}"
        return answer.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        texts = (path.read_text(errors="replace")[-3000:] for path in self.root.glob("*.log"))
        return "\n".join(texts)

    def stop(self) -> None:
        """End all jobs and daemons, and remove the networks; whatever of it there is."""
        for words in (["--signal=KILL", "--full"], []):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    ["scancel", "--user=root", *words],
                    env=self.environment,
                    stderr=subprocess.DEVNULL,
                    timeout=20,
                    check=False,
                )
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(15)
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        self._clear()

    def _clear(self) -> None:
        """Kill what is left in the networks of the nodes, and remove them."""
        for number, name in enumerate(NODES):
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # The pair first: it would outlive its network for a moment.
            for words in (["link", "del", f"{BRIDGE}{number}"], ["netns", "del", name]):
                subprocess.run(["ip", *words], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL, check=False)

    def _connect(self) -> None:
        """A network for each node, joined by a bridge at which the controller is."""
        lines = [
            f"link add {BRIDGE} type bridge",
            f"addr add {NETWORK}.254/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        ]
        for number, name in enumerate(NODES):
            lines += [
                f"netns add {name}",
                f"link add {BRIDGE}{number} type veth peer name eth0 netns {name}",
                f"link set {BRIDGE}{number} master {BRIDGE} up",
                f"-n {name} link set lo up",
                f"-n {name} addr add {NETWORK}.{number + 1}/24 dev eth0",
                f"-n {name} link set eth0 up",
            ]
        for line in lines:
            made = subprocess.run(
                ["ip", *line.split()], capture_output=True, text=True, check=False
            )
            if "not permitted" in made.stderr or "not supported" in made.stderr:
                pytest.skip(f"no networks can be made here: ip {line}: {made.stderr}")
            assert made.returncode == 0, f"ip {line}: {made.stderr}"

    def _configure(self) -> None:
        (self.root / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(root=self.root, host=host, tracking=self.tracking, network=NETWORK)
        hosts = f"127.0.0.1 localhost\n{NETWORK}.254 {host}\n"
        for number, name in enumerate(NODES):
            (self.root / f"spool.{name}").mkdir()
            address = f"{NETWORK}.{number + 1}"
            conf += NODE.format(name=name, address=address, cpus=os.cpu_count())
            hosts += f"{address} {name}\n"
        (self.root / "slurm.conf").write_text(conf + PARTITION)
        (self.root / "cgroup.conf").write_text(CGROUP_CONF)
        (self.root / "hosts").write_text(hosts)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))

    def _start_daemons(self) -> None:
        files = [
            f"--{name}={self.root}/munge.{ending}"
            for name, ending in (
                ("socket", "socket"),
                ("key-file", "key"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
        ]
        self._start("munged", "--foreground", "--force", *files)
        until((self.root / "munge.socket").exists, 30, self.logs)
        self._start("slurmctld", "-D", "-f", self.root / "slurm.conf")
        for name in NODES:
            place = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount"]
            place += ["bash", "-c", ENTER, "-", str(self.root / "hosts"), name]
            self._start(*place, "slurmd", "-D", "-f", self.root / "slurm.conf", "-N", name)
        until(self._is_ready, 60, self.logs)

    def _start(self, *words: str | Path) -> None:
        output = (self.root / "daemons.log").open("ab")
        self._daemons.append(
            subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        )
        output.close()

    def _is_ready(self) -> bool:
        said = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return said.stdout.split() == ["idle", "idle"]
