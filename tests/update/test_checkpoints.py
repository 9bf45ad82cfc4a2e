"""A run goes on in a project that was regenerated, from the weights that it had."""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import trainings
from tests.conftest import Count
from tests.rendering import SLUG, Answer, Answers, complete, run, succeed
from tests.serving import Server
from tests.update import survive
from tests.update.edits import EDITS, SWITCHES, put
from tests.update.projects import Edit, Repository, Workshop

pytestmark = pytest.mark.update

RANKS = 2
RUN = "runs/mine"

# Buffers are not the same on all ranks: one strategy saves each rank's own.
WITH_BUFFERS = {
    **EDITS,
    f"{SLUG}/model.py": put("nn.GroupNorm(4, ", "nn.BatchNorm2d("),
}

BOTH_WAYS = [row for key, a, b in SWITCHES for row in ((key, a, b), (key, b, a))]

# What was trained before, by the answers: as many tests begin with the same project.
_trained: dict[str, tuple[Path, dict[str, Any]]] = {}


def in_words(answer: Answer) -> str:
    return str(answer).lower() if isinstance(answer, bool) else answer


def train(
    server: Server,
    repository: Repository,
    answers: Answers,
    max_steps: int,
    run_dir: str = RUN,
    **more: Any,
) -> dict[str, Any]:
    """Train a project to a step, on two ranks."""
    settings = trainings.settings_of(complete(answers), max_steps=max_steps, **more)
    del settings["data__num_workers"]
    project, path = repository.project, str(repository.project / run_dir)
    result: dict[str, Any] = server.call(project, survive.train, SLUG, RANKS, path, settings)
    return result


def begin(
    server: Server,
    workshop: Workshop,
    path: Path,
    answers: Answers,
    edits: dict[str, Edit] = EDITS,
) -> tuple[Repository, dict[str, Any]]:
    """Give a project with edits everywhere, and a run of two steps in it."""
    repository = workshop.begin(path, answers)
    repository.edit(edits)
    name = f"{sorted(complete(answers).items())} {edits is EDITS}"
    if name not in _trained:
        result = train(server, repository, answers, 2)
        kept = workshop.store / f"run{len(_trained)}"
        shutil.copytree(repository.project / RUN, kept)
        _trained[name] = kept, result
    kept, result = _trained[name]
    shutil.copytree(kept, repository.project / RUN, dirs_exist_ok=True)
    return repository, result


@pytest.mark.parametrize(("key", "before", "after"), BOTH_WAYS, ids=in_words)
def test_each_switch_merges_lints_and_trains_on(
    server: Server,
    workshop: Workshop,
    tmp_path: Path,
    count: Count,
    key: str,
    before: Answer,
    after: Answer,
) -> None:
    repository, first = begin(server, workshop, tmp_path / "mine", {key: before})
    assert first["step"] == 2
    code, output = repository.regenerate(f"{key}={in_words(after)}")
    assert code == 0, output
    succeed("ruff", "check", "--no-cache", ".", cwd=repository.project)
    succeed("ruff", "format", "--no-cache", "--check", ".", cwd=repository.project)
    second = train(server, repository, {key: after}, 4)
    assert second["log"].count("resumed from step_00000002:") == 1
    assert second["step"] == 4
    assert [began["parameters"] for began in second["began"]] == first["ended"]
    assert len(set(second["ended"])) == 1
    assert set(second["ended"]) != set(first["ended"])
    count("switches of answers after which a run went on", 1)


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.permutations(["rank0", "per_rank", "sharded"], 2)]
)
def test_other_strategy_goes_on_as_if_nothing_had_happened(
    server: Server, workshop: Workshop, tmp_path: Path, before: str, after: str
) -> None:
    answers: Answers = {"checkpoint": before, "ema": True}
    repository, first = begin(server, workshop, tmp_path / "mine", answers, WITH_BUFFERS)
    straight = train(server, repository, answers, 4, "runs/straight")
    code, output = repository.regenerate(f"checkpoint={after}")
    assert code == 0, output
    second = train(server, repository, {**answers, "checkpoint": after}, 4)
    assert second["log"].count("resumed from step_00000002:") == 1
    assert [began["parameters"] for began in second["began"]] == first["ended"]
    assert second["began"][0]["model"] == first["model"]
    assert second["ended"] == straight["ended"]  # so the moments of the optimizer are there too
    path = str(repository.project / RUN)
    for step, weights in ((2, first), (4, second)):
        saved = server.call(repository.project, survive.saved_parts, SLUG, path, step)
        assert saved.keys() == {"model", "ema", "optimizer"}
        assert saved["model"] == weights["model"]
    # Both of them can be seen, checked and exported.
    command = [sys.executable, "-m", f"{SLUG}.checkpoints", RUN]
    shown = succeed(*command, "--verify", cwd=repository.project)
    assert shown.count("complete, every byte checked") == 2
    succeed(*command, "--ema", "--step", "2", "--export", "ema.pt", cwd=repository.project)


def test_average_starts_from_the_weights_of_the_checkpoint(
    server: Server, workshop: Workshop, tmp_path: Path
) -> None:
    repository, first = begin(server, workshop, tmp_path / "mine", {"ema": False})
    assert repository.regenerate("ema=true")[0] == 0
    decay = 0.9
    third = train(server, repository, {"ema": True}, 3, ema_decay=decay)
    assert "the checkpoint holds no EMA: the average starts from its weights" in third["log"]
    assert [began["ema"] for began in third["began"]] == first["ended"]
    path = str(repository.project / RUN)
    assert server.call(repository.project, survive.average, SLUG, path, decay) < 1e-4


def test_other_model_is_refused_in_a_sentence(
    server: Server, workshop: Workshop, tmp_path: Path
) -> None:
    repository, _ = begin(server, workshop, tmp_path / "mine", {})
    other = workshop.begin(tmp_path / "other", {"example": "bytes"})
    shutil.copytree(repository.project / RUN, other.project / RUN)
    done = run(
        *(sys.executable, "-m", f"{SLUG}.train", "--config", f"{SLUG}/configs/debug.yaml"),
        *("--device", "cpu", "--run_dir", RUN),
        cwd=other.project,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if "checkpoint" in line]
    assert "data." in line or "does not fit this model" in line
