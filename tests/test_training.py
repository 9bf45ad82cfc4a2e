"""Rendered projects train: the numbers of each combination, and four as people use them."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import proof, trainings
from tests.conftest import Count, Timed
from tests.rendering import SLUG, Answers, all_answers, render, silent, succeed
from tests.serving import Server
from tests.variants import MULTIPLIED, ONCE, TESTED, VARIANTS, combinations, missing_in

RANKS = 2


def name_of(answers: Answers) -> str:
    """Give the answers that are multiplied, in short."""
    return " ".join(f"{key}={str(answers[key]).lower()}" for key in MULTIPLIED)


def test_the_tested_variants_hold_every_answer_that_a_test_depends_on() -> None:
    assert {key for key, _ in missing_in(TESTED)} <= {"ci"}
    assert set(ONCE.values()) <= set(TESTED)


@pytest.mark.parametrize("name", TESTED)
def test_a_named_variant_passes_its_own_tests(
    name: str, tmp_path: Path, shared: Path, count: Count
) -> None:
    """All that the user gets, with a run through launcher and command line among them."""
    project = render(VARIANTS[name], tmp_path)
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'temporary'}"]
    for file in (project / SLUG / "tests" / file for file in ONCE):
        if ONCE[file.name] == name:
            assert file.exists()
        elif file.exists():  # reach.py, say, is of several machines alone
            options.append(f"--ignore={file}")
            count("files of tests that a named variant left to another one", 1)
    output = succeed(
        *(sys.executable, "-m", "pytest", *options),
        cwd=project,
        env={
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # The tests of mutations compile the same models: once for all.
            "TORCHINDUCTOR_CACHE_DIR": str(shared / "inductor"),
        },
    )
    (passed,) = re.findall(r"=+ (\d+) passed.* in .*=+$", output, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED .*", output, re.MULTILINE)
    assert [line for line in skipped if "there is a GPU" not in line] == []
    count("tests of named variants passed", int(passed))


GOOD: dict[str, Any] = {
    "windows": 46,
    "samples": 2874,
    "progress": {"step": 46, "skipped": 0, "epoch": trainings.EPOCHS, "samples": 2874},
    "stopped": {"step": trainings.STOP, "position": 448},
    "resumed_from": ["step_00000030"],
    "losses": [2.0, 0.5],
    "losses_in_parts": [2.0, 0.5],
    "weights_are_equal": True,
    "digests": ["1", "2"],
    "digests_in_parts": ["1", "2"],
}


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"losses": [2.0, 1.9], "losses_in_parts": [2.0, 1.9]}, "the loss went from"),
        ({"weights_are_equal": False}, "weights differ"),
        ({"progress": GOOD["progress"] | {"step": 45}}, "steps are missing"),
        ({"progress": GOOD["progress"] | {"step": 45, "skipped": 1}}, "left out"),
        ({"progress": GOOD["progress"] | {"samples": 2873}}, "samples are missing"),
        ({"stopped": {"step": 31, "position": 512}}, "did not stop"),
        ({"stopped": {"step": trainings.STOP, "position": 0}}, "between two epochs"),
        ({"resumed_from": []}, "did not resume"),
        ({"losses_in_parts": [2.0, 0.6]}, "other losses"),
        ({"digests_in_parts": ["1", "3"]}, "other bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_training_that_went_wrong_is_found(wrong: dict[str, Any], complaint: str) -> None:
    answers: Answers = {"amp": "bf16", "example": "digits"}
    trainings.check(GOOD, answers)
    with pytest.raises(AssertionError, match=complaint):
        trainings.check(GOOD | wrong, answers)


def test_every_example_has_settings_for_short_trainings() -> None:
    assert [*trainings.SETTINGS] == [*trainings.FALLS_TO] == all_answers()["example"]


def told(result: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Give what a record tells of a training."""
    return {
        "ranks": RANKS,
        "backend": "gloo",
        "settings": settings,
        "epochs": trainings.EPOCHS,
        **{name: result[name] for name in ("progress", "stopped", "resumed_from", "valid")},
        "digests": result["digests"],
        "equal": result["digests"] == result["digests_in_parts"],
        "first_loss": result["losses"][0],
        "last_loss": result["losses"][-1],
        "seconds": result["seconds"],
    }


@pytest.mark.parametrize("answers", combinations(), ids=name_of)
def test_each_combination_trains_and_resumes_exactly(
    answers: Answers, tmp_path: Path, server: Server, count: Count, timed: Timed
) -> None:
    """Two ranks on real data: from start to end, and in two parts with the same bits."""
    with silent():
        project = render(answers, tmp_path)
    tree = proof.tree_hash(project)
    settings = trainings.settings_of(answers, device="cpu")
    with proof.recorded("trained", answers, tree) as ran:
        result = server.call(project, trainings.main, project.name, RANKS, settings)
        ran.update(told(result, settings))
        trainings.check(result, answers)
    count("combinations trained on two ranks, stopped and resumed", 1)
    count("optimizer steps of these trainings, from start to end", result["progress"]["step"])
    timed("training", name_of(answers), result["seconds"])
