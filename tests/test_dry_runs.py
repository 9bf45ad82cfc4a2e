"""What the scripts of launch/ would run, on several machines that are made up for it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.rendering import SLUG, Answers, render, silent

SCRIPTS: dict[str, Answers] = {
    "train.sh": {"backend": "gloo"},
    "node.sh": {"backend": "gloo", "nodes": "multi"},
    "train_mpi.sh": {"backend": "mpi"},
}

# No machine has the names that the others would ask for.
PYTHON = """#!/bin/sh
case "$*" in
  *engine.nodes*) echo "10.0.0.$MACHINE $IS_HOST eth0" ;;
  *) exec {python} "$@" ;;
esac
"""

DryRun = Callable[..., tuple[dict[str, str], list[str]]]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    """Give the variables that a script would set, and the command that it would run."""
    root = tmp_path_factory.mktemp("dry")
    fake = root / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(PYTHON.replace("{python}", sys.executable))
    fake.chmod(0o755)
    with silent():
        projects = {name: render(answers, root / name) for name, answers in SCRIPTS.items()}

    def run(
        script: str, cpus: set[int] | None = None, **variables: str
    ) -> tuple[dict[str, str], list[str]]:
        path = os.pathsep.join([str(fake.parent), os.environ["PATH"]])
        own = {n: value for n, value in os.environ.items() if not n.startswith(("OMP_", "GLOO_"))}
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus or before)
        try:
            ended = subprocess.run(
                [projects[script] / SLUG / "launch" / script, "--dry-run"],
                env={**own, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **variables},
                capture_output=True,
                text=True,
                check=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        *lines, command = ended.stderr.splitlines()
        return dict(line.split("=", 1) for line in lines), shlex.split(command)

    return run


def words_after(command: list[str], option: str) -> str:
    """Give what an option of a command is set to."""
    return command[command.index(option) + 1]


@pytest.mark.parametrize("mode", ["c10d", "static"])
def test_machines_differ_in_what_is_their_own(dry_run: DryRun, mode: str) -> None:
    commands = []
    for number in range(3):
        own = {"MACHINE": str(number), "IS_HOST": str(number == 1).lower()}
        if mode == "static":
            own["NODE_RANK"] = str(number)
        place = {"NNODES": "3", "RDZV_ENDPOINT": "node1:29500"}
        variables, command = dry_run("node.sh", **place, **own)
        assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
        commands.append(command)
    addresses = [words_after(one, "--local-addr") for one in commands]
    assert addresses == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]
    ranks = [words_after(one, "--node-rank") for one in commands if "--node-rank" in one]
    assert ranks == (["0", "1", "2"] if mode == "static" else [])
    same = {"--rdzv-id": SLUG, "--nnodes": "3"}
    if mode == "static":
        same |= {"--master-addr": "node1", "--master-port": "29500"}
    else:
        same |= {"--rdzv-backend": "c10d", "--rdzv-endpoint": "node1:29500"}
        configuration = [words_after(one, "--rdzv-conf").split(",") for one in commands]
        hosts = [words.pop() for words in configuration]
        assert hosts == ["is_host=false", "is_host=true", "is_host=false"]
        assert configuration[0] == configuration[1] == configuration[2]
    for option, value in same.items():
        assert {words_after(one, option) for one in commands} == {value}


@pytest.mark.parametrize("script", SCRIPTS)
def test_processes_share_the_cpus_and_what_is_set_stays(dry_run: DryRun, script: str) -> None:
    cpus = os.sched_getaffinity(0)
    expected: list[tuple[dict[str, str], int]] = [
        ({}, len(cpus)),
        ({"NPROC": "2"}, max(1, len(cpus) // 2)),
        ({"NPROC": str(8 * len(cpus))}, 1),
        ({"OMP_NUM_THREADS": "7"}, 7),
    ]
    for settings, threads in expected:
        variables, _ = dry_run(script, **settings)
        assert variables["OMP_NUM_THREADS"] == str(threads), settings
    variables, _ = dry_run(script, {min(cpus)})
    assert variables["OMP_NUM_THREADS"] == "1"
