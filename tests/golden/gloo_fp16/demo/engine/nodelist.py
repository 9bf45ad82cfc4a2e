"""Engine: the machines of a job by name, from SLURM's short form of a list. No torch.

`python -m PACKAGE.engine.nodelist 'gpu[01-03],cpu7'` prints one a line, where scontrol can't.
"""

import itertools
import re
import sys

from .launch import Refused

_PART = re.compile(r"\[([^][]*)\]|([^][,]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hostnames(nodelist: str) -> list[str]:
    """The names that a list such as `gpu[01-03,7],cpu7` or `rack[1-2]n[1-4]x` means, in order.

    Raises:
        Refused: it is no such list, or empty.
    """
    names: list[str] = []
    position = 0
    while position < len(nodelist):
        choices: list[list[str]] = []
        while part := _PART.match(nodelist, position):
            choices.append([part[2]] if part[2] is not None else _numbers(part[1], nodelist))
            position = part.end()
        names += map("".join, itertools.product(*choices))
        if not choices or nodelist[position : position + 1] not in ("", ","):
            raise _no_list(nodelist)
        position += 1
    if not names or nodelist.endswith(","):
        raise _no_list(nodelist)
    return names


def counts(per_node: str) -> list[int]:
    """What a list such as `2(x3),1` says of each machine, in order: 2, 2, 2, 1.

    Raises:
        Refused: it is no such list.
    """
    found = [_COUNT.fullmatch(part) for part in per_node.split(",")]
    if None in found:
        raise _no_list(per_node)
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """The numbers in brackets, each as wide as the first of its range: `08-10` is 08, 09, 10."""
    numbers: list[str] = []
    for word in ranges.split(","):
        found = _RANGE.fullmatch(word)
        if found is None:
            raise _no_list(nodelist)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _no_list(nodelist)
        numbers += (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return numbers


def _no_list(text: str) -> Refused:
    return Refused(f"node list: expected something like gpu[01-03],cpu7, got {text!r}")


if __name__ == "__main__":
    try:
        print(*hostnames(*sys.argv[1:]), sep="\n")
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(2)
