"""Engine: metrics for TensorBoard, beside metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path


class Tracker:
    """Writes event files. Steps after the one resumed from are hidden from the earlier part."""

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        # Imported here: only rank 0 needs it, and it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None
        )

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a split ("train", "valid", …) at an optimizer step."""
        for name, value in values.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
