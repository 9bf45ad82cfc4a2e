"""Call functions where torch is imported already: importing it takes longer than most of them do.

    python -m tests.serving MODULE …

reads requests, one a line, and writes an answer for each. Every call has a process of its own,
forked from a server that has imported these modules and computes nothing: nothing that a call
leaves behind is there for the next. Ranks that a project's harness forks come from there as well.

Only the standard library is imported here, so that the program itself starts at once.
"""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent

LIMIT_S = 300.0
"""What a call may take: far more than the longest, compiling on a busy machine."""


class Server:
    """The program, for who asks it. It starts with the first call, and anew when it is gone."""

    def __init__(
        self, errors: Path, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        """Standard error of all calls goes to a file; modules that are not there are left out."""
        self._errors = errors
        self._environment = dict(environment)
        self._modules = modules
        self._program: subprocess.Popen[str] | None = None

    def call(
        self,
        project: Path,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float = LIMIT_S,
    ) -> Any:
        """Call a function of a module in a project: there, with its package on the path.

        Arguments and the returned value are of the kinds that JSON knows.

        Raises:
            AssertionError: it raised, ended its process, or was not done in time.
        """
        if self._program is None or self._program.poll() is not None:
            self._program = self._start()
        requests, answers = self._program.stdin, self._program.stdout
        assert requests is not None
        assert answers is not None
        name = f"{function.__module__}:{function.__name__}"
        before = self._errors.stat().st_size
        request = {"project": str(project), "function": name, "arguments": arguments}
        requests.write(json.dumps(request) + "\n")
        is_answered, _, _ = select.select([answers], [], [], limit_s)
        if line := answers.readline() if is_answered else "":
            answer = json.loads(line)
        else:
            self._kill()
            what = "the server has ended" if is_answered else f"no answer in {limit_s:g} s"
            answer = {"error": what}
        if error := answer.get("error"):
            said = self._errors.read_bytes()[before:].decode()
            raise AssertionError(f"{name}: {error.splitlines()[-1]}\n{error}\n{said}")
        return answer["value"]

    def stop(self) -> None:
        """End the program, which has nothing to do, or else kill it."""
        if self._program is not None:
            try:
                self._program.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self._kill()

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | self._environment
        # Rank after rank imports the project: compiled once.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, *self._modules],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,  # so that all processes below it can be killed
            )

    def _kill(self) -> None:
        if self._program is not None:
            os.killpg(self._program.pid, signal.SIGKILL)
            self._program.communicate()
            self._program = None


def serve(modules: list[str]) -> None:
    """Answer requests until the input ends: `{"value": …}`, or `{"error": …}`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    # The answers alone: what a call prints goes to standard error.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answer, end = context.Pipe(duplex=False)
            process = context.Process(target=answer_one, args=(end,), kwargs=json.loads(line))
            process.start()
            end.close()
            try:
                answers.write(answer.recv() + "\n")
                process.join()
            except EOFError:
                process.join()
                error = f"its process ended with {process.exitcode}"
                answers.write(json.dumps({"error": error}) + "\n")


def answer_one(end: Connection, project: str, function: str, arguments: list[Any]) -> None:
    """Call a function, and send the answer."""
    os.chdir(project)
    sys.path.insert(0, project)
    module, name = function.split(":")
    # Else the harness of a project would start a server of its own, and import torch in it.
    with patch.object(ForkServer, "ensure_running", lambda _: None):
        try:
            answer = {"value": getattr(import_module(module), name)(*arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
    end.send(json.dumps(answer))


if __name__ == "__main__":
    serve(sys.argv[1:])
