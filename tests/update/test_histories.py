"""Regenerating where the history is not a line: other branches, colleagues, what was undone."""

from pathlib import Path

import pytest

from tests.rendering import SLUG, Answers, run
from tests.update.edits import EDITS, one_line_more, put
from tests.update.projects import WHO, Contents, Repository, Workshop, edited

pytestmark = pytest.mark.update

TRAIN = f"{SLUG}/train.py"
FP16_TEST = f"{SLUG}/tests/test_fp16.py"


@pytest.fixture
def mine(workshop: Workshop, tmp_path: Path) -> Repository:
    """A project with edits everywhere, which nobody has regenerated."""
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    return repository


def expected(repository: Repository, **answers: str | bool) -> Contents:
    """Give a fresh render of these answers, with the edits."""
    chosen: Answers = answers
    return edited(repository.workshop.fresh(chosen), EDITS)


def without(contents: Contents, *names: str) -> Contents:
    """Give files without some of them."""
    assert contents.keys() >= set(names)
    return {name: file for name, file in contents.items() if name not in names}


def delete(repository: Repository, name: str) -> None:
    """Delete a file, and commit."""
    repository.git("rm", "--quiet", name)
    repository.commit()


def test_branch_from_before_takes_nothing_back(mine: Repository) -> None:
    """Somebody else's answer is on the branch of renders, and not merged here."""
    mine.git("branch", "feature")
    assert mine.regenerate("amp=off")[0] == 0
    mine.git("switch", "--quiet", "feature")
    code, output = mine.regenerate("tracker=none")
    assert code == 0, output
    assert "Answer: amp" not in output
    assert mine.contents() == expected(mine, tracker="none")
    mine.git("switch", "--quiet", "main")
    mine.git("merge", "--quiet", "--no-edit", "feature")
    assert mine.contents() == expected(mine, amp="off", tracker="none")
    # Both renders are what the next one goes on from.
    assert mine.regenerate("ci=none")[0] == 0
    assert mine.contents() == expected(mine, amp="off", tracker="none", ci="none")


def test_colleagues_regenerate_side_by_side(mine: Repository, tmp_path: Path) -> None:
    assert mine.regenerate()[0] == 0
    theirs = mine.clone(tmp_path / "theirs")
    mine.git("remote", "add", "origin", str(tmp_path / "theirs.git"))
    assert mine.regenerate("amp=off")[0] == 0
    mine.git("push", "--quiet", "origin", "HEAD", "template")
    assert theirs.regenerate("tracker=none")[0] == 0
    rejected = run("git", "push", "origin", "HEAD", "template", cwd=theirs.path)
    assert rejected.returncode == 1
    theirs.git("pull", "--quiet", "--no-rebase", "--no-edit", "origin", "main")
    assert theirs.contents() == expected(mine, amp="off", tracker="none")
    theirs.git("fetch", "--quiet")
    delete(theirs, f"{SLUG}/tests/test_platforms.py")
    assert theirs.regenerate("ci=none")[0] == 0
    both = expected(mine, amp="off", tracker="none", ci="none")
    assert theirs.contents() == without(both, f"{SLUG}/tests/test_platforms.py")
    theirs.git("push", "--quiet", "origin", "HEAD", "template")


def test_branch_that_nobody_pushed_is_found_in_what_was_merged(
    mine: Repository, tmp_path: Path
) -> None:
    assert mine.regenerate("amp=fp16")[0] == 0
    delete(mine, FP16_TEST)
    theirs = mine.clone(tmp_path / "theirs")
    theirs.git("update-ref", "-d", "refs/remotes/origin/template")
    theirs.git("config", "grep.patternType", "fixed")
    assert theirs.regenerate("tracker=none")[0] == 0
    assert theirs.contents() == without(expected(mine, amp="fp16", tracker="none"), FP16_TEST)


def test_branch_that_is_older_than_what_was_merged_is_brought_up(
    mine: Repository, tmp_path: Path
) -> None:
    assert mine.regenerate()[0] == 0
    theirs = mine.clone(tmp_path / "theirs")
    theirs.git("branch", "template", "origin/template")
    assert mine.regenerate("amp=fp16")[0] == 0
    delete(mine, FP16_TEST)
    theirs.git("pull", "--quiet", str(mine.path), "main")
    assert theirs.regenerate("tracker=none")[0] == 0
    assert theirs.contents() == without(expected(mine, amp="fp16", tracker="none"), FP16_TEST)


def test_conflict_in_a_fresh_clone_is_one_as_well(mine: Repository, tmp_path: Path) -> None:
    """Where tools that apply patches leave files of rejects."""
    assert mine.regenerate("tracker=none")[0] == 0
    line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
    mine.edit({TRAIN: put(line, f"{line}  # mine")})
    theirs = mine.clone(tmp_path / "theirs")
    assert theirs.regenerate("amp=off")[0] == 1
    assert theirs.conflicts() == {TRAIN: "UU"}
    assert not list(theirs.path.rglob("*.rej"))
    assert f"{line}  # mine" in (theirs.path / TRAIN).read_text()


def test_answer_that_was_changed_by_hand_is_rendered(mine: Repository) -> None:
    """Before and after there is a branch."""
    answers = f"{SLUG}/cookiecutter.yaml"
    for old, new in (("bf16", "fp16"), ("fp16", "off")):
        mine.edit({answers: put(f'amp: "{old}"', f'amp: "{new}"')})
        code, output = mine.regenerate()
        assert code == 0, output
        assert mine.contents() == expected(mine, amp=new)


def squash(mine: Repository) -> None:
    mine.git("branch", "--quiet", "pull-request")
    mine.git("reset", "--quiet", "--hard", "HEAD~2")  # the join, and the merge
    mine.git("merge", "--quiet", "--squash", "pull-request")
    message = mine.git("log", "--format=%B", "HEAD..pull-request")  # as GitHub has it
    mine.git("commit", "--quiet", "--message", message)
    mine.git("branch", "--quiet", "-D", "pull-request")


def begin_anew(mine: Repository) -> None:
    tree = mine.git("rev-parse", "HEAD^{tree}")
    mine.git("reset", "--quiet", "--hard", mine.git("commit-tree", "-m", "All", tree))


@pytest.mark.parametrize("change", [squash, begin_anew])
def test_history_that_lost_the_merge_goes_on_from_the_render_that_it_was(
    mine: Repository, change: object
) -> None:
    assert mine.regenerate("amp=fp16")[0] == 0
    assert callable(change)
    change(mine)
    delete(mine, FP16_TEST)
    assert mine.regenerate("tracker=none")[0] == 0
    assert mine.contents() == without(expected(mine, amp="fp16", tracker="none"), FP16_TEST)


def test_merge_that_was_undone_is_undone(mine: Repository) -> None:
    before = mine.git("rev-parse", "HEAD")
    assert mine.regenerate("amp=fp16")[0] == 0
    mine.git("reset", "--quiet", "--hard", before)
    assert mine.regenerate("tracker=none")[0] == 0
    assert mine.contents() == expected(mine, tracker="none")


def test_merge_that_was_reverted_can_be_made_again(mine: Repository) -> None:
    assert mine.regenerate("amp=fp16")[0] == 0
    mine.git("revert", "--no-edit", "--mainline", "1", "HEAD")
    assert mine.contents() == expected(mine)
    code, output = mine.regenerate("amp=fp16")
    assert code == 0, output
    assert f"create mode 100644 {FP16_TEST}" in output
    assert mine.contents() == expected(mine, amp="fp16")
    # And not where the answer alone was changed, by hand.
    mine.edit({f"{SLUG}/cookiecutter.yaml": put('amp: "fp16"', 'amp: "bf16"')})
    assert mine.regenerate("tracker=none")[0] == 0
    assert mine.contents() == expected(mine, tracker="none")


def test_after_a_merge_was_given_up_the_next_is_shown_whole_and_needs_its_room(
    mine: Repository,
) -> None:
    one_line_more(mine.path / SLUG / "tests" / "test_bf16.py")
    mine.commit()
    assert mine.regenerate("amp=fp16")[0] == 1
    mine.git("merge", "--abort")
    code, output = mine.regenerate("--dry-run", "amp=fp16")
    assert code == 1
    assert f"create mode 100644 {FP16_TEST}" in output
    (mine.path / ".git" / "info" / "exclude").write_text("test_fp16.py\n")
    (mine.path / FP16_TEST).write_text("mine\n")
    code, output = mine.regenerate("amp=fp16")
    assert code == 2
    assert f"in the way: {FP16_TEST}" in output
    assert (mine.path / FP16_TEST).read_text() == "mine\n"


def test_commits_of_others_on_the_branch_are_not_built_upon(mine: Repository) -> None:
    """A render that was rebased or squashed has the words of one, and is none."""
    assert mine.regenerate("amp=fp16")[0] == 0
    message = mine.git("log", "-1", "--format=%B", "template")
    mine.git("switch", "--quiet", "template")
    one_line_more(mine.path / "README.md")
    mine.git("add", "--all")
    mine.git("commit", "--quiet", "--message", message)
    mine.git("switch", "--quiet", "main")
    before = mine.git("for-each-ref")
    code, output = mine.regenerate("ema=true")
    assert code == 2
    assert "has commits that this command did not make" in output
    assert mine.git("for-each-ref") == before


def test_branch_in_another_working_tree_is_left_alone(mine: Repository, tmp_path: Path) -> None:
    assert mine.regenerate()[0] == 0
    mine.git("worktree", "add", "--quiet", str(tmp_path / "side"), "-b", "side")
    side = Repository(tmp_path / "side", mine.workshop)
    assert side.regenerate("amp=fp16")[0] == 0
    assert without(side.contents(), ".git") == expected(mine, amp="fp16")
    mine.git("switch", "--quiet", "template")
    code, output = side.regenerate("ema=true")
    assert code == 2
    assert f"template is checked out in {mine.path}" in output
    assert run("git", "status", "--short", cwd=mine.path, env=WHO).stdout == ""
