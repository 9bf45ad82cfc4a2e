"""Regenerating with a template that has changed since, by the command itself."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.releases.pythons import need
from tests.rendering import SLUG, TEMPLATE, run
from tests.update.edits import EDITS, one_line_more, put
from tests.update.projects import WHO, Repository, Workshop, copy_template, edited, files_in

pytestmark = pytest.mark.update

TRAIN = f"{SLUG}/train.py"
RENDERED = f"{TEMPLATE.name}/{TEMPLATE.name}"


@pytest.fixture
def template(tmp_path: Path, workshop: Workshop) -> Repository:
    """A clone of the template, as users have one."""
    return copy_template(workshop, tmp_path / "ddp template é")


def call(repository: Repository, template: Repository, *words: str) -> tuple[int, str]:
    """Regenerate as a user does."""
    script = template.path / "scripts" / "regenerate.py"
    done = run(sys.executable, script, *words, cwd=repository.project, env=WHO)
    return done.returncode, done.stdout


def change(template: Repository, name: str, edit: Callable[[str], str]) -> None:
    """Change a file of the template, which some projects have."""
    path = template.path / RENDERED / name
    path.write_text(edit(path.read_text()))
    template.commit("Change")


# A line of the answers' file.
ANSWERED = b"""  tracker: "{{ 'tensorboard' }}\""""

LOG = put('logger.info("nothing left to do: step', 'logger.info("nothing is left to do: step')


def test_newer_template_and_another_answer_at_once(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    edits = {name: edit for name, edit in EDITS.items() if name != TRAIN}
    code, output = call(repository, template)
    assert code == 0, output
    repository.edit(edits)
    change(template, "train.py", LOG)
    (template.path / RENDERED / "engine" / "new.py").write_text('"""Engine: new."""\n')
    (template.path / RENDERED / "engine" / "comm_hook.py").unlink()
    questions = json.loads((template.path / "cookiecutter.json").read_text())
    del questions["tracker"]  # a question that is no longer asked …
    questions["new"] = ["one", "two"]  # … and one that is new
    text = json.dumps(questions).replace("__prompts__", "_prompts")
    (template.path / "cookiecutter.json").write_text(text)
    for path in list(template.path.rglob("*tracker*.py*")):
        if name := path.name.partition("%}")[2].partition("{%")[0]:
            path.rename(path.with_name(name))
    for path in template.path.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            content = path.read_bytes().replace(b"cookiecutter.tracker", b"'tensorboard'")
            path.write_bytes(content.replace(ANSWERED, b'  new: "{{ cookiecutter.new }}"'))
    hook = template.path / "hooks" / "pre_gen_project.py"
    lines = hook.read_text().splitlines(keepends=True)
    hook.write_text("".join(line for line in lines if not line.startswith('    "tracker": [')))
    template.commit("Second version")

    code, output = call(repository, template, "amp=fp16", "new=two")
    assert code == 0, output
    assert "Answer: tracker=tensorboard becomes no question any more" in output
    assert "ddp template é v1-" in output
    expected = edited(workshop.fresh({"amp": "fp16"}), {**edits, TRAIN: LOG})
    expected[f"{SLUG}/engine/new.py"] = (b'"""Engine: new."""\n', False)
    del expected[f"{SLUG}/engine/comm_hook.py"]
    answers = expected[f"{SLUG}/cookiecutter.yaml"][0].decode()
    named = answers.replace('  tracker: "tensorboard"\n', '  new: "two"\n')
    expected[f"{SLUG}/cookiecutter.yaml"] = (named.encode(), False)
    assert repository.contents() == expected


def test_answer_that_is_none_any_more_is_refused(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine", {"amp": "off"})
    questions = template.path / "cookiecutter.json"
    questions.write_text(
        questions.read_text().replace('["bf16", "fp16", "off"]', '["bf16", "fp16"]')
    )
    code, output = call(repository, template)
    assert code == 2
    assert output == "Refused: amp: expected one of bf16, fp16, got 'off'\n"


def test_base_is_rendered_by_the_template_that_made_the_project(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    """Nobody has made the branch, and the template is newer: its news would look like edits."""
    repository = workshop.begin(tmp_path / "mine")
    edits = {name: edit for name, edit in EDITS.items() if name != TRAIN}
    repository.edit(edits)
    change(template, "train.py", LOG)
    before = repository.git("for-each-ref")
    code, output = call(repository, template, "amp=fp16")
    assert code == 2
    assert f"is not what this template renders for its answers, as in {TRAIN}" in output
    assert repository.git("for-each-ref") == before
    code, output = call(repository, template, "--from", "v0", "amp=fp16")
    assert code == 2
    assert "--from: expected a revision of the template, got 'v0'" in output

    code, output = call(repository, template, "--from", "v1", "amp=fp16")
    assert code == 0, output
    expected = edited(workshop.fresh({"amp": "fp16"}), {**edits, TRAIN: LOG})
    assert repository.contents() == expected
    assert call(repository, template, "--from", "v1", "amp=off")[0] == 2
    began = repository.git("log", "--format=%B", "--max-count=1", "template~1")
    assert f"Rendered-with: {template.path.name} v1\n" in began


@pytest.mark.parametrize("where", ["archive", "archive in a repository", "not committed"])
def test_template_says_which_it_is(
    workshop: Workshop, template: Repository, tmp_path: Path, where: str
) -> None:
    """One without a history of its own renders as well, but nothing of its past."""
    repository = workshop.begin(tmp_path / "mine")
    if where == "not committed":
        one_line_more(template.path / RENDERED / "train.py")
    else:
        shutil.rmtree(template.path / ".git")
    if where == "archive in a repository":
        repository.git("init", "--quiet", str(tmp_path))
    code, output = call(repository, template, "--from", "HEAD", "--dry-run")
    if where == "not committed":
        assert code == 0
        assert "Template: ddp template é v1-dirty\n" in output
        return
    assert code == 2
    assert output.startswith("Refused: --from: expected a revision of the template, got 'HEAD'")
    code, output = call(repository, template, "amp=fp16")
    assert code == 0
    assert "Template: ddp template é (no repository)\n" in output
    assert repository.contents() == files_in(workshop.fresh({"amp": "fp16"}))


@pytest.mark.parametrize("release", ["3.9", "3.10", "3.13"])
def test_other_pythons_run_it_or_say_why_not(
    workshop: Workshop, template: Repository, tmp_path: Path, release: str
) -> None:
    """The Python that is called may be another than that of cookiecutter."""
    repository = workshop.begin(tmp_path / "mine")
    script = template.path / "scripts" / "regenerate.py"
    done = run(need(release), script, "--dry-run", "ema=true", cwd=repository.project, env=WHO)
    if release == "3.9":
        assert done.stdout == "Refused: this needs Python 3.10 or newer\n"
        assert done.returncode == 2
    else:
        assert done.returncode == 0, done.stdout
        assert "Answer: ema=false becomes true" in done.stdout


def test_edits_before_the_first_commit_are_kept_where_the_user_says_so(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    repository.git(
        "update-ref", "refs/heads/main", repository.git("commit-tree", "HEAD^{tree}", "-m", "All")
    )
    assert call(repository, template, "amp=fp16")[0] == 2
    code, output = call(repository, template, "--from", "HEAD", "amp=fp16")
    assert code == 0, output
    assert repository.contents() == edited(workshop.fresh({"amp": "fp16"}), EDITS)


def test_what_the_template_refuses_is_refused_in_a_line(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    before = repository.git("for-each-ref")
    code, output = call(repository, template, "project_slug=torch")
    assert code == 2
    assert output == (
        "Refused: cookiecutter: ERROR: project_slug 'torch' would hide a package of that name, "
        "choose another name.\n"
    )
    code, output = call(repository, template, "author=")
    assert code == 2
    assert output.startswith("Refused: cookiecutter: ERROR: author is empty")
    assert repository.git("for-each-ref") == before


def test_texts_are_given_again_as_they_are(
    workshop: Workshop, template: Repository, tmp_path: Path
) -> None:
    """No answer is taken for a template: cookiecutter itself would make 49 of the last one."""
    text = 'Ann "Q" O\'Test \\ é 😀 }} a: b # c $HOME %'
    repository = workshop.begin(tmp_path / "mine", {"author": text})
    code, output = call(repository, template, "project_name='one' & # two")
    assert code == 0, output
    assert repository.contents() == files_in(
        workshop.fresh({"author": text, "project_name": "'one' & # two"})
    )
    code, output = call(repository, template, "author={{ 7*7 }}")
    assert code == 2
    assert "'{{ 7*7 }}' holds a tag of the template engine" in output


def test_settings_of_the_person_play_no_part(
    workshop: Workshop, template: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "cookiecutterrc"
    config.write_text('default_context: {amp: "off", author: "Somebody Else"}\n')
    monkeypatch.setenv("COOKIECUTTER_CONFIG", str(config))
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    repository = workshop.begin(tmp_path / "mine")
    assert call(repository, template, "ema=true")[0] == 0
    assert repository.contents() == files_in(workshop.fresh({"ema": True}))
    assert not (tmp_path / "nowhere").exists()


def test_without_cookiecutter_it_says_what_is_missing(
    workshop: Workshop, template: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code, output = call(repository, template, "ema=true")
    assert code == 2
    assert output.startswith("Refused: cookiecutter is not on the PATH")
