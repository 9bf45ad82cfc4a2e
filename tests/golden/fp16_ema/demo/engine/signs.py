"""Engine: signs that a rank goes on, where it makes no mark. No torch."""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

# Files of torch that are on the stack while it compiles, and not while what it made runs.
_COMPILERS = tuple(
    os.path.join("torch", *name.split("/"))
    for name in (
        "_dynamo/convert_frame.py",
        "_inductor/compile_fx.py",
        "_inductor/async_compile.py",
        "_inductor/codecache.py",
    )
)


def main_stack(thread: threading.Thread) -> FrameType | None:
    """What a thread executes now."""
    return sys._current_frames().get(thread.ident or 0)


def is_in_compiler(frame: FrameType | None) -> bool:
    """Whether torch.compile is at work in a stack, which may take minutes."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


def bytes_moved(main: threading.Thread) -> int:
    """Bytes that the threads which save have read and written; 0 where the system does not say."""
    total = 0
    for thread in threading.enumerate():
        if thread is not main and not thread.name.startswith("checkpoint"):
            continue
        with suppress(OSError, ValueError):
            text = Path(f"/proc/self/task/{thread.native_id}/io").read_text(encoding="utf-8")
            fields = dict(line.split(": ") for line in text.splitlines())
            total += int(fields["rchar"]) + int(fields["wchar"])
    return total


def bytes_growing(checkpoints: Path) -> int:
    """Bytes in the directories in which checkpoints grow."""
    total = 0
    with suppress(OSError):  # the directory gets its name, or is removed, at any moment
        for path in checkpoints.glob("*.tmp/*"):
            total += path.stat().st_size
    return total
