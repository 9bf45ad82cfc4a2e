"""The documentation: links, named tests, tables and commands are what they say."""

import ast
import errno
import os
import re
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import Count
from tests.rendering import (
    ROOT,
    TEMPLATE,
    Answers,
    all_answers,
    complete,
    is_refused,
    render,
    succeed,
)

# Set by `make golden`, and by hand for the table of the settings.
REFRESH = os.environ.get("REFRESH_GOLDEN") == "1"

PACKAGE = TEMPLATE / "{{cookiecutter.project_slug}}"
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide.md"
REFERENCE = ROOT / "docs" / "reference.md"
SETTINGS = re.compile(r"(<!-- settings: .*? -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)

PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not re.search(r"/(golden|build|\.\w+|\{\{.*\}\})/", str(path.relative_to(ROOT.parent)))
]


def _prose(text: str) -> str:
    """Give a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page.read_text()), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    anchors: set[str] = set()
    for slug in slugs:
        numbered = (f"{slug}-{number}" for number in range(1, 100))
        anchors.add(slug if slug not in anchors else next(n for n in numbered if n not in anchors))
    return anchors


def test_anchors_are_made_as_github_makes_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `no_sync`, and: more\n```\n# code\n```\n## Twice\n## Twice\n")
    assert _anchors(page) == {"no_sync-and-more", "twice", "twice-1"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path, count: Count) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text()))
    wrong = []
    for link in links:
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert not wrong
    count("links in the documentation", len(links))


def test_every_page_is_reached_from_the_readme() -> None:
    reached = {README}
    waiting = list(reached)
    while waiting:
        page = waiting.pop()
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text()):
            target = (page.parent / link).resolve()
            if target not in reached and target.exists():
                reached.add(target)
                waiting.append(target)
    assert set(PAGES) == reached


def _tests_in(directory: Path) -> set[str]:
    """Give `file::test` of a directory; of templates too, whose names may hold a condition.

    What a file includes for one of the answers stands in it.
    """
    found = set()
    for path in directory.glob("*test_*.py*"):
        texts = [path.read_text()]
        for start in re.findall(r'{% include "(\w+/test_)" ~', texts[0]):
            texts += [part.read_text() for part in (ROOT / "templates").glob(f"{start}*.py")]
        tests = re.findall(r"^def (test_\w+)", "\n".join(texts), re.MULTILINE)
        found |= {f"{re.sub('{%.*?%}', '', path.name)}::{test}" for test in tests}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path, count: Count) -> None:
    named = re.findall(r"`tests/(\w+\.py::\w+)`", page.read_text())
    wrong = set(named) - _tests_in(ROOT / "tests") - _tests_in(PACKAGE / "tests")
    assert not wrong
    count("tests named in the documentation", len(named))


# Tables


def _rows(text: str, header: str) -> list[list[str]]:
    """Give the cells of the table whose first line is `header`."""
    lines = text[text.index(header) :].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
        rows.append([cell.strip() for cell in cells])
    return rows


def _in_words(answers: list[str | bool]) -> list[str]:
    return [str(answer).lower() if isinstance(answer, bool) else answer for answer in answers]


def test_the_reference_has_every_question_and_answer() -> None:
    table: dict[str, list[str]] = {}
    unavailable = set()
    question = ""
    for first, second, meaning in _rows(REFERENCE.read_text(), "| question | answer | what"):
        question = first.strip("`") or question
        answer = second.strip("`")
        table.setdefault(question, []).append(answer)
        if meaning == "not available yet":
            unavailable.add((question, answer))
    expected = {key: _in_words(answers) for key, answers in all_answers().items()}
    assert table == expected
    assert unavailable == {
        (key, answer)
        for key, answers in expected.items()
        for answer in answers
        if is_refused({key: answer})
    }


def test_the_readme_has_every_question_and_answer() -> None:
    table = {}
    for question, answers, _ in _rows(README.read_text(), "| question | answers"):
        now, _, later = answers.partition("not yet:")
        table[question.strip("`")] = (re.findall("`(.*?)`", now), re.findall("`(.*?)`", later))
    assert table == {
        key: (
            _in_words([answer for answer in answers if not is_refused({key: answer})]),
            _in_words([answer for answer in answers if is_refused({key: answer})]),
        )
        for key, answers in all_answers().items()
    }


@dataclass(frozen=True)
class Setting:
    """A field of the rendered settings, in the words of the table."""

    kind: str
    default: str
    meaning: str
    is_yours: bool


def _kind(annotation: ast.expr) -> str:
    """Say what values a field takes."""
    if isinstance(annotation, ast.BinOp):
        return f"{_kind(annotation.left)}, or none"
    if isinstance(annotation, ast.Subscript):
        choices = ast.literal_eval(annotation.slice)
        return " ".join(f"`{choice}`" for choice in choices)
    words = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}
    return words[ast.unparse(annotation)]


def _default(value: ast.expr, slug: str) -> str:
    literal = ast.literal_eval(value)
    if literal is None:
        return "none"
    text = str(literal).lower() if isinstance(literal, bool) else ast.unparse(value).strip("'")
    return f"`{text.replace(slug, '<slug>')}`"


def _settings_of(project: Path) -> dict[str, Setting]:
    """Read the fields of a rendered project's settings, with the strings below them."""
    classes = {}
    for name in ("settings.py", "config.py"):
        tree = ast.parse((project / project.name / name).read_text())
        found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        classes.update({key: (node, name == "settings.py") for key, node in found.items()})
    settings = {}

    def read(cls: str, prefix: str) -> None:
        node, is_yours = classes[cls]
        for base in node.bases:
            read(ast.unparse(base), prefix)
        for field, below in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
            if not isinstance(field, ast.AnnAssign) or field.value is None:
                continue
            key = prefix + ast.unparse(field.target)
            if ast.unparse(field.annotation) in classes:
                read(ast.unparse(field.annotation), f"{key}.")
                continue
            assert isinstance(below, ast.Expr), f"{key} has no description"
            settings[key] = Setting(
                _kind(field.annotation),
                _default(field.value, project.name),
                " ".join(ast.literal_eval(below.value).split()),
                is_yours,
            )

    read("Config", "")
    return settings


PLAIN: Answers = {"accumulation": False, "ema": False}
MORE: list[Answers] = [
    {"accumulation": True},
    {"ema": True},
    {"backend": "gloo"},
    {"backend": "mpi"},
    {"example": "bytes"},
]


def _table_of_settings(dest: Path) -> list[str]:
    """Write the rows: what a plain project has, and where another answer changes it."""
    plain = _settings_of(render(PLAIN, dest / "plain"))
    with_answers: dict[str, list[str]] = {key: [] for key in plain}
    defaults: dict[str, list[str]] = {key: [one.default] for key, one in plain.items()}
    order = list(plain)
    for answers in MORE:
        name = " ".join(f"{key}={answer}".lower() for key, answer in answers.items())
        found = _settings_of(render(PLAIN | answers, dest / name))
        for key in plain.keys() - found.keys():
            if not with_answers[key]:  # this answer takes away what another brings
                with_answers[key] = [f"`{k}={complete({})[k]}`" for k in answers]
        for before, (key, one) in zip(["", *found], found.items(), strict=False):
            if key not in plain:
                plain[key] = one
                defaults[key] = [one.default]
                with_answers[key] = [f"`{name}`"]
                order.insert(order.index(before) + 1, key)
            elif one.default != plain[key].default:
                defaults[key].append(f"{one.default} with `{name}`")
    rows = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for key in order:
        one = plain[key]
        notes = ["yours"] * one.is_yours + with_answers[key]
        note = f" ({', '.join(notes)})" if notes else ""
        rows.append(f"| `{key}`{note} | {one.kind} | {'; '.join(defaults[key])} | {one.meaning} |")
    return rows


def test_the_table_of_the_settings_is_that_of_config_py(tmp_path: Path) -> None:
    text = REFERENCE.read_text()
    table = "\n".join(_table_of_settings(tmp_path)) + "\n"
    if REFRESH:
        text = SETTINGS.sub(lambda found: found[1] + table + found[3], text)
        REFERENCE.write_text(text)
    found = SETTINGS.search(text)
    assert found is not None
    assert found[2] == table


def _changes_of(project: Path) -> dict[str, list[str]]:
    """Give what a rendered project says of changed settings, and of which."""
    for node in ast.parse((project / project.name / "rules.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CHANGES" and node.value:
            return {words: list(keys) for words, keys in ast.literal_eval(node.value)}
    raise KeyError("CHANGES")


def test_the_table_of_changes_is_that_of_rules_py(tmp_path: Path) -> None:
    expected: dict[str, set[str]] = {}
    for number, answers in enumerate([PLAIN, *MORE]):
        for words, keys in _changes_of(render(PLAIN | answers, tmp_path / str(number))).items():
            expected.setdefault(words, set()).update(keys)
    table: dict[str, set[str]] = {}
    for what, settings in _rows(REFERENCE.read_text(), "| what happens | settings |"):
        _, _, words = what.partition(": ")
        named: set[str] = set(re.findall("`(.*?)`", settings)) - {"CHANGEABLE", "model", "data"}
        table.setdefault(words, set()).update(named)  # nothing is said where they have no part
    assert table == expected


def test_the_index_has_every_decision() -> None:
    directory = ROOT / "docs" / "decisions"
    expected = []
    for path in sorted(directory.glob("0*.md")):
        number, title = re.fullmatch(r"# (\d+)\. (.*)", path.read_text().splitlines()[0]).groups()  # type: ignore[union-attr]
        assert path.name.startswith(f"{int(number):04d}-")
        expected.append(f"{number}. [{title}]({path.name})")
    assert re.findall(r"^\d+\. .*$", (directory / "README.md").read_text(), re.M) == expected


def _words_of(project: Path) -> str:
    """Give all text that a project's code can say, and nothing else of it."""
    texts = [path.read_text() for path in (*project.rglob("*.sh"), *project.rglob("*.sbatch"))]
    for path in project.rglob("*.py"):
        if "tests" not in path.parts:
            tree = ast.parse(path.read_text())
            texts += [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return "\n".join(texts)


def _messages(*headers: str) -> list[str]:
    """Give the messages of the tables whose first column is named so."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    found: list[str] = []
    header = ""
    for line in page.splitlines():
        first = line.partition(" |")[0].removeprefix("| ")
        header = header if line.startswith("|") else ""
        if line.startswith("| `") and header in headers:
            found += re.findall("`(.*?)`", first)
        header = header or first
    return found


def _parts_of(messages: list[str]) -> list[str]:
    """Give what is said in each case: numbers and names stand between."""
    parts = [part.strip() for message in messages for part in re.split("[…;:,()]", message)]
    return [part for part in parts if len(part) > 7]


def test_messages_of_pytorch_are_those_of_this_version(count: Count) -> None:
    """In its libraries, in its Python, or among the texts of the operating system."""
    root = Path(torch.__file__).parent
    python = [*(root / "_dynamo").glob("*.py"), *(root / "nn").rglob("*.py")]
    texts = [path.read_bytes() for path in (root / "lib" / "libtorch_cpu.so", *python)]
    texts += [os.strerror(number).encode() for number in errno.errorcode]
    messages = _messages("PyTorch says")
    assert len(messages) >= 10
    parts = [part.encode() for part in _parts_of(messages)]
    assert not [part for part in parts if not any(part in text for text in texts)]
    count("messages of the documentation looked up", len(messages))


def test_messages_of_the_troubleshooting_page_are_said(tmp_path: Path, count: Count) -> None:
    rows: list[Answers] = [{"nodes": "multi"}, {"backend": "mpi", "amp": "fp16", "ema": True}]
    rows += [{"backend": "gloo", "checkpoint": "per_rank"}, {"checkpoint": "sharded"}]
    rows += [{"tracker": "wandb", "example": "bytes"}, {"tracker": "mlflow"}]
    rows += [{"cluster": "slurm", "nodes": answer} for answer in ("single", "multi")]
    said = "\n".join(
        _words_of(render(answers, tmp_path / str(number))) for number, answers in enumerate(rows)
    )
    messages = _messages("it says", "it says last")
    assert len(messages) > 100
    assert not [part for part in _parts_of(messages) if part not in said]
    count("messages of the documentation looked up", len(messages))


# Commands


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Give the commands of a page with what they need: nothing, a GPU, MPI, a cluster."""
    found = re.findall(r"^```sh ?(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(needs, commands) for needs, commands in found]


@pytest.fixture
def newcomer(tmp_path: Path) -> dict[str, str]:
    """Give the environment of a person who has only made a virtual environment.

    Packages come from the running environment, so that nothing large is downloaded.
    """
    venv = tmp_path / "venv"
    succeed(sys.executable, "-m", "venv", "--without-pip", venv)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "running.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # What pip would have written, had it installed the packages here.
    scripts = {"torchrun": "torch.distributed.run", "cookiecutter": "cookiecutter.__main__"}
    for name, module in scripts.items():
        script = venv / "bin" / name
        script.write_text(f"#!{venv}/bin/python\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    return {
        "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": "",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{f"GIT_{role}_NAME": "A Newcomer" for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_EMAIL": "new@example.com" for role in ("AUTHOR", "COMMITTER")},
        "GLOO_SOCKET_IFNAME": "lo",
        # Whole suites run elsewhere: here it matters that the command is right.
        "PYTEST_ADDOPTS": "-k keyed",
    }


def _as_far_as_possible(needs: str, commands: str, project: Path) -> tuple[str, str]:
    """Give the commands and settings that make them run on a CPU of one machine."""
    settings = {"gpu": "--device cpu", "mpi": "--backend gloo", "cluster": "--device cpu"}
    if needs == "template":
        commands = commands.replace("TEMPLATE", shlex.quote(str(ROOT)))
        if (
            commands.startswith("cookiecutter ") and "--no-input" not in commands
        ):  # Enter takes the default of every question
            commands = f"yes '' | {commands.strip()} --output-dir asked"
    if needs == "cluster":
        commands = commands.replace("NNODES=2", "NNODES=1").replace("node0:29500", "localhost:0")
        (project / "hosts").write_text("localhost slots=2\n")
    steps = "--max_steps 2 " if "make train" in commands else ""
    return commands, steps + settings.get(needs, "")


def _run_blocks(
    blocks: list[tuple[str, str]], project: Path, environment: dict[str, str], count: Count
) -> list[str]:
    """Run commands in a project, in order; give what each block said."""
    outputs = []
    for needs, commands in blocks:
        script, settings = _as_far_as_possible(needs, commands, project)
        variables = environment | {"ARGS": settings}
        outputs.append(succeed("bash", "-euc", script, cwd=project, env=variables))
    count("blocks of commands in the documentation run", len(outputs))
    return outputs


def test_commands_of_the_rendered_readme_work(
    tmp_path: Path, newcomer: dict[str, str], count: Count
) -> None:
    project = render({}, tmp_path, slug="my_project")
    blocks = _blocks(project / "README.md")
    assert [needs for needs, _ in blocks] == ["", "", "gpu", "", "", "template"]
    first, second, _, parity, listed, regenerated = _run_blocks(blocks, project, newcomer, count)
    result = r"^step 69  epoch 3  valid: loss 0\.\d+  accuracy 0\.\d+  targets 360$"
    assert re.search(result, first, re.MULTILINE), first
    assert "resumed from step_00000069: step 69, epoch 3, sample 0" in second
    assert "step 92  epoch 4" in second
    assert " passed" in second
    assert "explained: without these they are equal within the rounding of float64" in parity
    assert re.search(r"^ +92 .* complete, every byte checked, best$", listed, re.MULTILINE), listed
    assert (project / "weights.pt").is_file()
    assert "Answer: author=Your Name becomes Somebody Else" in regenerated
    assert "Somebody Else" in (project / "pyproject.toml").read_text()


def test_commands_for_several_machines_work(
    tmp_path: Path, newcomer: dict[str, str], count: Count
) -> None:
    project = render({"backend": "gloo", "nodes": "multi"}, tmp_path, slug="my_project")
    _, _, *others = _blocks(project / "README.md")
    assert [needs for needs, _ in others] == ["", "cluster", "", "", "template"]
    (train, cluster) = _run_blocks(others[:2], project, newcomer, count)
    assert "world size     2 on cpu" in train
    assert "resumed from step_00000002" in cluster


def test_commands_for_torchrun_work(tmp_path: Path, newcomer: dict[str, str], count: Count) -> None:
    (needs, single), *multi = _blocks(ROOT / "docs" / "launching" / "torchrun.md")
    assert needs == ""
    assert [needs for needs, _ in multi] == ["cluster", "cluster"]
    project = render({"backend": "gloo"}, tmp_path / "one", slug="my_project")
    (said,) = _run_blocks([("", single)], project, newcomer, count)
    assert "\ntorchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 1 " in said
    project = render({"backend": "gloo", "nodes": "multi"}, tmp_path / "two", slug="my_project")
    short = "configs/default.yaml --device cpu --max_steps 2"
    blocks = [(needs, words.replace("configs/default.yaml", short)) for needs, words in multi]
    first, second = _run_blocks(blocks, project, newcomer, count)
    assert "step 2  epoch 0  valid" in first
    assert "nothing left to do" in second


def test_commands_of_the_other_example_work(
    tmp_path: Path, newcomer: dict[str, str], count: Count
) -> None:
    project = render({"backend": "gloo", "example": "bytes"}, tmp_path, slug="my_project")
    needs = [block[0] for block in _blocks(project / "README.md")]
    assert needs == ["", "", "", "gpu", "", "", "template"]
    # The rest is as in the README of the first example, whose commands run all.
    (_, start), _, others, *_ = _blocks(project / "README.md")
    install, train = start.split("\n", 1)
    assert install == "make install"
    short = "configs/debug.yaml --max_steps 2 --device cpu"
    train = train.replace("configs/debug.yaml --device cpu", short)
    first, said = _run_blocks([("", train), others], project, newcomer, count)
    assert re.search(r"^step 2  epoch 0  valid: loss \d\.\d+  bits \d\.\d+", first, re.MULTILINE)
    assert re.search(r"^unigram  \d\.\d+ bits per byte", said, re.MULTILINE)
    assert re.search(r"^import ", said, re.MULTILINE)


def test_commands_of_the_guide_work(tmp_path: Path, newcomer: dict[str, str], count: Count) -> None:
    project = render({}, tmp_path, slug="my_project")
    blocks = [block for block in _blocks(GUIDE) if block[0] != "gpu"]  # the README has it too
    _, start, two, yours, parity = _run_blocks(blocks, project, newcomer, count)
    for output, processes in ((start, 1), (two, 2)):
        assert f"world size     {processes} on cpu" in output
        assert re.search(r"step 69  epoch 3  valid: loss 0\.5", output), output
    assert " passed" in yours
    assert "draws: each forward draws random numbers of its own (dropout)" in parity


def test_commands_of_the_reference_work(
    tmp_path: Path, newcomer: dict[str, str], count: Count
) -> None:
    """A file that is missing comes back, an edit stays; and does not without one of the options."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    ((needs, commands),) = _blocks(ROOT / "docs" / "reference.md")
    first, again = commands.split("\n", 1)
    (said,) = _run_blocks([(needs, first)], tmp_path, newcomer, count)
    closing = re.search(r"^Answers: .*\nTexts: .*$", said, re.MULTILINE)
    assert closing
    assert closing[0] in reference
    train, makefile = (
        tmp_path / "my_project" / name for name in ("my_project/train.py", "Makefile")
    )
    rendered = train.read_text(), makefile.read_text()
    train.write_text("mine")
    _run_blocks([(needs, again)], tmp_path, newcomer, count)
    assert (train.read_text(), makefile.read_text()) == ("mine", rendered[1])
    assert " --skip-if-file-exists" in again
    replaced = again.replace(" --skip-if-file-exists", "")
    _run_blocks([(needs, replaced)], tmp_path, newcomer, count)
    assert (train.read_text(), makefile.read_text()) == rendered
    for page in (README.read_text(), reference):
        assert re.search(r"`-f`.* replaces your edits", page.replace("\n", " "))
        assert "regenerate.md" in page


def test_demo_trains_to_what_the_readme_promises(count: Count) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    output = succeed(ROOT / "scripts" / "demo.sh", env={"PATH": path})
    # Its last bits may differ on another machine; the script itself insists on 97 %.
    result = re.compile(
        r"^step 690  epoch 30  valid: loss 0\.0\d+  accuracy 0\.9\d+  targets 360$", re.MULTILINE
    )
    assert result.search(README.read_text())
    assert result.search(output), output
    count("demonstrations", 1)
