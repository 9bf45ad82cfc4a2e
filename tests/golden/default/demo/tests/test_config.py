"""Engine: settings are read right, and each mistake is one line, in time and without torch."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .. import config as module
from ..config import Config, check, grad_accum_steps, parse, parse_or_exit, samples_per_forward
from ..engine import cli
from ..engine.launch import Launch, Refused
from ..engine.rundir import RunDir

PACKAGE = module.__name__.removesuffix(".config")
ROOT = Path(module.__file__).parents[PACKAGE.count(".") + 1]
CONFIGS = sorted((Path(module.__file__).parent / "configs").glob("*.yaml"))
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process, in a directory of its own."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the package can be imported."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.run(
        [sys.executable, *words],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


BAD_OPTIONS = [
    ("--optim.lr abc", "optim.lr: expected a number, got abc"),
    ("--optim.lr nan", "optim.lr: expected a number, got nan"),
    ("--optim.lr 0", "optim.lr: expected more than 0, got 0.0"),
    ("--optim.lr", "optim.lr: expected a number, got nothing"),
    ("--optim.lrr 1", "optim.lrr: no such setting; did you mean optim.lr?"),
    ("--optim.lrr=1", "optim.lrr: no such setting; did you mean optim.lr?"),
    ("--lr 1", "lr: no such setting; did you mean optim.lr?"),
    ("--epoch 1", "epoch: no such setting; did you mean epochs?"),
    ("--global_batch 1", "global_batch: no such setting; did you mean global_batch_size?"),
    ("--save-every 1", "save-every: no such setting; did you mean save_every?"),
    ("--optim sgd", "optim: no such setting, it is a group; did you mean optim.lr?"),
    ("--zzz 1", "zzz: no such setting; --help lists all"),
    ("fast", "command line: expected --name value, got fast"),
    ("--epochs 3 4", "command line: expected --name value, got 4"),
    ("--epochs 2.5", "epochs: expected a whole number, got 2.5"),
    ("--epochs null", "epochs: expected a whole number, got null"),
    ("--epochs 0", "epochs: expected at least 1, got 0"),
    ("--max_steps many", "max_steps: expected a whole number or null, got many"),
    ("--max_steps 0", "max_steps: expected at least 1, got 0"),
    ("--keep_checkpoints 0", "keep_checkpoints: expected at least 1, got 0"),
    ("--max_nonfinite_steps 0", "max_nonfinite_steps: expected at least 1, got 0"),
    ("--timeout_s 0", "timeout_s: expected more than 0, got 0.0"),
    ("--watchdog_s 0", "watchdog_s: expected more than 0, got 0.0"),
    ("--optim.warmup_steps -1", "optim.warmup_steps: expected 0 or more, got -1"),
    ("--optim.min_lr_ratio 1.5", "optim.min_lr_ratio: expected between 0 and 1, got 1.5"),
    ("--dtype int8", "dtype: expected one of float32, float64, got int8"),
    ("--ddp.static_graph 2", "ddp.static_graph: expected true or false, got 2"),
    (
        "--ddp.static_graph true --ddp.find_unused_parameters true",
        "ddp.static_graph: expected false where ddp.find_unused_parameters is true, got true "
        "(a static graph finds unused parameters by itself, once)",
    ),
    ("--ddp.powersgd_rank 0", "ddp.powersgd_rank: expected at least 1, got 0"),
    (
        "--device cuda:1",
        "device: expected a type without a number, such as cpu "
        "(each rank takes the device of its own number), got 'cuda:1'",
    ),
    (
        "--resume nowhere",
        "resume: expected auto, never or the directory of a checkpoint, got 'nowhere'",
    ),
    (
        "--config nowhere.yaml",
        "config: expected a YAML file, got 'nowhere.yaml' (No such file or directory)",
    ),
    ("--config", "config: expected a YAML file, got nothing"),
    (
        "--global_batch_size 33 --micro_batch_size 16",
        "global_batch_size: expected a multiple of micro_batch_size x world_size = 16 x 2 = 32, "
        "got 33 (32 or 64 would do)",
    ),
    (
        "--global_batch_size 24 --micro_batch_size 16",
        "global_batch_size: expected a multiple of micro_batch_size x world_size = 16 x 2 = 32, "
        "got 24 (32 would do, or micro_batch_size 12)",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_option_is_one_line(options: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        check(parse(options.split()), Launch(world_size=2, local_world_size=2))
    assert str(refused.value) == message


BAD_FILES = [
    ("", "config: expected lines of `name: value`, got none (bad.yaml)"),
    ("- 1", "config: expected lines of `name: value`, got none (bad.yaml)"),
    ("optim: {lrr: 1}", "optim.lrr: no such setting (bad.yaml, line 1); did you mean optim.lr?"),
    ("\noptimm: {}", "optimm: no such setting (bad.yaml, line 2); did you mean optim?"),
    ("epochs: ten", "epochs: expected a whole number, got ten (bad.yaml, line 1)"),
    ("epochs: {a: 1}", "epochs: expected a whole number, got {'a': 1} (bad.yaml, line 1)"),
    ("seed: 1\nepochs:", "epochs: expected a whole number, got null (bad.yaml, line 2)"),
    ("run_dir: 5", "run_dir: expected text (in quotes), got 5 (bad.yaml, line 1)"),
    ("device: off", "device: expected text (in quotes), got false (bad.yaml, line 1)"),
    ("dtype: int8", "dtype: expected one of float32, float64, got int8 (bad.yaml, line 1)"),
    (
        "optim:\n  lr: 1\n  schedule: step",
        "optim.schedule: expected one of cosine, linear, constant, got step (bad.yaml, line 3)",
    ),
    ("optim: 3", "optim: expected lines of `name: value` below it, got 3 (bad.yaml, line 1)"),
    ("optim:", "optim: expected lines of `name: value` below it, got nothing (bad.yaml, line 1)"),
    (
        "optim: [1]",
        "optim: expected lines of `name: value` below it, got a list (bad.yaml, line 1)",
    ),
    ("seed: 1\nseed: 2", "seed: expected once, got it again (bad.yaml, line 2)"),
    (
        "seed: 1\noptim:\n\tlr: 1",
        "config: no valid YAML (bad.yaml, line 3): "
        "found character '\\t' that cannot start any token",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_file_is_one_line(text: str, message: str) -> None:
    Path("bad.yaml").write_text(text)
    with pytest.raises(Refused) as refused:
        parse(["--config", "bad.yaml"])
    assert str(refused.value) == message


def test_file_that_is_no_text() -> None:
    Path("bad.yaml").write_bytes(b"run_dir: caf\xe9")
    with pytest.raises(Refused, match=r"^config: expected a YAML file in UTF-8, got 'bad\.yaml'$"):
        parse(["--config", "bad.yaml"])


def test_value_of_an_option_is_not_blamed_on_the_file() -> None:
    Path("good.yaml").write_text("epochs: 3")
    with pytest.raises(Refused, match=r"^epochs: expected a whole number, got ten$"):
        parse(["--config", "good.yaml", "--epochs", "ten"])


def test_options_win_over_files_wherever_they_stand() -> None:
    Path("one.yaml").write_text("epochs: 3\nseed: 3\noptim: {lr: 1e-3, weight_decay: 1}")
    Path("two.yaml").write_text("seed: 4")
    options = "--epochs=5 --config one.yaml --config=two.yaml --optim.lr 2e-3"
    config = parse(options.split())
    assert (config.epochs, config.seed) == (5, 4)
    assert (config.optim.lr, config.optim.weight_decay) == (2e-3, 1.0)


def test_no_options_are_the_defaults() -> None:
    assert parse([]) == Config()
    check(Config(), Launch())


def test_written_configuration_reads_back() -> None:
    config = parse(["--optim.lr", "1e-5", "--optim.grad_clip", "null", "--run_dir", "a: 'b' # é"])
    run = RunDir("run", Launch()).open()
    run.write_config(config)
    run.close()
    assert parse(["--config", "run/config.yaml"]) == config


def test_printed_configuration_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--optim.lr", "1e-5", "--print_config"])
    assert not left.value.code
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert parse(["--config", "printed.yaml"]) == parse(["--optim.lr", "1e-5"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_work(path: Path) -> None:
    config = parse(["--config", str(path)])
    for world_size in (1, 2):
        check(config, Launch(world_size=world_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batch_is_split_exactly(world_size: int) -> None:
    config = dataclasses.replace(Config(), global_batch_size=64, micro_batch_size=8)
    assert samples_per_forward(config, world_size) == 8
    assert grad_accum_steps(config, world_size) * world_size * 8 == 64


def test_only_rank_0_needs_the_checkpoint() -> None:
    check(dataclasses.replace(Config(), resume="elsewhere"), Launch(rank=1, world_size=2))


def test_a_value_error_of_your_own_dataclass_is_one_line() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        share: float = 0.5

        def __post_init__(self) -> None:
            if self.share > 1:
                raise ValueError("share is at most 1")

    outer = dataclasses.make_dataclass(
        "Outer", [("inner", Inner, dataclasses.field(default_factory=Inner))]
    )
    with pytest.raises(Refused, match=r"^inner: share is at most 1$"):
        cli.parse_settings(outer, ["--inner.share", "2"])


def test_parse_or_exit_returns_what_is_right() -> None:
    assert parse_or_exit(["--seed", "7"]).seed == 7
    assert not list(Path().iterdir())


def test_refusal_says_so_in_the_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("run_dir: from_file\nseed: x")
    for argv, run_dir in ((["--config", "mine.yaml"], "from_file"), (["--run_dir=b", "c"], "b")):
        with pytest.raises(SystemExit) as left:
            parse_or_exit(argv)
        assert left.value.code == 2
        assert json.loads(Path(run_dir, "status.json").read_text())["state"] == "refused"
        assert capsys.readouterr().err.count("\n") == 1


def test_refusal_leaves_a_live_run_alone() -> None:
    with RunDir("live", Launch()) as run:
        run.status("running", 7)
        with pytest.raises(SystemExit):
            parse_or_exit(["--run_dir", "live", "--seed", "x"])
        assert json.loads(Path("live/status.json").read_text())["state"] == "running"


@pytest.mark.parametrize("world_size", ["2", "not a number"])
def test_other_ranks_leave_in_silence(
    world_size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip(LAUNCHER, ("1", "1", world_size, "2"), strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", [].append)
    with pytest.raises(SystemExit) as left:
        parse_or_exit(["--seed", "x"])
    assert left.value.code == 2
    assert capsys.readouterr() == ("", "")
    assert not list(Path().iterdir())


def test_train_refuses_half_a_launcher() -> None:
    answer = python("-m", f"{PACKAGE}.train", RANK="0")
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"{PACKAGE}: RANK set without LOCAL_RANK and WORLD_SIZE")
    assert answer.stderr.count("\n") == 1


def test_help_is_quick_and_names_every_setting() -> None:
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 0.5:
        before = os.times()
        answer = python("-m", f"{PACKAGE}.train", "--help")
        after = os.times()
        # Of its own: on a machine with much else to do it has to wait.
        used = after.children_user + after.children_system
        seconds.append(used - before.children_user - before.children_system)
    assert answer.returncode == 0
    assert min(seconds) < 0.5
    for field in dataclasses.fields(module.OptimConfig):
        assert f"--optim.{field.name} " in answer.stdout
    text = " ".join(answer.stdout.split())
    assert "--optim.lr LR Peak learning rate, before `scale_lr`. (type: float, default:" in text


def test_settings_come_without_torch() -> None:
    answer = python(
        "-c",
        f"import sys; from {PACKAGE}.config import parse_or_exit; parse_or_exit([]);"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])",
    )
    assert answer.stdout == "[]\n"
