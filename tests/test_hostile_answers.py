"""Any answers, many at random: refused in a sentence before a file is written, or valid.

Valid means that every file parses, and that free text is read back as it was given.
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from cookiecutter.exceptions import FailedHookException
from cookiecutter.main import cookiecutter
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from jinja2.exceptions import TemplateError

from tests.rendering import (
    ROOT,
    all_answers,
    complete,
    files_of,
    in_one_process,
    is_refused,
    run,
)

# Each way to answer sees that many sets, always the same ones.
SETS = 130

GOOD_TEXTS = [
    'Ann "Q" O\'Test',
    "back\\slash\\",
    "\\n \\u0041 \\",
    "漢字 ü",
    "\N{GRINNING FACE} \N{MAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}",
    "\U0001fae9 of a later Unicode",
    "a: b # c",
    "100 % %s %(x)s",
    "$HOME `id` $(id) ${x} $$",
    "</x>&amp;<!--",
    "'''\"\"\"",
    "- [x], {y}, }} %} #}",
    "x\"); print('INJECTED",
    "[bold]rich[/bold] [/]",
    "null",
    "1e3",
    "~",
    "@decorated !tag *alias &anchor",
    "../../etc/passwd",
    "/absolute",
    "C:\\Windows",
    "x" * 200,
    "\u202eleft to right",
    "\ufeffmark",
    " blanks around ",
]
BAD_TEXTS = [
    "",
    "  \u00a0 ",
    "two\nlines",
    "tab\t",
    "\x1b[31m",
    "\x00",
    "\x7f",
    "\x85",
    "a\u2028b",
    "\ufffe",
    "\ud800",
]
# Cookiecutter runs these, unless they were typed.
JINJA = ["{{ 7*7 }}", "{{ nosuch }}", "{% raw", "{%", "{{", "{#", "{{ '{%' }}", "{# gone #}seen"]
GOOD_SLUGS = ["ok", "a_1", "zebra_9", "a" * 40, "engine", "train", "a__"]
BAD_SLUGS = [
    *("../x", "a/b", "/absolute", ".", "..", "a-b", "a b", "1a", "_a", "Upper", "é", "x\n", "\x00"),
    *("a", "a" * 41, "a" * 200, "a" * 300, "é" * 130, "a\\b", "c:x", "$HOME", "%", "</x>", "🙂"),
    *("con", "nul", "aux", "prn", "com1", "lpt9", "import", "None", "async", "os", "json", "imp"),
    *("torch", "numpy", "sklearn", "yaml", "pyyaml", "scikit_learn", "tests", "runs", "build"),
]
YES = ["true", "yes", "y", "on", "1", "True"]
NO = ["false", "no", "n", "off", "0", "False"]

TEXTS = ("project_name", "author")


@dataclass(frozen=True)
class Answered:
    """An answer, and whether it must be refused; None where it may."""

    value: Any
    is_bad: bool | None


def _of(values: list[Any], is_bad: bool | None) -> st.SearchStrategy[Answered]:
    return st.sampled_from([Answered(value, is_bad) for value in values])


def _anything() -> st.SearchStrategy[Answered]:
    pieces = st.sampled_from([*GOOD_TEXTS[:12], "{{", "}}", "{%", '"', "\\", "'", "\n", "#", " "])
    glued = st.lists(pieces, min_size=1, max_size=5).map("".join)
    return st.one_of(st.text(min_size=1, max_size=40), glued).map(lambda text: Answered(text, None))


def _choice(answers: list[Any]) -> st.SearchStrategy[Answered]:
    wrong = _of(["nosuch", "", "{{ 7*7 }}", f"{answers[0]} "], True)
    right: list[Any] = [*YES, *NO] if isinstance(answers[0], bool) else answers
    # Mostly right, or no set would be rendered.
    return st.integers(0, 60).flatmap(lambda n: wrong if n == 0 else _of(right, False))


def _mostly(good: st.SearchStrategy[Answered], *others: st.SearchStrategy[Answered]) -> Any:
    return st.integers(0, 3).flatmap(lambda n: st.one_of(*others) if n == 0 else good)


def answer_sets() -> st.SearchStrategy[dict[str, Answered]]:
    """Texts, names and choices; some questions are left to their defaults."""
    text = _mostly(_of(GOOD_TEXTS, False), _of(BAD_TEXTS, True), _of(JINJA, None), _anything())
    slug = _mostly(_of(GOOD_SLUGS, False), _of(BAD_SLUGS, True), _anything())
    choices = {key: _choice(answers) for key, answers in all_answers().items()}
    return st.fixed_dictionaries(
        {"project_slug": slug}, optional={**dict.fromkeys(TEXTS, text), **choices}
    )


@cache
def _fault(suffix: str, content: str) -> str | None:
    """Say what a parser says of a file; None where it is content. Equal files are read once."""
    try:
        if suffix == ".py":
            ast.parse(content)
        elif suffix == ".toml":
            tomllib.loads(content)
        elif suffix in {".yaml", ".yml"}:
            list(yaml.safe_load_all(content))
        elif suffix == ".json":
            json.loads(content)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return str(error)
    commands = {".sh": ("bash", "-n"), ".sbatch": ("bash", "-n"), "Dockerfile": ("hadolint",)}
    if suffix in commands:
        with tempfile.NamedTemporaryFile("w", suffix=suffix) as file:
            file.write(content)
            file.flush()
            result = run(*commands[suffix], file.name)
        return result.stdout if result.returncode else None
    return None


def _defaults() -> dict[str, Any]:
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    return {key: value for key, value in questions.items() if not key.startswith("_")}


def _render_words(answers: dict[str, Any], dest: Path) -> str:
    own = {"replay_dir": str(dest), "cookiecutters_dir": str(dest)}
    project: str = cookiecutter(
        str(ROOT),
        no_input=True,
        output_dir=str(dest / "out"),
        extra_context=answers,
        default_config=own,
    )
    return project


def _settings_file(answers: dict[str, Any], dest: Path) -> Path:
    path = dest / "settings.yaml"
    content = {
        "default_context": answers,
        "replay_dir": str(dest),
        "cookiecutters_dir": str(dest),
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def _render_file(answers: dict[str, Any], dest: Path) -> str:
    file = _settings_file(answers, dest)
    project: str = cookiecutter(
        str(ROOT), no_input=True, output_dir=str(dest / "out"), config_file=str(file)
    )
    return project


def _render_global(answers: dict[str, Any], dest: Path) -> str:
    file = _settings_file(answers, dest)
    with mock.patch.dict(os.environ, COOKIECUTTER_CONFIG=str(file)):
        project: str = cookiecutter(str(ROOT), no_input=True, output_dir=str(dest / "out"))
        return project


def _render_typed(answers: dict[str, Any], dest: Path) -> str:
    lines = []
    for key, default in _defaults().items():
        answer = answers.get(key, "")
        if isinstance(default, list):  # an answer is typed by its number
            answer = str(default.index(answer) + 1) if answer in default else answer
        lines.append(answer)
    own = {"replay_dir": str(dest), "cookiecutters_dir": str(dest)}
    with mock.patch.object(sys, "stdin", io.StringIO("\n".join([*lines, ""]), newline="\n")):
        project: str = cookiecutter(str(ROOT), output_dir=str(dest / "out"), default_config=own)
        return project


WAYS: dict[str, Callable[[dict[str, Any], Path], str]] = {
    "words": _render_words,
    "file": _render_file,
    "global": _render_global,
    "typed": _render_typed,
}


def _expected(way: str, text: str) -> str | None:
    """What a text becomes before a hook sees it; None where cookiecutter itself fails."""
    if way == "typed":
        return text.strip()
    try:
        return Environment(keep_trailing_newline=True).from_string(text).render()
    except (TemplateError, UnicodeError):
        return None


def _chosen(answers: dict[str, Any]) -> dict[str, Any]:
    """The answers to questions of yes and no, or of a list, as they are recorded."""
    known = {key: answers[key] for key in answers if key in all_answers()}
    words = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
    return {
        key: words.get(value, value) if isinstance(all_answers()[key][0], bool) else value
        for key, value in known.items()
    }


def _check_valid(project: Path, slug: str, way: str, answers: dict[str, Any], said: str) -> None:
    faults = {}
    for name, path in files_of(project).items():
        suffix = path.suffix if path.name != "Dockerfile" else path.name
        if fault := _fault(suffix, path.read_text(encoding="utf-8")):
            faults[name] = fault
    assert not faults
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recorded = yaml.safe_load((project / slug / "cookiecutter.yaml").read_text(encoding="utf-8"))
    recorded = recorded["default_context"]
    # Of a file, cookiecutter drops what stands behind a wrong choice. No hook can see that, but
    # the closing lines show it.
    is_cut = way in {"file", "global"} and recorded != {**recorded, **_chosen(answers)}
    for key in TEXTS:
        given = answers.get(key, "" if way == "typed" else _defaults()[key])
        expected = _expected(way, given) or _defaults()[key]  # typed, nothing is the default
        read = metadata["description"] if key == "project_name" else metadata["authors"][0]["name"]
        assert read == recorded[key]
        assert read == expected or (is_cut and read == _defaults()[key])
        assert f"{key}={json.dumps(read)}" in said
    assert metadata["name"] == recorded["project_slug"] == slug
    # What no hook can see, a dropped answer, shows here.
    line = said.rpartition("Answers: ")[2].partition("\n")[0]
    named = dict(word.split("=") for word in line.split())
    assert named == {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in recorded.items()
        if key not in TEXTS
    }


def _one_set(
    way: str, tmp_path: Path, tally: dict[str, int], answered: dict[str, Answered]
) -> None:
    answers = {key: one.value for key, one in answered.items()}
    if way == "typed":
        answers = {key: value.partition("\n")[0] for key, value in answers.items()}
    said = io.StringIO()
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        dest = Path(directory)
        (dest / "out").mkdir()
        with (
            contextlib.redirect_stdout(said),
            mock.patch.object(tempfile, "tempdir", str(dest)),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # as people run it
            try:
                project = Path(WAYS[way](answers, dest))
            except (Exception, SystemExit) as error:
                project, refusal = None, error
        if project is not None:
            tally["rendered"] += 1
            bad = {key for key, one in answered.items() if one.is_bad}
            assert not bad or way != "words", f"{bad} came through"
            _check_valid(project, project.name, way, answers, said.getvalue())
            return
        tally["refused"] += 1
        assert not [path for path in (dest / "out").rglob("*") if path.is_file()]
        words = str(refusal).splitlines()
        assert words, repr(refusal)
        must_pass = all(one.is_bad is False for one in answered.values())
        assert not must_pass or is_refused(complete(_chosen(answers))), (
            f"{answers} refused: {refusal!r}"
        )
        if isinstance(refusal, FailedHookException):
            assert len(words) == 1
            assert refusal.args[0].endswith("not be rendered") or words[0].endswith(".")


@pytest.mark.parametrize("way", WAYS)
def test_any_answers_are_refused_or_become_a_valid_project(way: str, tmp_path: Path) -> None:
    tally = {"rendered": 0, "refused": 0}

    @settings(
        max_examples=SETS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a set that fails is short enough
        suppress_health_check=list(HealthCheck),
    )
    @given(answer_sets())
    def try_one(answered: dict[str, Answered]) -> None:
        _one_set(way, tmp_path, tally, answered)

    with in_one_process():
        try_one()
    assert min(tally.values()) > SETS // 5, tally
