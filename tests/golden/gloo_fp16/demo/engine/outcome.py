"""Engine: how a run has ended, for the script that started it. No torch.

`python -m PACKAGE.engine.outcome SINCE [--config FILE] [--SETTING VALUE …]` prints
`STATE STEP STEPS CHECKPOINTS`: of status.json, how many steps were made, how many are there.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..config import Config
from .cli import guess_run_dir
from .manifest import list_checkpoints


@dataclass(frozen=True)
class Outcome:
    """What a run directory says of the starts since a time."""

    state: str = "none"
    """Of status.json; `none` where it is older, or missing."""
    step: int = 0
    """Optimizer steps that the run has done."""
    steps: int = 0
    """How many of them the last start did; none where it did not come as far as training."""
    checkpoints: int = 0
    """How many are there, whenever they were written."""

    def __str__(self) -> str:
        """Say it in words for a shell to read."""
        return f"{self.state} {self.step} {self.steps} {self.checkpoints}"


def outcome_of(run_dir: Path, since: float) -> Outcome:
    """Read what the starts since a time (seconds since 1970) have left in a run directory."""
    checkpoints = len(list_checkpoints(run_dir / "checkpoints"))
    try:
        status = _read(run_dir / "status.json")
        state, step = str(status["state"]), int(status["step"])
        is_old = datetime.fromisoformat(status["updated"]).timestamp() < since
    except (KeyError, TypeError, ValueError):
        is_old = True
    if is_old:
        return Outcome(checkpoints=checkpoints)
    steps = 0
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
        last = _read(run_dir / "attempts.json")[-1]
        steps = step - int(last["step"]) if float(last["started"]) >= since else 0
    return Outcome(state, step, steps, checkpoints)


def _read(path: Path) -> Any:
    """The content of a JSON file; nothing where it is missing."""
    with contextlib.suppress(OSError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def main(argv: Sequence[str]) -> None:
    """Print the outcome in the run directory that the words of a command line mean."""
    since, *words = argv
    print(outcome_of(Path(guess_run_dir(words, Config.run_dir)), float(since)))


if __name__ == "__main__":
    main(sys.argv[1:])
