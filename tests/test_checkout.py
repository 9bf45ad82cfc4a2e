"""What git makes of this repository and of a project: scripts keep their line ends and run bits."""

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import ROOT, SLUG, Answers, files_of, succeed

# As Git for Windows has it unless told otherwise.
CLONE = ("git", "-c", "core.autocrlf=true", "clone", "--quiet")

# Together they have every file of launch/.
CHOSEN: list[Answers] = [
    {"cluster": "slurm"},
    {"nodes": "multi", "cluster": "kubernetes"},
    {"backend": "mpi", "cluster": "slurm", "ci": "gitlab"},
]


def is_run(name: str) -> bool:
    """Say whether a file is a program, by its name in the repository or in a project."""
    is_part = name.startswith("templates/")
    name = name.removesuffix("{% endif %}")
    is_script = name.endswith((".sh", ".sbatch")) and not is_part
    return is_script or name in {".ci/run", "scripts/regenerate.py"}


def carriage_returns(directory: Path) -> list[str]:
    """Give the files that hold any."""
    files = files_of(directory)
    return [n for n, path in files.items() if ".git/" not in n and b"\r" in path.read_bytes()]


def commit(directory: Path) -> None:
    """Commit all that lies in a directory, as a repository of its own."""
    succeed("git", "init", "--quiet", cwd=directory)
    succeed("git", "add", "--all", cwd=directory)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    succeed("git", *identity, "commit", "--quiet", "--message", "first", cwd=directory)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository as it lies here, committed or not, or unpacked without its history."""
    copy = tmp_path_factory.mktemp("checkout") / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "build", ".venv", ".*_cache"))
    commit(copy)
    return copy


@pytest.fixture(scope="module")
def clone(repository: Path) -> Path:
    """A fresh clone of it, as on Windows."""
    place = repository.parent / "clone"
    succeed(*CLONE, f"file://{repository}", place)
    return place


def test_run_bits_are_those_of_the_scripts(repository: Path) -> None:
    entries = succeed("git", "ls-files", "--stage", "-z", cwd=repository).rstrip("\0").split("\0")
    modes = {entry.split("\t")[1]: entry[:6] for entry in entries}
    assert any(name.startswith("tests/golden/") and is_run(name) for name in modes)
    wrong = [name for name, mode in modes.items() if (mode == "100755") != is_run(name)]
    assert not wrong


def test_no_checkout_has_other_line_ends(clone: Path) -> None:
    assert not carriage_returns(clone)


@pytest.mark.parametrize("answers", CHOSEN, ids=lambda row: "-".join(map(str, row.values())))
def test_project_of_any_checkout_has_scripts_that_run(
    clone: Path, tmp_path: Path, answers: Answers, count: Count
) -> None:
    words = [f"{key}={value}" for key, value in {"project_slug": SLUG, **answers}.items()]
    home = {"HOME": str(tmp_path)}
    succeed("cookiecutter", clone, "--no-input", "-o", tmp_path / "made", *words, env=home)
    made = tmp_path / "made" / SLUG
    assert not carriage_returns(made)
    commit(made)
    succeed(*CLONE, f"file://{made}", tmp_path / "again")
    assert not carriage_returns(tmp_path / "again")
    for project in (made, tmp_path / "again"):
        files = {n: path for n, path in files_of(project).items() if ".git/" not in n}
        assert {n for n in files if is_run(n)} == {n for n in files if os.access(files[n], os.X_OK)}
        assert any(is_run(name) for name in files)
    count("projects rendered from a checkout with line ends of Windows", 1)
