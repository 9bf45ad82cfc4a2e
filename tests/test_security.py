"""What is rendered runs no code from data, fetches only what is pinned, and asks for few rights."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rendering import ROOT, TEMPLATE, Rendered, distinct, files_of, run, succeed

# What runs code that stands in data, or in an argument.
FORBIDDEN = re.compile(
    r"eval|exec|compile|__import__"
    r"|(pickle|marshal|dill|cloudpickle|joblib|shelve)\.(load|loads|open|Unpickler)"
    r"|(os|posix)\.(system|popen)|subprocess\.(getoutput|getstatusoutput)"
    r"|yaml\.(load|load_all|unsafe_load|unsafe_load_all|full_load|full_load_all|Loader"
    r"|UnsafeLoader|FullLoader)"
    r"|torch\.(hub|jit|export)\.load|torch\.package\.\w+|(np|numpy)\.load|pandas\.read_pickle"
    r"|runpy\.\w+"
)

# Where it stands all the same, and why.
ALLOWED = {
    ("P/engine/pieces.py", "pickle.Unpickler"): "finds nothing but a few classes of DCP",
    ("P/engine/processes.py", "pickle.loads"): "what a process of the same call wrote for it",
    ("P/tests/test_saving.py", "os.system"): "in the file that must not be read",
}

# Ranks of one job trust each other: torch sends what is no tensor as a pickle between them.
OBJECTS = "all_gather_object|broadcast_object_list|gather_object|scatter_object_list"


def _full_name(word: ast.expr, origins: dict[str, str]) -> str:
    """Give a dotted name by the module that it comes from, whatever that is called here."""
    first, dot, rest = ast.unparse(word).partition(".")
    return origins.get(first, first) + dot + rest


def _origins(tree: ast.Module) -> dict[str, str]:
    """Say what imported names stand for."""
    origins = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import) and alias.asname:
                origins[alias.asname] = alias.name
    return origins


def _dangers(source: str) -> set[str]:
    """Say what a source calls that could run data as code."""
    tree = ast.parse(source)
    origins = _origins(tree)
    read = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]
    words = [_full_name(node, origins) for node in read]
    found = {word for word in words if FORBIDDEN.fullmatch(word)}
    loads = words.count("torch.load")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if given.get("shell", "False") != "False":
            found.add("shell=True")
        if given.get("allow_pickle", "False") != "False":
            found.add("allow_pickle=True")
        if given.get("trust_remote_code", "False") != "False":
            found.add("trust_remote_code=True")
        if given.get("weights_only") == "True":
            loads -= _full_name(call.func, origins) == "torch.load"
    if loads:  # one that may unpickle anything, or is handed to somebody else
        found.add("torch.load")
    # In texts too: some tests write programs.
    for call_text in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", source):
        if "weights_only=True" not in call_text:
            found.add("torch.load")
    return found


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle\npickle.load(f)", "pickle.load"),
        ("from pickle import loads as l\nl(f)", "pickle.loads"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(str(path), weights_only=False)", "torch.load"),
        ("from torch import load\nload(path)", "torch.load"),
        ("import torch as t\nt.load(path)", "torch.load"),
        ("load = torch.load", "torch.load"),
        ("import pickle as p\np.Unpickler(f).load()", "pickle.Unpickler"),
        ("import numpy as np\nnp.load(f)", "numpy.load"),
        ("yaml.load(f, Loader=yaml.SafeLoader)", "yaml.load"),
        ("eval(text)", "eval"),
        ("compile = 1\ncompile(text)", "compile"),
        ("subprocess.run(line, shell=True)", "shell=True"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
    ],
)
def test_a_danger_is_seen(source: str, danger: str) -> None:
    assert danger in _dangers(source)


def test_the_usual_is_no_danger() -> None:
    assert not _dangers(
        "model.eval()\ncompile: bool = False\nre.compile(x)\nyaml.safe_load(f)\nimport pickle"
    )
    assert not _dangers("torch.load(path / f'{n}.pt', weights_only=True)\ntorch.compile(m)")


def test_no_rendered_python_runs_data_as_code(all_rendered: list[Rendered]) -> None:
    wrong: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for name, source in distinct(all_rendered, ".py"):
        for danger in _dangers(source):
            (used if (name, danger) in ALLOWED else wrong).add((name, danger))
    assert not wrong
    assert used == ALLOWED.keys()


def test_ranks_send_objects_in_one_module_alone(all_rendered: list[Rendered]) -> None:
    names = {
        name
        for name, source in distinct(all_rendered, ".py")
        if re.search(rf"\b({OBJECTS})\(", source)
    }
    assert names == {"P/engine/distributed.py"}


def test_no_script_evaluates_a_text(all_rendered: list[Rendered]) -> None:
    for suffix in (".sh", ".sbatch"):
        for name, source in distinct(all_rendered, suffix):
            assert not re.search(r"(^|[\s;&|])(eval|source <|bash -c|sh -c)\s", source), name
            assert not re.search(r"(curl|wget)\b", source), name


def _workflows(all_rendered: list[Rendered]) -> list[Path]:
    rendered = distinct(all_rendered, ".github/workflows/ci.yml").values()
    return [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), *rendered]


def test_workflows_pass_zizmor(all_rendered: list[Rendered], tmp_path: Path) -> None:
    """With all of its checks that need no network; and it finds what is wrong."""
    zizmor = ("zizmor", "--offline", "--no-progress", "--persona=auditor", "--strict-collection")
    workflows = _workflows(all_rendered)
    succeed(*zizmor, *workflows)

    wrong = tmp_path / ".github" / "workflows" / "ci.yml"
    wrong.parent.mkdir(parents=True)
    text = workflows[-1].read_text()
    changed = re.sub(r"checkout@\w+ # v([\d.]+)", r"checkout@v\1", text)
    assert changed != text
    wrong.write_text(changed)
    result = run(*zizmor, wrong)
    assert result.returncode != 0
    assert "unpinned-uses" in result.stdout


def test_workflows_ask_for_nothing_but_to_read(all_rendered: list[Rendered]) -> None:
    actions: set[str] = set()
    for path in _workflows(all_rendered):
        text = path.read_text()
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}, path
        assert "secrets." not in text
        assert "pull_request_target" not in text
        for job in workflow["jobs"].values():
            assert "permissions" not in job
            assert job["timeout-minutes"] <= 120
        actions |= set(re.findall(r"uses: (.*)", text))
    names = [action.partition("@")[0] for action in actions]
    assert sorted(names) == sorted(set(names)), "one release of each action"
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", a) for a in actions), actions


def test_images_have_a_release(all_rendered: list[Rendered]) -> None:
    """A digest can't be known without the registry; the release of Python is what is fixed."""
    texts = [
        *distinct(all_rendered, ".gitlab-ci.yml"),
        *distinct(all_rendered, "launch/Dockerfile"),
    ]
    images = {
        image for _, text in texts for image in re.findall(r"(?m)^(?:FROM|\s*image:) (\S+)", text)
    }
    assert images == {"python:3.11", "python:3.11-slim"}


def test_pre_commit_fetches_packages_of_a_registry_alone(all_rendered: list[Rendered]) -> None:
    configs = [ROOT / ".pre-commit-config.yaml"]
    configs += distinct(all_rendered, ".pre-commit-config.yaml").values()
    assert len(configs) > 1
    for config in configs:
        repositories: list[dict[str, Any]] = yaml.safe_load(config.read_text())["repos"]
        assert {repository["repo"] for repository in repositories} == {"local"}
        for hook in repositories[0]["hooks"]:
            assert hook["language"] == "python"
            for package in hook["additional_dependencies"]:
                assert re.fullmatch(r"[\w-]+==[\w.]+", package), package


def test_nothing_is_fetched_from_a_place_that_is_not_a_registry() -> None:
    """Addresses in what is rendered: an index of PyTorch and PyPI; the others are to read."""
    files = [*files_of(TEMPLATE).items(), *files_of(ROOT / "templates").items()]
    fetched = set()
    for name, path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            is_command = re.search(r"\b(pip|curl|wget|git clone|INDEX|docker pull)\b|INDEX", line)
            if is_command and name.rpartition(".")[2] != "md":
                fetched |= set(re.findall(r"\bhttps?://[^\s\"')]+", line))
    assert fetched <= {"https://download.pytorch.org/whl/cpu", "https://pypi.org/simple"}
    assert shutil.which("zizmor")
