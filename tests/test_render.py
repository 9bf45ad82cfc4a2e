"""What is rendered: which files, without remains of Jinja, and only what was chosen."""

import ast
import functools
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, nodes

from tests.branches import Branches
from tests.conftest import Count
from tests.rendering import (
    ROOT,
    SLUG,
    TEMPLATE,
    Answer,
    Answers,
    Rendered,
    all_answers,
    available_answers,
    complete,
    contents_of,
    distinct,
    is_refused,
    product,
    render,
    succeed,
    table,
)

Predicate = Callable[[Answers], bool]


def _always(_: Answers) -> bool:
    return True


# Every file that a project can have, and when it has it. `P` is the package directory.
FILES: dict[str, Predicate] = {
    ".dockerignore": lambda a: a["cluster"] == "kubernetes",
    ".gitattributes": _always,
    ".github/workflows/ci.yml": lambda a: a["ci"] == "github",
    ".gitignore": _always,
    ".gitlab-ci.yml": lambda a: a["ci"] == "gitlab",
    ".pre-commit-config.yaml": _always,
    "Makefile": _always,
    "README.md": _always,
    "pyproject.toml": _always,
    "P/.gitattributes": _always,
    "P/__init__.py": _always,
    "P/baselines.py": lambda a: a["example"] == "bytes",
    "P/checkpoints.py": _always,
    "P/config.py": _always,
    "P/configs/debug.yaml": _always,
    "P/configs/default.yaml": _always,
    "P/cookiecutter.yaml": _always,
    "P/data.py": _always,
    "P/engine/__init__.py": _always,
    "P/engine/agent.py": lambda a: a["backend"] != "mpi" and a["nodes"] == "multi",
    "P/engine/attempts.py": _always,
    "P/engine/changes.py": _always,
    "P/engine/beats.py": _always,
    "P/engine/checkpoint.py": _always,
    "P/engine/choice.py": _always,
    "P/engine/cli.py": _always,
    "P/engine/comm_hook.py": _always,
    "P/engine/ddp.py": _always,
    "P/engine/digest.py": _always,
    "P/engine/disks.py": lambda a: a["checkpoint"] != "rank0",
    "P/engine/distributed.py": _always,
    "P/engine/explain.py": _always,
    "P/engine/failure.py": _always,
    "P/engine/flops.py": lambda a: a["example"] == "bytes",
    "P/engine/gradient.py": _always,
    "P/engine/keyed.py": _always,
    "P/engine/launch.py": _always,
    "P/engine/leftovers.py": _always,
    "P/engine/levers.py": _always,
    "P/engine/loader.py": _always,
    "P/engine/lock.py": _always,
    "P/engine/manifest.py": _always,
    "P/engine/meeting.py": _always,
    "P/engine/metrics.py": _always,
    "P/engine/nodelist.py": lambda a: a["cluster"] == "slurm",
    "P/engine/nodes.py": lambda a: a["backend"] != "mpi" and a["nodes"] == "multi",
    "P/engine/optim.py": _always,
    "P/engine/outcome.py": lambda a: a["cluster"] == "slurm",
    "P/engine/pieces.py": _always,
    "P/engine/platforms.py": _always,
    "P/engine/prepare.py": _always,
    "P/engine/processes.py": _always,
    "P/engine/pulse.py": _always,
    "P/engine/reach.py": lambda a: a["nodes"] == "multi",
    "P/engine/reading.py": _always,
    "P/engine/report.py": _always,
    "P/engine/route.py": lambda a: a["nodes"] == "multi",
    "P/engine/rundir.py": _always,
    "P/engine/sampler.py": _always,
    "P/engine/signs.py": _always,
    "P/engine/srun.py": lambda a: a["cluster"] == "slurm",
    "P/engine/state.py": _always,
    "P/engine/stop.py": _always,
    "P/engine/strategy.py": _always,
    "P/engine/tracker.py": lambda a: a["tracker"] != "none",
    "P/engine/watchdog.py": _always,
    "P/generate.py": lambda a: a["example"] == "bytes",
    "P/launch/task.sh": lambda a: a["cluster"] == "slurm",
    "P/launch/train.sbatch": lambda a: a["cluster"] == "slurm",
    "P/launch/Dockerfile": lambda a: a["cluster"] == "kubernetes",
    "P/launch/job.yaml": lambda a: a["cluster"] == "kubernetes",
    "P/launch/trainjob.yaml": lambda a: a["cluster"] == "kubernetes" and a["backend"] != "mpi",
    "P/launch/volume.yaml": lambda a: a["cluster"] == "kubernetes",
    "P/launch/train_mpi.sh": lambda a: a["backend"] == "mpi",
    "P/launch/node.sh": lambda a: a["backend"] != "mpi" and a["nodes"] == "multi",
    "P/launch/train.sh": lambda a: a["backend"] != "mpi" and a["nodes"] == "single",
    "P/model.py": _always,
    "P/parity.py": _always,
    "P/parity_look.py": _always,
    "P/parity_ranks.py": _always,
    "P/parity_report.py": _always,
    "P/ruff.toml": _always,
    "P/rules.py": _always,
    "P/settings.py": _always,
    "P/task.py": _always,
    "P/tests/__init__.py": _always,
    "P/tests/conftest.py": _always,
    "P/tests/harness.py": _always,
    "P/tests/parts.py": _always,
    "P/tests/scenario.py": _always,
    "P/tests/test_agent.py": lambda a: a["backend"] != "mpi" and a["nodes"] == "multi",
    "P/tests/test_agreement.py": _always,
    "P/tests/test_attempts.py": _always,
    "P/tests/test_bf16.py": lambda a: a["amp"] == "bf16",
    "P/tests/test_bytes.py": lambda a: a["example"] == "bytes",
    "P/tests/test_bytes_data.py": lambda a: a["example"] == "bytes",
    "P/tests/test_changes.py": _always,
    "P/tests/test_checkpoint.py": _always,
    "P/tests/test_collectives.py": _always,
    "P/tests/test_command_line.py": _always,
    "P/tests/test_comm_hook.py": _always,
    "P/tests/test_compile.py": _always,
    "P/tests/test_config.py": _always,
    "P/tests/test_distributed.py": _always,
    "P/tests/test_ema.py": lambda a: a["ema"] is True,
    "P/tests/test_evaluation.py": _always,
    "P/tests/test_exactness.py": _always,
    "P/tests/test_failure.py": _always,
    "P/tests/test_fp16.py": lambda a: a["amp"] == "fp16",
    "P/tests/test_faults.py": _always,
    "P/tests/test_generate.py": lambda a: a["example"] == "bytes",
    "P/tests/test_keyed.py": _always,
    "P/tests/test_leftovers.py": _always,
    "P/tests/test_levers.py": _always,
    "P/tests/test_loader.py": _always,
    "P/tests/test_inspecting.py": _always,
    "P/tests/test_launch.py": _always,
    "P/tests/test_metrics.py": _always,
    "P/tests/test_models.py": _always,
    "P/tests/test_nodelist.py": lambda a: a["cluster"] == "slurm",
    "P/tests/test_nodes.py": lambda a: a["backend"] != "mpi" and a["nodes"] == "multi",
    "P/tests/test_nonfinite.py": _always,
    "P/tests/test_optim.py": _always,
    "P/tests/test_outcome.py": lambda a: a["cluster"] == "slurm",
    "P/tests/test_parity.py": _always,
    "P/tests/test_platforms.py": _always,
    "P/tests/test_prepare.py": _always,
    "P/tests/test_ranks.py": _always,
    "P/tests/test_reach.py": lambda a: a["nodes"] == "multi",
    "P/tests/test_rendezvous.py": _always,
    "P/tests/test_resume.py": _always,
    "P/tests/test_route.py": lambda a: a["nodes"] == "multi",
    "P/tests/test_rundir.py": _always,
    "P/tests/test_sampler.py": _always,
    "P/tests/test_saving.py": _always,
    "P/tests/test_srun.py": lambda a: a["cluster"] == "slurm",
    "P/tests/test_stop.py": _always,
    "P/tests/test_standstill.py": _always,
    "P/tests/test_strategy.py": _always,
    "P/tests/test_tracker.py": lambda a: a["tracker"] != "none",
    "P/tests/test_watchdog.py": _always,
    "P/tests/test_weights.py": _always,
    "P/tests/test_workers.py": _always,
    "P/tests/test_yours.py": _always,
    "P/tests/toy.py": _always,
    "P/train.py": _always,
}

# Words that belong to some answers of a question: they stand in no project without one of them.
WORDS: list[tuple[str, set[Answer], str]] = [
    ("backend", {"mpi"}, r"\bmpi|MPI\b|mpirun"),
    ("backend", {"nccl", "mpi"}, r"(?i:nccl)"),
    ("backend", {"nccl", "gloo"}, r"torchrun|rdzv"),
    ("nodes", {"multi"}, r"rdzv|(?i:nnodes)|HOSTFILE|several machines"),
    ("cluster", {"slurm"}, r"(?i:slurm|sbatch)|srun|scontrol|nodelist"),
    ("cluster", {"kubernetes"}, r"(?i:kube|docker|\bpods?\b|trainjob)"),
    # Every project can send gradients in 16 bits: `ddp.comm_hook`, whose values are quoted.
    ("amp", {"bf16"}, r"""bfloat16|test_bf16|(?<!["'_=])bf16(?!_compress)"""),
    (
        "amp",
        {"fp16"},
        r"""test_fp16|(?<!["'_=])fp16(?!_compress)|(?<!b)float16|(?i:scaler)|unscale""",
    ),
    ("amp", {"bf16", "fp16"}, r"autocast|\bamp\b|(?i:mixed precision)"),
    ("accumulation", {True}, r"(?i:accum)|micro_batch_size|no_sync"),
    ("checkpoint", {"per_rank"}, r"\bper_rank\b|own disk|drifted"),
    ("checkpoint", {"rank0", "per_rank"}, r"model\.pt"),
    ("checkpoint", {"sharded"}, r"(?i:sharded)|dcp_|torch\.distributed\.checkpoint"),
    (
        "ema",
        {True},
        r"\bema\b|\bema_|_ema\b|EMA\b|AveragedModel|(?i:averaged weights|moving average)",
    ),
    # The bare word is that of numbers, too.
    ("example", {"digits"}, r"Digit|\bdigits\.|(?i:handwritten|validation digits)|sklearn|scikit"),
    ("example", {"bytes"}, r"GPT|BLOCK_SIZE|(?i:flops)|\bmfu\b|baselines|\.generate\b|per byte"),
    ("tracker", {"tensorboard"}, r"(?i:tensorboard)|SummaryWriter"),
    ("tracker", {"wandb"}, r"(?i:wandb)"),
    ("tracker", {"mlflow"}, r"(?i:mlflow)"),
    ("ci", {"github"}, r"\.github|GitHub"),
    ("ci", {"gitlab"}, r"(?i:gitlab)"),
]

# Files that may be empty, and the one that names every answer.
EMPTY: set[str] = {"P/py.typed"}
ANSWERS_FILE = "P/cookiecutter.yaml"

# Checkpoints outlive the answer that wrote them: every project reads those of all others.
READERS = {("checkpoint", "P/engine/pieces.py")}


@functools.cache
def _finds(pattern: str, name: str, text: str) -> re.Match[str] | None:
    """Look for a pattern in a file, with its name as the first line."""
    return re.search(pattern, f"{name}\n{text}")


def _templates() -> list[Path]:
    """Every file that Jinja reads: the tree that is rendered and the included parts."""
    return [
        path
        for directory in (TEMPLATE, ROOT / "templates")
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


def test_every_project_has_exactly_the_files_of_the_table(
    all_rendered: list[Rendered], count: Count
) -> None:
    count("projects rendered", len(all_rendered))
    wrong: dict[str, list[str]] = {}
    for rendered in all_rendered:
        expected = {name for name, wanted in FILES.items() if wanted(rendered.answers)}
        found = set(rendered.files)
        for name in sorted(found ^ expected):
            complaint = f"{name} is {'not expected' if name in found else 'missing'}"
            wrong.setdefault(complaint, []).append(rendered.name)
    assert not wrong, "\n".join(
        f"{complaint} in {len(names)} projects, such as {names[0]}"
        for complaint, names in wrong.items()
    )


def test_no_empty_directory_is_left(all_rendered: list[Rendered]) -> None:
    empty = {
        str(path.relative_to(rendered.project))
        for rendered in all_rendered
        for path in rendered.project.rglob("*")
        if path.is_dir() and not any(path.iterdir())
    }
    assert not empty


def test_the_template_holds_no_file_of_a_tool() -> None:
    strays = [
        str(path.relative_to(TEMPLATE))
        for path in TEMPLATE.rglob("*")
        if path.suffix == ".pyc" or path.name.endswith("_cache") or path.name == "__pycache__"
    ]
    assert not strays, "cookiecutter would copy them into every project"


def test_nothing_of_jinja_is_left_over(all_rendered: list[Rendered]) -> None:
    wrong = []
    for name, text in distinct(all_rendered):
        for number, line in enumerate(text.splitlines(), 1):
            # What a workflow asks GitHub for is written as `${{ … }}`.
            if re.search(r"(?<!\$)\{\{|\{%|\{#|cookiecutter\.(?!yaml)", line):
                wrong.append(f"{name}:{number}: {line}")
        if re.search(r"\{\{|\{%|\{#|cookiecutter\.(?!yaml)", name):
            wrong.append(name)
    assert not wrong, "\n".join(wrong)


def test_files_are_tidy(all_rendered: list[Rendered]) -> None:
    wrong = []
    for name, text in distinct(all_rendered):
        wrong += [
            f"{name}:{number}: blanks at the end"
            for number, line in enumerate(text.split("\n"), 1)
            if line != line.rstrip()
        ]
        if not text.strip() and name not in EMPTY:
            wrong.append(f"{name}: empty")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            wrong.append(f"{name}: must end with one newline")
        if text.startswith("\n"):
            wrong.append(f"{name}: starts with a blank line")
        if "\n\n\n" in text and not name.endswith(".py"):
            wrong.append(f"{name}: two blank lines in a row")
    assert not wrong, "\n".join(wrong)


def test_scripts_and_nothing_else_can_be_executed(all_rendered: list[Rendered]) -> None:
    wrong = {
        name
        for rendered in all_rendered
        for name, path in rendered.files.items()
        if os.access(path, os.X_OK) != name.endswith((".sh", ".sbatch"))
    }
    assert not wrong


def test_every_file_parses(all_rendered: list[Rendered]) -> None:
    scripts = []
    for (name, text), path in distinct(all_rendered).items():
        if name.endswith(".py"):
            ast.parse(text, name)
        elif name.endswith(".toml"):
            tomllib.loads(text)
        elif name.endswith((".yaml", ".yml")):
            documents = list(yaml.safe_load_all(text))
            assert documents, name
            assert all(documents), name
        elif name.endswith((".sh", ".sbatch")):
            scripts.append(path)
    assert scripts
    for script in scripts:
        succeed("bash", "-n", script)


def test_no_word_of_an_answer_that_was_not_chosen(all_rendered: list[Rendered]) -> None:
    wrong = set()
    for rendered in all_rendered:
        for key, owners, pattern in WORDS:
            if rendered.answers[key] in owners:
                continue
            for name, text in rendered.texts.items():
                match = _finds(pattern, name, text)
                if match is None or name == ANSWERS_FILE or (key, name) in READERS:
                    continue
                whole = match.string
                line = whole[: whole.find("\n", match.end())].rsplit("\n", 1)[-1].strip()
                owned = " or ".join(f"{key}={owner}" for owner in sorted(owners, key=str))
                wrong.add(f"{name}: {match[0]!r} belongs to {owned}: {line}")
    assert not wrong, "\n".join(sorted(wrong))


def test_words_are_found_where_their_answer_was_chosen(all_rendered: list[Rendered]) -> None:
    """Else a pattern of the table above could be mistyped and never forbid anything."""
    missing = {
        f"{pattern} where {key}={rendered.answers[key]}"
        for rendered in all_rendered
        for key, owners, pattern in WORDS
        if rendered.answers[key] in owners
        and not any(
            _finds(pattern, name, text)
            for name, text in rendered.texts.items()
            if name != ANSWERS_FILE
        )
    }
    assert not missing


def test_every_answer_has_words_of_its_own() -> None:
    # The plain ones: nothing stands in a project because of them.
    plain: set[tuple[str, Answer]] = {
        ("backend", "gloo"),
        ("nodes", "single"),
        ("cluster", "none"),
        ("amp", "off"),
        ("accumulation", False),
        ("checkpoint", "rank0"),
        ("ema", False),
        ("tracker", "none"),
        ("ci", "none"),
    }
    owned = {(key, owner) for key, owners, _ in WORDS for owner in owners}
    questions = {(key, answer) for key, answers in all_answers().items() for answer in answers}
    assert owned | plain == questions


def test_every_branch_of_the_templates_is_rendered(branches: Branches) -> None:
    assert branches.known
    never = sorted(branches.known - branches.entered)
    assert not never, "\n".join(never)
    parts = {
        str(path.relative_to(ROOT / "templates")) for path in (ROOT / "templates").rglob("*.*")
    }
    assert not parts - branches.templates, "parts that no project includes"


def test_tags_stand_alone_on_their_line() -> None:
    wrong = []
    for path in _templates():
        if path.suffix == ".jinja":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "{%" in line and re.fullmatch(r"\s*\{% [^%]* %\}", line) is None:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def _used_answers(source: str) -> set[str]:
    """Give the keys of `cookiecutter` that a template reads."""
    tree = Environment().parse(source)
    assert not list(tree.find_all((nodes.CondExpr, nodes.For))), source[:200]
    return {
        node.attr
        for node in tree.find_all(nodes.Getattr)
        if isinstance(node.node, nodes.Name) and node.node.name == "cookiecutter"
    }


def test_declared_answers_are_the_used_ones() -> None:
    used = {key for path in _templates() for key in _used_answers(path.read_text())}
    used |= {key for path in _templates() for key in _used_answers(str(path.relative_to(ROOT)))}
    derived = {"__dns_name"}
    assert used == {"project_name", "author", "project_slug", *all_answers(), *derived}


def test_the_hook_knows_the_questions() -> None:
    assert table("CHOICES") == all_answers()
    for row, _ in table("UNSUPPORTED"):
        assert all(answer in all_answers()[key] for key, answer in row.items())
    assert not is_refused(complete({}))


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        (key, answer)
        for key, answers in available_answers().items()
        for answer in answers[1:]  # the first is the default
    ],
)
def test_every_answer_changes_something(tmp_path: Path, key: str, answer: Answer) -> None:
    """Where nothing but this answer differs, beside the file that records the answers."""
    default = {key: all_answers()[key][0]}
    rows = [row for row in product() if row[key] == answer and not is_refused(row | default)]

    def contents(answers: Answers, name: str) -> dict[str, tuple[bytes, bool]]:
        files = contents_of(render(answers, tmp_path / name))
        del files[ANSWERS_FILE.replace("P", SLUG)]
        return files

    assert contents(rows[0], "one") != contents(rows[0] | default, "other")


def test_rendering_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    answers: Answers = {"amp": "fp16", "ema": True}
    one = render(answers, tmp_path / "one")
    other = render(answers, tmp_path / "other" / "deeper")
    assert contents_of(one) == contents_of(other)


def test_no_path_of_the_machine_is_rendered(all_rendered: list[Rendered]) -> None:
    product_directory = all_rendered[0].project.parents[1]
    places = {str(ROOT), str(product_directory), os.path.expanduser("~")} - {"/"}
    for name, text in distinct(all_rendered):
        assert not [place for place in places if place in text], name


@pytest.mark.parametrize("slug", ["ab", "a" * 40, "zebra"], ids=["short", "long", "after-torch"])
def test_the_length_of_the_slug_does_not_show(slug: str, tmp_path: Path) -> None:
    """Names of any length, and one that sorts after torch, render lint-clean projects."""
    project = render({"ema": True, "amp": "fp16"}, tmp_path, slug=slug)
    succeed("ruff", "format", "--no-cache", "--check", project)
    succeed("ruff", "check", "--no-cache", "--output-format", "concise", project)
