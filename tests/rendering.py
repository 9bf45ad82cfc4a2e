"""Render projects: the questions, their answers, and the product of them that is tested."""

import ast
import functools
import hashlib
import itertools
import json
import os
import runpy
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

from cookiecutter import hooks
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from jinja2 import Environment

Answer = str | bool
Answers = dict[str, Answer]

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "{{cookiecutter.project_slug}}"
PRE_GEN = ROOT / "hooks" / "pre_gen_project.py"

SLUG = "demo"

# Answers that change few lines: cycled over the product of the others instead of multiplied.
CYCLED = ("example", "tracker", "ci")


@functools.cache
def table(name: str) -> Any:
    """Give a literal of the pre_gen hook, which is no module that could be imported."""
    for node in ast.parse(PRE_GEN.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def all_answers() -> dict[str, list[Answer]]:
    """Give every question that isn't free text, with its answers, the default first."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    answers: dict[str, list[Answer]] = {}
    for key, value in questions.items():
        if key.startswith("_"):
            continue
        if isinstance(value, bool):
            answers[key] = [value, not value]
        elif isinstance(value, list):
            answers[key] = value
    return answers


def is_refused(answers: Answers) -> bool:
    """Say whether a row of the hook's table applies to these answers."""
    rows: list[tuple[Answers, str]] = table("UNSUPPORTED")
    return any(all(answers.get(key) == row[key] for key in row) for row, _ in rows)


def available_answers() -> dict[str, list[Answer]]:
    """Give the answers of each question that can be rendered by themselves."""
    return {
        key: [answer for answer in answers if not is_refused({key: answer})]
        for key, answers in all_answers().items()
    }


def complete(answers: Answers) -> Answers:
    """Add the default answer of each question that these answers leave out."""
    return {key: values[0] for key, values in all_answers().items()} | answers


def pairs_of(answers: Answers) -> list[tuple[tuple[str, Answer], ...]]:
    """Give every two of these answers, each with its question."""
    return list(itertools.combinations(answers.items(), 2))


def spread(choices: Iterable[list[Answers]]) -> list[Answers]:
    """Take one candidate of each list, so that every two answers meet, and equally often.

    The one with the most pairs that are new; among those, with the pairs seen least. So no answer
    moves in step with another question, whatever the numbers of answers are.
    """
    seen: Counter[tuple[tuple[str, Answer], ...]] = Counter()
    chosen: list[Answers] = []
    for candidates in choices:
        costs = []
        for candidate in candidates:
            counts = [seen[pair] for pair in pairs_of(candidate)]
            costs.append((-counts.count(0), sum(counts)))
        best = candidates[costs.index(min(costs))]
        seen.update(pairs_of(best))
        chosen.append(best)
    return chosen


def multiply(questions: dict[str, list[Answer]]) -> list[Answers]:
    """Give all combinations of the answers to these questions."""
    return [
        dict(zip(questions, answers, strict=True))
        for answers in itertools.product(*questions.values())
    ]


def product() -> list[Answers]:
    """Give all combinations that are rendered and checked; new answers join by themselves."""
    questions = available_answers()
    multiplied = multiply({k: values for k, values in questions.items() if k not in CYCLED})
    cycled = multiply({key: questions[key] for key in CYCLED})
    choices = (
        [core | rest for rest in cycled if not is_refused(core | rest)] for core in multiplied
    )
    return spread(candidates for candidates in choices if candidates)


@contextmanager
def silent() -> Iterator[None]:
    """Drop what is printed meanwhile: the hooks' closing lines, once a project."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        stdout = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


@contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """Keep the rendered hooks, which cookiecutter never deletes, out of the machine's own."""
    before = tempfile.tempdir
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


_compile = Environment.compile
_compiled: dict[tuple[Any, ...], str | CodeType] = {}


def _compile_once(environment: Environment, *arguments: Any) -> str | CodeType:
    """Compile each text of the template once in a process: two thirds of the time of a project.

    What comes out depends on no answer: answers are looked up when the code runs.
    """
    # While branches are recorded, it is another parser.
    key = (Environment._parse, environment.trim_blocks, environment.lstrip_blocks, *arguments)
    if key not in _compiled:
        _compiled[key] = _compile(environment, *arguments)
    return _compiled[key]


def _run_here(script: str, cwd: str) -> None:
    """Run a hook in this process, as cookiecutter does in one of its own."""
    with chdir(cwd):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise FailedHookException(str(end.code)) from None


@contextmanager
def in_one_process() -> Iterator[None]:
    """Render in a tenth of the time. Templates, hooks and cookiecutter are the real ones.

    What a hook ends with is raised.
    """
    with (
        mock.patch.object(Environment, "compile", _compile_once),
        mock.patch.object(hooks, "run_script", _run_here),
    ):
        yield


def render(answers: Answers, dest: Path, slug: str = SLUG, **options: Any) -> Path:
    """Render one project into `dest`, untouched by the user's own settings of cookiecutter.

    `options` go to `cookiecutter.main.cookiecutter`; free texts may stand among the answers.
    """
    unknown = set(answers) - set(json.loads((ROOT / "cookiecutter.json").read_text()))
    assert not unknown, f"cookiecutter would drop these without a word: {unknown}"
    own = dest / ".cookiecutter"
    own.mkdir(parents=True, exist_ok=True)
    with _temporary_files_in(own), in_one_process():
        project = cookiecutter(
            str(ROOT),
            no_input=True,
            output_dir=str(dest),
            extra_context={"project_slug": slug, **answers},
            default_config={"replay_dir": str(own), "cookiecutters_dir": str(own)},
            **options,
        )
    return Path(project)


def files_of(project: Path) -> dict[str, Path]:
    """Give the files of a rendered project by their path in it, sorted."""
    return {
        str(path.relative_to(project)): path
        for path in sorted(project.rglob("*"))
        if path.is_file() or path.is_symlink()
    }


def contents_of(project: Path) -> dict[str, tuple[bytes, bool]]:
    """Give what makes a tree: bytes and executable bit of each file."""
    return {
        name: (path.read_bytes(), os.access(path, os.X_OK))
        for name, path in files_of(project).items()
    }


@dataclass(frozen=True)
class Rendered:
    """One rendered combination of answers."""

    answers: Answers
    project: Path

    @property
    def package(self) -> Path:
        """The package directory in the project."""
        return self.project / self.project.name

    @property
    def name(self) -> str:
        """Answers in few words, for messages."""
        return " ".join(f"{key}={str(answer).lower()}" for key, answer in self.answers.items())

    @functools.cached_property
    def files(self) -> dict[str, Path]:
        """The project's files by their path, with `P` for the package directory."""
        slug = f"{self.project.name}/"
        return {
            "P/" + name.removeprefix(slug) if name.startswith(slug) else name: path
            for name, path in files_of(self.project).items()
        }

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The text of each file; equal ones are a single object, also of several projects."""
        read = ((name, path.read_bytes().decode()) for name, path in self.files.items())
        return {name: _texts.setdefault(text, text) for name, text in read}

    def digest(self, suffix: str = ".py") -> str:
        """Give a hash of the package's files with this suffix: equal for equal trees."""
        total = hashlib.sha256()
        for name, text in self.texts.items():
            if name.startswith("P/") and name.endswith(suffix):
                total.update(f"{name}\0{text}\0".encode())
        return total.hexdigest()


_texts: dict[str, str] = {}


def distinct(projects: Iterable[Rendered], suffix: str = "") -> dict[tuple[str, str], Path]:
    """Give each text of the files with this suffix once, by name and text, and where it stands."""
    found: dict[tuple[str, str], Path] = {}
    for rendered in projects:
        for name, text in rendered.texts.items():
            if name.endswith(suffix):
                found.setdefault((name, text), rendered.files[name])
    return found


def run(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; give its exit code and output, both streams together."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def succeed(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a command that must exit with 0; give its output."""
    result = run(*command, cwd=cwd, env=env)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout
