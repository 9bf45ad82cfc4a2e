"""What all suites share: the rendered product, and a closing count of what was done."""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.branches import Branches, recorded
from tests.rendering import Rendered, product, render, silent

_COUNT = "count: "

# Trees that are compared stay free of __pycache__, whoever imports from them.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# No training of the suite goes to a server, whoever is logged in on this machine.
os.environ["WANDB_MODE"] = "offline"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_TRACKING_URI", None)

Count = Callable[[str, int], None]


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Count something for the closing lines: `count("projects trained", 1)`."""
    return lambda what, number: record_property(_COUNT + what, number)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests of all workers counted."""
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, number in getattr(report, "user_properties", []):
                # Setup and teardown repeat what the call reported.
                if report.when == "call" and name.startswith(_COUNT):
                    totals[name.removeprefix(_COUNT)] += number
    if totals:
        terminalreporter.section("what ran")
        for what, number in sorted(totals.items()):
            terminalreporter.write_line(f"{number:6d} {what}")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def all_rendered(shared: Path) -> list[Rendered]:
    """Every combination of answers, rendered once in a run by the first worker that asks."""
    directory = shared / "product"
    done = directory / "done.json"
    with FileLock(shared / "product.lock"):
        if not done.exists():
            with recorded() as branches, silent():
                projects = [
                    str(render(answers, directory / f"{number:03d}"))
                    for number, answers in enumerate(product())
                ]
            branches.save(directory / "branches.json")
            done.write_text(json.dumps(projects))
    projects = json.loads(done.read_text())
    return [
        Rendered(answers, Path(project))
        for answers, project in zip(product(), projects, strict=True)
    ]


@pytest.fixture(scope="session")
def branches(all_rendered: list[Rendered], shared: Path) -> Branches:
    """Branches of the templates, as the rendering of the product went through them."""
    assert all_rendered
    return Branches.load(shared / "product" / "branches.json")
