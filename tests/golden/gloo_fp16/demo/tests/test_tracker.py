"""Engine: MLflow has each step once, from whole trainings, and can't end one. No server needed."""

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from ..config import Config
from ..engine import tracker
from ..engine.metrics import Metrics
from ..engine.rundir import PACKAGE
from .harness import outcomes, values
from .parts import joined
from .scenario import read_metrics, run_training, set_config
from .toy import Toy, put

CONFIG = set_config(
    Config(), device="cpu", epochs=1, log_every=1, eval_every=2, save_every=3, data__num_workers=0
)
TOY = Toy(num_samples=8 * CONFIG.global_batch_size, is_tracked=True)  # eight steps
CLOCK = ("samples_per_s", "data_wait")


def read(_: str, run_dir: str) -> list[dict[str, Any]]:
    """The runs that the store of a run directory holds: points by name, parameters, status."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
    experiment = client.get_experiment_by_name(PACKAGE)
    assert experiment is not None
    return [
        {
            "id": run.info.run_id,
            "status": run.info.status,
            "settings": run.data.params,
            "points": {
                name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
                for name in run.data.metrics
            },
        }
        for run in client.search_runs([experiment.experiment_id])
    ]


def written(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """The same points from metrics.jsonl, without what the clock decides."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() - {"step", "epoch", "samples", "split", *CLOCK}:
            points.setdefault(f"{line['split']}/{name}", []).append((line["step"], line[name]))
    return points


def without_clock(points: dict[str, Any]) -> dict[str, Any]:
    """The points that a second run would have as well."""
    return {name: found for name, found in points.items() if name.split("/")[1] not in CLOCK}


def test_every_step_stands_once_through_a_stop_and_a_crash(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, set_config(config, max_steps=1), TOY.use)
    crashed = outcomes(run_training, 2, config, partial(TOY.use_until, 5))
    assert [rank.exit_code for rank in crashed] == [1, 1]
    [[run]] = values(read, 1, run_dir)
    assert run["points"]["train/loss"][-1][0] == 5  # the checkpoint is of step 3
    assert run["status"] == "FAILED"
    values(run_training, 2, config, TOY.use)
    [[run]] = values(read, 1, run_dir)
    assert without_clock(run["points"]) == written(run_dir)
    for name in ("loss", *CLOCK):
        assert [step for step, _ in run["points"][f"train/{name}"]] == list(range(1, 9))
    assert [step for step, _ in run["points"]["valid/loss"]] == [1, 2, 4, 6, 8]
    assert run["status"] == "FINISHED"
    assert Path(run_dir, "mlflow_run_id.txt").read_text().strip() == run["id"]
    assert run["settings"]["optim.lr"] == str(config.optim.lr)
    assert run["settings"]["max_steps"] == "1"  # the first part's: MLflow lets none change


def go_on(init_method: str, run_dir: str, steps: list[int], failures: int) -> None:
    """Write some steps; the server does not answer when it first gets numbers.

    With -1 failures the process is killed in the end.
    """
    import mlflow

    log_batch = mlflow.MlflowClient.log_batch

    def answer(client: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        nonlocal failures
        if metrics and failures > 0:
            failures -= 1
            raise ConnectionError("as if the server had gone")
        log_batch(client, run_id, metrics, params)

    put(mlflow.MlflowClient, log_batch=answer)
    put(tracker, _PAUSES_S=(0.0, 0.0))
    with joined(init_method, TOY) as job:
        progress = job.state.progress
        progress.step = progress.evaluated_step = steps[0] - 1
        Path(run_dir).mkdir(exist_ok=True)
        with Metrics(Path(run_dir), job) as metrics:
            for progress.step in steps:
                loss = math.nan if progress.step == 1 else progress.step / 2
                metrics.write("train", progress, {"loss": loss, "top@5": 1.0})
            if failures == -1:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_server_that_goes_away_ends_nothing_and_gets_all_in_the_end(run_dir: str) -> None:
    [rank] = outcomes(go_on, 1, run_dir, [1, 2, 3, 4], 2)
    assert rank.exit_code == 0, rank.output
    assert rank.output.count("MLflow does not answer") == 1
    assert "metrics.jsonl has them" not in rank.output
    [rank] = outcomes(go_on, 1, run_dir, [5, 6], 100)
    assert rank.exit_code == 0, rank.output
    assert rank.output.count("MLflow does not answer") == 1
    assert "MLflow lacks 4 numbers: metrics.jsonl has them" in rank.output
    assert [line["step"] for line in read_metrics(run_dir, "train")] == [1, 2, 3, 4, 5, 6]
    [[run]] = values(read, 1, run_dir)
    assert run["points"]["train/top_5"] == [(step, 1.0) for step in range(1, 5)]
    [rank] = outcomes(go_on, 1, run_dir, [7], -1)
    assert rank.exit_code == -signal.SIGKILL
    values(go_on, 1, run_dir, [8], 0)
    [[run]] = values(read, 1, run_dir)
    (first, nan), *others = run["points"]["train/loss"]
    assert first == 1
    assert math.isnan(nan)
    assert others == [(step, step / 2) for step in range(2, 9)]

    Path(run_dir, "mlflow_run_id.txt").write_text("0" * 32)  # as if it were another server
    [rank] = outcomes(go_on, 1, run_dir, [9, 10], 0)
    assert "a new one begins" in rank.output
    [runs] = values(read, 1, run_dir)
    assert sorted(len(run["points"]["train/loss"]) for run in runs) == [8, 10]


def without_server() -> None:
    """Prepare a training with a server that does not answer."""
    TOY.use()
    os.environ["MLFLOW_TRACKING_URI"] = "http://me:secret@127.0.0.1:9"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"


def test_server_that_does_not_answer_is_refused_by_all_ranks(run_dir: str) -> None:
    ranks = outcomes(run_training, 2, set_config(CONFIG, run_dir=run_dir), without_server)
    assert [rank.exit_code for rank in ranks] == [2, 2], ranks[0].output
    words = "MLFLOW_TRACKING_URI: expected a server that answers, got API request to"
    assert f"\n{PACKAGE}: {words}" in ranks[0].output
    assert "Traceback" not in ranks[0].output + ranks[1].output
    assert "secret" not in ranks[0].output + ranks[1].output
    assert not list(Path(run_dir).glob("checkpoints/step_*"))
    assert json.loads(Path(run_dir, "status.json").read_text())["state"] == "refused"
