"""Train in a project, and say what it began and ended with. Runs in the server's processes."""

import hashlib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


def digest(tensors: Mapping[str, Any]) -> str:
    """Give a hash of tensors that is the same in every variant of a project."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def note_the_beginning(package: str) -> dict[str, str]:
    """Let a rank note which weights it has before its first step."""
    train = import_module(f"{package}.train")
    run_steps = train.run_steps
    notes: dict[str, str] = {}

    def noted(job: Any, *rest: Any) -> None:
        parts = job.state.parts().items()
        notes.update({part: digest(tensors) for part, tensors in parts})
        notes["parameters"] = digest(dict(job.state.module.named_parameters()))
        run_steps(job, *rest)

    import_module(f"{package}.tests.toy").put(train, run_steps=noted)
    return notes


def train(package: str, ranks: int, run_dir: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train; digests of what all ranks began and ended with, and what the log says."""
    scenario = import_module(f"{package}.tests.scenario")
    config = scenario.set_config(
        import_module(f"{package}.config").Config(),
        run_dir=run_dir,
        device="cpu",
        epochs=1,
        log_every=1,
        data__num_workers=0,
        **settings,
    )
    values = import_module(f"{package}.tests.harness").values
    prepare = partial(note_the_beginning, package)
    records = values(scenario.run_training, ranks, config, prepare, timeout_s=240)
    return {
        "began": [record.notes for record in records],
        "ended": [digest(record.parameters) for record in records],
        "model": digest({**records[0].parameters, **records[0].buffers}),
        "step": records[0].progress["step"],
        "log": Path(run_dir, "logs", "rank0.log").read_text(),
    }


def average(package: str, run_dir: str, decay: float) -> float:
    """Give the largest difference of the average at step 3 from what it should be."""
    scenario = import_module(f"{package}.tests.scenario")
    read_part = import_module(f"{package}.engine.reading").read_part
    two, three = (scenario.saved(run_dir, step) for step in (2, 3))
    start, end, mean = read_part(two, "model"), read_part(three, "model"), read_part(three, "ema")
    differences = [
        (mean[name] - (decay * start[name] + (1 - decay) * end[name])).abs().max().item()
        for name in mean
    ]
    moved = [(end[name] - start[name]).abs().max().item() for name in mean]
    return float(max(differences) / max(moved))


def saved_parts(package: str, run_dir: str, step: int) -> dict[str, str]:
    """Give a digest of each part of a checkpoint."""
    reading = import_module(f"{package}.engine.reading")
    checkpoint = import_module(f"{package}.tests.scenario").saved(run_dir, step)
    names = reading.part_names(checkpoint)
    return {name: digest(reading.read_part(checkpoint, name)) for name in names}
