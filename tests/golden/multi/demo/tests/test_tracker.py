"""Engine: wandb gets each step once, from whole trainings, and can't end one. Always offline."""

import importlib
import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..config import Config
from ..engine import tracker
from ..engine.metrics import Metrics
from ..engine.rundir import PACKAGE
from .harness import outcomes, values
from .parts import joined
from .scenario import read_metrics, run_training, set_config
from .toy import Toy

CONFIG = set_config(
    Config(), device="cpu", epochs=1, log_every=1, eval_every=2, save_every=3, data__num_workers=0
)
TOY = Toy(num_samples=8 * CONFIG.global_batch_size, is_tracked=True)  # eight steps


def records(file: Path) -> list[Any]:
    """The records of a .wandb file: protobuf in LevelDB's log format, in blocks of 32 KiB."""
    internal: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, position, whole, found = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no header fits: filled up with zeros
            position += 32768 - position % 32768
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]  # 1 whole, 2 first part, 3 middle, 4 last
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            found.append(internal.Record.FromString(whole))
            whole = b""
    return found


def read(_: str, run_dir: str) -> dict[str, Any]:
    """What wandb's files hold of a run, all its parts together."""
    found: dict[str, Any] = {"rows": [], "codes": [], "settings": {}, "runs": set(), "axes": set()}
    for file in sorted(Path(run_dir, "wandb").glob("offline-run-*/run-*.wandb")):
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["runs"].add((record.run.project, record.run.run_id))
                changes = record.run.config.update
                found["settings"] |= {one.key: json.loads(one.value_json) for one in changes}
            elif kind == "history":
                items = record.history.item
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                found["rows"].append({**row, "_run": file.stem.removeprefix("run-")})
            elif kind == "metric":
                found["axes"].add((record.metric.glob_name, record.metric.step_metric))
            elif kind == "exit":
                found["codes"].append(record.exit.exit_code)
    return found


def numbers(rows: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """The rows of a split by their steps, without what the clock decides, and wandb's own."""
    mine = [row for row in rows if f"{split}/loss" in row]
    clock = ("samples_per_s", "data_wait")
    return [
        {
            name.removeprefix(f"{split}/"): value
            for name, value in sorted(row.items())
            if name[0] != "_" and name.removeprefix(f"{split}/") not in clock
        }
        for row in sorted(mine, key=lambda row: row["step"])
    ]


def written(run_dir: str, split: str) -> list[dict[str, Any]]:
    """The same from metrics.jsonl."""
    left_out = ("epoch", "samples", "split", "samples_per_s", "data_wait")
    return [
        {name: value for name, value in sorted(line.items()) if name not in left_out}
        for line in read_metrics(run_dir, split)
    ]


def splits(run_dir: str) -> set[str]:
    """The splits that metrics.jsonl has."""
    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["split"] for line in lines}


def test_every_step_stands_once_through_a_stop_and_crashes(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, set_config(config, max_steps=1), TOY.use)
    for _ in range(2):  # the second one has nothing new to log
        crashed = outcomes(run_training, 2, config, partial(TOY.use_until, 5))
        assert [rank.exit_code for rank in crashed] == [1, 1]
    values(run_training, 2, config, TOY.use)
    [found] = values(read, 1, run_dir)
    for split in splits(run_dir):
        assert numbers(found["rows"], split) == written(run_dir, split)
    assert [row["step"] for row in numbers(found["rows"], "train")] == list(range(1, 9))
    assert [row["step"] for row in numbers(found["rows"], "valid")] == [1, 2, 4, 6, 8]
    assert found["codes"] == [0, 1, 1, 0]
    assert found["axes"] == {("*", "step")}
    run_id = json.loads(Path(run_dir, "wandb.json").read_text())["run_id"]
    assert found["runs"] == {(PACKAGE, run_id)}
    assert found["settings"]["optim"]["lr"] == config.optim.lr


def service() -> list[int]:
    """The processes of wandb among the children of this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        lines = status.read_text().splitlines()
        if f"PPid:\t{os.getpid()}" in lines and lines[0].startswith("Name:\twandb"):
            found.append(int(status.parent.name))
    return found


def kill(victim: str) -> None:
    """Kill wandb's process, or this one, or none."""
    if victim:
        os.kill(service()[0] if victim == "service" else os.getpid(), signal.SIGKILL)


def go_on(init_method: str, run_dir: str, steps: list[int], victim: str = "") -> int:
    """Write some steps; at the third, one is killed. How many processes wandb has at the end."""
    with joined(init_method, TOY) as job:
        progress = job.state.progress
        progress.step = progress.evaluated_step = steps[0] - 1
        Path(run_dir).mkdir(exist_ok=True)
        with Metrics(Path(run_dir), job) as metrics:
            assert len(service()) == 1
            for progress.step in steps:
                kill(victim if progress.step == 3 else "")
                metrics.write("train", progress, {"loss": progress.step / 2})
        return len(service())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up as on Linux")
@pytest.mark.parametrize(
    ("victim", "exit_code", "is_said", "last"),
    [("service", 0, True, 4), ("training", -signal.SIGKILL, False, 2)],
)
def test_after_a_kill_a_new_run_has_all_steps(
    run_dir: str, victim: str, exit_code: int, is_said: bool, last: int
) -> None:
    [killed] = outcomes(go_on, 1, run_dir, [1, 2, 3, 4], victim)
    assert killed.exit_code == exit_code, killed.output
    # Which of the next writes meets the closed connection is the system's choice.
    pattern = "wandb gets nothing from step [34] on|wandb did not end well"
    assert bool(re.search(pattern, killed.output)) == is_said, killed.output
    steps = list(range(1, last + 3))
    assert [line["step"] for line in read_metrics(run_dir, "train")] == steps[:-2]
    assert not Path(run_dir, "wandb.json").exists()
    assert values(go_on, 1, run_dir, steps[-2:]) == [0]
    run_id = json.loads(Path(run_dir, "wandb.json").read_text())["run_id"]
    [found] = values(read, 1, run_dir)
    rows = [row for row in found["rows"] if row["_run"] == run_id]
    assert [row["step"] for row in numbers(rows, "train")] == steps


def without_login() -> None:
    """Prepare a training that is told to go online, where nobody is logged in."""
    TOY.use()
    os.environ.update(WANDB_MODE="online", NETRC=os.devnull, WANDB_CONFIG_DIR=os.devnull)


def with_bad_key() -> None:
    """Prepare a training with a key that wandb does not take; a server it would ask for long."""
    TOY.use()
    os.environ.update(WANDB_MODE="online", WANDB_API_KEY="short")


def without_wish() -> None:
    """Prepare a training without a mode, where nobody is logged in."""
    without_login()
    del os.environ["WANDB_MODE"]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (without_login, "WANDB_MODE: expected a login for online, got none: run `wandb login`"),
        (with_bad_key, "WANDB_MODE: expected a server that answers, or offline, got"),
    ],
)
def test_what_can_not_start_is_refused_by_all_ranks(run_dir: str, prepare: Any, words: str) -> None:
    ranks = outcomes(run_training, 2, set_config(CONFIG, run_dir=run_dir), prepare)
    assert [rank.exit_code for rank in ranks] == [2, 2], ranks[0].output
    assert f"\n{PACKAGE}: {words}" in ranks[0].output
    assert "Traceback" not in ranks[0].output + ranks[1].output
    assert not list(Path(run_dir).glob("checkpoints/step_*"))
    assert json.loads(Path(run_dir, "status.json").read_text())["state"] == "refused"


def test_without_a_login_it_is_offline_and_says_so(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, max_steps=1)
    [rank] = outcomes(run_training, 1, config, without_wish)
    assert rank.exit_code == 0, rank.output
    assert "not logged in" in rank.output
    [found] = values(read, 1, run_dir)
    assert numbers(found["rows"], "train") == written(run_dir, "train")


def test_a_message_leaves_out_the_password_of_an_address() -> None:
    error = OSError("no answer from https://me:secret@example.org/a and http://x@y z@w")
    assert tracker._text(error) == "no answer from https://example.org/a and http://y z@w"
    assert tracker._text(ValueError()) == "ValueError()"
