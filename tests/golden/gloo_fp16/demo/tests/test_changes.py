"""Engine: what becomes of a run that goes on with other settings, key by key."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ..config import Config
from ..engine.changes import changed, check_changes, flat, tell_changes
from ..engine.launch import Refused
from ..engine.manifest import Checkpoint, Manifest
from ..engine.optim import lr_at
from ..engine.reading import read_part
from ..rules import CHANGES, meaning_of_change
from ..settings import CHANGEABLE
from .harness import outcomes, values
from .scenario import read_metrics, run_training, saved, set_config
from .toy import Toy

KEYS = [key for key, _ in flat(asdict(Config()))]
ROWS = Counter(key for _, keys in CHANGES for key in keys)
YOURS = [key for key in KEYS if key.startswith(("model.", "data.")) and key not in ROWS]

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    log_every=1,
    data__num_workers=0,
    global_batch_size=16,
    optim__weight_decay=0.5,
)  # 4 steps of the 64 samples


def test_every_setting_is_in_one_row() -> None:
    assert set(ROWS.values()) == {1}
    assert sorted([*ROWS, *YOURS]) == sorted(KEYS)
    assert set(CHANGEABLE) <= set(YOURS)


def checkpoint_with(key: str, value: object) -> Checkpoint:
    """A checkpoint of a run with the default settings but for one."""
    config: dict[str, Any] = json.loads(json.dumps(asdict(Config())))
    *groups, leaf = key.split(".")
    group = config
    for name in groups:
        group = group[name]
    group[leaf] = value
    numbers: dict[str, Any] = {"progress": {"step": 7}, "world_size": 2, "order": ""}
    manifest = Manifest(**numbers, versions={}, config=config, numbers={}, valid_loss=None)
    return Checkpoint(Path("step_00000007"), manifest)


@pytest.mark.parametrize("key", KEYS)
def test_each_setting_is_refused_or_said_or_has_no_part_in_the_numbers(key: str) -> None:
    checkpoint = checkpoint_with(key, "another")
    now = dict(flat(asdict(Config())))[key]
    assert changed(checkpoint, Config()) == {key: ("another", now)}
    if key in YOURS and key not in CHANGEABLE:
        with pytest.raises(Refused) as refused:
            check_changes(checkpoint, Config())
        assert str(refused.value).startswith(
            f"{key}: expected 'another' as in the checkpoint step_00000007, got {now!r}: "
        )
        return
    check_changes(checkpoint, Config())
    words = meaning_of_change(key)
    lines = list(tell_changes(checkpoint, Config()))
    assert lines == [f"{key} is {now!r}, and 'another' in the checkpoint: {words}"] * bool(words)


def test_setting_that_only_one_of_the_two_has_is_no_change() -> None:
    assert changed(checkpoint_with("model.new", 3), Config()) == {}
    assert meaning_of_change("added") == "it holds from this step on"


def resume_with(run_dir: str, **changes: Any) -> str:
    """Train two of four steps, then the others with changed settings; what rank 0 said of it."""
    config = set_config(CONFIG, run_dir=run_dir)
    values(run_training, 2, set_config(config, max_steps=2), Toy().use)
    ranks = outcomes(run_training, 2, set_config(config, **changes), Toy().use)
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks[0].output
    assert ranks[0].value.digest == ranks[1].value.digest
    return ranks[0].output


def test_weight_decay_is_the_configured_one(run_dir: str) -> None:
    said = resume_with(run_dir, optim__weight_decay=0.25)
    assert "optim.weight_decay is 0.25, and 0.5 in the checkpoint: it holds from" in said
    last = saved(run_dir, read_metrics(run_dir, "train")[-1]["step"]).manifest
    groups = last.numbers["optimizer_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_learning_rate_follows_the_new_settings(run_dir: str) -> None:
    said = resume_with(run_dir, optim__lr=0.5, optim__schedule="linear", epochs=2)
    for key in ("optim.lr", "optim.schedule", "epochs"):
        assert f"\n{key} is " in said
    new = set_config(CONFIG, optim__lr=0.5, optim__schedule="linear").optim
    for line in read_metrics(run_dir, "train")[2:]:
        assert line["lr"] == lr_at(line["step"], 8, new, 0.5)


def test_other_batch_goes_on_at_the_sample_where_the_run_stopped(run_dir: str) -> None:
    said = resume_with(run_dir, global_batch_size=32)
    assert "global_batch_size is 32, and 16 in the checkpoint: a step is another number" in said
    samples = [line["samples"] for line in read_metrics(run_dir, "train")]
    assert samples == [16, 32, 64]


def test_weights_and_moments_are_converted(run_dir: str) -> None:
    said = resume_with(run_dir, dtype="float64")
    assert "dtype is 'float64', and 'float32' in the checkpoint: weights and moments are" in said
    step = read_metrics(run_dir, "train")[-1]["step"]
    parts = [read_part(saved(run_dir, step), name) for name in ("model", "optimizer")]
    types = {name: t.dtype for part in parts for name, t in part.items() if t.ndim}
    assert set(types.values()) == {torch.float64}
    assert any(name.endswith("exp_avg") for name in types)


def test_refused_setting_changes_nothing(run_dir: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, save_every=1)
    values(run_training, 2, config, Toy().use)
    root = Path(run_dir, "checkpoints")
    before = sorted(path.name for path in root.iterdir())
    other = set_config(config, resume=str(root / before[1]), model__channels=7)
    key = "model.channels: expected 32"
    ranks = outcomes(run_training, 2, other, Toy().use)
    assert [rank.exit_code for rank in ranks] == [2, 2]
    assert f"{key} as in the checkpoint {before[1]}, got 7: " in ranks[0].output
    assert sorted(path.name for path in root.iterdir()) == before
