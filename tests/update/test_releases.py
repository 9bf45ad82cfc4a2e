"""Cookiecutter and Python, from the oldest that are supported on: the same project, or a sentence.

A release of Python that this machine lacks is skipped.
"""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rendering import ROOT, SLUG, contents_of, files_of, render, run, succeed, table

pytestmark = pytest.mark.update


@functools.cache
def python(release: str) -> str | None:
    """Find a Python of this release: on PATH, or where pyenv keeps them."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*root.glob(f"versions/{release}.*/bin/python"), shutil.which(f"python{release}")]
    for path in filter(None, found):
        command = [str(path), "-c", "import ensurepip, venv"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return str(path)
    return None


def _rendered_by(release: str, cookiecutter: str, tmp_path: Path) -> tuple[int, str, Path]:
    found = python(release)
    if found is None:
        pytest.skip(f"no Python {release} here")
    succeed(found, "-m", "venv", tmp_path / "venv")
    installed = tmp_path / "venv" / "bin" / "python"
    succeed(installed, "-m", "pip", "install", "--quiet", cookiecutter)
    result = run(
        *(installed, "-m", "cookiecutter", ROOT, "--no-input", "--output-dir", tmp_path / "out"),
        f"project_slug={SLUG}",
        env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    return result.returncode, result.stdout, tmp_path / "out" / SLUG


@pytest.mark.parametrize("release", ["3.10", "3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("cookiecutter", ["cookiecutter==2.6.0", "cookiecutter"])
def test_all_render_the_same(release: str, cookiecutter: str, tmp_path: Path) -> None:
    code, output, project = _rendered_by(release, cookiecutter, tmp_path)
    assert code == 0, output
    assert contents_of(project) == contents_of(render({}, tmp_path / "expected"))


@pytest.mark.parametrize(
    ("release", "cookiecutter", "words"),
    [
        (
            "3.8",
            "cookiecutter",
            r"ERROR: cookiecutter runs on Python 3\.8\.\d+, use 3\.10 or newer",
        ),
        (
            "3.9",
            "cookiecutter",
            r"ERROR: cookiecutter runs on Python 3\.9\.\d+, use 3\.10 or newer",
        ),
        ("3.11", "cookiecutter==2.5.0", r"ERROR: cookiecutter 2\.5\.0 is too old"),
    ],
)
def test_older_ones_are_refused(
    release: str, cookiecutter: str, words: str, tmp_path: Path
) -> None:
    code, output, project = _rendered_by(release, cookiecutter, tmp_path)
    assert code == 1
    assert re.match(words, output.splitlines()[0]), output
    assert not files_of(project)


@pytest.mark.parametrize("release", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_no_name_of_a_standard_library_is_left_to_a_project(release: str) -> None:
    """Whichever Python renders: the project may run on another."""
    found = python(release)
    if found is None:
        pytest.skip(f"no Python {release} here")
    names = succeed(found, "-c", "import sys; print(*sys.stdlib_module_names)").split()
    common = succeed(
        python("3.11") or "python3", "-c", "import sys; print(*sys.stdlib_module_names)"
    )
    public = {name for name in names if name[0] != "_"}
    assert public <= {*common.split(), *table("MODULES")}
