"""Projects that hold every pair of answers, through commands alone: rendered, tested, started.

Minutes a project, so `make test` leaves this out, by its marker: `make test-all` runs it.
"""

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import proof
from tests.conftest import Count, Timed
from tests.rendering import ROOT, SLUG, Answers, render, silent, succeed
from tests.variants import all_pairs

pytestmark = pytest.mark.all_pairs

MOST_SECONDS = "1200"  # of one command, as timeout takes it


def name_of(answers: Answers) -> str:
    return proof.name_of(answers, "all-pairs")


@pytest.fixture
def environment(tmp_path: Path, shared: Path) -> dict[str, str]:
    """Give what a person's shell would have, and what lets two projects run beside each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": f"--basetemp={tmp_path / 'temporary'}",
        "PYTHONDONTWRITEBYTECODE": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(shared / "inductor"),  # the projects compile the same models
        "MASTER_PORT": str(port),
        "RDZV_ENDPOINT": "localhost:0",
        # A container may have no other user.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # No account, and nothing that leaves the machine.
        "WANDB_MODE": "offline",
    }


def render_by_command(answers: Answers, dest: Path, environment: dict[str, str]) -> Path:
    """Render a project as a person does, with none of that person's own settings."""
    settings = dest / "settings.yaml"
    settings.write_text(json.dumps({"replay_dir": str(dest), "cookiecutters_dir": str(dest)}))
    given = [f"{key}={str(answer).lower()}" for key, answer in answers.items()]
    command = ["cookiecutter", str(ROOT), "--no-input", "--config-file", str(settings)]
    succeed(*command, "--output-dir", dest, f"project_slug={SLUG}", *given, env=environment)
    return dest / SLUG


def start_commands(project: Path) -> list[str]:
    """Give the commands of the README's section Start, by block, without those of make."""
    text = (project / "README.md").read_text()
    section = text[text.index("## Start") :]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[:2]
    return [re.sub(r"^make .*\n", "", block, flags=re.MULTILINE) for block in blocks]


def status_of(project: Path) -> dict[str, Any]:
    """Give what the only run says of itself: its state and its step."""
    (file,) = project.glob("runs/*/status.json")
    status = json.loads(file.read_text())
    return {"state": status["state"], "step": status["step"]}


def use(project: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a project's tests and its README's first commands; give what a record tells of it."""
    command = ("timeout", MOST_SECONDS)
    output = succeed(*command, "make", "test", cwd=project, env=environment)
    (passed,) = re.findall(r"=+ (\d+) passed.* in .*=+$", output, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[(\d+)\] (.*)", output, re.MULTILINE)
    assert [reason for _, reason in skipped if "there is a GPU" not in reason] == []
    suite = {"passed": int(passed), "skipped": sum(int(number) for number, _ in skipped)}

    runs = []
    for commands in start_commands(project):
        assert "NPROC=2" in commands
        output = succeed(*command, "bash", "-euc", commands, cwd=project, env=environment)
        assert "world size     2 on cpu" in output
        runs.append(status_of(project))
    started, resumed = runs
    assert started["state"] == resumed["state"] == "done", runs
    assert resumed["step"] > started["step"] > 0, runs
    assert f"step {started['step']}, " in re.findall(r"^resumed from .*$", output, re.M)[0]
    return {"suite": suite, "started": started, "resumed": resumed}


@pytest.mark.parametrize("answers", all_pairs(), ids=name_of)
def test_a_project_is_rendered_tested_started_and_resumed(
    answers: Answers, tmp_path: Path, environment: dict[str, str], count: Count, timed: Timed
) -> None:
    project = render_by_command(answers, tmp_path, environment)
    tree = proof.tree_hash(project)
    with silent():
        assert tree == proof.tree_hash(render(answers, tmp_path / "by_function"))
    with proof.recorded("all-pairs", answers, tree) as ran:
        ran.update(use(project, environment))
    count("projects of all pairs rendered, tested, started and resumed", 1)
    count("tests of these projects passed", ran["suite"]["passed"])
    timed("project of all pairs", name_of(answers), ran["seconds"])
