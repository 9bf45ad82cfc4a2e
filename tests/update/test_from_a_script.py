"""A script for one GPU, and the four files that a page of the documentation makes of it."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import ROOT, render, silent, succeed

PAGE = ROOT / "docs" / "from_a_script.md"
EXAMPLE = ROOT / "examples" / "one_gpu"
SLUG = "my_project"

# The script as it is, but in float64, from the weights and in the order of the project: a script
# draws both from one generator.
BEFORE = f"""
import runpy, sys
import torch
from torch.utils.data import RandomSampler
from {SLUG}.engine.keyed import seed_init
from {SLUG}.engine.sampler import epoch_order
epochs = iter(range(100))
RandomSampler.__iter__ = lambda self: iter(epoch_order(0, next(epochs), len(self)).tolist())
torch.manual_seed = lambda seed: seed_init(seed, torch.device("cpu"))
source = open(sys.argv[1]).read()
source, replaced = source.replace("torch.float32\\n\\n", "torch.float64\\n\\n"), source
assert source != replaced
exec(compile(source, sys.argv[1], "exec"), {{"__name__": "__main__"}})
"""

COMPARE = """
import sys, torch
before, *after = (torch.load(name, weights_only=True) for name in sys.argv[1:])
for weights in after:
    for one, other in zip(before.values(), weights.values(), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)
"""

ENVIRONMENT = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the four files, and the weights that the script ends with."""
    answers = {"backend": "gloo", "amp": "off", "tracker": "none"}
    with silent():
        project = render({**answers}, tmp_path_factory.mktemp("script"), slug=SLUG)
    shutil.copytree(EXAMPLE / "after", project / SLUG, dirs_exist_ok=True)
    return project


def test_the_files_are_clean(project: Path) -> None:
    succeed("ruff", "check", "--no-cache", project)
    succeed("ruff", "format", "--no-cache", "--check", project)


@pytest.mark.update
def test_both_end_with_the_same_weights(project: Path, count: Count) -> None:
    script = EXAMPLE / "before.py"
    said = succeed(sys.executable, "-c", BEFORE, script, cwd=project, env=ENVIRONMENT)
    epochs = re.findall(r"^epoch \d: loss (\S+), accuracy (\S+)$", said, re.MULTILINE)
    assert len(epochs) == 5
    options = f"--config {SLUG}/configs/default.yaml --dtype float64 --data.num_workers 0"
    for processes in (1, 2):
        launch = f"NPROC={processes} {SLUG}/launch/train.sh"
        run = f"runs/{processes}"
        succeed(
            *("bash", "-c", f"{launch} {options} --run_dir {run}"), cwd=project, env=ENVIRONMENT
        )
        export = f"{SLUG}.checkpoints {run} --export {processes}.pt"
        succeed(sys.executable, "-m", *export.split(), cwd=project, env=ENVIRONMENT)
        lines = (project / run / "metrics.jsonl").read_text().splitlines()
        valid = [line for line in map(json.loads, lines) if line["split"] == "valid"]
        assert [line["loss"] for line in valid] == pytest.approx([float(x) for x, _ in epochs])
        assert [f"{line['accuracy']:.4f}" for line in valid] == [right for _, right in epochs]
    files = ("model.pt", "1.pt", "2.pt")
    succeed(sys.executable, "-c", COMPARE, *files, cwd=project, env=ENVIRONMENT)
    count("trainings beside a script", 2)


@pytest.mark.update
def test_commands_of_the_page_work(project: Path, count: Count) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    yours, train, parity = (
        succeed("bash", "-euc", commands, cwd=project, env=ENVIRONMENT) for commands in blocks
    )
    assert " passed" in yours
    assert re.search(r"^step 115  epoch 5  valid: loss 0\.\d+", train, re.MULTILINE)
    assert "explained: without these they are equal within the rounding of float64" in parity
    count("blocks of commands in the documentation run", len(blocks))
