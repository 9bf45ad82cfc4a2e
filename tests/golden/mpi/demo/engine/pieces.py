"""Engine: the tensors of a checkpoint that all ranks wrote together, read by one process.

Every project reads them, for an earlier variant of it may have written them: `reading.py` asks
this module where torch.distributed.checkpoint has left its list of pieces.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .launch import Refused
from .manifest import Checkpoint

# All that `.metadata`, a pickle, may name. Anything else could run code.
_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(FileSystemReader):
    """Reads `.metadata` without trusting it; the tensors are read without trust anyway."""

    def read_metadata(self) -> Metadata:
        """What the checkpoint holds, and where."""
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


def _metadata(checkpoint: Checkpoint) -> Metadata:
    try:
        return _Reader(checkpoint.path).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise Refused(f"can't read checkpoint {checkpoint.path}: {error}") from None


def part_names(checkpoint: Checkpoint) -> list[str]:
    """The parts that such a checkpoint holds.

    Raises:
        Refused: it can't be read.
    """
    return sorted({path[0] for path in _metadata(checkpoint).planner_data.values()})


def read_part(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The tensors of a part by name, on the CPU, whichever ranks wrote them.

    Raises:
        Refused: the part can't be read.
    """
    reader, planner = _Reader(checkpoint.path), DefaultLoadPlanner()
    metadata = _metadata(checkpoint)
    tensors = {
        metadata.planner_data[key][1]: torch.empty(found.size, dtype=found.properties.dtype)
        for key, found in metadata.state_dict_metadata.items()
        if metadata.planner_data[key][0] == name and isinstance(found, TensorStorageMetadata)
    }
    if not tensors:
        raise Refused(f"can't read checkpoint {checkpoint.path}: it has no {name}")
    # What torch.distributed.checkpoint.load does, for this process alone.
    planner.set_up_planner({name: tensors}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
    try:
        reader.read_data(plan, planner).wait()
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise Refused(f"can't read checkpoint {checkpoint.path}: {error}") from None
    return tensors
