"""Engine: what is said about a setting that is wrong, in one line and in words. No torch."""

import difflib
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal


def explain(message: str, hints: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Put jsonargparse's message into one line: the key, what was expected, what was got.

    `hints` has the type of each setting; `places` says where a file sets one.
    """
    wrong = re.match(r'Parser key "([^"]+)":.*(?:Got|Given) value: (.*)', message, re.DOTALL)
    if wrong and wrong[1] in hints:
        key = wrong[1]
        place = f" ({places[key]})" if key in places else ""
        return mismatch(key, hints[key], wrong[2]) + place
    missing = re.match(r"argument --(\S+): expected one argument", message)
    if missing:
        return mismatch(missing[1], hints.get(missing[1], "a YAML file"), "nothing")
    unknown = re.match(r"[Uu]nrecognized arguments: (--([^\s=]+)|\S+)", message)
    if unknown and unknown[2]:
        return f"{unknown[2]}: no such setting{nearest(unknown[2], hints)}"
    if unknown:
        return f"command line: expected --name value, got {unknown[1]}"
    return one_line(message)


def mismatch(key: str, hint: Any, got: str) -> str:
    """Say that the setting `key` of type `hint` can't be `got`."""
    word = {"None": "null", "True": "true", "False": "false"}.get(got, got)
    return one_line(f"{key}: expected {_expected(hint)}, got {word}")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of `X | None`; any other type alone."""
    members = typing.get_args(hint)
    is_optional = typing.get_origin(hint) is not Literal and type(None) in members
    return members if is_optional else (hint,)


def _expected(hint: Any) -> str:
    """Say in words what a value of this type looks like."""
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        # On the command line all is text: only a YAML file can get this wrong.
        str: "text (in quotes)",
        type(None): "null",
    }
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(str(choice) for choice in typing.get_args(hint))}"
    members = alternatives(hint)
    if len(members) > 1:
        return " or ".join(_expected(member) for member in members)
    return words.get(hint, hint if isinstance(hint, str) else f"a value of type {hint}")


def nearest(key: str, known: Collection[str]) -> str:
    """Return `; did you mean ...?` with the known setting, or group, that is most like `key`."""
    key = key.replace("-", "_")
    by_tail = {name.rpartition(".")[2]: name for name in known}
    tail = key.rpartition(".")[2]
    if key in known:
        return f"; did you mean {key}?"
    for member in (name for name in known if name.startswith(f"{key}.")):
        return f", it is a group; did you mean {member}?"
    if tail in by_tail:
        return f"; did you mean {by_tail[tail]}?"
    groups = {name.partition(".")[0] for name in known if "." in name}
    for near in difflib.get_close_matches(key, [*known, *sorted(groups)], n=1):
        return f"; did you mean {near}?"
    for near in difflib.get_close_matches(tail, by_tail, n=1):
        return f"; did you mean {by_tail[near]}?"
    return "; --help lists all"


def one_line(text: str) -> str:
    """Return the text without line breaks, and not endless."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:400]}..."
