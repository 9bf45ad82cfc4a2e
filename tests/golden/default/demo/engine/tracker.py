"""Engine: metrics for TensorBoard, beside metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class Tracker:
    """Writes event files. Steps after the one resumed from are hidden from the earlier part."""

    def __init__(self, run_dir: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        # Imported here: only rank 0 needs it, and it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None
        )
        text = yaml.safe_dump(dict(settings), sort_keys=False)
        self._writer.add_text("settings", f"```yaml\n{text}```", resumed_step)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a split ("train", "valid", …) at an optimizer step."""
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)

    def close(self, _: BaseException | None) -> None:
        """Flush and close the event file."""
        self._writer.close()
