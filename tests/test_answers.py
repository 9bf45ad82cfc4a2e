"""Questions and answers: what is refused, what survives, and the ways to give them."""

import ast
import json
import re
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pexpect
import pytest
import yaml
from packaging.requirements import Requirement

from tests.rendering import (
    ROOT,
    SLUG,
    TEMPLATE,
    Answer,
    all_answers,
    complete,
    contents_of,
    files_of,
    render,
    run,
    succeed,
    table,
)

TOO_LONG = "a" * 41

# All that are refused: tests/test_hostile_answers.py.
SLUGS = [
    "../x",
    "/absolute",
    ".",
    "x\n",
    TOO_LONG,
    "a" * 300,
    "import",
    "os",
    "torch",
    "con",
    "tests",
]


def _cookiecutter(dest: Path, *arguments: str, template: str = str(ROOT)) -> list[str | Path]:
    """Give a command line that doesn't see the settings of the person who runs the tests."""
    home = dest / "home"
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "settings.yaml"
    if not settings.exists():
        settings.write_text(f"replay_dir: {home}\ncookiecutters_dir: {home}\n")
    options: list[str | Path] = ["--output-dir", dest / "out", *arguments]
    if "--config-file" not in arguments:
        options += ["--config-file", settings]
    return [sys.executable, "-m", "cookiecutter", template, *options]


def _answer(dest: Path, *arguments: str, template: str = str(ROOT)) -> tuple[int, str]:
    """Render through the command line, without questions; give exit code and output."""
    command = _cookiecutter(dest, "--no-input", *arguments, template=template)
    environment = {"HOME": str(dest / "home"), "TMPDIR": str(dest / "home")}
    result = run(*command, env=environment)
    return result.returncode, result.stdout


def _error(output: str) -> str:
    """Give the hook's own line: the first of the output, one sentence."""
    first = output.splitlines()[0]
    assert first.startswith("ERROR: "), output
    assert first.endswith("."), first
    assert len(first) < 240
    return first


def _left_over(dest: Path) -> list[Path]:
    """Give what a refused rendering left behind."""
    return [path for path in dest.rglob("*") if dest / "home" not in [path, *path.parents]]


@pytest.mark.parametrize("slug", SLUGS, ids=repr)
def test_a_bad_slug_is_refused(slug: str, tmp_path: Path) -> None:
    if slug == "/absolute":
        slug = str(tmp_path / "absolute")
    (tmp_path / "out").mkdir()
    code, output = _answer(tmp_path, f"project_slug={slug}")
    assert code == 1
    assert _left_over(tmp_path) == [tmp_path / "out"]
    if len(slug) > 60 or not slug.isprintable() or {"/", "\\"} & {*slug}:
        # Before cookiecutter makes a directory of that name; it prints a traceback above.
        assert f"project_slug {slug!r} is no import name" in output.splitlines()[-1].replace(
            "\\\\", "\\"
        )
    elif slug != ".":  # the output directory itself, which cookiecutter refuses to write into
        assert "project_slug" in _error(output)


def test_an_empty_slug_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, output = _answer(tmp_path, "project_slug=")
    assert code == 1
    assert "already exists" in output
    code, output = _answer(tmp_path, "project_slug=", "--overwrite-if-exists")
    assert code == 1
    assert "project_slug ''" in _error(output)
    assert _left_over(tmp_path) == [tmp_path / "out"]


@pytest.mark.parametrize("key", ["project_name", "author"])
@pytest.mark.parametrize(
    "text", ["", "  ", "two\nlines", "tab\t", "\x1b[31m", "\x7f", "a\u2028b"], ids=repr
)
def test_text_of_more_than_a_line_is_refused(key: str, text: str, tmp_path: Path) -> None:
    code, output = _answer(tmp_path, "project_slug=demo", f"{key}={text}")
    assert code == 1
    assert key in _error(output)
    assert not [path for path in _left_over(tmp_path) if path.is_file()]


def test_no_project_hides_what_it_imports_or_needs() -> None:
    """All that the packages of a project bring along, as far as it is installed here."""
    names: set[str] = set()
    todo, done = {"pip", "setuptools", "torch", *_requirements()}, set[str]()
    while todo - done:
        name = (todo - done).pop()
        done.add(name)
        if name == "mlflow":  # in this environment it is the part that a run needs
            name = "mlflow-skinny"
        package = metadata.distribution(name)
        for requirement in map(Requirement, package.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.add(requirement.name.lower().replace("_", "-"))
        files = [file.parts for file in package.files or [] if file.suffix in {".py", ".so"}]
        names |= {parts[0].partition(".")[0] for parts in files if parts[0] != ".."}
    taken = {*table("IMPORTED"), *table("INSTALLED"), *sys.stdlib_module_names}
    words = {re.sub("[-.]", "_", name).lower() for name in names | done}
    assert "sklearn" in words
    assert "scikit_learn" in words
    assert {word for word in words if re.fullmatch("[a-z][a-z0-9_]+", word)} - taken == set()


def _requirements() -> set[str]:
    text = (TEMPLATE / "pyproject.toml").read_text()
    lines = re.findall(r'^    "([A-Za-z0-9-]+)(?:[>=]=[\d.]+)?",', text, re.MULTILINE)
    return {line.lower() for line in lines if not line.isupper()}


@pytest.mark.parametrize(("answers", "reason"), table("UNSUPPORTED"), ids=str)
def test_what_is_not_there_yet_is_refused(
    answers: dict[str, Answer], reason: str, tmp_path: Path
) -> None:
    code, output = _answer(tmp_path, *(f"{key}={answer}" for key, answer in answers.items()))
    assert code == 1
    assert reason in _error(output)
    assert not [path for path in _left_over(tmp_path) if path.is_file()]


@pytest.mark.parametrize("key", all_answers())
def test_a_wrong_choice_is_refused(key: str, tmp_path: Path) -> None:
    code, output = _answer(tmp_path, f"{key}=nosuch")
    assert code == 1
    assert "nosuch provided for" in output.splitlines()[-1]
    assert not _left_over(tmp_path)


@pytest.mark.parametrize(("key", "answer"), [("amp", "nosuch"), ("ema", "no"), ("ema", 1)])
def test_a_wrong_choice_in_a_replay_file_is_refused(
    key: str, answer: Answer, tmp_path: Path
) -> None:
    """Cookiecutter itself takes anything from there."""
    texts = {"project_name": "Demo", "project_slug": SLUG, "author": "A"}
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    private = {key: value for key, value in questions.items() if key.startswith("_")}
    private |= {"__dns_name": SLUG, "__is_no_path": ""}
    replay = tmp_path / "replay.json"
    for given, expected in (({key: answer}, 1), ({}, 0)):
        context = complete({}) | texts | private | given
        replay.write_text(json.dumps({"cookiecutter": context}))
        command = [c for c in _cookiecutter(tmp_path) if c != "--no-input"]
        result = run(*command, "--replay-file", replay)
        assert result.returncode == expected, result.stdout
        if expected:
            assert f"{key}={answer!r} is no answer" in _error(result.stdout)


def test_an_old_cookiecutter_is_refused() -> None:
    source = (ROOT / "hooks" / "pre_gen_project.py").read_text()
    source = source.replace("def main", "version = lambda _: '2.5.9'\n\n\ndef main")
    result = run(sys.executable, "-c", source.replace("{{ cookiecutter | tojson }}", _context()))
    assert result.returncode == 1
    assert "cookiecutter 2.5.9 is too old" in _error(result.stdout)


def _context() -> str:
    texts = {"project_name": "Demo", "project_slug": SLUG, "author": "A"}
    return json.dumps(complete({}) | texts)


HOSTILE = [
    'Ann "Q" O\'Test',
    "back\\slash\\",
    "漢字 ü",
    "\N{GRINNING FACE} \N{MAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}",
    "a: b # c",
    "100 % %s %(x)s",
    "$HOME `id` $(id) ${x}",
    "</x>&amp;",
    "'''\"\"\"",
    "- [x], {y}",
    'x"); print("INJECTED',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_through(text: str, tmp_path: Path) -> None:
    code, output = _answer(
        tmp_path, f"project_slug={SLUG}", f"project_name={text}", f"author={text}"
    )
    assert code == 0, output
    given = f"project_name={json.dumps(text)} author={json.dumps(text)}"
    assert f"Texts: {given}" in output.splitlines()
    assert "INJECTED" not in output.replace(given, "")
    project = tmp_path / "out" / SLUG
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert described["description"] == text
    assert described["authors"] == [{"name": text}]
    answers = yaml.safe_load((project / SLUG / "cookiecutter.yaml").read_text())
    assert answers["default_context"]["project_name"] == text
    assert answers["default_context"]["author"] == text
    for name, path in files_of(project).items():
        if name.endswith(".py"):
            ast.parse(path.read_text(), name)
        if name.endswith((".py", ".sh")) or name == "Makefile":
            assert text not in path.read_text(), f"{name}: no code holds free text"


def test_jinja_in_an_answer_runs_or_is_refused(tmp_path: Path) -> None:
    """Cookiecutter runs it before a hook sees it; what is left of it is refused."""
    code, output = _answer(tmp_path, f"project_slug={SLUG}", "author={{ 7*7 }}")
    assert code == 0, output
    described = tomllib.loads((tmp_path / "out" / SLUG / "pyproject.toml").read_text())
    assert described["project"]["authors"] == [{"name": "49"}]
    for number, text in enumerate(["{{ '{{' }} 7*7 }}", "{{ '{%' }}", "{{ '{#' }}"]):
        dest = tmp_path / str(number)
        code, output = _answer(dest, f"project_slug={SLUG}", f"author={text}")
        assert code == 1
        assert "author" in _error(output)
        assert not [path for path in _left_over(dest) if path.is_file()]


@pytest.mark.parametrize("text", ["{%", "{% raw", "{{", "{{ nosuch }}"])
def test_jinja_that_does_not_run_is_refused_by_cookiecutter(text: str, tmp_path: Path) -> None:
    code, output = _answer(tmp_path, f"project_slug={SLUG}", f"author={text}")
    assert code == 1
    unknown = "Unable to render variable 'author'\nError message: 'nosuch' is undefined"
    assert unknown in output or output.splitlines()[-1].startswith("jinja2.exceptions.")
    assert not _left_over(tmp_path)


def test_tags_of_others_stay_as_they_are(tmp_path: Path) -> None:
    """What a workflow asks GitHub for looks like what cookiecutter fills in."""
    workflow = render({"ci": "github"}, tmp_path) / ".github" / "workflows" / "ci.yml"
    group = yaml.safe_load(workflow.read_text())["concurrency"]["group"]
    assert group == "${{ github.workflow }}-${{ github.ref }}"


def test_a_mistyped_question_shows_in_the_closing_lines(tmp_path: Path) -> None:
    code, output = _answer(tmp_path, "ammp=fp16", "ema=yes", f"project_slug={SLUG}")
    assert code == 0
    line = next(line for line in output.splitlines() if line.startswith("Answers: "))
    named = dict(pair.split("=") for pair in line.removeprefix("Answers: ").split())
    assert named["amp"] == "bf16"
    assert named["ema"] == "true"
    assert "ammp" not in named
    assert named.keys() == {"project_slug", *all_answers()}
    assert 'Texts: project_name="My DDP Project" author="Your Name"' in output.splitlines()
    assert f"  cd {SLUG}" in output


@pytest.mark.parametrize("way", ["--config-file", "COOKIECUTTER_CONFIG", ".cookiecutterrc"])
def test_what_a_wrong_choice_in_a_file_drops_shows_in_the_closing_lines(
    way: str, tmp_path: Path
) -> None:
    """Cookiecutter warns, and goes on with the default answers from there."""
    home = tmp_path / "home"
    home.mkdir()
    file = home / ".cookiecutterrc"
    # A question that there is not is dropped alone, without a word.
    given = {"project_slug": SLUG, "author": HOSTILE[0], "ammp": "x", "amp": "fp8", "ema": "yes"}
    places = {"replay_dir": str(home), "cookiecutters_dir": str(home)}
    file.write_text(yaml.safe_dump({"default_context": given, **places}, sort_keys=False))
    command = _cookiecutter(tmp_path, "--no-input")[:-2]  # without its own file
    command += [way, file] if way.startswith("--") else []
    environment = {"HOME": str(home), "TMPDIR": str(home)}
    environment |= {way: str(file)} if way.isupper() else {}
    result = run(*command, env=environment)
    assert result.returncode == 0, result.stdout
    assert "Invalid default received: fp8 provided for choice variable amp" in result.stdout
    lines = result.stdout.splitlines()
    words = next(line for line in lines if line.startswith("Answers: ")).split()[1:]
    named = dict(word.split("=") for word in words)
    assert (named["project_slug"], named["amp"], named["ema"]) == (SLUG, "bf16", "false")
    assert "ammp" not in named
    assert f"author={json.dumps(HOSTILE[0])}" in next(x for x in lines if x.startswith("Texts: "))
    project = tmp_path / "out" / SLUG
    assert contents_of(project) == contents_of(render({"author": HOSTILE[0]}, tmp_path / "as"))


def test_directories_that_tools_do_not_look_into_are_taken(pytestconfig: pytest.Config) -> None:
    output = succeed("ruff", "check", "--isolated", "--show-settings", ROOT / "tests")
    excluded = re.search(r"file_resolver\.exclude = \[(.*?)\]", output, re.DOTALL)
    assert excluded
    names = {*re.findall(r'"([^"]+)"', excluded[1]), *pytestconfig.getini("norecursedirs")}
    assert {"build", "node_modules", "venv"} < names
    slugs = {name for name in names if re.fullmatch("[a-z][a-z0-9_]*[a-z0-9]", name)}
    assert slugs - {*table("TAKEN"), *sys.stdlib_module_names} == {"golden"}  # here alone


def test_makefile_is_read_as_it_is_rendered(tmp_path: Path) -> None:
    """GNU make reads the first that it finds, in any case where the disk knows none."""
    project = render({}, tmp_path)
    files = [name for name in files_of(project) if name.lower() in table("TAKEN")]
    assert files == ["Makefile"]
    assert {"gnumakefile", "makefile"} < {*table("TAKEN")}
    (project / "makefile").mkdir()
    result = run("make", "-n", "test", cwd=project)
    assert result.returncode != 0
    assert "Is a directory" in result.stdout


def test_a_file_of_the_user_outlives_a_refusal(tmp_path: Path) -> None:
    """Under -f into a directory that is there; and nothing else is written."""
    mine = tmp_path / "out" / "torch" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, output = _answer(tmp_path, "project_slug=torch", "--overwrite-if-exists")
    assert code == 1
    assert "project_slug 'torch'" in _error(output)
    assert mine.read_text() == "mine"
    assert [path for path in _left_over(tmp_path) if path.is_file()] == [mine]


def test_files_of_the_user_outlive_a_rendering(tmp_path: Path) -> None:
    """Workflows too, where the project has none: only empty directories are removed."""
    for answers in ("ci=github", "ci=none"):
        mine = [
            tmp_path / "out" / SLUG / name
            for name in ("mine.txt", ".github/workflows/mine.yml", f"{SLUG}/mine.py")
        ]
        for path in mine:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        code, output = _answer(tmp_path, f"project_slug={SLUG}", answers, "--overwrite-if-exists")
        assert code == 0, output
        assert all(path.read_text() == "mine" for path in mine)


def test_an_existing_project_is_not_overwritten_unasked(tmp_path: Path) -> None:
    project = render({}, tmp_path / "out")
    readme = project / "Makefile"
    readme.write_text("mine")
    code, output = _answer(tmp_path, f"project_slug={SLUG}")
    assert code == 1
    assert "already exists" in output
    assert readme.read_text() == "mine"
    # With -f -s only missing files are added.
    code, _ = _answer(
        tmp_path, f"project_slug={SLUG}", "--overwrite-if-exists", "--skip-if-file-exists"
    )
    assert code == 0
    assert readme.read_text() == "mine"


def test_the_answers_file_renders_the_same_project(tmp_path: Path) -> None:
    answers: dict[str, Answer] = {
        "author": HOSTILE[0],
        "amp": "fp16",
        "ema": True,
        "accumulation": False,
        "ci": "gitlab",
    }
    project = render(answers, tmp_path / "first")
    code, output = _answer(tmp_path, "--config-file", str(project / SLUG / "cookiecutter.yaml"))
    assert code == 0, output
    assert "Warning" not in output
    assert contents_of(tmp_path / "out" / SLUG) == contents_of(project)


def test_the_answers_file_is_enough_for_a_template_with_a_new_question(tmp_path: Path) -> None:
    """Nobody is asked: the answer is the default."""
    project = render({"amp": "fp16"}, tmp_path / "old")
    template = tmp_path / "template"
    template.mkdir()
    for name in ("hooks", "templates", TEMPLATE.name):
        shutil.copytree(ROOT / name, template / name)
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    questions = {"newer": ["one", "two"], **questions, "newest": "text"}
    (template / "cookiecutter.json").write_text(json.dumps(questions))
    answers = str(project / SLUG / "cookiecutter.yaml")
    code, output = _answer(tmp_path, "--config-file", answers, template=str(template))
    assert code == 0, output
    assert contents_of(tmp_path / "out" / SLUG) == contents_of(project)


def test_prompts_fit_on_a_line_of_80_columns() -> None:
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    lines = []
    for prompt in questions["__prompts__"].values():
        if isinstance(prompt, str):
            lines.append(f"  [12/12] {prompt}")
        else:
            lines += [f"    1 - {label}" for label in prompt.values()]
    assert [line for line in lines if len(line) > 80] == []


def _type(dest: Path, typed: dict[str, list[str]]) -> tuple[int, str]:
    """Answer the questions at a terminal; exit code, and what it showed after the last answer.

    Several answers to one question: it is asked again after each but the last.
    """
    command = [str(word) for word in _cookiecutter(dest)]
    child = pexpect.spawn(
        command[0],
        command[1:],
        env={"HOME": str(dest / "home"), "PATH": "/usr/bin:/bin", "TERM": "xterm", "NO_COLOR": "1"},
        dimensions=(50, 250),  # no prompt is broken into lines
        encoding="utf-8",
        timeout=60,
    )
    questions = json.loads((ROOT / "cookiecutter.json").read_text())
    keys = [key for key in questions if not key.startswith("_")]
    for number, key in enumerate(keys, start=1):
        prompt = questions["__prompts__"][key]
        child.expect_exact(f"[{number}/{len(keys)}]")
        child.expect_exact(prompt if isinstance(prompt, str) else prompt["__prompt__"])
        if isinstance(prompt, dict):
            assert prompt.keys() == {"__prompt__", *questions[key]}
            for label in list(prompt.values())[1:]:
                child.expect_exact(label)
            child.expect_exact("Choose from")
        answers = typed.get(key, [""])
        for wrong in answers[:-1]:
            child.sendline(wrong)
            again = r"select one of the available options|(?i:enter y or n)"
            child.expect(again)
        child.sendline(answers[-1])
        child.expect_exact("\r\n")  # the echo of what was typed
    child.expect(pexpect.EOF)
    child.close()
    return int(child.exitstatus or 0), str(child.before)


def test_questions_are_answered_by_typing(tmp_path: Path) -> None:
    typed = {"project_name": "Typed Project", "author": "{Ann}", "amp": "2", "ema": "y"}
    code, output = _type(tmp_path, {key: [answer] for key, answer in typed.items()})
    assert code == 0
    assert "Answers: " in output
    project = tmp_path / "out" / "typed_project"
    expected = render(
        {"project_name": "Typed Project", "author": "{Ann}", "amp": "fp16", "ema": True},
        tmp_path / "expected",
        slug="typed_project",
    )
    assert contents_of(project) == contents_of(expected)


def test_hostile_answers_can_be_typed(tmp_path: Path) -> None:
    """Texts come through as they are, and wrong choices are asked for again."""
    name = " ".join(HOSTILE[:5])
    author = f"{HOSTILE[6]} {HOSTILE[7]} {HOSTILE[9]} {'x' * 200}"
    choices = {"amp": ["nosuch", "9", "2"], "ema": ["maybe", "yes"], "ci": ["{{ 7*7 }}", "3"]}
    texts = {"project_name": [name], "author": [author], "project_slug": [SLUG]}
    code, output = _type(tmp_path, {**texts, **choices})
    assert code == 0
    assert f"author={json.dumps(author)}" in output
    project = tmp_path / "out" / SLUG
    answers: dict[str, Answer] = {"amp": "fp16", "ema": True, "ci": "none"}
    expected = render({"project_name": name, "author": author, **answers}, tmp_path / "expected")
    assert contents_of(project) == contents_of(expected)
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert described["description"] == name
    assert described["authors"] == [{"name": author}]


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("author", "{{ 7*7 }}", "author '{{ 7*7 }}' holds a tag of the template engine"),
        ("project_name", "{%", "project_name '{%' holds a tag of the template engine"),
        ("project_slug", "torch", "project_slug 'torch' would hide a package of that name"),
        ("project_slug", "../x", "project_slug '../x' is no import name"),
    ],
)
def test_what_is_typed_is_refused(key: str, text: str, reason: str, tmp_path: Path) -> None:
    if text == "../x":  # is refused at once, before the questions that follow
        command = [str(word) for word in _cookiecutter(tmp_path)]
        child = pexpect.spawn(command[0], command[1:], encoding="utf-8", timeout=60)
        child.sendline("Name")
        child.sendline(text)
        child.expect(pexpect.EOF)
        child.close()
        code, output = child.exitstatus, str(child.before)
    else:
        code, output = _type(tmp_path, {"project_slug": [SLUG], key: [text]})
    assert code == 1
    assert reason in output
    assert [path.name for path in _left_over(tmp_path)] in [[], ["out"]]


def test_a_tag_of_a_remote_repository_can_be_rendered(tmp_path: Path) -> None:
    """From a bare clone, as from a server: the tag's state, not what came after it."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("cookiecutter.json", "hooks", "templates", TEMPLATE.name):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, work / name)
        else:
            shutil.copy2(source, work / name)
    succeed("git", "init", "--quiet", cwd=work)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    succeed("git", "add", "--all", cwd=work)
    succeed("git", *identity, "commit", "--quiet", "--message", "one", cwd=work)
    succeed("git", "tag", "v1", cwd=work)
    (work / TEMPLATE.name / "later.txt").write_text("later\n")
    succeed("git", "add", "--all", cwd=work)
    succeed("git", *identity, "commit", "--quiet", "--message", "two", cwd=work)
    bare = tmp_path / "server.git"
    succeed("git", "clone", "--quiet", "--bare", work, bare)

    code, output = _answer(
        tmp_path, f"project_slug={SLUG}", "--checkout", "v1", template=f"file://{bare}"
    )
    assert code == 0, output
    expected = contents_of(render({}, tmp_path / "expected"))
    assert contents_of(tmp_path / "out" / SLUG) == expected
