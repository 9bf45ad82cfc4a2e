"""Engine: the machines of a job, where scontrol can't name them."""

import subprocess
import sys

import pytest

from ..engine import nodelist
from ..engine.launch import Refused


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node0", "node0"),
        ("gpu[01-03],cpu7", "gpu01 gpu02 gpu03 cpu7"),
        ("cpu7,gpu[01-03]", "cpu7 gpu01 gpu02 gpu03"),
        ("n[1-2,5]x", "n1x n2x n5x"),
        ("n[08-10]", "n08 n09 n10"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[007]", "n007"),
        ("rack[1-2]n[3,5]", "rack1n3 rack1n5 rack2n3 rack2n5"),
        ("a-b.c[1-2].org,d_e", "a-b.c1.org a-b.c2.org d_e"),
    ],
)
def test_list_is_spelt_out(short: str, names: str) -> None:
    assert nodelist.hostnames(short) == names.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "n[1-2", "n1-2]", "n[]", "n[a]", "n[2-1]", "n[1,]", "n[1-2-3]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="node list: expected something like"):
        nodelist.hostnames(text)


@pytest.mark.parametrize(
    ("short", "numbers"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])]
)
def test_counts_are_spelt_out(short: str, numbers: list[int]) -> None:
    assert nodelist.counts(short) == numbers


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x3", "2,"])
def test_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="node list: expected something like"):
        nodelist.counts(text)


def test_command_prints_a_name_a_line_or_refuses_in_one() -> None:
    command = [sys.executable, "-m", nodelist.__name__]
    good = subprocess.run([*command, "n[1-2]"], capture_output=True, text=True, check=True)
    assert good.stdout == "n1\nn2\n"
    bad = subprocess.run([*command, "n["], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
