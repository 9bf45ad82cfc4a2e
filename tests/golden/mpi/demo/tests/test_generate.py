"""Yours: what a trained model writes, from which checkpoint, and what is refused."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .. import generate
from ..config import Config
from ..engine.launch import Refused
from ..engine.manifest import list_checkpoints, manifest_text
from ..engine.reading import read_part
from ..engine.rundir import PACKAGE
from ..settings import BLOCK_SIZE
from .harness import values
from .scenario import run_training, set_config

CONFIG = set_config(
    Config(),
    device="cpu",
    epochs=1,
    global_batch_size=4,
    micro_batch_size=4,
    save_every=1,
    eval_every=1,
    keep_checkpoints=9,
    model__layers=1,
    model__width=16,
    data__train_bytes=16 * BLOCK_SIZE + 1,
    data__valid_bytes=2 * BLOCK_SIZE + 1,
    data__num_workers=0,
    optim__lr=0.03,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps, with a checkpoint of each."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    values(run_training, 1, set_config(CONFIG, run_dir=str(run_dir)))
    return run_dir


def rate(run_dir: Path, losses: list[float | None]) -> list[Path]:
    """Write these validation losses into the manifests, the newest first; the checkpoints."""
    paths = list_checkpoints(run_dir / "checkpoints")[: len(losses)]
    for path, loss in zip(paths, losses, strict=True):
        rewrite(path, valid_loss=loss)
    return paths


def rewrite(path: Path, **changes: Any) -> None:
    """Change what a checkpoint says of itself."""
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    (path / "manifest.json").write_text(manifest_text({**content, **changes}))


def copy_of(run_dir: Path, dest: Path) -> Path:
    """A copy of a run's checkpoints, to be changed."""
    for path in list_checkpoints(run_dir / "checkpoints"):
        there = dest / "checkpoints" / path.name
        there.mkdir(parents=True)
        for file in path.iterdir():
            (there / file.name).write_bytes(file.read_bytes())
    return dest


def largest_file(path: Path) -> Path:
    """The file of a checkpoint that holds weights."""
    return max(path.iterdir(), key=lambda file: file.stat().st_size)


def write(_: str, words: list[str]) -> tuple[str, str]:
    """What `generate` puts on standard output and on standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        generate.main(["--device", "cpu", *words])
    return out.getvalue(), err.getvalue()


def written(path: Path, *words: str) -> str:
    """The sample alone."""
    ((text, _),) = values(write, 1, [str(path), "--length", "40", *words])
    return str(text)


def test_sample_follows_from_the_seed(trained: Path) -> None:
    text = written(trained, "--seed", "3")
    assert text == written(trained, "--seed", "3")
    assert text != written(trained, "--seed", "4")
    assert text.startswith("def ")
    assert written(trained, "--length", "0", "--prompt", "é") == "é\n"


def test_no_temperature_takes_the_likeliest(trained: Path) -> None:
    greedy = [written(trained, "--temperature", "0", "--seed", seed) for seed in "12"]
    assert greedy[0] == greedy[1]


class Noting(nn.Module):
    """Takes all bytes for equally likely, and notes what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))
        self.shown: list[bytes] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (1, T, 256) of bytes (1, T)."""
        self.shown.append(bytes(inputs[0].tolist()))
        return torch.zeros(*inputs.shape, 256)


def contexts(_: str, prompt: bytes) -> tuple[bytes, list[bytes]]:
    """A text of four bytes more than the prompt, and what the model saw before each of them."""
    model = Noting()
    return generate.generate(model, prompt, 4, temperature=1.0, seed=0), model.shown


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 2, 2 * BLOCK_SIZE])
def test_context_is_what_was_written_cropped_to_a_block(length: int) -> None:
    prompt = bytes(place % 251 for place in range(length))
    ((text, shown),) = values(contexts, 1, prompt)
    assert len(text) == length + 4
    assert text.startswith(prompt)
    assert shown == [text[max(0, end - BLOCK_SIZE) : end] for end in range(length, length + 4)]


def test_best_checkpoint_is_taken_else_the_newest(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    paths = rate(run_dir, [3.0, 2.0, 1.0, 4.0])
    assert generate.find_checkpoint(run_dir).path == paths[2]
    ((_, said),) = values(write, 1, [str(run_dir), "--length", "1"])
    assert said == f"{generate.PART} of {paths[2]}\n"
    assert generate.find_checkpoint(paths[3]).path == paths[3]
    rate(run_dir, [None] * 4)
    assert generate.find_checkpoint(run_dir).path == paths[0]
    largest_file(paths[0]).unlink()
    assert generate.find_checkpoint(run_dir).path == paths[1]


def loaded(_: str, run_dir: str) -> dict[str, torch.Tensor]:
    """The weights that a sample comes from, and whether dropout is off."""
    checkpoint = generate.find_checkpoint(Path(run_dir))
    model = generate.load_model(checkpoint, torch.device("cpu"))
    assert not any(module.training for module in model.modules())
    return dict(model.state_dict())


def test_weights_are_those_that_were_evaluated(trained: Path) -> None:
    (weights,) = values(loaded, 1, str(trained))
    checkpoint = generate.find_checkpoint(trained)
    current = read_part(checkpoint, "model")["head.weight"]
    assert not torch.equal(weights["head.weight"], current), "the average is what was evaluated"
    saved = read_part(checkpoint, "ema")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def test_missing_checkpoint_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", f"{PACKAGE}.generate", str(tmp_path), "--device", "cpu"],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    expected = f"expected a run directory or a checkpoint, got {tmp_path}"
    assert answer.stderr == f"{PACKAGE}: {expected}\n"


def test_what_can_not_be_read_is_refused(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    for path in list_checkpoints(run_dir / "checkpoints"):
        largest_file(path).write_bytes(b"damaged")
    with pytest.raises(Refused, match=r"got .*: step_00000001 can't be read, .* has 7 bytes"):
        generate.find_checkpoint(run_dir)
    for words, said in (
        (["--length", "-1"], "length and temperature: expected 0 or more, got -1 and 0.8"),
        (["--temperature", "nan"], "length and temperature: expected 0 or more, got 400 and nan"),
        (["--prompt", ""], "prompt: expected at least one byte, got none"),
        (["--size", "1"], "unrecognized arguments: --size 1"),
    ):
        with pytest.raises(Refused) as refused:
            generate.parse([str(run_dir), *words])
        assert str(refused.value) == said


def refused_model(_: str, path: str) -> str:
    """Why the weights of a checkpoint are not taken."""
    try:
        generate.load_model(generate.find_checkpoint(Path(path)), torch.device("cpu"))
    except Refused as error:
        return str(error)
    return ""


def test_checkpoint_of_another_model_is_refused(trained: Path, tmp_path: Path) -> None:
    path = list_checkpoints(copy_of(trained, tmp_path) / "checkpoints")[0]
    config = json.loads((path / "manifest.json").read_text())["config"]
    for model in ({"channels": 3}, config["model"] | {"width": 32}):
        rewrite(path, config={**config, "model": model})
        (said,) = values(refused_model, 1, str(path))
        assert said.startswith(f"{path} does not fit this model: ")
