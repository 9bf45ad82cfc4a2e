"""Engine: compiled training: equal numbers, exact resumes, plain names; one line where it can't be.

Compiling takes seconds, so there are few trainings here, and they share what was compiled.
"""

import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .. import train
from ..config import Config, check
from ..engine.choice import newest
from ..engine.launch import Launch, Refused
from ..engine.reading import read_part
from ..engine.rundir import PACKAGE
from .harness import outcomes, values
from .scenario import run_training, set_config
from .toy import Notes, Toy, put

CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
pytestmark = pytest.mark.skipif(
    shutil.which(CXX) is None, reason=f"torch.compile needs a C++ compiler, and {CXX} is not here"
)

CONFIG = set_config(
    Config(),
    device="cpu",
    compile="static",
    epochs=1,
    data__num_workers=0,
    global_batch_size=24,
)
# Three steps an epoch; the last has 6 samples, so batches have two shapes.
NUM_SAMPLES, STOP = 54, 2
BUCKET = 200  # bytes: the gradients of a layer are more, so each has a bucket of its own


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where compiled code goes; the rank after looks there first. Yours where you have one."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return given or str(tmp_path_factory.mktemp("inductor"))


def use_compiler(toy: Toy, cache: str) -> Notes:
    """Prepare a training of the toy task."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return toy.use()


def assert_plain_names(run_dir: str) -> None:
    """The newest checkpoint has the names of a model that nothing wraps."""
    checkpoint = newest(Path(run_dir, "checkpoints"))
    assert checkpoint is not None
    weights = read_part(checkpoint, "model")
    assert set(weights) == {f"layers.{n}.{kind}" for n in (0, 3) for kind in ("weight", "bias")}


def note_order(cache: str) -> list[list[str]]:
    """Prepare one with small buckets; of each step, what reduces and what computes, in order."""
    use_compiler(Toy(num_samples=NUM_SAMPLES, dropout=0.2), cache)
    put(dist, _DEFAULT_FIRST_BUCKET_BYTES=BUCKET)
    steps: list[list[str]] = []
    train_step = train.train_step

    def noted(*args: Any, **named: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            numbers = train_step(*args, **named)
        events = sorted(recorded.events() or [], key=lambda event: event.time_range.start)
        names = {"CompiledFunctionBackward": "part", "c10d::allreduce_": "reduction"}
        steps.append([names[event.name] for event in events if event.name in names])
        return numbers

    put(train, train_step=noted)
    return steps


def test_stopped_and_resumed_is_bit_exact(run_dir: str, cache: str) -> None:
    config = set_config(CONFIG, run_dir=run_dir, ddp__bucket_cap_mb=BUCKET / 2**20)
    straight_config = set_config(config, run_dir=run_dir + "-straight")
    prepare = partial(note_order, cache)
    straight = values(run_training, 2, straight_config, prepare, timeout_s=300)
    values(run_training, 2, set_config(config, max_steps=STOP), prepare, timeout_s=300)
    # Starts with the short window: the shapes come in another order.
    resumed = values(run_training, 2, config, prepare, timeout_s=300)
    assert [rank.digest for rank in resumed] == [rank.digest for rank in straight]
    # The compiled backward is cut at the buckets: the first one leaves before the last part runs.
    before: list[str] = []
    reduced = ["part", "reduction", "part", "reduction"]
    assert straight[0].notes[0][: len(before) + 4] == before + reduced
    assert_plain_names(run_dir)


def test_one_run_with_and_without(run_dir: str, cache: str) -> None:
    toy = Toy(num_samples=NUM_SAMPLES)
    config = set_config(CONFIG, run_dir=run_dir, dtype="float64")
    for compile_, stop in (("none", 1), ("static", 2), ("dynamic", 3)):
        part = set_config(config, compile=compile_, max_steps=stop)
        prepare = partial(use_compiler, toy, cache)
        [mixed] = values(run_training, 1, part, prepare, timeout_s=300)
        assert_plain_names(run_dir)
    usual = set_config(config, run_dir=run_dir + "-usual", compile="none")
    [straight] = values(run_training, 1, usual, toy.use)
    for name, tensor in straight.parameters.items():
        torch.testing.assert_close(mixed.parameters[name], tensor, rtol=0, atol=1e-12)


def use_few_shapes() -> Notes:
    """Prepare a training with a compiler that does nothing, and with room for one shape."""
    put(torch, compile=partial(torch.compile, backend="eager"))
    put(torch._dynamo.config, recompile_limit=1)
    return Toy(num_samples=NUM_SAMPLES).use()


def test_nothing_goes_on_uncompiled_in_silence(run_dir: str) -> None:
    [rank] = outcomes(run_training, 1, set_config(CONFIG, run_dir=run_dir), use_few_shapes)
    assert rank.exit_code == 1
    assert "fail_on_recompile_limit_hit" in rank.output
    [rank] = outcomes(
        run_training, 1, set_config(CONFIG, run_dir=run_dir, compile="dynamic"), use_few_shapes
    )
    assert rank.exit_code == 0


def test_small_buckets_are_refused() -> None:
    for size in (None, 1.0):
        check(set_config(Config(), compile="static", ddp__bucket_cap_mb=size), Launch())
    with pytest.raises(Refused) as refused:
        check(set_config(Config(), compile="static", ddp__bucket_cap_mb=0.5), Launch())
    assert str(refused.value) == (
        "ddp.bucket_cap_mb: expected at least 1 where compile is static, got 0.5 "
        "(the first part of the graph has a bucket of 1 MiB)"
    )


def test_a_rank_without_a_compiler_is_refused_in_one_line(
    run_dir: str, cache: str, tmp_path: Path
) -> None:
    settings = ["--device", "cpu"]
    settings += ["--compile", "static", "--run_dir", run_dir, "--data.num_workers", "0"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = port
    here = {"TORCHINDUCTOR_CACHE_DIR": cache}
    without = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "nothing"),
        "CXX": "/nonexistent",
        "PATH": str(tmp_path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.train", *settings],
            env={**os.environ, **group, **own, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in (("0", here), ("1", without))
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    refused = (
        f"\n{PACKAGE}: rank 1: compile: expected none where nothing can be compiled for cpu, got "
        "InvalidCxxCompiler: No working C++ compiler found"
    )
    assert f"\n{said[0]}".count(refused) == 1
    assert not any("Traceback" in words for words in said)
    assert Path(run_dir, "metrics.jsonl").read_text() == ""
