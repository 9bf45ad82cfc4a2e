"""Render the projects that `test_gpu.py` trains, and put what they import beside them.

`make gpu-projects` does it. Then, on a machine with GPUs, torch, numpy and pytest:

    python -m pytest --noconftest tests/gpu
"""

import importlib.util
import json
import shutil
from pathlib import Path

from tests.gpu.test_gpu import PROJECTS
from tests.rendering import render
from tests.variants import combinations, short_name

# Pure Python, or able to do without their compiled parts.
PACKAGES = ("jsonargparse", "tqdm", "yaml")

# In place of scikit-learn, which is large and compiled: its digits alone.
DIGITS = '''"""The handwritten digits of scikit-learn, without the rest of it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np


def load_digits() -> SimpleNamespace:
    """As sklearn.datasets.load_digits."""
    table = np.loadtxt(Path(__file__).parent / "digits.csv.gz", delimiter=",")
    return SimpleNamespace(images=table[:, :64].reshape(-1, 8, 8), target=table[:, 64].astype(int))
'''


def location(package: str) -> Path:
    """Give the directory of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def vendor(target: Path) -> None:
    """Copy the packages that a machine with torch alone lacks."""
    for package in PACKAGES:
        shutil.copytree(
            location(package), target / package, ignore=shutil.ignore_patterns("*.so", "*.pyc")
        )
    datasets = target / "sklearn" / "datasets"
    datasets.mkdir(parents=True)
    (target / "sklearn" / "__init__.py").write_text('"""Only the digits."""\n')
    (datasets / "__init__.py").write_text(DIGITS)
    shutil.copy(location("sklearn") / "datasets" / "data" / "digits.csv.gz", datasets)


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(PROJECTS, ignore_errors=True)
    vendor(PROJECTS / "vendor")
    for backend in ("nccl", "gloo"):
        for answers in combinations():
            answers |= {"backend": backend, "tracker": "none"}
            directory = PROJECTS / f"{backend}-{short_name(answers)}"
            render(answers, directory)
            (directory / "answers.json").write_text(json.dumps(answers))
    print(f"{len(list(PROJECTS.glob('*/answers.json')))} projects in {PROJECTS}")


if __name__ == "__main__":
    main()
