"""Engine: saved weights are a plain `nn.Module`'s, for Python with nothing but torch."""

import subprocess
import sys
from pathlib import Path

from ..config import Config
from .harness import values
from .scenario import run_training, set_config
from .toy import Toy

CONFIG = set_config(Config(), device="cpu", max_steps=1, data__num_workers=0)

ELSEWHERE = """
import sys
import torch
from torch import nn

for path in sys.argv[1:]:
    weights = torch.load(path, weights_only=True)
    model = nn.Module()
    model.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(), nn.Linear(16, 3))
    model.load_state_dict(weights, strict=True)
    print(*weights)
"""


def test_weights_load_without_this_project(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, config, Toy().use)
    directory = Path(run_dir, "checkpoints", "step_00000001")
    paths = [str(directory / "model.pt")]
    answer = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, *paths], capture_output=True, text=True, check=True
    )
    names = "layers.0.weight layers.0.bias layers.3.weight layers.3.bias"
    assert answer.stdout.splitlines() == [names for _ in paths]
