"""A project's own tests of disks and kills, at length and with every strategy."""

import sys
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import SLUG, all_answers, render, run, silent

ROUNDS = 30


@pytest.mark.faults
@pytest.mark.parametrize("strategy", all_answers()["checkpoint"])
def test_nothing_is_lost(tmp_path: Path, strategy: str, count: Count) -> None:
    with silent():
        project = render({"checkpoint": strategy, "ema": True, "tracker": "none"}, tmp_path)
    command = (sys.executable, "-m", "pytest", "-q", f"{SLUG}/tests/test_faults.py")
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FAULT_ROUNDS": str(ROUNDS)}
    result = run(*command, cwd=project, env=environment)
    assert result.returncode == 0, result.stdout
    count("kills during saves", ROUNDS)
