"""Engine: what differs between operating systems where processes meet. No torch."""

import os
import sys

from .launch import Launch, Refused


def prepare(launch: Launch, backend: str) -> None:
    """Set what this system needs before the processes meet; what is set already stays.

    Raises:
        Refused: they can't train together here.
    """
    if sys.platform == "linux":
        return
    if sys.platform == "darwin":
        if launch.local_world_size < launch.world_size:
            raise Refused("platform: expected one machine on macOS, got processes on several")
        # Its own name often has no address, and gloo would look that up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    elif sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch is built without it there
        is_file = launch.init_method.startswith("file:")
        if launch.world_size > 1 and not (launch.world_size == 2 and is_file and backend == "gloo"):
            raise Refused(
                "platform: expected one process on Windows, or two with gloo that meet at "
                f"file:///PATH, got {launch.world_size} with {backend} at {launch.init_method}"
            )
    else:
        raise Refused(f"platform: expected Linux, macOS or Windows, got {sys.platform}")
