"""Cruft, which some know better, gives what cookiecutter gives; and the traps that it has."""

import json
from pathlib import Path

import pytest

from tests.rendering import SLUG, Answers, run, succeed
from tests.update.edits import EDITS, one_line_more, put
from tests.update.projects import WHO, Repository, Workshop, copy_template, edited, files_in

pytestmark = pytest.mark.update

TRAIN = f"{SLUG}/train.py"


@pytest.fixture
def template(tmp_path: Path, workshop: Workshop) -> Repository:
    """The template's repository."""
    return copy_template(workshop, tmp_path / "ddp-template")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home without settings, and a place for what is left behind."""
    home = tmp_path / "home"
    home.mkdir()
    return {**WHO, "HOME": str(home), "TMPDIR": str(home)}


def create(
    template: Repository, path: Path, environment: dict[str, str], **answers: object
) -> Repository:
    """Make a project with cruft, and commit it."""
    path.mkdir()
    context = json.dumps({"project_slug": SLUG, **answers})
    command = ["cruft", "create", str(template.path), "--no-input", "--extra-context", context]
    succeed(*command, cwd=path, env=environment)
    repository = Repository(path / SLUG, template.workshop)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.commit("Render")
    return repository


def update(
    repository: Repository, environment: dict[str, str], **answers: object
) -> tuple[int, str]:
    """Let cruft change answers."""
    words = ["--skip-apply-ask", "--variables-to-update", json.dumps(answers)]
    done = run("cruft", "update", *words, cwd=repository.path, env=environment)
    return done.returncode, done.stdout


def without_state(repository: Repository) -> dict[str, tuple[bytes, bool]]:
    """Give the files of a project, but not cruft's own."""
    return {name: file for name, file in repository.contents().items() if name != ".cruft.json"}


def test_cruft_gives_what_cookiecutter_gives(
    workshop: Workshop, template: Repository, environment: dict[str, str], tmp_path: Path
) -> None:
    repository = create(template, tmp_path / "mine", environment, checkpoint="per_rank")
    assert without_state(repository) == files_in(workshop.fresh({"checkpoint": "per_rank"}))
    succeed("cruft", "check", cwd=repository.path, env=environment)

    repository.edit(EDITS)
    code, output = update(repository, environment, amp="fp16", ema=True, nodes="multi")
    assert code == 0, output
    answers: Answers = {"checkpoint": "per_rank", "amp": "fp16", "ema": True, "nodes": "multi"}
    assert without_state(repository) == edited(workshop.fresh(answers), EDITS)
    succeed("cruft", "check", cwd=repository.path, env=environment)


def test_cruft_takes_over_a_project_and_a_newer_template(
    workshop: Workshop, template: Repository, environment: dict[str, str], tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    context = json.dumps({"project_slug": SLUG})
    command = ["cruft", "link", str(template.path), "--no-input", "--extra-context", context]
    succeed(*command, cwd=repository.path, env=environment)
    repository.commit("Link")
    makefile = next(template.path.glob("{{*/Makefile"))
    one_line_more(makefile)
    template.commit("Second version")
    assert run("cruft", "check", cwd=repository.path, env=environment).returncode == 1
    code, output = update(repository, environment)
    assert code == 0, output
    expected = edited(workshop.fresh({}), {"Makefile": lambda text: f"{text}# mine\n"})
    assert without_state(repository) == expected


def test_traps_are_as_the_page_says(
    workshop: Workshop, template: Repository, environment: dict[str, str], tmp_path: Path
) -> None:
    repository = create(template, tmp_path / "mine", environment)
    line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
    gone, moved = f"{SLUG}/tests/test_bf16.py", f"{SLUG}/reports.py"
    one_line_more(repository.path / gone)
    repository.git("mv", f"{SLUG}/engine/report.py", moved)
    repository.edit({TRAIN: put(line, f"{line}  # mine")})
    code, output = update(repository, environment, amp="fp16", amppp="off")
    assert code == 0
    assert "Good work!" in output  # the misspelt question, too
    assert repository.conflicts().keys() >= {TRAIN} or list(repository.path.rglob("*.rej"))
    assert (repository.path / gone).exists()
    assert gone not in repository.conflicts()
    old = (workshop.fresh({}) / SLUG / "engine" / "report.py").read_bytes()
    assert (repository.path / moved).read_bytes() == old
