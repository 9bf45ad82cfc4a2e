"""Engine: whole trainings for the tests: `train.main` itself, with your task or the toy one."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import train
from ..config import Config
from ..engine.digest import digest
from ..engine.manifest import Checkpoint, read_checkpoint
from ..engine.state import Job
from ..engine.stop import EXIT_STOPPED
from .toy import put


@dataclass
class Record:
    """What a rank knows at the end of a training."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    digest: str = ""
    """Of all that a checkpoint would hold."""
    progress: dict[str, int] = field(default_factory=dict)
    notes: Any = None
    """What `prepare` returned, as it is after the training."""
    exit_code: int = 0
    """0: it went on to its end; 75: it was stopped by a signal, after saving."""


def set_config(config: Config, **changes: Any) -> Config:
    """The configuration with some fields changed; `optim__lr` means `optim.lr`."""
    for name, value in changes.items():
        group, _, leaf = name.partition("__")
        new = replace(getattr(config, group), **{leaf: value}) if leaf else value
        config = replace(config, **{group: new})
    return config


def run_training(
    init_method: str, config: Config, prepare: Callable[[], Any] | None = None
) -> Record:
    """Train as `train.main` does; how this rank ends. `prepare` may replace parts before."""
    record = Record(notes=prepare() if prepare else None)
    run_steps = train.run_steps

    def recorded(job: Job, *rest: Any) -> None:
        run_steps(job, *rest)
        module = job.state.module
        record.parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        record.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        record.digest = digest([job.state.parts(), job.state.numbers()])
        record.progress = vars(job.state.progress).copy()

    put(train, run_steps=recorded)
    try:
        train.main(set_config(config, rendezvous__init_method=init_method))
    except SystemExit as error:
        if error.code != EXIT_STOPPED:
            raise
        record.exit_code = EXIT_STOPPED
    return record


def saved(run_dir: str, step: int) -> Checkpoint:
    """The checkpoint of a step, which is complete."""
    return read_checkpoint(Path(run_dir, "checkpoints", f"step_{step:08d}"), verify=True)


def read_metrics(run_dir: str, split: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that belong to a split."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]
