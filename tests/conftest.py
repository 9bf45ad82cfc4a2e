"""What all suites share: the rendered product, and a closing count of what was done."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.branches import Branches, recorded
from tests.rendering import Rendered, product, render, silent
from tests.serving import Server

_COUNT = "count: "
_TIMED = "timed: "
_SLOWEST = 3

# Trees that are compared stay free of __pycache__, whoever imports from them.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# No training of the suite goes to a server, whoever is logged in on this machine.
os.environ["WANDB_MODE"] = "offline"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.pop("MLFLOW_TRACKING_URI", None)

# Half a minute or more each, by a part of their names.
_LONG = (
    "passes_its_own_tests",
    "mypy_is_content",
    "without_a_fault",
    "compiler is not tried",
    "again_and_again",
)

# What rendered projects and their tests import.
_IMPORTED = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "hypothesis",
    "jsonargparse",
    "pytest",
    "sklearn.datasets",
    "tqdm",
    "yaml",
)

Count = Callable[[str, int], None]
Timed = Callable[[str, str, float], None]


@pytest.hookimpl(trylast=True)  # when what is not to run is gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each of the workers, which begin with equal shares, begin with the longest tests.

    Else one of them would end with several, while the others have nothing left to take over.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if any(part in item.name for part in _LONG)]
    short = [item for item in items if item not in long]
    share = -(-len(items) // workers)
    items.clear()
    for number in range(workers):
        first = long[number::workers]
        rest = max(0, share - len(first))
        items += first + short[:rest]
        del short[:rest]
    assert not short


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Count something for the closing lines: `count("projects trained", 1)`."""
    return lambda what, number: record_property(_COUNT + what, number)


@pytest.fixture
def timed(record_property: Callable[[str, object], None]) -> Timed:
    """Let the closing lines name the slowest of a kind: `timed("training", "amp=off", 9.5)`."""
    return lambda kind, name, seconds: record_property(_TIMED + kind, [seconds, name])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests of all workers counted."""
    totals: Counter[str] = Counter()
    times: dict[str, list[tuple[float, str]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if report.when != "call":
                    continue  # setup and teardown repeat what the call reported
                if name.startswith(_COUNT):
                    totals[name.removeprefix(_COUNT)] += value
                elif name.startswith(_TIMED):
                    times.setdefault(name.removeprefix(_TIMED), []).append(tuple(value))
    if totals:
        terminalreporter.section("what ran")
        for what, number in sorted(totals.items()):
            terminalreporter.write_line(f"{number:6d} {what}")
        for kind, all_times in sorted(times.items()):
            slowest = sorted(all_times, reverse=True)[:_SLOWEST]
            words = ", ".join(f"{seconds:.0f} s ({name})" for seconds, name in slowest)
            terminalreporter.write_line(f"       slowest {kind}: {words}")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def server(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Where functions are called that need torch; one for each worker."""
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(shared / "inductor"),
    }
    server = Server(tmp_path_factory.mktemp("server") / "errors.txt", environment, _IMPORTED)
    yield server
    server.stop()


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
