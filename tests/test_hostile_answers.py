"""Any answers, many at random: refused in a sentence before a file is written, or valid.

Valid means that every file parses, and that each answer is read back as it was given.
"""

import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from cookiecutter.exceptions import CookiecutterException, FailedHookException
from cookiecutter.main import cookiecutter
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from jinja2.exceptions import TemplateError
from packaging.utils import canonicalize_name

from tests.rendering import (
    ROOT,
    all_answers,
    complete,
    contents_of,
    files_of,
    in_one_process,
    is_refused,
    render,
    run,
    table,
)

# Each way to answer sees that many sets, always the same ones.
SETS = 150

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
    "a\u2029b",
    "\ufffe",
    "\ufdd0",
    "\ud800",
]
# Cookiecutter runs these, unless they were typed.
JINJA = ["{{ 7*7 }}", "{{ nosuch }}", "{% raw", "{%", "{{", "{#", "{{ '{%' }}", "{# gone #}seen"]
GOOD_SLUGS = ["ok", "a_1", "zebra_9", "a" * 40, "engine", "train", "a__b"]
BAD_SLUGS = [
    *("../x", "../" * 3 + "x/y", "a/b", "/absolute", "a\\b", "c:x", ".", "..", "", "x\n", "\x00"),
    *("a-b", "a b", "1a", "_a", "Upper", "é", "$HOME", "%", "</x>", "🙂", "a__", "ends_"),
    *("a", "a" * 41, "a" * 200, "a" * 300, "é" * 130),
    *("con", "nul", "aux", "prn", "com1", "lpt9", "import", "None", "async"),
    *("os", "json", "cgi", "imp", "tomllib", "annotationlib", "sitecustomize"),
    *("torch", "numpy", "sklearn", "yaml", "pyyaml", "scikit_learn"),
    *("build", "makefile", "node_modules", "runs", "test", "tests"),
]
YES = ["true", "yes", "y", "on", "1", "True"]
NO = ["false", "no", "n", "off", "0", "False"]

TEXTS = ("project_name", "author")
SLUG = "project_slug"

# No question has this name: cookiecutter drops it.
UNKNOWN = "ammp"


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


def _choice(key: str, is_bad: bool) -> st.SearchStrategy[Answered]:
    answers: list[Any] = all_answers()[key]
    if is_bad:
        return _of(["nosuch", "", "{{ 7*7 }}", f"no{answers[0]}"], True)
    return _of([*YES, *NO] if isinstance(answers[0], bool) else answers, False)


GOOD = {**dict.fromkeys(TEXTS, _of(GOOD_TEXTS, False)), SLUG: _of(GOOD_SLUGS, False)}
BAD = {
    **dict.fromkeys(TEXTS, st.one_of(_of(BAD_TEXTS, True), _of(JINJA, None))),
    SLUG: _of(BAD_SLUGS, True),
}


@st.composite
def answer_sets(draw: st.DrawFn) -> dict[str, Answered]:
    """Texts, names and choices, in any order; some questions are left to their defaults.

    A third is good, a third has one answer that is not, a third has any texts.
    """
    fault = draw(st.sampled_from(["none"] * 4 + ["any"] * 4 + [*BAD, "choice"]))
    keys = [*TEXTS, SLUG, *all_answers()]
    wrong = draw(st.sampled_from(list(all_answers()))) if fault == "choice" else None
    answered = {}
    for key in keys:
        if key not in {fault, wrong, SLUG} and draw(st.booleans()):
            continue
        if key in all_answers():
            answered[key] = draw(_choice(key, key == wrong))
        elif fault == "any":
            answered[key] = draw(st.one_of(GOOD[key], _anything()))
        else:
            answered[key] = draw((BAD if key == fault else GOOD)[key])
    if draw(st.booleans()):
        answered[UNKNOWN] = draw(st.one_of(GOOD["author"], BAD["author"]))
        answered[UNKNOWN] = Answered(answered[UNKNOWN].value, False)
    start = draw(st.integers(0, len(answered) - 1))
    order = [*answered][start:] + [*answered][:start]
    return {key: answered[key] for key in order}


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
    commands = {
        ".sh": ("bash", "-n"),
        ".sbatch": ("bash", "-n"),
        "Dockerfile": ("hadolint",),
        "Makefile": ("make", "-n", "-f"),
    }
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
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
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


def _evaluated(text: str) -> str | None:
    """What cookiecutter makes of a text; None where it fails."""
    try:
        return Environment(keep_trailing_newline=True).from_string(text).render()
    except (TemplateError, UnicodeError):
        return None


def _kept(way: str, answers: dict[str, Any]) -> dict[str, Any]:
    """The answers that reach a hook. Of a file, cookiecutter drops a wrong choice and the rest."""
    kept: dict[str, Any] = {}
    for key, value in answers.items():
        choices: list[Any] = all_answers().get(key, [value])
        known = [*YES, *NO] if isinstance(choices[0], bool) else choices
        if way in {"file", "global"} and value not in known:
            break
        if key != UNKNOWN:
            kept[key] = value
    return kept


def _recorded(way: str, kept: dict[str, Any]) -> dict[str, Any]:
    """What a project must say of the answers that reached the hook."""
    words = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
    recorded: dict[str, Any] = complete({})
    for key, value in kept.items():
        if key in all_answers() and value:  # typed, nothing is the default here, too
            is_switch = isinstance(all_answers()[key][0], bool)
            recorded[key] = words.get(value, value) if is_switch else value
    for key in TEXTS:
        if way == "typed":
            recorded[key] = kept.get(key, "").strip() or _defaults()[key]
        else:
            recorded[key] = _evaluated(kept.get(key, _defaults()[key]))
    derived = str(recorded["project_name"]).lower().replace(" ", "_").replace("-", "_")
    slug = kept.get(SLUG, derived)
    recorded[SLUG] = (slug.strip() or derived) if way == "typed" else _evaluated(slug)
    return recorded


def _check_valid(project: Path, expected: dict[str, Any], said: str) -> None:
    slug = project.name
    faults = {}
    for name, path in files_of(project).items():
        suffix = path.name if path.name in {"Dockerfile", "Makefile"} else path.suffix
        if fault := _fault(suffix, path.read_text(encoding="utf-8")):
            faults[name] = fault
    assert not faults
    assert not [path for path in project.rglob("*") if path.is_dir() and not any(path.iterdir())]
    answers = yaml.safe_load((project / slug / "cookiecutter.yaml").read_text(encoding="utf-8"))
    recorded = answers["default_context"]
    assert recorded == expected
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["name"] == recorded[SLUG] == slug
    assert canonicalize_name(slug, validate=True)
    assert metadata["description"] == recorded["project_name"]
    assert metadata["authors"] == [{"name": recorded["author"]}]
    # What no hook can see, a dropped answer, shows in the closing lines.
    lines = said[said.rindex("Answers: accumulation=") :].splitlines()
    assert dict(word.split("=") for word in lines[0].split()[1:]) == {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in recorded.items()
        if key not in TEXTS
    }
    texts = " ".join(f"{key}={json.dumps(recorded[key])}" for key in TEXTS)
    assert lines[1] == f"Texts: {texts}"


def _is_bad(way: str, one: Answered) -> bool | None:
    """Whether an answer must be refused; None where it may."""
    if way != "typed":
        return one.is_bad
    typed = one.value.partition("\n")[0].strip()
    if "{{" in typed or "{%" in typed or "{#" in typed:  # what is typed is not run
        return True
    return one.is_bad if typed == one.value != "" else None


def _one_set(way: str, tmp_path: Path, tally: Counter[str], answered: dict[str, Answered]) -> None:
    answers = {key: one.value for key, one in answered.items()}
    if way == "typed":
        answers = {key: value.partition("\n")[0] for key, value in answers.items()}
    kept = _kept(way, answers)
    is_bad = {key: _is_bad(way, answered[key]) for key in kept}
    bad = {"choice" if key in all_answers() else key for key in kept if is_bad[key]}
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
        assert [path.name for path in dest.iterdir() if path.is_dir()] == ["out"]
        if project is not None:
            assert not bad, f"{bad} came through"
            assert not is_refused(_recorded(way, kept))
            _check_valid(project, _recorded(way, kept), said.getvalue())
            tally.update(f"{key}: taken" for key in (*TEXTS, SLUG) if kept.get(key))
            tally.update(["choice: taken"] if {*kept} & {*all_answers()} else [])
            tally.update(["choice: dropped"] if len(kept) < len({*answers} - {UNKNOWN}) else [])
            return
        assert not list((dest / "out").iterdir())
        words = str(refusal).splitlines()
        assert words, repr(refusal)
        is_good = SLUG in kept and all(value is False for value in is_bad.values())
        if is_good:  # but for answers that don't go together
            assert is_refused(_recorded(way, kept)), f"{answers} refused: {refusal!r}"
        if isinstance(refusal, FailedHookException):
            assert len(words) == 1
            assert refusal.args[0].endswith("not be rendered") or words[0].endswith(".")
        if len(bad) == 1 and None not in is_bad.values():
            tally.update(f"{key}: refused" for key in bad)


@pytest.mark.parametrize("way", WAYS)
def test_any_answers_are_refused_or_become_a_valid_project(way: str, tmp_path: Path) -> None:
    tally: Counter[str] = Counter()

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
    # Each kind of answer was taken, and was refused because of nothing else.
    outcomes = [f"{key}: {outcome}" for key in (*TEXTS, SLUG) for outcome in ("taken", "refused")]
    is_file = way in {"file", "global"}
    outcomes += ["choice: taken", "choice: dropped" if is_file else "choice: refused"]
    assert {outcome: tally[outcome] for outcome in outcomes if tally[outcome] < 3} == {}


def test_the_reference_tells_how_many() -> None:
    assert f"throws {SETS * len(WAYS)} sets" in (ROOT / "docs" / "reference.md").read_text()


def _render_replay(answers: dict[str, Any], dest: Path) -> str:
    """As cookiecutter keeps the answers of a rendering, which somebody has edited since."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    private = {key: value for key, value in questions.items() if key.startswith("_")}
    derived = {SLUG: "ok", "__dns_name": "ok", "__is_no_path": ""}
    context = _defaults() | complete({}) | private | derived | answers
    file = dest / "replay.json"
    file.write_text(json.dumps({"cookiecutter": context}))
    own = {"replay_dir": str(dest), "cookiecutters_dir": str(dest)}
    project: str = cookiecutter(
        str(ROOT), replay=str(file), output_dir=str(dest / "out"), default_config=own
    )
    return project


ALL_WAYS = {**WAYS, "replay": _render_replay}


def _refusal(way: str, answers: dict[str, Any], dest: Path) -> str:
    """What is said of answers that must be refused, and leave no file behind."""
    (dest / "out").mkdir(parents=True)
    with (
        in_one_process(),
        mock.patch.object(tempfile, "tempdir", str(dest)),
        pytest.raises((CookiecutterException, LookupError, ValueError)) as refusal,
    ):
        ALL_WAYS[way](answers, dest)
    assert not files_of(dest / "out")
    return str(refusal.value)


@pytest.mark.parametrize("slug", BAD_SLUGS, ids=repr)
def test_a_bad_name_is_refused(slug: str, tmp_path: Path) -> None:
    words = _refusal("words", {SLUG: slug}, tmp_path)
    is_path = len(slug) > 60 or not slug.isprintable() or {*"/\\:"} & {*slug}
    if is_path:  # before cookiecutter makes a directory of it
        assert f"project_slug {slug!r} is no import name, use 2" in words.replace("\\\\", "\\")
        assert not list((tmp_path / "out").iterdir())
    elif slug in {".", "..", ""}:
        assert words.endswith("already exists")
    else:
        assert re.fullmatch(rf"ERROR: project_slug {re.escape(repr(slug))} .*\.", words)


@pytest.mark.parametrize("text", BAD_TEXTS, ids=repr)
@pytest.mark.parametrize("key", TEXTS)
def test_a_bad_text_is_refused(key: str, text: str, tmp_path: Path) -> None:
    words = _refusal("words", {SLUG: "ok", key: text}, tmp_path)
    assert re.fullmatch(rf"ERROR: {key} .*(at least one character|line of printable text)\.", words)


@pytest.mark.parametrize("tag", ["{{", "{%", "{#"])
@pytest.mark.parametrize("key", TEXTS)
def test_a_tag_that_is_left_is_refused(key: str, tag: str, tmp_path: Path) -> None:
    words = _refusal("words", {SLUG: "ok", key: f"{{{{ '{tag}' }}}}"}, tmp_path)
    assert words == f"ERROR: {key} {tag!r} holds a tag of the template engine, leave it out."


@pytest.mark.parametrize("way", ["file", "global", "replay"])
@pytest.mark.parametrize("value", [None, True, False, {"a": "b"}, {}], ids=repr)
@pytest.mark.parametrize("key", TEXTS)
def test_what_is_no_text_is_refused(key: str, value: object, way: str, tmp_path: Path) -> None:
    """YAML makes a truth value of `yes`, and nothing of an empty line."""
    words = _refusal(way, {SLUG: "ok", key: value}, tmp_path)
    assert words == f"ERROR: {key} is {value!r}, which is no text, put it in quotes."


@pytest.mark.parametrize(
    ("way", "key", "value"),
    [
        ("words", "__dns_name", "other"),
        ("file", "__dns_name", 'a": "b'),
        ("replay", "__dns_name", "other"),
        ("file", "_jinja2_env_vars", {"trim_blocks": False}),
        ("replay", "_jinja2_env_vars", {}),
        ("words", "_new_lines", "\r\n"),
        ("global", "_new_lines", "\r\n"),
        ("replay", "_new_lines", "\r\n"),
    ],
)
def test_what_is_no_question_can_not_be_answered(
    way: str, key: str, value: object, tmp_path: Path
) -> None:
    """Cookiecutter takes it all the same, and the project would be another one."""
    words = _refusal(way, {SLUG: "ok", key: value}, tmp_path)
    assert words.startswith(f"ERROR: {key}=")
    assert words.endswith(" answers no question, leave it out.")


def test_the_hook_knows_how_cookiecutter_renders() -> None:
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    private = {key for key in questions if key.startswith("_") and not key.startswith("__")}
    assert table("FIXED") == {key: questions[key] for key in private}


@pytest.mark.parametrize("slug", ["../x", "a/b/c", "torch", "a\x00"])
def test_a_path_in_a_replay_file_is_refused(slug: str, tmp_path: Path) -> None:
    """Cookiecutter has made its directory by then, and removes it."""
    words = _refusal("replay", {SLUG: slug}, tmp_path)
    assert "project_slug" in words or "null byte" in words
    assert not [path for path in tmp_path.rglob("*") if path.name in {"x", "c", "torch"}]


SWITCHES = [key for key, answers in all_answers().items() if isinstance(answers[0], bool)]


@pytest.mark.parametrize("way", ["words", "file", "global", "replay"])
@pytest.mark.parametrize("key", SWITCHES)
def test_yes_and_no_mean_the_same_however_they_are_spelled(
    key: str, way: str, tmp_path: Path
) -> None:
    """By each way, or they are refused: a text is true in a template, whatever it says."""
    expected = {
        meaning: contents_of(render({key: meaning}, tmp_path / str(meaning), slug="ok"))
        for meaning in (True, False)
    }
    meanings: list[tuple[Any, bool]] = [(word, True) for word in YES]
    meanings += [(word, False) for word in NO]
    for number, (value, meaning) in enumerate([*meanings, (True, True), (False, False)]):
        dest = tmp_path / f"taken{number}"
        if way == "replay" and isinstance(value, str):
            words = _refusal(way, {key: value}, dest)
            assert words.startswith(f"ERROR: {key}={value!r} is no answer, choose from: ")
            continue
        (dest / "out").mkdir(parents=True)
        with in_one_process(), mock.patch.object(tempfile, "tempdir", str(dest)):
            project = ALL_WAYS[way]({SLUG: "ok", key: value}, dest)
        assert contents_of(Path(project)) == expected[meaning], value
    wrong: list[Any] = ["maybe", ""] if way in {"words", "replay"} else []  # else it is dropped
    for number, value in enumerate([*wrong, 1, 0, None]):
        words = _refusal(way, {SLUG: "ok", key: value}, tmp_path / f"wrong{number}")
        assert "is no answer" in words or "could not be converted to a boolean" in words
