"""Engine: the program as people start it: refusals in one line, and a run from end to end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .. import train
from ..config import Config
from ..engine.launch import Launch
from ..engine.rundir import PACKAGE, RunDir
from .harness import outcomes
from .scenario import read_metrics, run_training, set_config
from .toy import Toy, put

HERE = Path(train.__file__).parent
SCRIPT = HERE / "launch" / "train.sh"
CPU, GPU = ["--device", "cpu"], ["--device", "cuda"]

Answer = subprocess.CompletedProcess[str]


def call(words: list[str], **environment: str) -> Answer:
    """Run a command in the environment of these tests, and wait for its end."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        words,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def launch(*settings: str) -> Answer:
    """Train two processes with the script of launch/."""
    environment = {"NPROC": "2"}
    return call([str(SCRIPT), *settings], **environment)


def status(run_dir: str) -> dict[str, Any]:
    """What status.json says."""
    content: dict[str, Any] = json.loads(Path(run_dir, "status.json").read_text())
    return content


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("--config nowhere.yaml", "config"),
        ("--optim.lr abc", "optim.lr"),
        ("--optim.lrr 1", "optim.lrr"),
        ("--global_batch_size 33", "global_batch_size"),
    ],
)
def test_wrong_setting_is_one_line_at_once(settings: str, key: str, run_dir: str) -> None:
    """As the first of two processes; torch is not even imported."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    place = dict(zip(names, ("0", "0", "2", "2"), strict=True))
    start = time.monotonic()
    words = [sys.executable, "-m", f"{PACKAGE}.train", "--run_dir", run_dir, *settings.split()]
    answer = call(words, **place)
    assert time.monotonic() - start < 5
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"{PACKAGE}: {key}: ")
    assert answer.stderr.count("\n") == 1
    assert status(run_dir)["state"] == "refused"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["--global_batch_size", "33"], "global_batch_size: expected a multiple of "),
        pytest.param(
            GPU,
            "device: expected 'cuda', but this machine shows ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=["setting", "device"],
)
def test_launched_processes_say_it_once(settings: list[str], line: str, run_dir: str) -> None:
    start = time.monotonic()
    answer = launch("--run_dir", run_dir, *settings)
    assert time.monotonic() - start < 60
    assert answer.returncode != 0
    assert answer.stderr.count(f"{PACKAGE}: {line}") == 1, answer.stderr
    assert f'File "{HERE}' not in answer.stderr, "a traceback for a mistake of the user's"
    assert status(run_dir)["state"] == "refused"


def test_debug_run_on_two_processes(run_dir: str) -> None:
    """With your model and data, from the launch script to the last checkpoint."""
    debug = str(HERE / "configs" / "debug.yaml")
    answer = launch("--config", debug, "--run_dir", run_dir, *CPU, "--max_steps", "3")
    assert answer.returncode == 0, answer.stderr
    assert "world size     2 on cpu" in answer.stdout
    assert "Warning" not in answer.stdout + answer.stderr
    assert (status(run_dir)["state"], status(run_dir)["step"]) == ("done", 3)
    assert [line["step"] for line in read_metrics(run_dir, "valid")] == [3]
    assert Path(run_dir, "checkpoints", "step_00000003", "manifest.json").exists()
    written = {path.name for path in Path(run_dir).iterdir()}
    assert written >= {"config.yaml", "environment.json", "logs", "metrics.jsonl", "status.json"}


CONFIG = set_config(Config(), device="cpu", max_steps=2, data__num_workers=0)


def test_finished_run_has_nothing_left_to_do(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    for said in ("valid: loss", "nothing left to do: step 2 was the last\n"):
        (ended,) = outcomes(run_training, 1, config, Toy().use)
        assert (ended.exit_code, status(run_dir)["state"]) == (0, "done")
        assert said in ended.output
    assert len(read_metrics(run_dir, "valid")) == 1


def test_second_run_in_a_live_directory_is_refused(run_dir: str) -> None:
    with RunDir(run_dir, Launch()) as live:
        live.status("running", 7)
        ended = outcomes(run_training, 2, set_config(CONFIG, run_dir=run_dir), Toy().use)
        assert [rank.exit_code for rank in ended] == [2, 2]
        assert ended[0].output.count("\n") == 1
        assert ended[0].output.startswith(
            f"{PACKAGE}: run_dir: expected a directory without a live run, got {run_dir} "
            f"(in use by process {os.getpid()} on "
        )
        assert (status(run_dir)["state"], status(run_dir)["step"]) == ("running", 7)


def use_no_data() -> None:
    """Prepare a training on an empty data set."""
    Toy().use()
    put(train, data=SimpleNamespace(build_datasets=lambda _: ([], [1])))


def test_empty_data_set_is_refused_on_every_rank(run_dir: str) -> None:
    ended = outcomes(run_training, 2, set_config(CONFIG, run_dir=run_dir), use_no_data)
    assert [rank.exit_code for rank in ended] == [2, 2]
    assert ended[0].output == (
        f"{PACKAGE}: training data: expected at least one sample, got an empty data set\n"
    )
    assert status(run_dir)["state"] == "refused"
