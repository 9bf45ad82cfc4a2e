"""A project's package directory in a repository that was there before, as a page has it."""

import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import ROOT, render, silent, succeed

PAGE = ROOT / "docs" / "existing_repo.md"
SLUG = "my_training"

# The repository of somebody who wants to know everything early.
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "shapes"
version = "1.0"

[tool.ruff]
line-length = 79

[tool.ruff.lint]
select = ["ALL"]
ignore = ["CPY001", "D203", "D213", "INP001", "PLR2004", "S101"]

[tool.pytest.ini_options]
minversion = "8"
addopts = "-W error --strict-markers --strict-config --import-mode=MODE"
filterwarnings = ["error"]
testpaths = ["tests"]
xfail_strict = true
PYTHONPATH
"""
FILES = {
    "README.md": "# Shapes\n",
    ".gitignore": "__pycache__/\n.pytest_cache/\n.ruff_cache/\n.mypy_cache/\n",
    "SOURCE/shapes/__init__.py": '"""Shapes."""\n\n\ndef area(a: int, b: int) -> int:\n'
    '    """Multiply two sides."""\n    return a * b\n',
    # A name that the package has as well.
    "tests/test_config.py": '"""Shapes have an area."""\n\nfrom shapes import area\n\n\n'
    'def test_area() -> None:\n    """Two by three."""\n    assert area(2, 3) == 6\n',
    "tests/conftest.py": '"""Set-up."""\n\nimport os\n\nos.environ["SHAPES"] = "1"\n',
}
# Where the code lies, and how pytest imports tests.
LAYOUTS = {"src": ("src", "importlib"), "flat": (".", "prepend")}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A person who has installed the dependencies, and nothing of the package."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def repository(path: Path, layout: str) -> Path:
    """Make the repository, everything committed."""
    source, mode = LAYOUTS[layout]
    found = 'pythonpath = ["src"]' if layout == "src" else ""
    files = {name.replace("SOURCE", source): text for name, text in FILES.items()}
    files["pyproject.toml"] = PYPROJECT.replace("MODE", mode).replace("PYTHONPATH", found).lstrip()
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    succeed("git", "init", "--quiet", cwd=path)
    succeed("git", "add", "--all", cwd=path)
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    succeed("git", *who, "commit", "--quiet", "--message", "Shapes", cwd=path)
    return path


def commands_of_the_page(layout: str, **replaced: str) -> list[str]:
    """Give the page's commands for a layout."""
    blocks = re.findall(r"^```sh ?\w*\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    texts = blocks
    if layout == "flat":
        texts = [text.replace(f"{SLUG} src/", f"{SLUG} .").replace("src/", "") for text in blocks]
    for old, new in replaced.items():
        texts = [text.replace(old, new) for text in texts]
    return texts


def join(path: Path, layout: str, environment: dict[str, str]) -> tuple[Path, list[str]]:
    """Follow the page; give the repository and what each block of commands said."""
    here = repository(path / "re po", layout)  # a blank, for nobody quotes enough
    texts = commands_of_the_page(layout, TEMPLATE=shlex.quote(str(ROOT)))
    said = [succeed("bash", "-euc", text, cwd=here, env=environment) for text in texts]
    return here, said


def untracked(here: Path) -> str:
    """What git says about the repository."""
    return succeed("git", "status", "--short", cwd=here)


@pytest.mark.parametrize("layout", ["src", "flat"])
@pytest.mark.update
def test_page_leads_to_a_training_and_to_two_suites_that_pass(
    tmp_path: Path, environment: dict[str, str], layout: str, count: Count
) -> None:
    here, said = join(tmp_path, layout, environment)
    assert len(said) == 3
    package = f"src/{SLUG}/" if layout == "src" else f"{SLUG}/"
    assert said[0].splitlines()[-1] == f"?? {package}"
    assert "world size     2 on cpu" in said[1]
    assert re.search(r"^step 69  epoch 3  valid: loss 0\.\d+", said[1], re.MULTILINE)
    own, theirs = re.findall(r"^=*\s*(\d+) passed", said[2], re.MULTILINE) or (0, 0)
    assert (int(own), int(theirs) > 300) == (1, True)
    assert untracked(here) == f"?? {package}\n"
    _check_tools(here, package, environment)
    assert untracked(here) == f" M pyproject.toml\n?? {package}\n"
    count("repositories joined", 1)


def _check_tools(here: Path, package: str, environment: dict[str, str]) -> None:
    """Let the repository's linters look at all of it, with the page's settings for mypy."""
    succeed("ruff", "check", cwd=here, env=environment)
    settings = re.search(r"^```toml\n(\[tool\.mypy\].*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
    assert settings
    with (here / "pyproject.toml").open("a") as file:
        file.write(settings[1])
    succeed(sys.executable, "-m", "mypy", package, cwd=here, env=environment)


@pytest.mark.parametrize("layout", ["src", pytest.param("flat", marks=pytest.mark.update)])
def test_copied_package_is_found_and_leaves_no_files(
    tmp_path: Path, environment: dict[str, str], layout: str
) -> None:
    """The short form: few of the package's tests, both suites in one call, and no training."""
    here = repository(tmp_path / "repo", layout)
    source = here / LAYOUTS[layout][0]
    with silent():
        project = render({"backend": "gloo", "tracker": "none"}, tmp_path / "out", slug=SLUG)
    succeed("cp", "-r", project / SLUG, source)
    package = f"{source.relative_to(here)}/{SLUG}/".removeprefix("./")
    assert untracked(here) == f"?? {package}\n"
    quick = ("test_sampler.py", "test_rundir.py", "test_yours.py")
    tests = [f"{package}tests/{name}" for name in quick]
    said = succeed(sys.executable, "-m", "pytest", "tests", *tests, cwd=here, env=environment)
    assert int(re.findall(r"(\d+) passed", said)[0]) > 20
    succeed("ruff", "check", "--no-cache", cwd=here, env=environment)
    succeed("ruff", "format", "--no-cache", "--check", package, cwd=here, env=environment)
    assert untracked(here) == f"?? {package}\n"


def test_page_names_what_a_project_depends_on(tmp_path: Path) -> None:
    """Each dependency of each tracker's project, as it is bounded there."""
    named = set(re.findall(r"`([\w>=.-]+)`", PAGE.read_text().split("## Dependencies")[1]))
    for tracker in ("none", "tensorboard", "wandb", "mlflow"):
        with silent():
            project = render({"tracker": tracker}, tmp_path / tracker)
        metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        assert set(metadata["dependencies"]) <= named
    tools = ("mypy", "pre-commit", "ruff", "types-PyYAML")
    dev = metadata["optional-dependencies"]["dev"]
    assert {one for one in dev if not one.startswith(tools)} <= named


def test_page_lists_what_a_wheel_needs(tmp_path: Path) -> None:
    with silent():
        project = render({}, tmp_path, slug=SLUG)
    tools = tomllib.loads((project / "pyproject.toml").read_text())["tool"]
    listed = json.dumps(tools["setuptools"]["package-data"][SLUG])
    assert f"{SLUG} = {listed}\n" in PAGE.read_text()
