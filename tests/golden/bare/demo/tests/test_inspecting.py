"""Engine: `python -m … .checkpoints` tells what a run has saved, and takes weights out of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..checkpoints import main
from ..config import Config
from .harness import PACKAGE, values
from .scenario import run_training, saved, set_config
from .toy import Toy

CONFIG = set_config(
    Config(), device="cpu", epochs=1, data__num_workers=0, save_every=1, eval_every=1, max_steps=3
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run directory with checkpoints of the steps 1, 2 and 3."""
    path = str(tmp_path_factory.mktemp("inspected") / "run")
    config = set_config(CONFIG, run_dir=path, global_batch_size=16)
    values(run_training, 2, config, Toy().use)
    return path


def rows(output: str) -> list[list[str]]:
    """The columns of each line but the first."""
    return [line.split(maxsplit=3) for line in output.splitlines()[1:]]


def test_list_names_each_with_its_loss_and_the_best(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([run_dir]) == 0
    listed = rows(capsys.readouterr().out)
    losses = {step: saved(run_dir, step).manifest.valid_loss for step in (1, 2, 3)}
    assert [int(step) for step, *_ in listed] == [3, 2, 1]
    top = min(losses, key=lambda step: losses[step] or 0.0)
    for step, size, loss, state in listed:
        assert float(size) > 0
        assert float(loss) == pytest.approx(losses[int(step)], rel=1e-5)
        assert state == ("complete, best" if int(step) == top else "complete")


def test_damage_is_said_and_is_an_error(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "run"
    subprocess.run(["cp", "-r", run_dir, copied], check=True)
    directory = copied / "checkpoints" / "step_00000002"
    victim = max((p for p in directory.iterdir()), key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (copied / "checkpoints" / "step_00000009.tmp").mkdir()
    assert main([str(copied)]) == 0  # the sizes are right
    assert "step_00000009.tmp: left over" in capsys.readouterr().out
    assert main([str(copied), "--verify"]) == 1
    output = capsys.readouterr().out
    assert f"not complete: the checksum of {victim.name} is wrong" in output
    assert output.count("complete, every byte checked") == 2
    assert main([str(copied), "--export", str(tmp_path / "w.pt"), "--step", "2"]) == 2
    assert f"got none (step_00000002: the checksum of {victim.name}" in capsys.readouterr().err


def exported(_: str, run_dir: str, file: str, *options: str) -> dict[str, torch.Tensor]:
    """What a file holds that was exported. In a child: reading starts threads."""
    assert main([run_dir, "--export", file, *options]) == 0
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return weights


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_export_is_plain_weights(run_dir: str, tmp_path: Path, suffix: str) -> None:
    if suffix == "safetensors":
        pytest.importorskip("safetensors", reason="an optional package, which is not installed")
    (weights,) = values(exported, 1, run_dir, str(tmp_path / f"newest.{suffix}"))
    assert weights.keys() == Toy().build_model().state_dict().keys()
    (other,) = values(exported, 1, run_dir, str(tmp_path / f"first.{suffix}"), "--step", "1")
    assert any(not torch.equal(other[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "expected a run directory with checkpoints, got nowhere"),
        (["RUN", "--export", "nowhere/file.pt"], "--export: expected the name of a new file"),
        (["RUN", "--export", "file.pt", "--step", "7"], "a complete checkpoint of step 7 in "),
    ],
)
def test_mistake_is_one_line(
    run_dir: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("RUN", run_dir) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_list_needs_no_torch(run_dir: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; "
        f"from {PACKAGE}.checkpoints import main; sys.exit(main(sys.argv[1:]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, run_dir], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert len(rows(answer.stdout)) == 3
