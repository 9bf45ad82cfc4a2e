"""Two machines, made of namespaces: with names, addresses, name look-up and disks of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

DISK = Path("/mnt")
"""Where each machine has its own disk."""


def call(*words: str) -> str:
    """Run a command that must succeed; what it says."""
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
    return ended.stdout


class Machine:
    """One of them: commands run in it, and it can be killed, cut off, and shielded."""

    def __init__(self, number: int, directory: Path) -> None:
        """Make it; it has no network yet."""
        self.number, self.name = number, f"node{number}"
        self.address = f"10.77.0.{number + 1}"
        self.namespace = f"ddp{os.getpid()}n{number}"
        self.etc = Path("/etc/netns", self.namespace)
        self.disk = directory / f"disk{number}"
        self.disk.mkdir()
        self.running: list[Running] = []
        call("ip", "netns", "add", self.namespace)
        self.etc.mkdir(parents=True)
        self.set_hosts("127.0.0.1 localhost", "10.77.0.1 node0", "10.77.0.2 node1")
        (self.etc / "nsswitch.conf").write_text("hosts: files\n")

    def set_hosts(self, *lines: str) -> None:
        """What names mean on this machine."""
        (self.etc / "hosts").write_text("\n".join(lines) + "\n")

    def connect(self) -> None:
        """Give its end of the cable an address."""
        for link in ("lo", "eth0"):
            call("ip", "-n", self.namespace, "link", "set", link, "up")
        call("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")

    def shield(self, *rule: str) -> None:
        """Drop what comes in and fits a rule of iptables."""
        words = ("ip", "netns", "exec", self.namespace, "iptables", "-A", "INPUT", *rule)
        call(*words, "-j", "DROP")

    def cut(self) -> None:
        """Pull the cable."""
        call("ip", "-n", self.namespace, "link", "set", "eth0", "down")

    def start(self, command: list[str], **environment: str) -> "Running":
        """Run a command on it."""
        # Its own name, and its own disk: both end with the last process.
        script = f'hostname {self.name}; mount --bind {self.disk} {DISK}; exec "$@"'
        inside = ["unshare", "--uts", "--mount", "bash", "-c", script, "_", *command]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        number = len(list(self.disk.glob("output*")))
        return Running(
            self,
            ["ip", "netns", "exec", self.namespace, *inside],
            {**os.environ, "PATH": path, **environment},
            self.disk / f"output{number}",
        )

    def processes(self) -> list[int]:
        """All that run on it."""
        return [int(word) for word in call("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """End all of them, as a loss of power does."""
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it has ended since
            time.sleep(0.1)

    def remove(self) -> None:
        """End all that runs, and give the names back."""
        self.kill()
        for one in self.running:
            one.process.wait(10)
        call("ip", "netns", "del", self.namespace)
        shutil.rmtree(self.etc)


class Running:
    """A command on a machine."""

    def __init__(
        self, machine: Machine, command: list[str], environment: dict[str, str], output: Path
    ) -> None:
        """Start it."""
        self.machine, self.output = machine, output
        machine.running.append(self)
        self.began = time.monotonic()
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """What it has said."""
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Wait for its end, and that of all that it started; its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.machine.processes():
            if time.monotonic() > deadline:
                self.machine.kill()
                pytest.fail(f"{self.machine.name} still ran after {seconds} s\n{self.text()}")
            time.sleep(0.1)
        return self.process.returncode


class Machines:
    """Both, with a cable between them."""

    def __init__(self, directory: Path) -> None:
        """Nothing is made before it is entered."""
        self.directory = directory
        self.both: list[Machine] = []

    def __enter__(self) -> Self:
        """Make them."""
        for number in (0, 1):
            self.both.append(Machine(number, self.directory))
        one, other = (machine.namespace for machine in self.both)
        ends = ("eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
        call("ip", "link", "add", *ends)
        for machine in self.both:
            machine.connect()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them, whatever still runs there."""
        for machine in self.both:
            machine.remove()


def why_not() -> str:
    """Why this machine can't be made into two; empty where it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"ddp{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    call("ip", "netns", "del", name)
    return ""


def install_iptables() -> None:
    """Install what drops packets, on Debian."""
    if shutil.which("iptables") is None:
        call("apt-get", "update")
        call("apt-get", "install", "--yes", "--no-install-recommends", "iptables")
