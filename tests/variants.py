"""Which projects do more than to be rendered: the named ones, the trained, and all pairs.

Snapshots of the named variants are kept, and some run their whole own suites. Together they hold
every answer that can be rendered (`test_golden.py` and `test_training.py` check it).
"""

from collections.abc import Iterable

from allpairspy import AllPairs

from tests.rendering import (
    Answer,
    Answers,
    available_answers,
    complete,
    is_refused,
    multiply,
    pairs_of,
    product,
    spread,
)

VARIANTS: dict[str, Answers] = {
    "default": {},
    "bare": {
        "backend": "gloo",
        "amp": "off",
        "accumulation": False,
        "tracker": "none",
        "ci": "none",
    },
    "fp16_ema": {"amp": "fp16", "ema": True, "ci": "gitlab"},
    "multi": {
        "nodes": "multi",
        "cluster": "kubernetes",
        "accumulation": False,
        "checkpoint": "per_rank",
        "ema": True,
        "tracker": "wandb",
    },
    "gloo_fp16": {
        "backend": "gloo",
        "nodes": "multi",
        "cluster": "slurm",
        "amp": "fp16",
        "accumulation": False,
        "checkpoint": "sharded",
        "tracker": "mlflow",
        "ci": "gitlab",
    },
    "mpi": {
        "backend": "mpi",
        "amp": "off",
        "checkpoint": "sharded",
        "ema": True,
        "example": "bytes",
        "tracker": "none",
    },
}

# Their own suites run in `make test`, and hold every answer but the workflow's, which no test of a
# project depends on. Other suites are left to `make test-all`.
TESTED = ("default", "multi", "gloo_fp16", "mpi")

# Files of their tests that take long and depend on little: one variant runs each, the others leave
# it to that one. What compiles wants micro-batches and averaged weights.
ONCE = {
    "test_compile.py": "mpi",
    "test_changes.py": "mpi",
    "test_attempts.py": "default",
    "test_comm_hook.py": "default",
    "test_levers.py": "default",
    "test_command_line.py": "default",
    "test_failure.py": "multi",
    "test_faults.py": "multi",
    "test_stop.py": "gloo_fp16",
    "test_ranks.py": "default",
    "test_rendezvous.py": "multi",
    "test_weights.py": "default",
    "test_workers.py": "default",
    "test_parity.py": "default",
    "test_standstill.py": "multi",
    "test_prepare.py": "gloo_fp16",
    "test_reach.py": "multi",
    "test_route.py": "multi",
    "test_watchdog.py": "gloo_fp16",
}

# What changes a step: every combination is trained.
MULTIPLIED = ("amp", "accumulation", "checkpoint", "ema")


def missing_in(names: Iterable[str]) -> set[tuple[str, Answer]]:
    """Give the answers that can be rendered, and that none of these named variants has."""
    chosen = [complete(VARIANTS[name]) for name in names]
    every = {(key, answer) for key, values in available_answers().items() for answer in values}
    return every - {answer for answers in chosen for answer in answers.items()}


def combinations() -> list[Answers]:
    """Give all combinations of what changes a step, from the product: the rest takes turns."""
    questions = available_answers()
    rendered = product()
    return spread(
        [answers for answers in rendered if answers.items() >= core.items()]
        for core in multiply({key: questions[key] for key in MULTIPLIED})
    )


def all_pairs() -> list[Answers]:
    """Give few projects in which every two answers stand together that can be rendered together."""
    questions = available_answers()

    def can_be_rendered(values: list[Answer]) -> bool:
        return not is_refused(dict(zip(questions, values, strict=False)))

    rows = AllPairs(list(questions.values()), filter_func=can_be_rendered)
    chosen = [dict(zip(questions, row, strict=True)) for row in rows]

    # Where answers exclude each other, allpairspy runs into dead ends and leaves pairs out.
    possible = [answers for answers in multiply(questions) if not is_refused(answers)]
    missing = {pair for answers in possible for pair in pairs_of(answers)}
    missing.difference_update(pair for answers in chosen for pair in pairs_of(answers))
    while missing:
        pair = dict(min(missing, key=str))
        holding = (answers for answers in possible if answers.items() >= pair.items())
        best = max(holding, key=lambda answers: len(missing.intersection(pairs_of(answers))))
        missing.difference_update(pairs_of(best))
        chosen.append(best)
    return chosen


def short_name(answers: Answers, keys: tuple[str, ...] = MULTIPLIED) -> str:
    """Give some answers in words for a file's name and for `pytest -k`: a yes by its question."""
    words = [key if answers[key] is True else answers[key] for key in keys]
    return "-".join(word for word in words if isinstance(word, str))
