"""Strict mypy reads every package of the product; `make test` has those in which modules meet."""

from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import Rendered
from tests.test_quality import distinct_packages, type_packages

pytestmark = pytest.mark.all_pairs

PARTS = 6  # the whole at once takes 12 GB of memory


@pytest.mark.parametrize("part", range(PARTS))
def test_mypy_is_content_with_every_package(
    part: int, all_rendered: list[Rendered], tmp_path: Path, count: Count
) -> None:
    packages = distinct_packages(all_rendered)[part::PARTS]
    type_packages(packages, tmp_path)
    count("different packages typed", len(packages))
