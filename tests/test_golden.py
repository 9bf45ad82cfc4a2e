"""Snapshots of six named projects, so that a change of the template is read as plain Python.

`make golden` writes them anew; the difference belongs into the same commit.
"""

import difflib
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import ROOT, SLUG, complete, contents_of, render
from tests.variants import VARIANTS, missing_in

GOLDEN = ROOT / "tests" / "golden"

# Set by `make golden`.
REFRESH = os.environ.get("REFRESH_GOLDEN") == "1"


def test_the_named_variants_hold_every_answer() -> None:
    assert not missing_in(VARIANTS)
    chosen = [complete(answers) for answers in VARIANTS.values()]
    assert len({tuple(sorted(one.items())) for one in chosen}) == len(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_named_variant_equals_its_snapshot(name: str, tmp_path: Path, count: Count) -> None:
    project = render(VARIANTS[name], tmp_path)
    assert project.name == SLUG
    if REFRESH:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        shutil.copytree(project, GOLDEN / name)
    assert (GOLDEN / name).is_dir(), "no snapshot yet: make golden"
    expected, found = contents_of(GOLDEN / name), contents_of(project)
    count("snapshots compared", 1)
    changes: list[str] = []
    for file in sorted(expected.keys() | found.keys()):
        before, was_executable = expected.get(file, (b"", False))
        after, is_executable = found.get(file, (b"", False))
        if (file in expected) != (file in found) or was_executable != is_executable:
            changes.append(
                f"{file}: in the snapshot {file in expected}, executable {was_executable}; "
                f"rendered {file in found}, executable {is_executable}"
            )
        changes += difflib.unified_diff(
            before.decode().splitlines(),
            after.decode().splitlines(),
            f"tests/golden/{name}/{file}",
            f"rendered {file}",
            lineterm="",
        )
    assert not changes, "\n".join([*changes, "", "if this is meant: make golden"])


def test_every_snapshot_is_of_a_named_variant() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(VARIANTS)
