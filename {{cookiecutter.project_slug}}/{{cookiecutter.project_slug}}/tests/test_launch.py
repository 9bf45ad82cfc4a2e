"""Engine: a process knows its place from the launcher's variables, and ends with the right code."""

{% if cookiecutter.backend != "mpi" %}
import os
{% endif %}
import subprocess
import sys
{% if cookiecutter.backend != "mpi" %}
from pathlib import Path
{% endif %}

import pytest

from ..engine import launch

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"RANK": "0"}, "RANK set without LOCAL_RANK and WORLD_SIZE and LOCAL_WORLD_SIZE"),
        (dict.fromkeys(NAMES, "one"), "expected whole numbers"),
        (dict.fromkeys(NAMES, "2"), "contradict each other: RANK=2 of 2, LOCAL_RANK=2 of 2"),
    ],
)
def test_place_that_makes_no_sense_is_refused(
    place: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(launch.Refused, match=said):
        launch.launch_from_environment()


{% if cookiecutter.backend == "mpi" %}
def test_place_among_the_processes_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "set and deleted, so that the end of the test deletes it too")
        monkeypatch.delenv(name)
    for name, value in (("RANK", 3), ("SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert launch.launch_from_environment() == launch.Launch(3, 1, 4, 2)


{% endif %}
{% if cookiecutter.backend != "mpi" %}
@pytest.mark.parametrize(("asked", "given"), [({}, "0"), ({"MAX_RESTARTS": "4"}, "4")])
def test_restarts_are_passed_on(tmp_path: Path, asked: dict[str, str], given: str) -> None:
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\necho "$@ store=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"\n')
    program.chmod(0o755)
    scripts = Path(launch.__file__).parents[1].glob("launch/*.sh")
    (script,) = (path for path in scripts if path.name != "task.sh")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "NPROC": "2", "PATH": path, **asked}
    said = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    assert f" --max-restarts {given} " in said.stdout
    assert said.stdout.endswith(".train store=1\n")


{% endif %}
@pytest.mark.parametrize(
    ("body", "code", "output", "error"),
    [
        ("print('body')", 0, "body\nat exit\n", ""),
        ("raise SystemExit(2)", 2, "", ""),
        ("raise SystemExit", 0, "at exit\n", ""),
        ("raise SystemExit('words')", 1, "", "words"),
        ("1 / 0", 1, "", "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt"),
    ],
)
def test_end_of_a_process(body: str, code: int, output: str, error: str) -> None:
    program = (
        "import atexit\n"
        f"from {launch.__name__} import run_to_exit\n"
        "atexit.register(print, 'at exit')\n"
        f"def main(argument):\n    {body}\n"
        "run_to_exit(main, None)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, output)
    assert error in ended.stderr
    assert bool(error) == bool(ended.stderr)
