"""Regenerating where the package directory alone was copied into a repository."""

import shutil
from pathlib import Path

import pytest

from tests.rendering import SLUG, Answers
from tests.update.edits import EDITS
from tests.update.projects import Repository, Workshop, edited, files_in

PACKAGE = {name: edit for name, edit in EDITS.items() if name.startswith(f"{SLUG}/")}

THEIRS = {
    "pyproject.toml": '[project]\nname = "theirs"\nversion = "1"\n',
    "README.md": "Mine, and about something else.\n",
    "Makefile": "all:\n\techo mine\n",
    "src/theirs/__init__.py": "",
    "tests/test_theirs.py": "def test_nothing() -> None: ...\n",
}


def join(workshop: Workshop, path: Path, place: str) -> Repository:
    """Copy the package directory of a project into a repository that was there before."""
    for name, text in THEIRS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    repository = Repository(path, workshop, place)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.commit("Before")
    shutil.copytree(workshop.fresh({}) / SLUG, repository.project / SLUG)
    repository.commit("Copy")
    return repository


@pytest.mark.parametrize("place", [".", pytest.param("src", marks=pytest.mark.update)])
def test_the_package_alone_is_regenerated(workshop: Workshop, tmp_path: Path, place: str) -> None:
    repository = join(workshop, tmp_path / "theirs", place)
    repository.edit(PACKAGE)
    prefix = "" if place == "." else f"{place}/"
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    assert f"Project: the package directory alone, in {prefix}{SLUG}" in output
    assert repository.regenerate("ema=true")[0] == 0

    answers: Answers = {"amp": "fp16", "ema": True}
    rendered = edited(workshop.fresh(answers), PACKAGE)
    package = {f"{prefix}{n}": file for n, file in rendered.items() if n in PACKAGE or is_in(n)}
    theirs = {name: (text.encode(), False) for name, text in THEIRS.items()}
    assert files_in(repository.path) == theirs | package
    names = repository.git("ls-tree", "-r", "--name-only", "template").splitlines()
    assert names == sorted(package)


def is_in(name: str) -> bool:
    """Whether a file of a project lies in the package."""
    return name.startswith(f"{SLUG}/")


@pytest.mark.update
def test_branch_of_the_whole_repository_costs_no_file(workshop: Workshop, tmp_path: Path) -> None:
    """A user may take the advice for new projects in an old one: git branch template."""
    repository = join(workshop, tmp_path / "theirs", ".")
    repository.git("branch", "template")
    repository.edit(PACKAGE)
    assert repository.regenerate("amp=fp16")[0] == 0
    found = files_in(repository.path)
    assert {name: found[name][0].decode() for name in THEIRS} == THEIRS
    rendered = edited(workshop.fresh({"amp": "fp16"}), PACKAGE)
    assert {n: f for n, f in found.items() if is_in(n)} == {
        n: f for n, f in rendered.items() if is_in(n)
    }
