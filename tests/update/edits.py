"""What users do to a project before it is regenerated."""

from pathlib import Path

from tests.rendering import SLUG, Answer
from tests.update.projects import Edit


def put(old: str, new: str) -> Edit:
    """Give an edit that puts something in place of what must be there."""

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


# In every file that is the user's, and in files that they share with the template.
EDITS: dict[str, Edit] = {
    f"{SLUG}/model.py": put("nn.ReLU()", "nn.GELU()"),
    f"{SLUG}/data.py": put("unsqueeze(1) / 16", "unsqueeze(1) / 16.0"),
    f"{SLUG}/task.py": put('labels, reduction="sum")', 'labels, reduction="sum") * 1.0'),
    f"{SLUG}/settings.py": put("dropout: float = 0.1", "dropout: float = 0.2"),
    f"{SLUG}/configs/debug.yaml": put("eval_every: 23", "eval_every: 46"),
    f"{SLUG}/train.py": put("nothing left to do:", "there is nothing left to do:"),
    f"{SLUG}/engine/rundir.py": put("and logs. No torch.", "and logs. Mine."),
    "README.md": put("Training with PyTorch's", "My experiments. Training with PyTorch's"),
    "pyproject.toml": put('version = "0.1.0"', 'version = "0.2.0"'),
}

# Every two answers of each question that shapes the training.
SWITCHES: list[tuple[str, Answer, Answer]] = [
    ("backend", "nccl", "gloo"),
    ("backend", "nccl", "mpi"),
    ("backend", "gloo", "mpi"),
    ("nodes", "single", "multi"),
    ("cluster", "none", "slurm"),
    ("cluster", "none", "kubernetes"),
    ("cluster", "slurm", "kubernetes"),
    ("amp", "bf16", "fp16"),
    ("amp", "bf16", "off"),
    ("amp", "fp16", "off"),
    ("accumulation", True, False),
    ("checkpoint", "rank0", "per_rank"),
    ("checkpoint", "rank0", "sharded"),
    ("checkpoint", "per_rank", "sharded"),
    ("ema", False, True),
]


def one_line_more(path: Path) -> None:
    """Append to a file."""
    path.write_text(path.read_text() + "# mine\n")
