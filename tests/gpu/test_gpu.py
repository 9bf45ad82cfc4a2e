"""Every combination trains on GPUs: NCCL on all of them, and two gloo ranks on one.

Imports nothing of the generator, so that it runs on a machine that has only torch, numpy and
pytest, on projects that `make gpu-projects` has rendered elsewhere: see `prerender.py`.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import trainings

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = ROOT / "build" / "gpu"
AT_ONCE = 4

# Another device for a rehearsal without a GPU: GPU_TESTS_DEVICE=cpu.
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")

NAMES = sorted(path.parent.name for path in PROJECTS.glob("*/answers.json"))

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
    ),
    pytest.mark.skipif(not NAMES, reason="no projects in build/gpu: make gpu-projects"),
]


def answers_of(name: str) -> dict[str, Any]:
    """Give the answers that a project was rendered with."""
    answers: dict[str, Any] = json.loads((PROJECTS / name / "answers.json").read_text())
    return answers


def train(name: str) -> subprocess.CompletedProcess[str]:
    """Train one project on its ranks, in a process of its own."""
    answers = answers_of(name)
    project = next(path for path in (PROJECTS / name).iterdir() if (path / "Makefile").is_file())
    on_all = answers["backend"] == "nccl" and DEVICE == "cuda"
    ranks = torch.cuda.device_count() if on_all else 2
    batch = 8 * ranks * max(1, 8 // ranks)
    settings = trainings.settings_of(answers, device=DEVICE, global_batch_size=batch)
    words = [f"{name}={value}" for name, value in settings.items()]
    # All ranks of gloo share the first GPU; NCCL takes each its own.
    environment = {"PYTHONPATH": f"{project}{os.pathsep}{PROJECTS / 'vendor'}"}
    if not on_all:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "trainings.py", project.name, str(ranks), *words],
        cwd=project,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, subprocess.CompletedProcess[str]]:
    """All trainings that were asked for, several at a time: they mostly wait for a start."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    names = sorted({call.params["name"] for call in calls if call and "name" in call.params})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(train, names), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_trains_and_resumes_exactly(
    name: str, trained: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    ended = trained[name]
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    trainings.check(result, answers_of(name))
