"""Runs end: hundreds of times without a hang, and without a word on standard error."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import Count
from tests.rendering import SLUG, Answers, render, silent

# Two processes that keep their models until after the group is destroyed hang, but only in the
# 121st training. New ones don't, in 200: so fewer of these, which all other suites end as well.
IN_ONE_PAIR = 200
IN_NEW_PAIRS = 50
FIRST: Answers = {"amp": "fp16", "ema": True}
VARIANTS: dict[str, Answers] = {"default": {}, "fp16_ema": FIRST, "off": {"amp": "off"}}

TRAINING = f"""
import sys
from {SLUG} import train
from {SLUG}.config import Config
from {SLUG}.tests.harness import values
from {SLUG}.tests.scenario import run_training, set_config
from {SLUG}.tests.toy import Toy

directory, repeats = sys.argv[1], range(int(sys.argv[2]))
toy = Toy(num_samples=16, num_valid=2, has_batch_norm=True)
config = set_config(
    Config(), device="cpu", epochs=1, global_batch_size=8, micro_batch_size=2,
    data__num_workers=0, timeout_s=30.0,
)
"""

LOOP = f"""
{TRAINING}
toy.use()
for number in repeats:
    place = f"file://{{directory}}/rendezvous{{number}}"
    one = set_config(config, run_dir=f"{{directory}}/{{number}}")
    train.main(set_config(one, rendezvous__init_method=place))
"""

FORKS = f"""
{TRAINING}
if __name__ == "__main__":
    for number in repeats:
        one = set_config(config, run_dir=f"{{directory}}/{{number}}")
        values(run_training, 2, one, toy.use, timeout_s=30.0)
"""


def environment(project: Path, **more: str) -> dict[str, str]:
    """Give what the processes of a run find in their environment."""
    settled = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(project)}
    return os.environ | settled | more


def wait_for(processes: list[subprocess.Popen[str]], seconds: float) -> None:
    """Wait for processes that must end by themselves, with exit code 0; leave none behind."""
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="session")
def projects(shared: Path) -> dict[str, Path]:
    """The projects that are run, rendered once."""
    directory = shared / "clean_end"
    with FileLock(shared / "clean_end.lock"):
        for name, answers in VARIANTS.items():
            if not (directory / name).exists():
                with silent():
                    render(answers, directory / name)
    return {name: directory / name / SLUG for name in VARIANTS}


def start(
    project: Path, script: Path, directory: Path, repeats: int, **more: str
) -> subprocess.Popen[str]:
    """Start a script that trains again and again in a directory."""
    return subprocess.Popen(
        [sys.executable, script, directory, str(repeats)],
        env=environment(project, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_train_again_and_again(
    projects: dict[str, Path], tmp_path: Path, count: Count
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        start(
            projects["fp16_ema"], script, tmp_path, IN_ONE_PAIR, RANK=rank, LOCAL_RANK=rank, **size
        )
        for rank in ("0", "1")
    ]
    wait_for(ranks, 240)
    assert len(list(tmp_path.glob("*/status.json"))) == IN_ONE_PAIR
    count("trainings in one pair of processes", IN_ONE_PAIR)


def test_forked_pairs_end(projects: dict[str, Path], tmp_path: Path, count: Count) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    wait_for([start(projects["fp16_ema"], script, tmp_path, IN_NEW_PAIRS)], 400)
    assert len(list(tmp_path.glob("*/status.json"))) == IN_NEW_PAIRS
    count("trainings in pairs of processes of their own", IN_NEW_PAIRS)


@pytest.mark.parametrize("name", VARIANTS)
def test_normal_run_says_nothing_on_standard_error(
    projects: dict[str, Path], tmp_path: Path, name: str
) -> None:
    project = projects[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", f"{SLUG}.train"]
    command += ["--config", f"{SLUG}/configs/debug.yaml", "--device", "cpu"]
    command += ["--data.num_workers", "1", "--run_dir", str(tmp_path / "run")]
    for stop in ("24", "30"):  # in the second epoch, and there again
        answer = subprocess.run(
            [*command, "--max_steps", stop],
            cwd=project,
            env=environment(project),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        assert answer.stderr == ""
        assert f"step {stop} " in answer.stdout
