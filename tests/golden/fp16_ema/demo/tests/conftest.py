"""Engine: set-up of the tests. One thread a rank, and nothing computed in pytest's own process.

Ranks are forked from a server process. A parallel region in a process that is forked later (a
matrix product on two threads is enough) hangs its children, so the server only imports.
"""

import os
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is imported
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# The server that forks ranks starts with the environment, not with pytest's sys.path.
ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """A fresh run directory, as the setting of that name wants it."""
    return str(tmp_path / "run")
