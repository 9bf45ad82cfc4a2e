"""Calls into processes that have imported torch: each is alone, and its failures are said."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from filelock import FileLock

from tests.serving import Server


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that imports nothing before."""
    server = Server(tmp_path_factory.mktemp("server") / "errors.txt", {"WORD": "hello"}, [])
    yield server
    server.stop()


def leave_traces(name: str) -> list[str]:
    """Say what is found in the process, and change it."""
    found = [name, os.getcwd(), os.environ["WORD"], str(import_module("of_project").__file__)]
    os.environ["WORD"] = "changed"
    return found


def complain() -> None:
    os.write(2, b"said before\n")
    raise ValueError("two\nlines")


def end_the_server() -> None:
    os.kill(os.getsid(0), signal.SIGKILL)


def hang(lock: str) -> None:
    """Hold a lock, here and in another process."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fork()
        time.sleep(600)


def test_each_call_is_alone_in_its_project(quick: Server, tmp_path: Path) -> None:
    for name in ("one", "two"):
        project = tmp_path / name
        project.mkdir()
        (project / "of_project.py").touch()
        found = quick.call(project, leave_traces, name)
        assert found == [name, str(project), "hello", str(project / "of_project.py")]


def test_failures_are_said_and_the_next_call_works(quick: Server, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)^\S+:complain: .*ValueError: two.*said before"):
        quick.call(tmp_path, complain)
    assert quick.call(tmp_path, os.getcwd) == str(tmp_path)
    with pytest.raises(AssertionError, match="its process ended with 3\n"):
        quick.call(tmp_path, os._exit, 3)
    assert quick.call(tmp_path, os.getcwd) == str(tmp_path)
    with pytest.raises(AssertionError, match="the server has ended\n"):
        quick.call(tmp_path, end_the_server)
    assert quick.call(tmp_path, os.getcwd) == str(tmp_path)


def test_a_call_that_hangs_is_ended_with_all_its_processes(quick: Server, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with pytest.raises(AssertionError, match="no answer in 3 s"):
        quick.call(tmp_path, hang, str(lock), limit_s=3)
    assert lock.exists()
    with FileLock(lock, timeout=10):
        assert quick.call(tmp_path, os.getcwd) == str(tmp_path)
