"""What the suite says that ran: sets of projects that are complete, and a page that is true."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests import proof, rendering
from tests.all_pairs.test_all_pairs import start_commands
from tests.conftest import Count
from tests.proof import PAGE, PROOF, Record, Variant, page, records_in, tree_hash
from tests.rendering import (
    CYCLED,
    Answer,
    Answers,
    Rendered,
    available_answers,
    multiply,
    pairs_of,
    product,
    render,
    silent,
    table,
)
from tests.variants import MULTIPLIED, all_pairs, combinations

Rows = list[tuple[Answers, str]]
Pair = tuple[tuple[str, Answer], ...]

# Answers that exclude each other, such as a launcher for several machines only.
EXCLUDING: Rows = [
    ({"cluster": "kubernetes", "backend": "mpi"}, ""),
    ({"cluster": "slurm", "nodes": "single"}, ""),
]


@pytest.fixture(params=["now", "everything", "excluding"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the table of what can't be rendered as it is, as empty, and with excluding answers."""
    kinds: dict[str, Rows] = {"now": table("UNSUPPORTED"), "everything": []}
    chosen = kinds.get(request.param, EXCLUDING)
    monkeypatch.setattr(rendering, "table", lambda _: chosen)


def possible_pairs() -> set[Pair]:
    """Give every two answers that some project can have together."""
    every = multiply(available_answers())
    return {pair for row in every if not rendering.is_refused(row) for pair in pairs_of(row)}


def pairs_in(answers: list[Answers]) -> Counter[Pair]:
    assert not [row for row in answers if rendering.is_refused(row)]
    return Counter(pair for row in answers for pair in pairs_of(row))


@pytest.mark.usefixtures("rows")
def test_every_two_answers_are_rendered_together() -> None:
    """Cycled answers move in step with no other question: each is met by each answer to it."""
    found = pairs_in(product())
    assert set(found) == possible_pairs()
    cores = [{key: row[key] for key in row if key not in CYCLED} for row in product()]
    questions = {k: values for k, values in available_answers().items() if k not in CYCLED}
    assert cores == [row for row in multiply(questions) if not rendering.is_refused(row)]


def test_cycled_answers_come_equally_often() -> None:
    found = pairs_in(product())
    for key in CYCLED:
        for other in set(available_answers()) - set(CYCLED):
            counts = [n for pair, n in found.items() if {key, other} == {k for k, _ in pair}]
            assert min(counts) >= max(counts) / 2, (key, other, counts)


@pytest.mark.usefixtures("rows")
def test_every_combination_that_changes_a_step_is_trained() -> None:
    rows = combinations()
    trained = [{key: row[key] for key in MULTIPLIED} for row in rows]
    assert trained == multiply({key: available_answers()[key] for key in MULTIPLIED})
    # Each with each answer to another question.
    wanted = {pair for pair in possible_pairs() if {k for k, _ in pair} & set(MULTIPLIED)}
    assert wanted <= set(pairs_in(rows))
    rendered = product()
    assert all(row in rendered for row in rows)


@pytest.mark.usefixtures("rows")
def test_all_pairs_are_all_pairs() -> None:
    rows = all_pairs()
    assert set(pairs_in(rows)) == possible_pairs()
    assert len(rows) < 30
    assert rows == all_pairs()


def test_the_hash_depends_on_neither_place_nor_texts(tmp_path: Path) -> None:
    answers: Answers = {"amp": "fp16", "nodes": "multi"}
    one = render(answers, tmp_path / "one")
    texts: Answers = {"project_name": 'Says "demo"', "author": "Renée \\ O'Neil"}
    other = render(answers | texts, tmp_path / "other" / "deeper", slug="my_own_thing")
    assert tree_hash(one) == tree_hash(other)

    # What runs and tools leave behind is not a part of it.
    for name in ("runs/debug/status.json", "my_own_thing/__pycache__/train.pyc", ".ruff_cache/x"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("{}")
    assert tree_hash(one) == tree_hash(other)


def _change_byte(project: Path) -> None:
    file = project / "demo" / "train.py"
    file.write_text(file.read_text().replace("step(", "step (", 1))


def _change_answer(project: Path) -> None:
    file = project / "demo" / "cookiecutter.yaml"
    file.write_text(file.read_text().replace('"bf16"', '"fp16"'))


CHANGES: dict[str, Callable[[Path], object]] = {
    "byte": _change_byte,
    "answer": _change_answer,
    "name": lambda project: (project / "Makefile").rename(project / "makefile"),
    "mode": lambda project: (project / "Makefile").chmod(0o755),
    "new file": lambda project: (project / "demo" / "more.py").write_text(""),
    "moved text": lambda project: shutil.move(project / "README.md", project / "demo"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_depends_on_everything_else(change: str, tmp_path: Path) -> None:
    project = render({}, tmp_path)
    before = tree_hash(project)
    CHANGES[change](project)
    assert tree_hash(project) != before


def record_of(answers: Answers, **changes: Any) -> Record:
    """Give a record as a training writes it."""
    return {
        "kind": "trained",
        "answers": answers,
        "tree": "1",
        "passed": True,
        "complaint": None,
        "progress": {"step": 46, "skipped": 0},
        "stopped": {"step": 30},
        "digests": ["0123456789abcdef", "0123456789abcdef"],
        "equal": True,
        "valid": {"loss": 0.25, "accuracy": 0.9},
        "seconds": 7.5,
        "torch": "2.13.0",
        "python": "3.11.7",
        "platform": "Linux x86_64",
        "date": "2026-01-31",
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "46 steps; stopped at 30, resumed | same bits, `0123456789ab` | loss 0.2500"),
        ({"tree": "2"}, "| not run (changed since 2026-01-31) |"),
        ({"passed": False, "complaint": "a | b"}, r"| **failed**: a \| b |"),
        (None, "| not run | "),
    ],
    ids=["passed", "changed", "failed", "none"],
)
def test_the_page_says_what_a_record_says(changes: Record | None, expected: str) -> None:
    variants = [
        Variant("trained", combinations()[0], "1"),
        Variant("all-pairs", all_pairs()[0], ""),
    ]
    records = {}
    if changes is not None:
        records[variants[0].record] = record_of(variants[0].answers, **changes)
    text = page(variants, records)
    assert expected in text
    assert ("torch 2.13.0" in text) == (changes is not None and "tree" not in changes)


def test_a_record_is_written_only_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PROOF", tmp_path)
    answers = combinations()[0]
    for is_asked_for in (False, True):
        monkeypatch.setattr(proof, "IS_ASKED_FOR", is_asked_for)
        proof.write("trained", answers, "1", None, {"seconds": 1.0})
        assert len(records_in(tmp_path)) == is_asked_for
    (record,) = records_in(tmp_path).values()
    assert (record["answers"], record["tree"], record["passed"]) == (answers, "1", True)
    proof.write("trained", answers, "1", "other bits\nand more", {})
    (record,) = records_in(tmp_path).values()
    assert (record["passed"], record["complaint"]) == (False, "other bits")


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (None, None),
        (AssertionError("other bits\nand more"), "other bits"),
        (ValueError(), "ValueError()"),
        (KeyboardInterrupt(), "it did not end"),
    ],
    ids=repr,
)
def test_only_what_comes_to_its_end_has_passed(
    error: BaseException | None,
    complaint: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "PROOF", tmp_path)
    monkeypatch.setattr(proof, "IS_ASKED_FOR", True)
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        proof.recorded("trained", combinations()[0], "1") as ran,
    ):
        ran["steps"] = 46
        if error is not None:
            raise error
    (record,) = records_in(tmp_path).values()
    assert (record["passed"], record["complaint"]) == (error is None, complaint)
    assert record["steps"] == 46
    assert record["seconds"] < 60


def test_every_readme_has_the_commands_that_test_all_runs(all_rendered: list[Rendered]) -> None:
    for rendered in {one.files["README.md"].read_bytes(): one for one in all_rendered}.values():
        blocks = start_commands(rendered.project)
        assert ["NPROC=2" in block for block in blocks] == [True, True]
        assert ["--epochs" in block for block in blocks] == [False, True]
        assert "make " not in "".join(blocks)


def test_the_page_is_what_the_records_and_the_template_give(
    all_rendered: list[Rendered], tmp_path: Path, count: Count
) -> None:
    """Else: `make proof`, or `python -m tests.proof table` where nothing was to run."""
    projects = {json.dumps(one.answers, sort_keys=True): one.project for one in all_rendered}
    variants = [
        Variant("trained", row, tree_hash(projects[json.dumps(row, sort_keys=True)]))
        for row in combinations()
    ]
    with silent():
        variants += [
            Variant("all-pairs", row, tree_hash(render(row, tmp_path / str(number))))
            for number, row in enumerate(all_pairs())
        ]
    records = records_in(PROOF)
    assert PAGE.read_text() == page(variants, records), "docs/variants.md is not of now"
    known = {variant.record: variant.answers for variant in variants}
    for path, record in records.items():
        assert known.get(path) == record["answers"], f"proof/{path} belongs to no variant"
    ran = [
        variant
        for variant in variants
        if variant.record in records and records[variant.record]["tree"] == variant.tree
    ]
    count("records of variants as they are now", len(ran))
