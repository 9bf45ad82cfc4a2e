"""Engine: metrics for MLflow, beside metrics.jsonl."""

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .launch import Refused
from .rundir import PACKAGE, atomic_write_text

if TYPE_CHECKING:  # at run time it is imported on rank 0 alone
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

logger = logging.getLogger(__name__)

_BATCH = 1000
"""As many numbers as MLflow takes in one call."""
_PAUSES_S = (1.0, 4.0)
"""How long the thread waits at the end of a run before it tries once more."""
_CLOSE_S = 60.0
"""How long the end of a run waits for the thread."""


class Tracker:
    """One MLflow run for each run directory, across restarts; each step of a split stands once.

    MLflow takes no point back. So what it has is left out when a step is taken again after a
    crash, and the first numbers stay; a bit-exact resume would give the same. `mlflow_run_id.txt`
    in the run directory holds the run's id: without it, a new run begins.

    A thread sends, so that no rank waits for the server. While that is away the numbers are kept
    and training goes on; what the server lacks at the end the next start adds, from metrics.jsonl.
    """

    def __init__(self, run_dir: Path, resumed_step: int, settings: Mapping[str, Any]) -> None:
        """Start the run, or go on with it; for some seconds, and on rank 0 alone.

        MLFLOW_TRACKING_URI names the server; without it, `mlflow.db` in the run directory it is.

        Raises:
            Refused: the server does not answer.
        """
        # Seven, MLflow's own number, are four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        try:
            self._client = MlflowClient(uri or f"sqlite:///{run_dir.resolve() / 'mlflow.db'}")
            artifacts = None if uri else (run_dir.resolve() / "mlflow-artifacts").as_uri()
            run = _run(self._client, run_dir, artifacts)
            self._run_id = run.info.run_id
            self._logged = _logged(self._client, run)
            _add_settings(self._client, run, settings)
        except MlflowException as error:
            raise Refused(
                f"MLFLOW_TRACKING_URI: expected a server that answers, got {_short(error)}"
            ) from None
        if any(step > resumed_step for _, step in self._logged):
            logger.info("MLflow keeps what it has of the steps after %d", resumed_step)
        self._status = "FINISHED"
        self._is_away = False
        self._queue: queue.SimpleQueue[list[Metric] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, split: str, step: int, values: Mapping[str, float]) -> None:
        """Hand over numbers of a split ("train", "valid", …) at an optimizer step, once."""
        from mlflow.entities import Metric

        if (split, step) in self._logged:
            return
        self._logged.add((split, step))
        now_ms = time.time_ns() // 1_000_000
        names = {name: re.sub(r"[^\w./ -]", "_", f"{split}/{name}") for name in values}
        self._queue.put([Metric(names[n], value, now_ms, step) for n, value in values.items()])

    def close(self, error: BaseException | None) -> None:
        """Send the rest, and mark the run as finished, or after an error as failed.

        As killed where it was stopped from outside, which is no `Exception`.
        """
        if error is not None:
            self._status = "FAILED" if isinstance(error, Exception) else "KILLED"
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("MLflow did not answer for %g s: metrics.jsonl has the rest", _CLOSE_S)

    def _send(self) -> None:
        """The thread: send what comes, in order, until None does, and end the run."""
        waiting: list[Metric] = []
        is_open = True
        while is_open:
            metrics = self._queue.get()
            is_open = metrics is not None
            waiting += metrics or []
            if self._queue.empty() or len(waiting) >= _BATCH:
                waiting = self._try(waiting)
        for pause_s in _PAUSES_S if waiting else ():
            time.sleep(pause_s)
            waiting = self._try(waiting)
        try:
            self._client.set_terminated(self._run_id, self._status)
        except Exception as error:
            logger.warning("MLflow still says that this run goes on: %s", _short(error))
        if waiting:
            logger.warning("MLflow lacks %d numbers: metrics.jsonl has them", len(waiting))

    def _try(self, waiting: list["Metric"]) -> list["Metric"]:
        """Send, and return what is left over where the server does not answer."""
        while waiting:
            try:
                self._client.log_batch(self._run_id, metrics=waiting[:_BATCH])
            except Exception as error:  # whatever it is, it does not end a training
                if not self._is_away:
                    logger.warning("MLflow does not answer, its numbers wait: %s", _short(error))
                self._is_away = True
                return waiting
            self._is_away = False
            waiting = waiting[_BATCH:]
        return waiting


def _run(client: "MlflowClient", run_dir: Path, artifacts: str | None) -> "Run":
    """The run of this directory: the one of before, or a new one."""
    from mlflow.exceptions import MlflowException

    path = run_dir / "mlflow_run_id.txt"
    if path.exists():
        run_id = path.read_text(encoding="utf-8").strip()
        try:
            run = client.get_run(run_id)
            if run.info.lifecycle_stage == "active":
                client.update_run(run_id, status="RUNNING")
                return run
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        logger.warning("MLflow does not have run %s: a new one begins", run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PACKAGE)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        experiment_id = client.create_experiment(name, artifact_location=artifacts)
    else:
        experiment_id = experiment.experiment_id
    run = client.create_run(experiment_id, run_name=run_dir.name)
    atomic_write_text(path, f"{run.info.run_id}\n")
    return run


def _logged(client: "MlflowClient", run: "Run") -> set[tuple[str, int]]:
    """The splits and steps that the run has: every one of them has a loss."""
    return {
        (key.removesuffix("/loss"), metric.step)
        for key in run.data.metrics
        if key.endswith("/loss")
        for metric in client.get_metric_history(run.info.run_id, key)
    }


def _add_settings(client: "MlflowClient", run: "Run", settings: Mapping[str, Any]) -> None:
    """Write the settings as parameters; MLflow lets none change, so the first value stays."""
    from mlflow.entities import Param

    flat, known = dict(_flat(settings)), run.data.params
    new = [Param(name, value) for name, value in flat.items() if name not in known]
    for start in range(0, len(new), 100):  # as many as MLflow takes in one call
        client.log_batch(run.info.run_id, params=new[start : start + 100])
    changed = [name for name, value in flat.items() if known.get(name, value) != value]
    if changed:
        logger.info("MLflow keeps the first value of %s", ", ".join(changed))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting under its dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _short(error: Exception) -> str:
    """The first words of a long message, on one line, without what stands before `@` in a URL."""
    return re.sub(r"//[^\s/]*@", "//", " ".join(str(error).split()))[:200]
