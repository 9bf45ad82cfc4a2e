"""No password of the environment, and none of a URL, gets into what a run leaves behind or says."""

import os
import sys
from pathlib import Path

import pytest

from tests.rendering import SLUG, Answers, render, run, succeed

pytestmark = pytest.mark.update

SECRET = "hunter2"

ENVIRONMENT = {
    "WANDB_API_KEY": SECRET * 6,
    "MLFLOW_TRACKING_USERNAME": "me",
    "MLFLOW_TRACKING_PASSWORD": f"{SECRET}password",
    "MLFLOW_TRACKING_TOKEN": f"{SECRET}token",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}aws",
    "AWS_SESSION_TOKEN": f"{SECRET}session",
    "HF_TOKEN": f"hf_{SECRET}",
    "GITHUB_TOKEN": f"ghp_{SECRET}",
    "PIP_INDEX_URL": f"https://me:{SECRET}@example.org/simple",
    "HTTPS_PROXY": f"http://me:{SECRET}@127.0.0.1:9",
    "WANDB_MODE": "offline",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "OMP_NUM_THREADS": "1",
}


def _files_with_the_secret(directory: Path) -> list[Path]:
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


@pytest.mark.parametrize("end", ["done", "failed", "refused"])
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "none"])
def test_a_run_keeps_no_secret(tracker: str, end: str, tmp_path: Path) -> None:
    answers: Answers = {"tracker": tracker, "backend": "gloo"}
    project = render(answers, tmp_path)
    # A clone that was made with a password in its address.
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    succeed("git", "init", "--quiet", cwd=project)
    succeed("git", "add", "--all", cwd=project)
    succeed("git", *identity, "commit", "--quiet", "--message", "one", cwd=project)
    address = f"https://me:{SECRET}@example.org/mine.git"
    succeed("git", "remote", "add", "origin", address, cwd=project)
    words = ["--max_steps", "4"]
    if end == "failed":
        task = project / SLUG / "task.py"
        task.write_text(f"{task.read_text()}\n\ndef loss_sum(*_):\n    raise OSError('no disk')\n")
    if end == "refused":
        words = ["--global_batch_size", "0"]
    run_dir = tmp_path / "run"
    home = {"HOME": str(tmp_path / "home"), **ENVIRONMENT}
    (tmp_path / "home").mkdir()
    command = ("-m", f"{SLUG}.train", "--config", f"{SLUG}/configs/debug.yaml", "--device", "cpu")
    result = run(sys.executable, *command, "--run_dir", str(run_dir), *words, cwd=project, env=home)
    assert result.returncode == {"done": 0, "failed": 1, "refused": 2}[end], result.stdout
    assert SECRET not in result.stdout
    assert not _files_with_the_secret(run_dir)
    if end == "done":
        assert (run_dir / "environment.json").exists()


def test_an_address_of_a_server_is_said_without_its_password(tmp_path: Path) -> None:
    project = render({"tracker": "mlflow", "backend": "gloo"}, tmp_path)
    env = {**ENVIRONMENT, "MLFLOW_TRACKING_URI": f"http://me:{SECRET}@127.0.0.1:9"}
    command = ("-m", f"{SLUG}.train", "--config", f"{SLUG}/configs/debug.yaml", "--device", "cpu")
    result = run(sys.executable, *command, "--run_dir", str(tmp_path / "run"), cwd=project, env=env)
    assert result.returncode == 2, result.stdout
    assert "MLFLOW_TRACKING_URI: expected a server that answers" in result.stdout
    assert "http://127.0.0.1:9/" in result.stdout
    assert SECRET not in result.stdout
    assert not _files_with_the_secret(tmp_path / "run")
    assert os.environ.get("MLFLOW_TRACKING_URI") is None
