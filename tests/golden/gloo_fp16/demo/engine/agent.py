"""Engine: torchrun on one of several machines: it says why they do not meet, and hangs on none.

`python -m PACKAGE.engine.agent …` takes torchrun's options, and does what it does.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError, DistNetworkError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.run import main as torchrun

_LOOK_S = 2.0


def main() -> None:
    """Be torchrun; what it raises about the other machines becomes one line, and exit code 1."""
    endpoint, nodes = (os.environ.get(name, "?") for name in ("RDZV_ENDPOINT", "NNODES"))
    limit_s = float(os.environ.get("JOIN_TIMEOUT_S", "300"))
    guard = threading.Thread(target=leave_when_left, args=(limit_s + 15, endpoint), daemon=True)
    guard.start()
    try:
        torchrun()
    except ChildFailedError as error:
        leave(str(error))  # which rank, with what; its traceback is its own
    except RendezvousClosedError:
        leave("the run has ended on the other machines: start it on all of them")
    except (RendezvousConnectionError, DistNetworkError) as error:
        leave(  # it answered when this launcher was started
            f"the launcher of the machine at {endpoint} has ended, or can't be reached any more: "
            "look at its output; the same command on all machines goes on from the newest "
            f"checkpoint ({type(error).__name__})"
        )
    except (RendezvousTimeoutError, DistError) as error:
        leave(
            f"not all {nodes} machines met at {endpoint} within {limit_s:g} s: start the same "
            "command on each, with the same RDZV_ENDPOINT and RDZV_ID, and open its port; "
            f"JOIN_TIMEOUT_S waits longer ({type(error).__name__})"
        )
    except RendezvousError as error:
        leave(f"the machines did not meet at {endpoint}: {error}")


def leave_when_left(patience_s: float, endpoint: str) -> NoReturn:
    """End this process when it has had no processes for so long: a machine that is gone is awaited.

    After a cut, torchrun waits without end for the machine that keeps the list of all.
    """
    alone_since = time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        if has_children():
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > patience_s:
            leave(f"left: the machine at {endpoint} does not answer any more")


def has_children() -> bool:
    """Whether a process that this one has started still lives.

    One that has ended, and waits for torchrun to take notice, does not.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                return True
    return False


def leave(words: str) -> NoReturn:
    """Say why, and end this process, from whatever thread."""
    print(f"{__package__.partition('.')[0]}: {words}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
