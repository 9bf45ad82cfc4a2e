"""Every rendered project passes the tools that it brings, and keeps the promises of its design."""

import ast
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.covering import covering
from tests.rendering import ROOT, Rendered, distinct, render, run, succeed

MOST_LINES = 300
MOST_LINES_OF_TRAIN = 250
MOST_LINES_OF_FUNCTION = 60
DEEPEST_NESTING = 3

# Answered before torch is imported, which takes seconds.
WITHOUT_TORCH = ["config", "rules", "settings", "engine.cli", "engine.launch", "engine.rundir"]

YOURS = ["settings", "model", "data", "task"]


def distinct_packages(all_rendered: list[Rendered]) -> list[Rendered]:
    """Give one project for each different set of Python files."""
    return list({rendered.digest(): rendered for rendered in all_rendered}.values())


@pytest.fixture(scope="module")
def few(all_rendered: list[Rendered]) -> list[Rendered]:
    """Projects that hold each Python file, beside whatever it can meet; test-all has all."""
    packages = distinct_packages(all_rendered)
    few = covering(packages)
    assert len(few) < len(packages)
    assert distinct(few, ".py").keys() == distinct(all_rendered, ".py").keys()
    assert distinct(few, "ruff.toml").keys() == distinct(all_rendered, "ruff.toml").keys()
    return few


@pytest.fixture(scope="module")
def sources(all_rendered: list[Rendered]) -> list[tuple[str, str, ast.Module]]:
    """Every different Python file of all projects: name, text, syntax tree."""
    return [(name, text, ast.parse(text)) for name, text in distinct(all_rendered, ".py")]


def test_ruff_has_nothing_to_change(few: list[Rendered]) -> None:
    """In one call, each with the settings that it brings."""
    projects = [rendered.project for rendered in few]
    wrong = run("ruff", "format", "--no-cache", "--check", "--output-format", "concise", *projects)
    bad = run("ruff", "check", "--no-cache", "--output-format", "concise", *projects)
    # The same line of all projects is one line here.
    lines = (wrong.stdout + bad.stdout).splitlines()
    unique = sorted({re.sub(r"^.*/product/\d+/", "", line) for line in lines})
    assert wrong.returncode == bad.returncode == 0, "\n".join(unique)


def test_ruff_reads_the_settings_of_the_project(tmp_path: Path) -> None:
    """Else the test above would check with ruff's own few rules."""
    project = render({}, tmp_path)
    (project / "demo" / "bad.py").write_text("# x = 1\nimport os\n")
    result = run("ruff", "check", "--no-cache", tmp_path)
    assert "ERA001" in result.stdout
    assert "F401" in result.stdout


def _settings_of_mypy(rendered: Rendered) -> str:
    text = (rendered.project / "pyproject.toml").read_text()
    return repr(tomllib.loads(text)["tool"]["mypy"])


def type_packages(packages: list[Rendered], directory: Path) -> None:
    """Let mypy read packages, side by side under names of their own, with their own settings.

    Imports inside a package are relative, so a copy under another name is the same program.
    """
    groups: dict[str, dict[str, Rendered]] = {}
    for number, rendered in enumerate(packages):
        name = f"v{number:03d}"
        shutil.copytree(rendered.package, directory / name)
        groups.setdefault(_settings_of_mypy(rendered), {})[name] = rendered
    wrong = {}
    for group in groups.values():
        result = run(
            *(sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context"),
            *("--config-file", next(iter(group.values())).project / "pyproject.toml"),
            # torch's own modules are read once, then come from here.
            *("--cache-dir", ROOT / "build" / "mypy"),
            *group,
            cwd=directory,
        )
        assert result.returncode in (0, 1), result.stdout
        for line in result.stdout.splitlines():
            name, _, rest = line.partition("/")
            wrong[rest] = f"{line}   [{group[name].name}]"
    assert not wrong, "\n".join(wrong.values())


def test_mypy_is_content_with_every_module(
    few: list[Rendered], tmp_path: Path, count: Count
) -> None:
    type_packages(few, tmp_path)
    count("different packages typed, in which all modules meet", len(few))


def test_imports_inside_the_package_are_relative(
    sources: list[tuple[str, str, ast.Module]],
) -> None:
    wrong = [
        f"{name}: {ast.unparse(node)}"
        for name, _, tree in sources
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "demo")
        or (isinstance(node, ast.Import) and any(a.name.startswith("demo") for a in node.names))
    ]
    assert not wrong


def test_shellcheck_is_content_with_every_script(all_rendered: list[Rendered]) -> None:
    scripts = distinct(all_rendered, ".sh") | distinct(all_rendered, ".sbatch")
    assert scripts
    succeed("shellcheck", *scripts.values())


@pytest.mark.parametrize(
    ("suffix", "schema"),
    [("ci.yml", "vendor.github-workflows"), (".gitlab-ci.yml", "vendor.gitlab-ci")],
)
def test_workflows_follow_their_schema(
    all_rendered: list[Rendered], suffix: str, schema: str
) -> None:
    start = ".github" if schema == "vendor.github-workflows" else ".gitlab-ci"
    workflows = [
        path for (name, _), path in distinct(all_rendered, suffix).items() if name.startswith(start)
    ]
    assert workflows
    succeed("check-jsonschema", "--builtin-schema", schema, *workflows)


def _nesting(node: ast.AST, depth: int = 0) -> int:
    """Give how deep if, for, while, with, try and match stand in each other."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
    deepest = depth
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST):
                continue
            # An elif is written at the depth of its if.
            is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1
            deeper = isinstance(child, blocks) and not (is_elif and isinstance(child, ast.If))
            deepest = max(deepest, _nesting(child, depth + deeper))
    return deepest


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_nesting_is_counted_as_a_reader_counts_it() -> None:
    chain = "if a:\n  for b in c:\n    d()\nelif e:\n  f()\nelse:\n  with g:\n    h()\n"
    assert _nesting(ast.parse(chain)) == 2


def test_files_and_functions_stay_small(sources: list[tuple[str, str, ast.Module]]) -> None:
    wrong = set()
    for name, text, tree in sources:
        most = MOST_LINES_OF_TRAIN if name == "P/train.py" else MOST_LINES
        if (lines := len(text.splitlines())) > most:
            wrong.add(f"{name}: {lines} lines, at most {most}")
        for function in _functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MOST_LINES_OF_FUNCTION:
                wrong.add(f"{name}: {function.name} has {lines} lines")
            if (depth := _nesting(function)) > DEEPEST_NESTING:
                wrong.add(f"{name}: {function.name} is nested {depth} deep")
    assert not wrong, "\n".join(sorted(wrong))


def test_other_files_stay_small(all_rendered: list[Rendered]) -> None:
    wrong = [name for name, text in distinct(all_rendered) if len(text.splitlines()) > MOST_LINES]
    assert not wrong


def test_the_engine_knows_nothing_of_the_users_files(
    sources: list[tuple[str, str, ast.Module]],
) -> None:
    wrong = []
    for name, _, tree in sources:
        if not name.startswith("P/engine/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                reached = [node.module] if node.module else [alias.name for alias in node.names]
                wrong += [f"{name}: {ast.unparse(node)}" for module in reached if module in YOURS]
    assert not wrong


def test_what_needs_no_torch_imports_none(few: list[Rendered]) -> None:
    """So that `--help` and a mistake in the settings answer at once, in every project."""
    program = """
import importlib, sys
sys.modules["torch"] = None  # from here on, importing it fails
for argument in sys.argv[1:]:
    project, *modules = argument.split(":")
    sys.path.insert(0, project)
    for module in modules:
        importlib.import_module("demo." + module)
    sys.path.pop(0)
    for name in [name for name in sys.modules if name.split(".")[0] == "demo"]:
        del sys.modules[name]
"""
    arguments = []
    for rendered in few:
        promised = {
            name.removeprefix("P/").removesuffix(".py").replace("/", ".")
            for name, text in rendered.texts.items()
            if name.endswith(".py") and "Imports no torch" in text
        }
        modules = sorted(promised.union(WITHOUT_TORCH))
        arguments.append(":".join([str(rendered.project), *modules]))
    succeed(sys.executable, "-c", program, *arguments)


def _owner(name: str) -> str | None:
    """Give the word that a file of the package must start with; None: any of the three."""
    if name.removeprefix("P/").split(".")[0] in YOURS or name.startswith("P/configs/"):
        return "Yours:"
    if name.startswith("P/launch/") and name.endswith((".yaml", "Dockerfile")):
        return "Shared:"  # how many machines, how large: the user's to write into them
    if name.startswith(("P/engine/", "P/launch/")):
        return "Engine:"
    if name in {"P/train.py", "P/config.py", "P/cookiecutter.yaml"}:
        return "Shared:"
    return None


def test_each_file_of_the_package_says_who_owns_it(all_rendered: list[Rendered]) -> None:
    wrong = set()
    for name, text in distinct(all_rendered):
        if not name.startswith("P/"):
            continue
        if name.endswith(".py"):
            first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        else:
            lines = [line for line in text.splitlines() if not line.startswith("#!")]
            first = lines[0].removeprefix("#").strip() if lines else ""
        owners = [owner] if (owner := _owner(name)) else ["Yours:", "Shared:", "Engine:"]
        if not first.startswith(tuple(owners)):
            wrong.add(f"{name} starts with {first!r}, not with {' or '.join(owners)}")
    assert not wrong, "\n".join(sorted(wrong))


def test_pre_commit_passes_in_a_rendered_project(tmp_path: Path) -> None:
    project = render({"ema": True}, tmp_path)
    succeed("git", "init", "--quiet", cwd=project)
    succeed("git", "add", "--all", cwd=project)
    # Its tools are installed once, then come from here.
    home = {"PRE_COMMIT_HOME": str(ROOT / "build" / "pre-commit")}
    output = succeed("pre-commit", "run", "--all-files", cwd=project, env=home)
    assert "Skipped" not in output, output
    assert output.count("Passed") >= 8, output

    # It can fail: a script with an unquoted variable, a blank at the end of a line.
    (project / "demo" / "launch" / "train.sh").write_text("#!/bin/bash\nrm $1 \n")
    result = run("pre-commit", "run", "--all-files", cwd=project, env=home)
    assert result.returncode == 1
    assert "SC2086" in result.stdout
