"""Records of what ran in `proof/`, and the page `docs/variants.md` that is made of them.

    python -m tests.proof hash PROJECT    the hash of a rendered project, as in the records
    python -m tests.proof table           write the page anew, delete records of no variant

`make proof` and `make test-all PROOF=1` set the variable that lets tests write records.
"""

import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tests.rendering import ROOT, Answers, complete, contents_of, render, silent
from tests.variants import MULTIPLIED, all_pairs, combinations, short_name

Record = dict[str, Any]

PROOF = ROOT / "proof"
PAGE = ROOT / "docs" / "variants.md"
KINDS = ("trained", "all-pairs")
QUESTIONS = tuple(complete({}))

# Set by `make proof`.
IS_ASKED_FOR = os.environ.get("PROOF") == "1"

# What tools and runs leave in a project.
_LEFT_BEHIND = re.compile(
    r"(runs|build|dist|\.venv|\.git|\.cache|\w+\.egg-info)/"
    r"|(.*/)?(__pycache__|\.hypothesis|\.\w+_cache)/"
)

# What a person has typed: in pyproject.toml, and in the file of the answers.
_FREE_TEXTS = re.compile(r"^(description = |authors = |  project_name: |  author: ).*$", re.M)


def tree_hash(project: Path) -> str:
    """Give a SHA-256 of a rendered project: names, executable bits and bytes of all its files.

    It depends on neither the place nor the free texts: the lines with name and author count
    without them, and the slug is replaced wherever it stands alone. So a project whose slug is a
    word that stands in it anyway, such as `model`, has another hash.
    """
    (answers_file,) = project.glob("*/cookiecutter.yaml")
    slug = yaml.safe_load(answers_file.read_text())["default_context"]["project_slug"]
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(slug)}(?![A-Za-z0-9])")
    entries = []
    for name, (content, is_executable) in contents_of(project).items():
        if _LEFT_BEHIND.match(name):
            continue
        text = content.decode()
        if name == "pyproject.toml" or name.endswith("/cookiecutter.yaml"):
            text = _FREE_TEXTS.sub(r"\1<text>", text)
        entries.append((word.sub("<slug>", name), is_executable, word.sub("<slug>", text)))
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(json.dumps(entry).encode() + b"\n")
    return total.hexdigest()


def name_of(answers: Answers, kind: str) -> str:
    """Give the name of a variant's record."""
    return short_name(answers, MULTIPLIED if kind == "trained" else QUESTIONS)


def path_of(answers: Answers, kind: str) -> Path:
    """Give the file of a variant's record."""
    return PROOF / kind / f"{name_of(answers, kind)}.json"


def write(kind: str, answers: Answers, tree: str, complaint: str | None, ran: Record) -> None:
    """Write the record of a variant, with the first line of a complaint; only if asked for."""
    if not IS_ASKED_FOR:
        return
    record = {
        "kind": kind,
        "answers": answers,
        "tree": tree,
        "passed": complaint is None,
        "complaint": complaint and complaint.splitlines()[0],
        **ran,
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
    }
    path = path_of(answers, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def recorded(kind: str, answers: Answers, tree: str) -> Iterator[Record]:
    """Write a record of what runs inside, as one that passed only if that comes to its end.

    What is put into the dictionary stands in the record; its seconds are added where it has none.
    """
    start = time.monotonic()
    ran: Record = {}
    complaint: str | None = "it did not end"  # as of one that is interrupted
    try:
        yield ran
        complaint = None
    except Exception as error:
        complaint = str(error) or repr(error)
        raise
    finally:
        ran.setdefault("seconds", round(time.monotonic() - start, 1))
        write(kind, answers, tree, complaint, ran)


def records_in(directory: Path) -> dict[Path, Record]:
    """Give the records of all kinds by their path in the directory."""
    return {
        path.relative_to(directory): json.loads(path.read_text())
        for kind in KINDS
        for path in sorted((directory / kind).glob("*.json"))
    }


_TEXT = """\
# Variants that ran

Written by `make proof` from the records in `proof/`. A test compares this page with them and with
the projects that the template gives now: a project whose files have changed since its record was
made counts as not run. {made}

## Trained, stopped and resumed

Every combination of {multiplied}; the other answers take turns.
Two gloo ranks on the CPU train two epochs of the example. Then they train again and end in the
middle of the second epoch, and others go on from the checkpoint. Both ways must end with the same
losses and with the same bits, on each rank, in weights, optimizer and whatever else a checkpoint
holds.

{trained}

## All pairs of answers

Few projects in which every two answers stand together. Each is rendered by the `cookiecutter`
command, passes its own `make test`, is started with two processes as its README says, and once more
for another epoch: `make test-all`.

{pairs}

## Check a record

A record names its answers and the hash of the project's tree: names, executable bits and bytes of
all files, without the place and the free texts.

```sh
.venv/bin/cookiecutter . --no-input -o /tmp/try project_slug=demo amp=fp16 ema=true
.venv/bin/python -m tests.proof hash /tmp/try/demo
```
"""


@dataclass(frozen=True)
class Variant:
    """A project that is to run, and the hash of its tree as the template gives it now."""

    kind: str
    answers: Answers
    tree: str

    @property
    def record(self) -> Path:
        """The path of its record in the directory of the records."""
        return path_of(self.answers, self.kind).relative_to(PROOF)


def _word(answer: object) -> str:
    return str(answer).lower() if isinstance(answer, bool) else str(answer)


def _trained(record: Record) -> list[str]:
    """Say what a training record holds: what ran, its result, the validation."""
    progress, stopped = record["progress"], record["stopped"]
    skipped = f", {progress['skipped']} left out" if progress["skipped"] else ""
    ran = f"{progress['step']} steps{skipped}; stopped at {stopped['step']}, resumed"
    result = f"same bits, `{record['digests'][0][:12]}`" if record["equal"] else "other bits"
    valid = ", ".join(f"{name} {value:.4f}" for name, value in record["valid"].items())
    return [ran, result, valid]


def _whole(record: Record) -> list[str]:
    """Say what an all-pairs record holds: its tests, its start, its resumption."""
    suite, started, resumed = record["suite"], record["started"], record["resumed"]
    return [
        f"{suite['passed']} tests passed, {suite['skipped']} skipped",
        f"step {started['step']}, {started['state']}",
        f"step {resumed['step']}, {resumed['state']}",
    ]


def _cells(variant: Variant, record: Record | None) -> list[str]:
    """Say in four cells what ran, what came out, and in how many seconds."""
    if record is None:
        return ["not run", "", "", ""]
    if record["tree"] != variant.tree:
        return [f"not run (changed since {record['date']})", "", "", ""]
    if not record["passed"]:
        complaint = record["complaint"].replace("|", "\\|")
        return [f"**failed**: {complaint}", "", "", ""]
    told = _trained(record) if variant.kind == "trained" else _whole(record)
    return [*told, f"{record['seconds']:.0f}"]


def _table(
    variants: Iterable[Variant], records: dict[Path, Record], columns: dict[str, list[str]]
) -> list[str]:
    """Give a table's lines; `columns` names the first ones, with the questions that they answer."""
    variants = list(variants)
    last = {
        "trained": ["ran", "resumed with", "validation", "s"],
        "all-pairs": ["`make test`", "start", "one more epoch", "s"],
    }[variants[0].kind]
    head = [*columns, *last]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for variant in variants:
        cells = [" ".join(_word(variant.answers[k]) for k in keys) for keys in columns.values()]
        cells += _cells(variant, records.get(variant.record))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _where(records: Iterable[Record]) -> str:
    """Say with what the records were made."""
    made = {(record["torch"], record["python"], record["platform"]) for record in records}
    words = [f"torch {torch}, Python {python}, {place}" for torch, python, place in sorted(made)]
    return f"Run with {'; '.join(words)}." if words else "Nothing was run yet."


def page(variants: list[Variant], records: dict[Path, Record]) -> str:
    """Render `docs/variants.md` from the variants as they are now and the records."""
    trained = [variant for variant in variants if variant.kind == "trained"]
    pairs = [variant for variant in variants if variant.kind == "all-pairs"]
    is_run = [
        records[variant.record]
        for variant in variants
        if records.get(variant.record, {}).get("tree") == variant.tree
    ]
    others = [key for key in QUESTIONS if key not in MULTIPLIED]
    columns = {key: [key] for key in MULTIPLIED} | {" ".join(others): others}
    every = {key: [key] for key in MULTIPLIED}
    every = {" ".join(QUESTIONS[:3]): list(QUESTIONS[:3]), **every}
    every[" ".join(QUESTIONS[-3:])] = list(QUESTIONS[-3:])
    assert sorted(key for keys in every.values() for key in keys) == sorted(QUESTIONS)
    return _TEXT.format(
        made=_where(is_run),
        multiplied=f"{', '.join(MULTIPLIED[:-1])} and {MULTIPLIED[-1]}",
        trained="\n".join(_table(trained, records, columns)),
        pairs="\n".join(_table(pairs, records, every)),
    )


def variants_now(directory: Path) -> list[Variant]:
    """Render what is to run into a directory; give it with the hashes of the trees."""
    wanted = [("trained", answers) for answers in combinations()]
    wanted += [("all-pairs", answers) for answers in all_pairs()]
    with silent():
        return [
            Variant(kind, answers, tree_hash(render(answers, directory / f"{number:03d}")))
            for number, (kind, answers) in enumerate(wanted)
        ]


def write_page() -> None:
    """Write the page, and delete records that belong to no variant."""
    with tempfile.TemporaryDirectory() as directory:
        variants = variants_now(Path(directory))
    known = {variant.record for variant in variants}
    for path in records_in(PROOF):
        if path not in known:
            (PROOF / path).unlink()
            print(f"deleted {path}: no such variant")
    PAGE.write_text(page(variants, records_in(PROOF)))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def main(words: list[str]) -> None:
    """Do what the command says."""
    match words:
        case ["hash", project]:
            print(tree_hash(Path(project)))
        case ["table"]:
            write_page()
        case _:
            sys.exit("usage: python -m tests.proof hash PROJECT | table")


if __name__ == "__main__":
    main(sys.argv[1:])
