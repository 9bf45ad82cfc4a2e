"""Pythons of other releases, where this machine has them."""

import functools
import os
import shutil
from pathlib import Path

import pytest

from tests.rendering import run

# What cookiecutter may run on; a project itself needs 3.11.
RENDERING = ("3.10", "3.11", "3.12", "3.13", "3.14")


@functools.cache
def find(release: str) -> str | None:
    """Find a Python of this release that can make environments: on PATH, or where pyenv has it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*pyenv.glob(f"versions/{release}.*/bin/python")]
    if (on_path := shutil.which(f"python{release}")) is not None:
        found.append(Path(on_path))
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in found:
        result = run(path, "-c", code)
        if (result.returncode, result.stdout.strip()) == (0, release):
            return str(path)
    return None


def need(release: str) -> str:
    """Find it, or skip the test that asks."""
    found = find(release)
    if found is None:
        pytest.skip(f"no Python {release} on PATH or in pyenv's directory")
    return found
