"""Projects with the oldest releases that they ask for, and with the newest that there are.

Each is installed into an environment of its own by its own command, then linted, tested and
trained by them: minutes a project. `TORCH_FROM` says where pip finds torch, as for `make setup`.
"""

import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.all_pairs.test_all_pairs import use
from tests.conftest import Count
from tests.releases.pythons import need
from tests.rendering import ROOT, TEMPLATE, render, silent, succeed
from tests.variants import TESTED, VARIANTS

Pins = dict[str, str]

# What the suite itself runs with, from the Makefile.
(SUITES_TORCH,) = re.findall(r"^TORCH := torch==(.+)$", (ROOT / "Makefile").read_text(), re.M)


def metadata_of(project: Path) -> dict[str, Any]:
    """Read the pyproject.toml of a project."""
    return tomllib.loads((project / "pyproject.toml").read_text())


def requirements(project: Path) -> list[str]:
    """Give what a project and its tools depend on, as it is bounded."""
    metadata = metadata_of(project)["project"]
    return [*metadata["dependencies"], *metadata["optional-dependencies"]["dev"]]


def lowest(required: list[str]) -> Pins:
    """Give the lowest release that each requirement takes."""
    found = [re.fullmatch(r"([\w-]+)(?:>=|==)([\d.]+)", one) for one in required]
    unbounded = [one for one, match in zip(required, found, strict=True) if not match]
    assert not unbounded
    return {match[1]: match[2] for match in found if match}


def test_every_dependency_has_a_lowest_release_and_a_project_that_tries_it(tmp_path: Path) -> None:
    named = re.findall(r'^    "([^"]+)",', (TEMPLATE / "pyproject.toml").read_text(), re.M)
    assert len(lowest(named)) == len(named) > 10
    with silent():
        projects = [render(VARIANTS[name], tmp_path / name) for name in TESTED]
    assert {one for project in projects for one in requirements(project)} == {*named}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Give a directory whose environment does not stay: each takes gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)


def install(project: Path, python: str, directory: Path, pins: Pins) -> dict[str, str]:
    """Install a project, with these releases; give what a shell in its environment has."""
    succeed(python, "-m", "venv", directory / "venv")
    constraints = directory / "constraints.txt"
    constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in pins.items()))
    bounded = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(constraints))
    shell = {
        "PATH": f"{directory / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(directory / "pre-commit"),
        "PYTEST_ADDOPTS": f"--basetemp={directory / 'temporary'}",
        "PYTHONDONTWRITEBYTECODE": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "RDZV_ENDPOINT": "localhost:0",
        # A container may have no other user.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **(bounded if pins else {}),
    }
    torch = [*shlex.split(os.environ.get("TORCH_FROM", "")), "torch"]
    succeed("python", "-m", "pip", "install", "--quiet", *torch, env=shell)
    succeed("make", "install", cwd=project, env=shell)
    return shell


def installed(names: list[str], shell: dict[str, str]) -> Pins:
    """Give the releases that an environment holds, without what a build adds to them."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name).split('+')[0] for name in sys.argv[1:]}))"
    )
    releases: Pins = json.loads(succeed("python", "-I", "-c", code, *names, env=shell))
    return releases


def use_all(project: Path, shell: dict[str, str], *, is_typed: bool = True) -> int:
    """Lint, test, train and resume; give how many tests passed."""
    if is_typed:
        succeed("make", "lint", cwd=project, env=shell)
    succeed("git", "init", "--quiet", cwd=project)
    succeed("git", "add", "--all", cwd=project)
    succeed("pre-commit", "run", "--all-files", cwd=project, env=shell)
    passed: int = use(project, shell)["suite"]["passed"]
    return passed


@pytest.mark.releases
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        *((name, {}) for name in TESTED),
        ("default", {"torch": SUITES_TORCH}),
    ],
    ids=[*TESTED, "newer torch"],
)
def test_a_project_works_with_the_lowest_releases(
    name: str, pins: Pins, place: Path, count: Count
) -> None:
    with silent():
        project = render(VARIANTS[name], place)
    metadata = metadata_of(project)
    (python,) = lowest([f"python{metadata['project']['requires-python']}"]).values()
    wanted = lowest(requirements(project)) | pins
    building = lowest(metadata["build-system"]["requires"])
    shell = install(project, need(python), place, building | wanted)
    found = installed([*wanted], shell)
    assert {one: Version(pin) for one, pin in found.items()} == {
        one: Version(pin) for one, pin in wanted.items()
    }
    # Annotations in torch 2.8 lack arguments that its functions take: types are checked by the
    # lowest mypy, but with a newer torch.
    passed = use_all(project, shell, is_typed="torch" in pins)
    count("tests passed with the lowest releases", passed)


@pytest.mark.releases
@pytest.mark.parametrize("release", ["3.12", "3.13", "3.14"])
def test_a_project_works_with_the_newest_releases(release: str, place: Path, count: Count) -> None:
    with silent():
        project = render({}, place)
    shell = install(project, need(release), place, {})
    assert Version(installed(["torch"], shell)["torch"]) >= Version(SUITES_TORCH)
    count(f"tests passed with the newest releases on Python {release}", use_all(project, shell))
