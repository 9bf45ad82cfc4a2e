"""How a training of a rendered project has ended, for comparing it with another one."""

import subprocess
import sys
from pathlib import Path

from tests.rendering import SLUG

DIGEST = f"""
import sys
from pathlib import Path
from {SLUG}.engine.digest import digest
from {SLUG}.engine.manifest import list_checkpoints, read_checkpoint
from {SLUG}.engine.reading import part_names, read_part
newest = read_checkpoint(list_checkpoints(Path(sys.argv[1], "checkpoints"))[0], verify=True)
parts = {{name: read_part(newest, name) for name in part_names(newest)}}
print(newest.manifest.step, digest([parts, newest.manifest.numbers, newest.manifest.progress]))
"""


def end_of(project: Path, run_dir: Path) -> str:
    """The newest checkpoint: its step, and the digest of all that it holds."""
    answer = subprocess.run(
        [sys.executable, "-c", DIGEST, run_dir],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()
