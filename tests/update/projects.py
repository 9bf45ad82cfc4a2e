"""Projects in repositories, as a user has them, and the command that regenerates them."""

import contextlib
import functools
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.rendering import (
    ROOT,
    SLUG,
    TEMPLATE,
    Answers,
    contents_of,
    render,
    run,
    silent,
    succeed,
)

SCRIPT = ROOT / "scripts" / "regenerate.py"

# What renders: nothing of this repository's own tests or documentation.
PARTS = ("cookiecutter.json", "hooks", "templates", "scripts", TEMPLATE.name)

Edit = Callable[[str], str]
Contents = dict[str, tuple[bytes, bool]]

WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A User"), ("EMAIL", "user@example.com"))
}


def load_script() -> ModuleType:
    """Import the script, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("regenerate", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["regenerate"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def _rendered(store: Path, answers: tuple[tuple[str, Any], ...]) -> Path:
    """Render a project once for all tests, without a process of its own."""
    directory = store / str(len(list(store.iterdir())))
    words = dict(answers)
    with silent():
        return render(words, directory, slug=str(words.pop("project_slug", SLUG)))


@dataclass(frozen=True)
class Workshop:
    """Where projects are rendered and regenerated."""

    store: Path
    script: ModuleType

    def fresh(self, answers: Answers) -> Path:
        """Give a project that nobody has edited, to be read alone."""
        return _rendered(self.store, tuple(sorted(answers.items())))

    def begin(self, path: Path, answers: Answers | None = None, place: str = ".") -> "Repository":
        """Commit a new project, in a repository of its own or in a directory of one."""
        path.mkdir(parents=True, exist_ok=True)
        repository = Repository(path, self, place)
        if not (path / ".git").exists():
            repository.git("init", "--quiet", "--initial-branch", "main")
        shutil.copytree(self.fresh(answers or {}), repository.project, dirs_exist_ok=True)
        repository.commit("Render")
        return repository


@dataclass(frozen=True)
class Repository:
    """A user's repository, with a project in it."""

    path: Path
    workshop: Workshop
    place: str = "."

    @property
    def project(self) -> Path:
        """The directory that was rendered."""
        return self.path / self.place

    def git(self, *words: str) -> str:
        """Run a command that must succeed."""
        return succeed("git", *words, cwd=self.path, env=WHO).strip()

    def commit(self, message: str = "Edit") -> None:
        """Commit everything."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def edit(self, edits: dict[str, Edit]) -> None:
        """Change files of the project, and commit."""
        for name, change in edits.items():
            path = self.project / name
            path.write_text(change(path.read_text()))
        self.commit()

    def regenerate(self, *words: str) -> tuple[int, str]:
        """Regenerate in this process; exit code and output."""
        output = io.StringIO()
        with (
            contextlib.chdir(self.project),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            pytest.MonkeyPatch.context() as patch,
        ):
            for key, value in WHO.items():
                patch.setenv(key, value)
            code = self.workshop.script.main(list(words))
        return code, output.getvalue()

    def clone(self, path: Path) -> "Repository":
        """Clone it as a colleague would, from where both branches were pushed."""
        bare = path.with_suffix(".git")
        if not bare.exists():
            self.git("clone", "--quiet", "--bare", str(self.path), str(bare))
        run("git", "clone", "--quiet", str(bare), str(path), cwd=self.path)
        return Repository(path, self.workshop, self.place)

    def conflicts(self) -> dict[str, str]:
        """Give what git status says of files that are not merged."""
        lines = self.git("status", "--porcelain").splitlines()
        return {line[3:]: line[:2] for line in lines if line[:2] in UNMERGED}

    def contents(self) -> Contents:
        """Give the files of the project."""
        return files_in(self.project)


UNMERGED = {"DD", "AU", "UD", "UA", "DU", "AA", "UU"}


def files_in(directory: Path) -> Contents:
    """Give all files of a directory but those of git."""
    found = contents_of(directory)
    return {name: file for name, file in found.items() if not name.startswith(".git/")}


def edited(project: Path, edits: dict[str, Edit]) -> Contents:
    """Give the files of a project as they would be with edits."""
    files = files_in(project)
    for name, change in edits.items():
        content, is_executable = files[name]
        files[name] = change(content.decode()).encode(), is_executable
    return files


def copy_template(workshop: Workshop, path: Path) -> Repository:
    """Copy the template into a repository of its own, as users have it."""
    path.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            leave = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(ROOT / part, path / part, ignore=leave)
        else:
            shutil.copy(ROOT / part, path / part)
    repository = Repository(path, workshop)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.commit("First version")
    repository.git("tag", "v1")
    return repository


def renders_once(script: ModuleType, store: Path) -> Iterator[Workshop]:
    """Let the script render each project once, in this process."""
    workshop = Workshop(store, script)

    def render_once(template: Path, answers: Answers, _: Path) -> Path:
        assert template == ROOT
        return workshop.fresh(answers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "render", render_once)
        patch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        yield workshop
