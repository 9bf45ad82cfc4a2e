"""Engine: metrics for Weights & Biases, beside metrics.jsonl."""

import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .launch import Refused
from .rundir import PACKAGE, atomic_write_text

logger = logging.getLogger(__name__)


class Tracker:
    """One wandb run for each run directory, across restarts; each step of a split stands once.

    wandb takes no point back. So what it was given is left out when a step is taken again after a
    failure, and the first numbers stay; a bit-exact resume would give the same. `wandb.json` in the
    run directory says which run it is and how far it got. It is there after an orderly end: a
    process that is killed takes along what wandb had not written yet, so the start after that
    begins a new wandb run, with all of metrics.jsonl.

    wandb's own step counts calls and refuses to go back, so the optimizer step is logged as `step`,
    over which everything is drawn.
    """

    def __init__(self, run_dir: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        """Start the run, or go on with it; for some seconds, and on rank 0 alone.

        WANDB_MODE decides whether a server is asked. Where nothing does and nobody is logged in,
        the run is recorded in the run directory, for `wandb sync`.

        Raises:
            Refused: wandb does not start, as when the server does not answer.
        """
        import wandb  # here: only rank 0 needs it

        self._teardown = wandb.teardown
        self._path = run_dir / "wandb.json"
        before = json.loads(self._path.read_text("utf-8")) if self._path.exists() else {}
        self._run_id = before.get("run_id", uuid.uuid4().hex[:8])
        self._last: dict[str, int] = before.get("last", {})
        try:
            self._run: wandb.Run | None = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PACKAGE),
                id=self._run_id,
                resume="allow",
                name=os.environ.get("WANDB_NAME", run_dir.name),
                dir=run_dir,
                mode=_mode(os.environ.get("WANDB_MODE")),
                config=dict(settings),
                allow_val_change=True,
            )
        except wandb.Error as error:
            wandb.teardown()
            raise Refused(
                f"WANDB_MODE: expected a server that answers, or offline, got {_text(error)}"
            ) from None
        self._run.define_metric("*", step_metric="step")
        self._path.unlink(missing_ok=True)
        if any(step > resumed_step for step in self._last.values()):
            logger.info("wandb keeps what it has of the steps after %d", resumed_step)

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a split ("train", "valid", …) at an optimizer step, once.

        wandb buffers, and sends in a process of its own: no server holds this up. Should that
        process die, a line says so and training goes on.
        """
        if self._run is None or step <= self._last.get(split, 0):
            return
        try:
            self._run.log({"step": step, **{f"{split}/{n}": value for n, value in values.items()}})
        except Exception as error:
            logger.warning("wandb gets nothing from step %d on: %s", step, _text(error))
            self._run = None
        self._last[split] = step

    def close(self, error: BaseException | None) -> None:
        """Send the rest, and mark the run as finished, or after an error as failed."""
        try:
            if self._run is not None:
                self._run.finish(exit_code=0 if error is None else 1)
                if self._run.settings.mode != "disabled":  # which keeps nothing
                    record = {"run_id": self._run_id, "last": self._last}
                    atomic_write_text(self._path, json.dumps(record) + "\n")
            self._teardown()  # wandb's process ends before this one does
        except Exception as problem:
            logger.warning("wandb did not end well: %s", _text(problem))


def _text(error: Exception) -> str:
    """A message without what stands before `@` in a URL: a name and a password."""
    return re.sub(r"//[^\s/]*@", "//", str(error) or repr(error))


def _mode(wanted: str | None) -> Any:
    """The mode that the user wants; without a wish, offline where nobody is logged in."""
    import wandb

    if wanted not in (None, "online") or wandb.login(prompt=False, verify=False):
        return wanted
    if wanted == "online":
        raise Refused("WANDB_MODE: expected a login for online, got none: run `wandb login`")
    logger.info("wandb: not logged in, so this run is recorded offline; `wandb sync` sends it")
    return "offline"
