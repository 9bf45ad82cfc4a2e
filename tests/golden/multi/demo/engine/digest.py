"""Engine: a short name for a nesting of tensors and numbers, to compare over ranks and runs."""

import hashlib
from typing import Any

import numpy as np
import torch


def digest(tree: Any) -> str:
    """16 hex digits that differ when any value, type, shape or name in the tree differs.

    Tensors may be on any device (copying them to the host synchronises it). Of objects that are
    neither tensors, arrays, numbers, strings nor containers only the type counts.
    """
    state = hashlib.blake2b(digest_size=8)
    _add(state, tree)
    return state.hexdigest()


def _add(state: "hashlib.blake2b", node: Any) -> None:
    if isinstance(node, torch.Tensor):
        state.update(f"{node.dtype}{tuple(node.shape)}".encode())
        flat = node.detach().cpu().contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(node, np.ndarray):
        state.update(f"{node.dtype}{node.shape}".encode())
        state.update(node.tobytes())
    elif isinstance(node, dict):
        for name, value in node.items():
            state.update(f"{name!r}:".encode())
            _add(state, value)
    elif isinstance(node, list | tuple):
        state.update(f"{type(node).__name__}{len(node)}".encode())
        for value in node:
            _add(state, value)
    elif isinstance(node, bool | int | float | str | bytes | None):
        state.update(repr(node).encode())
    else:
        state.update(type(node).__qualname__.encode())
