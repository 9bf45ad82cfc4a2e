"""Engine: the tensors of a checkpoint, read by one process, without the others.

Whatever wrote it: a project that was rendered anew goes on from what it wrote before.
"""

from pickle import UnpicklingError

import torch
from torch import Tensor

from .launch import Refused
from .manifest import Checkpoint


def part_names(checkpoint: Checkpoint) -> list[str]:
    """The parts that a checkpoint holds.

    Raises:
        Refused: it can't be read.
    """
    names = [entry.name for entry in checkpoint.manifest.files]
    if ".metadata" in names:
        from . import pieces  # takes half a second, which few need

        return pieces.part_names(checkpoint)
    # What is a single rank's own is no part of the model.
    return [name.removesuffix(".pt") for name in names if not name.startswith("rank")]


def read_part(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The tensors of a part by name, on the CPU.

    Raises:
        Refused: the part can't be read.
    """
    if any(entry.name == ".metadata" for entry in checkpoint.manifest.files):
        from . import pieces

        return pieces.read_part(checkpoint, name)
    try:
        # Tensors only: nothing in the file can run code.
        tensors: dict[str, Tensor] = torch.load(
            checkpoint.path / f"{name}.pt", map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise Refused(f"can't read checkpoint {checkpoint.path}: {error}") from None
    return tensors
