"""Regenerating under the settings, hooks and names that users have."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.rendering import SLUG
from tests.update.edits import EDITS, one_line_more
from tests.update.projects import Contents, Repository, Workshop, edited, files_in

pytestmark = pytest.mark.update

VETO = '[ "$1" = prepared ] && grep -q refs/heads/main && exit 1; exit 0'

SETTINGS = {
    "autocrlf": ("core.autocrlf=true", "core.safecrlf=true"),
    "merges": ("merge.ff=only", "merge.conflictStyle=zdiff3", "rerere.enabled=true"),
    "renames": ("diff.renames=false", "merge.renames=false"),
    "output": ("color.ui=always", "diff.noprefix=true", "log.showSignature=true"),
    "modes": ("core.fileMode=false",),
    "main": ("branch.main.mergeOptions=--no-commit",),
}


def hook(repository: Repository, name: str, text: str) -> None:
    """Give a repository a hook."""
    path = repository.path / "hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    repository.git("config", "core.hooksPath", "hooks")
    (repository.path / ".git" / "info" / "exclude").write_text("/hooks/\n")


def contents(repository: Repository) -> Contents:
    """Give the files of the project, without the hooks."""
    files = repository.contents().items()
    return {name: file for name, file in files if not name.startswith("hooks/")}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_git_make_no_difference(
    workshop: Workshop, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    for setting in settings:
        repository.git("config", *setting.split("=", 1))
    repository.edit(EDITS)
    # What a hook sees is as in any merge.
    hook(repository, "pre-merge-commit", "git diff --cached --name-only -- '*.py' | grep train.py")
    moved = f"{SLUG}/reports.py"
    repository.git("mv", f"{SLUG}/engine/report.py", moved)
    repository.commit()
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    assert repository.git("status", "--porcelain") == ""
    assert "\x1b" not in repository.git("log", "-1", "--format=%B", "template")
    expected = edited(workshop.fresh({"amp": "fp16"}), EDITS)
    expected[moved] = expected.pop(f"{SLUG}/engine/report.py")
    assert contents(repository) == expected
    assert repository.git("ls-tree", "template", f"{SLUG}/launch/train.sh").startswith("100755")


@pytest.mark.parametrize("name", ["pre-merge-commit", "commit-msg", "signature"])
def test_merge_that_may_not_be_committed_is_left_to_the_user(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    if name == "signature":
        repository.git("config", "commit.gpgSign", "true")
        repository.git("config", "gpg.program", "false")
    else:
        hook(repository, name, "echo no; exit 1")
    code, output = repository.regenerate("amp=fp16")
    assert code == 1
    assert "Merged, but not committed for the reason above" in output
    assert "conflict" not in output
    assert contents(repository) == edited(workshop.fresh({"amp": "fp16"}), EDITS)
    repository.git("commit", "--quiet", "--no-edit", "--no-verify", "--no-gpg-sign")
    assert repository.regenerate("amp=bf16", "--dry-run")[0] == 0


def test_merge_that_git_refuses_leaves_everything_as_it_was(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Half of it would be taken for what was merged, and be lost."""
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    before = repository.contents(), repository.git("for-each-ref"), repository.git("status")
    for key, value in (("merge.verifySignatures", "true"), ("core.hooksPath", "hooks")):
        repository.git("config", key, value)
        code, output = repository.regenerate("amp=fp16")
        assert code == 2, output
        assert before[:2] == (contents(repository), repository.git("for-each-ref"))
        assert repository.git("status") == before[2]
        repository.git("config", "--unset", key)
        hook(repository, "reference-transaction", VETO)
        repository.git("config", "--unset", "core.hooksPath")
    assert repository.regenerate("amp=fp16")[0] == 0
    assert contents(repository) == edited(workshop.fresh({"amp": "fp16"}), EDITS)


@pytest.mark.parametrize("end", ["in a hook", "afterwards"])
def test_interrupted_merge_leaves_everything_as_it_was(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    if end == "in a hook":
        hook(repository, "pre-merge-commit", "kill -INT $PPID; sleep 1")
    before = repository.contents(), repository.git("for-each-ref"), repository.git("status")
    git = workshop.script.Git
    run = git.run

    def interrupted(self: object, *words: str, **more: object) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = run(self, *words, **more)
        if words[0] == "merge":
            assert done.returncode == {"in a hook": -signal.SIGINT, "afterwards": 0}[end]
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(git, "run", interrupted)
        code, output = repository.regenerate("amp=fp16")
    assert code == 130
    assert output.endswith("Interrupted, and nothing was changed\n")
    after = repository.contents(), repository.git("for-each-ref"), repository.git("status")
    assert after == before
    repository.git("config", "core.hooksPath", "nowhere")
    assert repository.regenerate("amp=fp16")[0] == 0
    assert contents(repository) == edited(workshop.fresh({"amp": "fp16"}), EDITS)


@pytest.mark.parametrize("place", [":odd", "a [b]*", "-é\nx"])
def test_directories_of_any_name(workshop: Workshop, tmp_path: Path, place: str) -> None:
    path = tmp_path / 'a:b "c"'
    repository = workshop.begin(path, place=place)
    (path / "a b").mkdir()
    (path / "a b" / "mine").write_text("mine\n")
    repository.edit(EDITS)
    assert repository.regenerate("--dry-run", "amp=fp16")[0] == 0
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    assert repository.contents() == edited(workshop.fresh({"amp": "fp16"}), EDITS)
    assert (path / "a b" / "mine").exists()


def test_sparse_working_tree(workshop: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "large"
    repository = workshop.begin(path, place="tools/digits")
    (path / "lib").mkdir()
    one = path / "lib" / "one.py"
    one.write_text("")
    repository.edit(EDITS)
    repository.git("sparse-checkout", "set", "tools/digits")
    assert not one.exists()
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    assert repository.contents() == edited(workshop.fresh({"amp": "fp16"}), EDITS)
    assert repository.git("ls-tree", "--name-only", "HEAD:lib") == "one.py"


def test_moved_package_gets_new_files_in_its_new_place(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.regenerate()
    (repository.path / "src").mkdir()
    repository.git("mv", SLUG, f"src/{SLUG}")
    repository.commit()
    code, output = repository.regenerate("--dry-run", "ema=true")
    assert code == 0, output
    code, output = repository.regenerate("ema=true")
    assert code == 0, output
    assert repository.contents() == {
        f"src/{name}" if name.startswith(f"{SLUG}/") else name: file
        for name, file in files_in(workshop.fresh({"ema": True})).items()
    }


@pytest.mark.parametrize("is_ignored", [False, True], ids=["unknown", "ignored"])
def test_files_in_the_way_of_a_moved_package(
    workshop: Workshop, tmp_path: Path, is_ignored: bool
) -> None:
    """A merge writes over what is ignored."""
    repository = workshop.begin(tmp_path / "mine")
    repository.regenerate()
    (repository.path / "src").mkdir()
    repository.git("mv", SLUG, f"src/{SLUG}")
    repository.commit()
    name = f"src/{SLUG}/tests/test_ema.py"
    (repository.path / name).write_text("mine\n")
    (repository.path / ".git" / "info" / "exclude").write_text("test_ema.py\n" * is_ignored)
    code, output = repository.regenerate("ema=true")
    assert code == 2
    assert f"files that are not committed are in the way: {name}" in output
    assert (repository.path / name).read_text() == "mine\n"


def test_what_git_says_is_one_line(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    one_line_more(repository.path / "README.md")
    repository.commit()
    for key in ("name", "email"):
        repository.git("config", f"user.{key}", "")
    repository.git("branch", "template/mine")
    code, output = repository.regenerate("amp=fp16")
    assert code == 2
    refused = [line for line in output.splitlines() if line.startswith("Refused: ")]
    assert output.splitlines()[-1:] == refused
    assert "refs/heads/template" in refused[0]
