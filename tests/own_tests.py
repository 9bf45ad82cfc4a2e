"""Tests of a rendered project, run in the process that asks for them."""

import os
import sys
import tempfile
from pathlib import Path

import pytest


def run_own_tests(*node_ids: str) -> tuple[int, str]:
    """Run tests of the project in the current directory, by their ids below its tests/.

    Returns:
        Exit code and output of pytest, which ends at a failure. What this process prints
        afterwards is lost.
    """
    tests = [f"{Path.cwd().name}/tests/{node_id}" for node_id in node_ids]
    with tempfile.TemporaryFile() as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        output.seek(0)
        return int(code), output.read().decode()
