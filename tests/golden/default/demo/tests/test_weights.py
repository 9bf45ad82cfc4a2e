"""Engine: saved weights are a plain `nn.Module`'s, for Python with nothing but torch."""

import subprocess
import sys
from pathlib import Path

from ..config import Config
from .harness import values
from .scenario import run_training, set_config
from .toy import Toy

CONFIG = set_config(Config(), device="cpu", max_steps=1, data__num_workers=0)

READ = """
parts = {name: torch.load(f"{directory}/{name}.pt", weights_only=True) for name in names}
"""
ELSEWHERE = f"""
import sys
import torch
from torch import nn

directory, *names = sys.argv[1:]
{READ}
for name in names:
    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout())
    model.layers.append(nn.Linear(16, 3))
    model.load_state_dict(parts[name], strict=True)
    print(*sorted(parts[name]))
"""


def test_weights_load_without_this_project(run_dir: str, tmp_path: Path) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, config, Toy(has_batch_norm=True).use)
    directory = Path(run_dir, "checkpoints", "step_00000001")
    names = ["model"]
    command = [sys.executable, "-I", "-W", "ignore", "-c", ELSEWHERE, str(directory), *names]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    expected = [f"layers.{layer}.{name}" for layer in (0, 1, 4) for name in ("bias", "weight")]
    buffers = ("num_batches_tracked", "running_mean", "running_var")
    expected += [f"layers.1.{name}" for name in buffers]
    assert answer.stdout.splitlines() == [" ".join(sorted(expected)) for _ in names]
