"""Engine: what other systems than Linux need, and what they can't do."""

import os
import sys

import pytest

from ..engine import platforms
from ..engine.launch import Launch, Refused

FILE = "file:///meet"
TWO = Launch(0, 0, 2, 2)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "USE_LIBUV"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("system", "launch", "backend"),
    [
        ("linux", Launch(0, 0, 8, 4), "another"),
        ("darwin", Launch(), "gloo"),
        ("darwin", TWO, "gloo"),
        ("win32", Launch(), "gloo"),
        ("win32", Launch(), "another"),
        ("win32", Launch(0, 0, 2, 2, FILE), "gloo"),
    ],
)
def test_what_can_train(
    system: str, launch: Launch, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    platforms.prepare(launch, backend)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo0" if system == "darwin" else None)
    assert os.environ.get("USE_LIBUV") == ("0" if system == "win32" else None)


@pytest.mark.parametrize(
    ("system", "launch", "backend", "said"),
    [
        ("darwin", Launch(0, 0, 2, 1), "gloo", "expected one machine on macOS, "),
        ("win32", TWO, "gloo", "expected one process on Windows, .* got 2 with gloo at env://$"),
        ("win32", Launch(0, 0, 2, 2, FILE), "another", "expected one process on Windows, "),
        ("win32", Launch(0, 0, 3, 3, FILE), "gloo", "expected one process on Windows, "),
        ("freebsd14", Launch(), "gloo", "expected Linux, macOS or Windows, got freebsd14$"),
    ],
)
def test_what_can_not_is_refused(
    system: str, launch: Launch, backend: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(Refused, match=f"^platform: {said}"):
        platforms.prepare(launch, backend)


@pytest.mark.parametrize(
    ("system", "name"), [("darwin", "GLOO_SOCKET_IFNAME"), ("win32", "USE_LIBUV")]
)
def test_what_is_set_stays(system: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv(name, "mine")
    platforms.prepare(Launch(), "gloo")
    assert os.environ[name] == "mine"
