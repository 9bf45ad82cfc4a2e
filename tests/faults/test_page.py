"""The page of the faults says of each what its test demands."""

import os
import re

from tests.faults.test_launched import CASES, STRATEGIES, Case
from tests.rendering import ROOT

PAGE = ROOT / "docs" / "faults.md"
TABLE = re.compile(r"(<!-- faults: .*? -->\n)(.*?)(<!-- end of faults -->)", re.DOTALL)


def row(case: Case) -> str:
    """A case, in the words of the page."""
    place, _, rank, _ = case.fault.split()
    moment = f"in `{place}` on rank {rank}" + (f", {case.workers} workers" * (case.workers > 0))
    names = [f"**{name}**" if name == case.short else name for name in STRATEGIES]
    state = f"`{case.state}`" if case.state else "`running`, or `failed`"
    limit = f"{case.within_s:.0f}"
    return f"| {case.name} | {moment} | {', '.join(names)} | {state} | {limit} | goes on exactly |"


def test_page_has_every_fault() -> None:
    head = "| fault | moment | strategies | `status.json` | ends within | the next start |\n"
    table = head + "|---|---|---|---|---|---|\n" + "".join(f"{row(case)}\n" for case in CASES)
    text = PAGE.read_text()
    if os.environ.get("REFRESH_GOLDEN") == "1":
        text = TABLE.sub(lambda found: found[1] + table + found[3], text)
        PAGE.write_text(text)
    found = TABLE.search(text)
    assert found is not None
    assert found[2] == table
