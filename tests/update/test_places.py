"""Regenerating in clones, in larger repositories, again and again, and after a formatter."""

import ast
from pathlib import Path

import pytest

from tests.rendering import SLUG, Answers, succeed
from tests.update.edits import EDITS, one_line_more, put
from tests.update.projects import Contents, Repository, Workshop, edited, files_in

pytestmark = pytest.mark.update

TRAIN = f"{SLUG}/train.py"


def answers_commit(repository: Repository) -> str:
    return repository.git("log", "-1", "--format=%s", "template")


def test_twice_in_a_row_and_back(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    assert repository.regenerate("amp=fp16")[0] == 0
    assert answers_commit(repository) == f"Render {SLUG}: amp=fp16"
    one_line_more(repository.path / "Makefile")
    repository.commit()
    assert repository.regenerate("ema=true", "tracker=none")[0] == 0
    both: Answers = {"amp": "fp16", "ema": True, "tracker": "none"}
    edits = {**EDITS, "Makefile": lambda text: f"{text}# mine\n"}
    assert repository.contents() == edited(workshop.fresh(both), edits)
    assert repository.regenerate("amp=bf16", "ema=no", "tracker=tensorboard")[0] == 0
    assert repository.contents() == edited(workshop.fresh({}), edits)


def test_again_without_a_change_does_nothing(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    assert repository.regenerate("amp=fp16")[0] == 0
    before = repository.git("for-each-ref")
    code, output = repository.regenerate("amp=fp16")
    assert code == 0
    assert "The template changes nothing" in output
    assert repository.git("for-each-ref") == before


def test_merge_that_was_given_up_is_offered_again(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
    edits = {**EDITS, TRAIN: put(line, f"{line}  # mine")}
    repository.edit(edits)
    assert repository.regenerate("amp=off")[0] == 1
    repository.git("merge", "--abort")
    assert repository.contents() == edited(workshop.fresh({}), edits)
    assert repository.regenerate("amp=off")[0] == 1
    repository.git("merge", "--abort")
    # Another change, which does not meet the edit: the one that was given up is not in it.
    assert repository.regenerate("tracker=none")[0] == 0
    assert repository.contents() == edited(workshop.fresh({"tracker": "none"}), edits)


def test_fresh_clone_goes_on_from_the_branch_that_was_pushed(
    workshop: Workshop, tmp_path: Path
) -> None:
    mine = workshop.begin(tmp_path / "mine")
    mine.edit(EDITS)
    assert mine.regenerate("amp=fp16")[0] == 0
    theirs = mine.clone(tmp_path / "theirs")
    assert "template" not in theirs.git("branch", "--format=%(refname:short)").split()
    assert theirs.regenerate("ema=true")[0] == 0
    assert theirs.contents() == edited(workshop.fresh({"amp": "fp16", "ema": True}), EDITS)
    assert theirs.git("merge-base", "template", "origin/template") == theirs.git(
        "rev-parse", "origin/template"
    )
    # Pushed, and fetched by one whose own branch is older.
    theirs.git("push", "--quiet", "origin", "HEAD", "template")
    mine.git("remote", "add", "origin", str(tmp_path / "theirs.git"))
    mine.git("pull", "--quiet", "origin", "main")
    mine.git("fetch", "--quiet", "origin")
    assert mine.regenerate("amp=bf16")[0] == 0
    assert mine.contents() == edited(workshop.fresh({"ema": True}), EDITS)


def test_fresh_clone_without_a_branch_renders_the_old_answers(
    workshop: Workshop, tmp_path: Path
) -> None:
    mine = workshop.begin(tmp_path / "mine", {"amp": "fp16"})
    mine.edit(EDITS)
    theirs = mine.clone(tmp_path / "theirs")
    assert theirs.regenerate("ema=true")[0] == 0
    assert theirs.contents() == edited(workshop.fresh({"amp": "fp16", "ema": True}), EDITS)


def test_whole_project_is_known_by_its_first_commit(workshop: Workshop, tmp_path: Path) -> None:
    """Later the user may give the project another name in pyproject.toml."""
    repository = workshop.begin(tmp_path / "mine")
    edits = {**EDITS, "pyproject.toml": put(f'name = "{SLUG}"', 'name = "mine"')}
    repository.edit(edits)
    code, output = repository.regenerate("tracker=none", "ci=none")
    assert code == 0, output
    assert "Project: the whole project, in ." in output
    expected = edited(workshop.fresh({"tracker": "none", "ci": "none"}), edits)
    assert repository.contents() == expected


def test_shallow_clone_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    mine = workshop.begin(tmp_path / "mine")
    mine.edit(EDITS)
    succeed("git", "clone", "--quiet", "--depth", "1", f"file://{mine.path}", tmp_path / "theirs")
    code, output = Repository(tmp_path / "theirs", workshop).regenerate("amp=fp16")
    assert code == 2
    assert "the clone is shallow" in output


def test_branch_that_the_user_made_of_the_render_is_used(
    workshop: Workshop, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.git("branch", "template")
    repository.edit(EDITS)
    assert repository.regenerate("amp=fp16")[0] == 0
    assert repository.contents() == edited(workshop.fresh({"amp": "fp16"}), EDITS)
    assert repository.git("rev-list", "--max-parents=0", "--all").count("\n") == 0


def test_directory_of_a_larger_repository(workshop: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "large"
    repository = workshop.begin(path, place="tools/digits")
    (path / "README.md").write_text("Mine, and about something else.\n")
    (path / "tools" / "digits" / "notes.md").write_text("Mine, among the project's.\n")
    repository.edit(EDITS)
    repository.git("branch", "template")  # in good faith: it holds more than the render
    repository.git("branch", "--delete", "template")
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    assert "Project: the whole project, in tools/digits" in output
    expected = edited(workshop.fresh({"amp": "fp16"}), EDITS)
    expected["notes.md"] = (b"Mine, among the project's.\n", False)
    assert repository.contents() == expected
    assert (path / "README.md").read_text() == "Mine, and about something else.\n"
    names = repository.git("ls-tree", "-r", "--name-only", "template").splitlines()
    assert all(name.startswith("tools/digits/") for name in names)
    assert repository.regenerate("amp=off")[0] == 0
    assert repository.contents().keys() == {"notes.md", *files_in(workshop.fresh({"amp": "off"}))}


def test_project_that_came_with_a_merge(workshop: Workshop, tmp_path: Path) -> None:
    """As git subtree brings it, or a pull request."""
    source = workshop.begin(tmp_path / "source")
    path = tmp_path / "large"
    large = Repository(path, workshop, "tools/digits")
    path.mkdir()
    (path / "README.md").write_text("Mine, and about something else.\n")
    large.git("init", "--quiet", "--initial-branch", "main")
    large.commit()
    large.git("fetch", "--quiet", str(source.path), "main")
    large.git(
        "merge", "--strategy=ours", "--no-commit", "--allow-unrelated-histories", "FETCH_HEAD"
    )
    large.git("read-tree", "--prefix=tools/digits/", "-u", "FETCH_HEAD")
    large.git("commit", "--quiet", "--message", "Add tools/digits")
    large.edit(EDITS)
    code, output = large.regenerate("amp=fp16")
    assert code == 0, output
    assert large.contents() == edited(workshop.fresh({"amp": "fp16"}), EDITS)


def test_two_projects_in_a_repository_have_a_branch_each(
    workshop: Workshop, tmp_path: Path
) -> None:
    one = workshop.begin(tmp_path / "both", place="one")
    other = workshop.begin(tmp_path / "both", {"amp": "off"}, place="other")
    assert one.regenerate("amp=fp16")[0] == 0
    code, output = other.regenerate("ema=true")
    assert code == 2
    assert f"the branch does not hold other/{SLUG}" in output
    assert other.regenerate("--branch", "template-other", "ema=true")[0] == 0
    assert one.contents() == files_in(workshop.fresh({"amp": "fp16"}))
    assert other.contents() == files_in(workshop.fresh({"amp": "off", "ema": True}))


def test_project_is_not_taken_for_another_that_looks_the_same(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Git finds what was moved by its content."""
    one = workshop.begin(tmp_path / "both", place="one")
    other = workshop.begin(tmp_path / "both", {"amp": "off"}, place="other")
    assert one.regenerate("amp=fp16")[0] == 0
    assert other.regenerate("--branch", "template-other")[0] == 0
    one.git("mv", "one", "uno")
    one.commit()
    assert other.regenerate("--branch", "template-other", "tracker=none")[0] == 0
    assert other.contents() == files_in(workshop.fresh({"amp": "off", "tracker": "none"}))
    uno = Repository(one.path, workshop, "uno")
    for word in ("accumulation=false", "ema=true"):
        code, output = uno.regenerate(word)
        assert code == 2
        assert "git would take files of another project" in output
    new = ("--branch", "template-uno")
    assert uno.regenerate(*new, "accumulation=false")[0] == 0
    assert uno.regenerate(*new, "ema=true")[0] == 0
    answers: Answers = {"amp": "fp16", "accumulation": False, "ema": True}
    assert uno.contents() == files_in(workshop.fresh(answers))
    assert other.contents() == files_in(workshop.fresh({"amp": "off", "tracker": "none"}))


def trees(contents: Contents) -> dict[str, str]:
    """Give what the Python files mean."""
    return {
        name: ast.dump(ast.parse(content))
        for name, (content, _) in contents.items()
        if name.endswith(".py")
    }


def differing(one: Contents, other: Contents) -> set[str]:
    """Give the files that are not the same in both."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def test_after_the_projects_own_formatter(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    succeed("ruff", "format", "--no-cache", repository.path)
    repository.git("commit", "--quiet", "--allow-empty", "--all", "--message", "Format")
    assert repository.regenerate("ema=true")[0] == 0
    assert repository.contents() == edited(workshop.fresh({"ema": True}), EDITS)


@pytest.mark.parametrize("is_late", [False, True], ids=["before the first commit", "afterwards"])
def test_after_another_formatter_only_what_it_rewrote_can_conflict(
    workshop: Workshop, tmp_path: Path, is_late: bool
) -> None:
    """Black's line length in all Python files, other quotes in the file of the answers."""
    repository = workshop.begin(tmp_path / "mine")
    succeed("ruff", "format", "--no-cache", "--isolated", "--line-length", "88", repository.path)
    answers = repository.path / SLUG / "cookiecutter.yaml"
    answers.write_text(answers.read_text().replace('"', "'").replace("amp: 'bf16'", "amp: bf16"))
    rewritten = differing(repository.contents(), files_in(workshop.fresh({})))
    repository.git("add", "--all")
    words = [] if is_late else ["--amend"]
    repository.git("commit", "--quiet", "--message", "Format", *words)
    repository.edit(EDITS)
    code, output = repository.regenerate("ema=true")
    conflicts = repository.conflicts()
    assert code == 1, output
    changed = differing(files_in(workshop.fresh({})), files_in(workshop.fresh({"ema": True})))
    assert conflicts.keys() < rewritten & changed
    assert set(conflicts.values()) == {"UU"}
    expected = trees(edited(workshop.fresh({"ema": True}), EDITS))
    found = trees({n: f for n, f in repository.contents().items() if n not in conflicts})
    assert found == {name: tree for name, tree in expected.items() if name not in conflicts}
    assert not list(repository.path.rglob("*.rej"))


def test_new_name_moves_the_package(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    edits = {name: edit for name, edit in EDITS.items() if name.startswith(f"{SLUG}/")}
    repository.edit(edits)
    code, output = repository.regenerate("project_slug=other")
    assert code == 0, output
    renamed = {name.replace(f"{SLUG}/", "other/"): edit for name, edit in edits.items()}
    assert repository.contents() == edited(workshop.fresh({"project_slug": "other"}), renamed)
