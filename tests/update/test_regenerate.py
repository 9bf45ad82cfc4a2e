"""Regenerating: the merge is what a fresh render would be with the user's edits in it."""

import itertools
import shutil
from pathlib import Path

import pytest

from tests.rendering import SLUG, Answer, complete
from tests.update.edits import EDITS, SWITCHES, one_line_more, put
from tests.update.projects import Repository, Workshop, edited, files_in

TRAIN = f"{SLUG}/train.py"


def words(key: str, answer: Answer) -> str:
    return f"{key}={str(answer).lower() if isinstance(answer, bool) else answer}"


def forth_and_back() -> list[object]:
    rows = [row for key, a, b in SWITCHES for row in ((key, a, b), (key, b, a))]
    quick = {("amp", "bf16", "fp16"), ("nodes", "single", "multi")}
    return [
        pytest.param(
            *row, id=f"{words(*row[:2])} to {row[2]}", marks=[] if row in quick else UPDATE
        )
        for row in rows
    ]


UPDATE = [pytest.mark.update]


@pytest.mark.parametrize(("key", "before", "after"), forth_and_back())
def test_edits_elsewhere_merge_silently(
    workshop: Workshop, tmp_path: Path, key: str, before: Answer, after: Answer
) -> None:
    repository = workshop.begin(tmp_path / "mine", {key: before})
    repository.edit(EDITS)
    code, output = repository.regenerate(words(key, after))
    assert code == 0, output
    assert repository.contents() == edited(workshop.fresh({key: after}), EDITS)
    assert repository.git("status", "--porcelain") == ""
    # What the branch holds is a pure render, and so is what it began with.
    assert output.count("Conflict") == 0
    shown = repository.git("show", f"template:{TRAIN}")
    assert shown == (workshop.fresh({key: after}) / TRAIN).read_text().strip()


def pairs() -> list[tuple[tuple[str, Answer], tuple[str, Answer]]]:
    """Give every two answers of two questions that are not the first of their question."""
    others = [(key, after) for key, before, after in SWITCHES if before == complete({})[key]]
    return [(one, two) for one, two in itertools.combinations(others, 2) if one[0] != two[0]]


@pytest.mark.parametrize(("one", "two"), pairs(), ids=lambda pair: words(*pair))
@pytest.mark.update
def test_two_answers_at_once(
    workshop: Workshop, tmp_path: Path, one: tuple[str, Answer], two: tuple[str, Answer]
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.edit(EDITS)
    code, output = repository.regenerate(words(*one), words(*two))
    assert code == 0, output
    assert repository.contents() == edited(workshop.fresh(dict([one, two])), EDITS)


def test_edit_in_a_changed_block_is_a_conflict(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
    repository.edit({**EDITS, TRAIN: put(line, f"{line}  # mine")})
    code, output = repository.regenerate("amp=off")
    assert code == 1, output
    assert repository.conflicts() == {TRAIN: "UU"}
    assert f"Conflict: {TRAIN}" in output
    text = (repository.path / TRAIN).read_text()
    assert "<<<<<<< HEAD" in text
    assert f"{line}  # mine" in text

    # The user takes the template's side, and edits elsewhere are there.
    (repository.path / TRAIN).write_bytes((workshop.fresh({"amp": "off"}) / TRAIN).read_bytes())
    repository.commit("Resolve")
    others = {name: edit for name, edit in EDITS.items() if name != TRAIN}
    assert repository.contents() == edited(workshop.fresh({"amp": "off"}), others)


def test_edited_file_that_the_variant_lacks_is_a_conflict(
    workshop: Workshop, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine", {"ema": True, "amp": "bf16"})
    name = f"{SLUG}/tests/test_ema.py"
    one_line_more(repository.path / name)
    repository.commit()
    mine = (repository.path / name).read_text()
    code, output = repository.regenerate("ema=false")
    assert code == 1, output
    assert repository.conflicts() == {name: "UD"}
    assert (repository.path / name).read_text() == mine
    assert "modify/delete" in output

    repository.git("rm", "--quiet", name)
    repository.commit("Resolve")
    assert repository.contents() == files_in(workshop.fresh({"ema": False, "amp": "bf16"}))


def test_moved_file_keeps_its_changes(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    old, new = f"{SLUG}/engine/report.py", f"{SLUG}/reports/mine.py"
    (repository.path / new).parent.mkdir()
    repository.git("mv", old, new)
    repository.commit()
    one_line_more(repository.path / new)
    repository.commit()
    code, output = repository.regenerate("amp=fp16")
    assert code == 0, output
    expected = files_in(workshop.fresh({"amp": "fp16"}))
    content, mode = expected.pop(old)
    assert content != (workshop.fresh({}) / old).read_bytes()
    assert repository.contents() == {**expected, new: (content + b"# mine\n", mode)}


@pytest.mark.update
def test_moved_package_gets_the_changes_in_its_new_place(
    workshop: Workshop, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    repository.regenerate()  # makes the branch
    repository.edit(EDITS)
    (repository.path / "src").mkdir()
    repository.git("mv", SLUG, f"src/{SLUG}")
    repository.commit()
    code, output = repository.regenerate("accumulation=false")
    assert code == 0, output
    expected = edited(workshop.fresh({"accumulation": False}), EDITS)
    assert repository.contents() == {
        f"src/{name}" if name.startswith(f"{SLUG}/") else name: file
        for name, file in expected.items()
    }


@pytest.mark.update
def test_edits_go_along_where_the_template_renames_a_file(
    workshop: Workshop, tmp_path: Path
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    text = 'cd "$(dirname "${BASH_SOURCE[0]}")/../.."'
    edits = {f"{SLUG}/launch/train.sh": put(text, f"{text}  # mine")}
    repository.edit(edits)
    code, output = repository.regenerate("nodes=multi")
    assert code == 0, output
    assert f"rename {SLUG}/launch/{{train.sh => node.sh}}" in output
    moved = {f"{SLUG}/launch/node.sh": put(text, f"{text}  # mine")}
    assert repository.contents() == edited(workshop.fresh({"nodes": "multi"}), moved)


@pytest.mark.update
def test_deleted_file_stays_deleted(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    gone, changes = f"{SLUG}/tests/test_platforms.py", f"{SLUG}/tests/test_bf16.py"
    repository.git("rm", "--quiet", gone, changes)
    repository.commit()
    code, output = repository.regenerate("amp=off")
    assert code == 0, output
    expected = files_in(workshop.fresh({"amp": "off"}))
    del expected[gone]
    assert repository.contents() == expected


def snapshot(repository: Repository) -> dict[str, bytes]:
    """Give every byte of a repository, git's own among them."""
    return {
        str(path): path.read_bytes()
        for path in sorted(repository.path.rglob("*"))
        if path.is_file()
    }


def dirty(repository: Repository) -> str:
    one_line_more(repository.path / "README.md")
    return "there are changes that are not committed"


def staged(repository: Repository) -> str:
    one_line_more(repository.path / "README.md")
    repository.git("add", "--all")
    return "there are changes that are not committed"


def in_a_merge(repository: Repository) -> str:
    repository.git("switch", "--quiet", "--create", "other")
    repository.git("commit", "--quiet", "--allow-empty", "--message", "One")
    repository.git("switch", "--quiet", "main")
    repository.git("commit", "--quiet", "--allow-empty", "--message", "Other")
    repository.git("merge", "--quiet", "--no-commit", "other")
    return "a merge is under way"


def in_a_cherry_pick(repository: Repository) -> str:
    head = repository.git("rev-parse", "HEAD")
    (repository.path / ".git" / "CHERRY_PICK_HEAD").write_text(f"{head}\n")
    return "a cherry-pick is under way: finish it, or git cherry-pick --abort"


def on_the_branch(repository: Repository) -> str:
    repository.git("switch", "--quiet", "--create", "template")
    return "template is checked out"


def in_the_way(repository: Repository) -> str:
    (repository.path / SLUG / "tests" / "test_fp16.py").write_text("mine\n")
    return f"files that are not committed are in the way: {SLUG}/tests/test_fp16.py"


def in_the_way_and_ignored(repository: Repository) -> str:
    (repository.path / ".git" / "info" / "exclude").write_text("test_fp16.py\n")
    return in_the_way(repository)


def without_answers(repository: Repository) -> str:
    repository.git("rm", "--quiet", f"{SLUG}/cookiecutter.yaml")
    repository.commit()
    return "this repository holds no project with its cookiecutter.yaml"


def twice(repository: Repository) -> str:
    shutil.copytree(repository.path / SLUG, repository.path / "other" / SLUG)
    repository.commit()
    return f"there is more than one project, go into the one that you mean: {SLUG}, other/{SLUG}"


def went_apart(repository: Repository) -> str:
    repository.git("update-ref", "refs/remotes/origin/template", "HEAD")
    tree = repository.git("rev-parse", "HEAD^{tree}")
    repository.git("branch", "template", repository.git("commit-tree", "-m", "Other", tree))
    return "template, here or at origin, has commits that this command did not make"


def edited_before_the_branch(repository: Repository) -> str:
    repository.edit(EDITS)
    repository.git("branch", "template")
    return "is not what this template renders for its answers"


def edited_before_the_first_commit(repository: Repository) -> str:
    one_line_more(repository.path / TRAIN)
    (repository.path / SLUG / "engine" / "report.py").write_text("print()\n")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--amend", "--message", "Late")
    return "is not what this template renders for its answers, as in demo/engine/report.py. Give"


@pytest.mark.parametrize(
    "prepare",
    [
        dirty,
        staged,
        in_a_merge,
        in_a_cherry_pick,
        on_the_branch,
        in_the_way,
        in_the_way_and_ignored,
        without_answers,
        twice,
        went_apart,
        edited_before_the_branch,
        edited_before_the_first_commit,
    ],
)
@pytest.mark.update
def test_refused_and_nothing_is_changed(
    workshop: Workshop, tmp_path: Path, prepare: object
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    assert callable(prepare)
    reason = prepare(repository)
    before = repository.contents(), repository.git("for-each-ref"), repository.git("status")
    code, output = repository.regenerate("amp=fp16")
    assert code == 2
    assert reason in output
    assert before == (
        repository.contents(),
        repository.git("for-each-ref"),
        repository.git("status"),
    )


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("ampp=fp16", "ampp: expected a question (project_name, project_slug, author, backend"),
        ("amp=fp8", "amp: expected one of bf16, fp16, off, got 'fp8'"),
        ("ema=maybe", "ema: expected true or false, got 'maybe'"),
        ("amp", "expected key=answer, got 'amp'"),
        ("_template=x", "_template: expected a question"),
    ],
)
def test_mistyped_answer_is_refused(
    workshop: Workshop, tmp_path: Path, word: str, reason: str
) -> None:
    repository = workshop.begin(tmp_path / "mine")
    code, output = repository.regenerate(word)
    assert code == 2
    assert output.startswith(f"Refused: {reason}")
    assert "template" not in repository.git("branch")


def test_dry_run_shows_all_and_changes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    repository = workshop.begin(tmp_path / "mine")
    line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
    repository.edit({TRAIN: put(line, f"{line}  # mine")})
    one_line_more(repository.path / SLUG / "tests" / "test_bf16.py")
    repository.commit()
    before = snapshot(repository)
    code, output = repository.regenerate("--dry-run", "amp=fp16")
    assert snapshot(repository) == before
    assert code == 1
    for part in (
        "Project: the whole project, in .",
        "Answer: amp=bf16 becomes fp16",
        f"delete mode 100644 {SLUG}/tests/test_bf16.py",
        f"create mode 100644 {SLUG}/tests/test_fp16.py",
        f"{SLUG}/engine/state.py",
        f"Conflict: {TRAIN}",
        f"Conflict: {SLUG}/tests/test_bf16.py",
    ):
        assert part in output
    assert repository.regenerate("amp=fp16")[0] == 1
    assert set(repository.conflicts()) == {TRAIN, f"{SLUG}/tests/test_bf16.py"}
