"""Processes that no script of launch/ starts, as a page of the documentation says it."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import Count
from tests.rendering import ROOT, render, silent

PAGE = ROOT / "docs" / "launching" / "by_hand.md"
SLUG = "my_project"


def test_commands_of_the_page_work(tmp_path: Path, count: Count) -> None:
    with silent():
        project = render({"backend": "gloo", "tracker": "none"}, tmp_path, slug=SLUG)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    first, second, older = (block.replace("29500", port) for block in blocks)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for together in ((second, first), (older,)):
        shells = [
            subprocess.Popen(
                ["bash", "-euc", f"exec {commands.rstrip()} --max_steps 2"],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for commands in together
        ]
        said = [shell.communicate(timeout=240)[0] for shell in shells]
        assert [shell.returncode for shell in shells] == [0] * len(shells), "\n".join(said)
        assert "world size     2 on cpu" in said[-1]
    count("trainings without a script", 2)
