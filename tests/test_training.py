"""Rendered projects train: the numbers of each combination, and six of them as people use them."""

import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import trainings
from tests.conftest import Count
from tests.rendering import ROOT, Answers, available_answers, render, silent, succeed
from tests.variants import VARIANTS

# What changes a step: every combination is trained.
MULTIPLIED = ("amp", "accumulation", "ema")


def combinations() -> list[Answers]:
    """Give all combinations of what changes a step; other answers take turns."""
    questions = available_answers()
    others = [key for key in questions if key not in MULTIPLIED]
    return [
        dict(zip(MULTIPLIED, chosen, strict=True))
        | {key: questions[key][number % len(questions[key])] for key in others}
        for number, chosen in enumerate(itertools.product(*(questions[k] for k in MULTIPLIED)))
    ]


def name_of(answers: Answers) -> str:
    """Give the answers that are multiplied, in short."""
    return " ".join(f"{key}={str(answers[key]).lower()}" for key in MULTIPLIED)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_named_variant_passes_its_own_tests(name: str, tmp_path: Path, count: Count) -> None:
    """All that the user gets, with a run through launcher and command line among them."""
    project = render(VARIANTS[name], tmp_path)
    output = succeed(
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
        f"--basetemp={tmp_path / 'temporary'}",
        cwd=project,
        env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    (passed,) = re.findall(r"=+ (\d+) passed.* in .*=+$", output, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED .*", output, re.MULTILINE)
    assert [line for line in skipped if "there is a GPU" not in line] == []
    count("tests of named variants passed", int(passed))


@pytest.mark.parametrize("answers", combinations(), ids=name_of)
def test_each_combination_trains_and_resumes_exactly(
    answers: Answers, tmp_path: Path, count: Count
) -> None:
    """Two ranks on the real digits: from start to end, and in two parts with the same bits."""
    with silent():
        project = render(answers, tmp_path)
    settings = ["device=cpu", "data__num_workers=0"]
    if answers["accumulation"]:
        settings.append("micro_batch_size=8")
    program = str(ROOT / "tests" / "trainings.py")
    output = succeed(
        *(sys.executable, program, project.name, "2", *settings),
        cwd=project,
        env={"PYTHONPATH": str(project)},
    )
    trainings.check(json.loads(output.splitlines()[-1]), may_skip=answers["amp"] == "fp16")
    count("combinations trained on two ranks, stopped and resumed", 1)
