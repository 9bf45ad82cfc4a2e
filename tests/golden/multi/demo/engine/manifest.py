"""Engine: what a checkpoint says of itself, and which there are. Imports no torch.

`checkpoints/step_00000120/` holds manifest.json and the files that it lists.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
_NAME = re.compile(r"step_\d{8,}")


class NewerFormat(ValueError):
    """A later version of this project wrote the checkpoint."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint, as the manifest lists it."""

    name: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, in numbers and words that a person can read."""

    progress: dict[str, int]
    world_size: int
    order: str
    """Digest of the order in which the epoch visits its samples."""
    versions: dict[str, str]
    config: dict[str, Any]
    numbers: dict[str, Any]
    """What training changes beside tensors, such as the optimizer's groups."""
    valid_loss: float | None
    """What makes it the best; none where its step was not evaluated, or not to a number."""
    files: tuple[FileEntry, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def step(self) -> int:
        """Optimizer steps that the run had taken."""
        return self.progress["step"]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def valid_loss(self) -> float:
        """The validation loss of its step; infinite where there is none."""
        loss = self.manifest.valid_loss
        return math.inf if loss is None else loss


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step_{step:08d}"


def file_sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(content: dict[str, Any]) -> str:
    """The text of a manifest, which ends with a checksum of all that stands before."""
    return json.dumps({**content, "sha256": _sum_of(content)}, indent=2)


def _sum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_checkpoint(path: Path, *, verify: bool) -> Checkpoint:
    """Read a checkpoint's manifest and check its files: their sizes, with `verify` all their bytes.

    Raises:
        NewerFormat: it is of a format that comes after this project's.
        ValueError: it is not complete, or of another format, with the reason.
    """
    try:
        numbers = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        _check_format(numbers["format_version"])
        if numbers.pop("sha256") != _sum_of(numbers):
            raise ValueError("its manifest is damaged")
        entries = tuple(FileEntry(**entry) for entry in numbers["files"])
        manifest = Manifest(**{**numbers, "files": entries})
    except FileNotFoundError:
        raise ValueError("it has no manifest") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise ValueError("its manifest is damaged") from None
    for entry in entries:
        file = path / entry.name
        if not file.is_file():
            raise ValueError(f"{entry.name} is missing")
        if file.stat().st_size != entry.size:
            raise ValueError(f"{entry.name} has {file.stat().st_size} bytes, expected {entry.size}")
        if verify and file_sha256(file) != entry.sha256:
            raise ValueError(f"the checksum of {entry.name} is wrong")
    return Checkpoint(path, manifest)


def _check_format(version: object) -> None:
    if version == FORMAT_VERSION:
        return
    is_newer = isinstance(version, int) and version > FORMAT_VERSION
    raise (NewerFormat if is_newer else ValueError)(
        f"its format version is {version}, this project reads {FORMAT_VERSION}: "
        "go on with the version of the project that wrote it, or give another run_dir"
    )


def list_checkpoints(root: Path) -> list[Path]:
    """The directories that are named as checkpoints, newest first (by number, not by letters)."""
    named = [path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest validation loss; never one whose loss is not a finite number."""
    rated = [checkpoint for checkpoint in checkpoints if math.isfinite(checkpoint.valid_loss)]
    return min(rated, key=lambda checkpoint: checkpoint.valid_loss, default=None)
