"""The workshop of the tests here: each project is rendered once, whoever asks for it."""

from collections.abc import Iterator

import pytest

from tests.update.projects import Workshop, load_script, renders_once


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Where the command runs in this process."""
    yield from renders_once(load_script(), tmp_path_factory.mktemp("rendered"))
