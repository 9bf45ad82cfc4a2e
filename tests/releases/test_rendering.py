"""Cookiecutter and Python, from the oldest that are supported on: the same project, or a sentence.

A release of Python that this machine lacks is skipped.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.releases.pythons import RENDERING, need
from tests.rendering import ROOT, SLUG, contents_of, files_of, render, run, silent, succeed, table

pytestmark = pytest.mark.releases

RUNNING = "{}.{}".format(*sys.version_info)


def _rendered_by(release: str, cookiecutter: str, tmp_path: Path) -> tuple[int, str, Path]:
    found = need(release)
    succeed(found, "-m", "venv", tmp_path / "venv")
    installed = tmp_path / "venv" / "bin" / "python"
    succeed(installed, "-m", "pip", "install", "--quiet", cookiecutter)
    result = run(
        *(installed, "-m", "cookiecutter", ROOT, "--no-input", "--output-dir", tmp_path / "out"),
        f"project_slug={SLUG}",
        env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    return result.returncode, result.stdout, tmp_path / "out" / SLUG


@pytest.mark.parametrize("release", RENDERING)
@pytest.mark.parametrize("cookiecutter", ["cookiecutter==2.6.0", "cookiecutter"])
def test_all_render_the_same(release: str, cookiecutter: str, tmp_path: Path, count: Count) -> None:
    code, output, project = _rendered_by(release, cookiecutter, tmp_path)
    assert code == 0, output
    with silent():
        expected = render({}, tmp_path / "expected")
    assert "train.py" in {path.name for path in files_of(expected).values()}
    assert contents_of(project) == contents_of(expected)
    count("projects rendered by other releases", 1)


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
    assert code == 1, output
    assert re.match(words, output.splitlines()[0]), output
    assert not files_of(project)


@pytest.mark.parametrize("release", [one for one in RENDERING if one != RUNNING])
def test_no_name_of_a_standard_library_is_left_to_a_project(release: str) -> None:
    """Whichever of the two renders: the project may run on the other."""
    code = "import sys; print(*sys.stdlib_module_names)"
    names = set(succeed(need(release), "-c", code).split())
    assert "pathlib" in names
    differ = {name for name in names ^ sys.stdlib_module_names if name[0] != "_"}
    assert differ, "no two releases have the same"
    assert differ <= {*table("MODULES")}
