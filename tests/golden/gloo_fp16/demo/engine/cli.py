"""Engine: settings from YAML files and the command line; each mistake is one line. No torch."""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import sys
import textwrap
import time
import typing
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentParser

from .explain import alternatives, explain, mismatch, nearest, one_line
from .launch import Launch, Refused, is_launched, is_restarted
from .rundir import PACKAGE, RunDir

EXIT_REFUSED = 2
"""The exit code of a process whose settings, device or data were refused."""

T = TypeVar("T")


def parse_settings(cls: type[T], argv: Sequence[str] | None = None, program: str = "train") -> T:
    """Build the dataclass `cls` from its defaults, `--config` files and `--name value` options.

    A dataclass inside it is a group: `--optim.lr 1e-3`, or `lr: 1e-3` below `optim:` in YAML.
    Options win over files wherever they stand; of two files or two options the later one wins.
    `--help` and `--print_config` print and raise SystemExit(0).

    Raises:
        Refused: a mistake, in one line: the key, what was expected, what was got.
    """
    files, options = split_option(sys.argv[1:] if argv is None else argv, "config")
    # `python -m torch.distributed.launch` adds it to every command, beside the variable.
    options = [word for word in options if word != f"--local-rank={os.environ.get('LOCAL_RANK')}"]
    hints = _leaf_hints(cls)
    places: dict[str, str] = {}
    for file in files:
        places.update(_check_file(file, hints))
    parser = ArgumentParser(
        prog=f"python -m {PACKAGE}.{program}",
        description=cls.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of settings; options win.")
    # Only --help shows the fields' docstrings, and finding them takes longer than parsing.
    _add_options(parser, parser, cls, with_help=not {"-h", "--help"}.isdisjoint(options))
    try:
        namespace = parser.parse_args([*(f"--config={file}" for file in files), *options])
    except (ArgumentError, OSError, UnicodeError) as error:
        from_files = {key: p for key, p in places.items() if not split_option(options, key)[0]}
        raise Refused(explain(str(error), hints, from_files)) from None
    settings: T = _build(cls, namespace)
    return settings


def split_option(argv: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Return the values of `--name value` and `--name=value` in `argv`, and all other words."""
    values: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word.startswith(f"--{name}="):
            values.append(word.partition("=")[2])
        elif word == f"--{name}" and (value := next(words, None)) is not None:
            values.append(value)
        else:
            others.append(word)
    return values, others


def guess_run_dir(argv: Sequence[str], default: str) -> str:
    """Return the run directory that `argv` means, as far as it can be read: it may be refused."""
    files, options = split_option(argv, "config")
    for file in files:
        with contextlib.suppress(OSError, UnicodeError, yaml.YAMLError):
            content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("run_dir"), str):
                default = content["run_dir"]
    return (split_option(options, "run_dir")[0] or [default])[-1]


def guess_launch(argv: Sequence[str]) -> Launch:
    """Return this process's rank as far as it can be told: the launcher may be what is wrong."""
    given = split_option(argv, "rendezvous.rank")[0]
    words = [os.environ.get("RANK", (given or [""])[-1]), os.environ.get("LOCAL_RANK", "")]
    rank, local_rank = (int(word) if word.isdecimal() else 0 for word in words)
    return Launch(rank=rank, local_rank=local_rank)


@contextlib.contextmanager
def told_how_it_ends(run: RunDir) -> Iterator[None]:
    """Whatever ends the block early stands in status.json; a refusal ends the process.

    Raises:
        SystemExit: what was refused is told.
    """
    try:
        yield
    except Refused as error:
        refuse(error, run)
    except BaseException:
        run.mark("failed")
        raise
    finally:
        run.close()


def leave_if_refused(argv: Sequence[str] | None, default: str) -> None:
    """End a process that was started again after a refusal: nothing has been mended since.

    Without a word: the line that says why was printed by the process before.

    Raises:
        SystemExit: with the code of a refusal.
    """
    if not is_restarted():
        return
    words = sys.argv[1:] if argv is None else argv
    if RunDir(guess_run_dir(words, default), guess_launch(words)).is_refused():
        raise SystemExit(EXIT_REFUSED)


def refuse(error: Refused, run: RunDir) -> NoReturn:
    """End this process with exit code 2: a line on standard error, `refused` in status.json.

    One rank of each machine speaks, or each that was started by hand; rank 0 writes, and never
    into a directory where another run is live.

    Raises:
        SystemExit: always.
    """
    if run.launch.local_rank == 0 or not is_launched():
        print(f"{PACKAGE}: {one_line(str(error))}", file=sys.stderr, flush=True)
    if run.launch.rank == 0:
        run.mark("refused")
    elif is_launched():
        # A launcher ends all ranks as soon as one has left: let rank 0 say why before that. It is
        # waited for where its word can be seen, on a loaded machine for some seconds.
        for _ in range(50):
            if run.is_refused():
                break
            time.sleep(0.1)
    raise SystemExit(EXIT_REFUSED)


def _groups(cls: type) -> dict[str, type]:
    """Return the fields of `cls` that are dataclasses themselves."""
    hints = typing.get_type_hints(cls)
    names = (field.name for field in dataclasses.fields(cls))
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def _leaf_hints(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the dotted key of every setting with its type."""
    groups = _groups(cls)
    hints = typing.get_type_hints(cls)
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        if field.name in groups:
            leaves.update(_leaf_hints(groups[field.name], f"{key}."))
        else:
            leaves[key] = hints[field.name]
    return leaves


def _add_options(
    parser: ArgumentParser, group: Any, cls: type, prefix: str = "", *, with_help: bool
) -> None:
    """Add an option for each setting of `cls`; its groups get a heading each."""
    groups = _groups(cls)
    hints = typing.get_type_hints(cls)
    docs = _attribute_docs(cls) if with_help else {}
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        if field.name in groups:
            inner = groups[field.name]
            heading = parser.add_argument_group(key, inner.__doc__)
            _add_options(parser, heading, inner, f"{key}.", with_help=with_help)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            default = None
        text = docs.get(field.name, "").replace("%", "%%")
        group.add_argument(f"--{key}", type=hints[field.name], default=default, help=text)


def _attribute_docs(cls: type) -> dict[str, str]:
    """Return the string below each field of `cls` and its bases; Python itself drops them."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
            for field, below in itertools.pairwise(body):
                docs.update(_doc_of(field, below))
    return docs


def _doc_of(field: ast.stmt, below: ast.stmt) -> dict[str, str]:
    if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
        return {}
    if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
        return {}
    return {field.target.id: " ".join(str(below.value.value).split())}


def _build(cls: type, namespace: Any, prefix: str = "") -> Any:
    """Return an instance of `cls` with the parsed values; its own ValueErrors become `Refused`."""
    groups = _groups(cls)
    values: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        key = prefix + name
        if name in groups:
            values[name] = _build(groups[name], namespace, f"{key}.")
            continue
        values[name] = namespace[key]
        # A setting without a default that nobody gave.
        if values[name] is None and type(None) not in alternatives(hint):
            raise Refused(mismatch(key, hint, "null"))
    try:
        return cls(**values)
    except ValueError as error:
        raise Refused(f"{prefix.rstrip('.') or 'settings'}: {error}") from None


def _check_file(path: str, hints: Mapping[str, Any]) -> dict[str, str]:
    """Refuse what is no file of settings or names an unknown one; return where each key stands."""
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise Refused(f"config: expected a YAML file, got {path!r} ({error.strerror})") from None
    except UnicodeError:
        raise Refused(f"config: expected a YAML file in UTF-8, got {path!r}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else path
        raise Refused(f"config: no valid YAML ({place}): {error.problem}") from None
    except yaml.YAMLError as error:
        raise Refused(f"config: no valid YAML ({path}): {one_line(str(error))}") from None
    places: dict[str, str] = {}
    if not isinstance(root, yaml.MappingNode):
        raise Refused(f"config: expected lines of `name: value`, got none ({path})")
    _check_mapping(root, path, "", hints, places)
    return places


def _check_mapping(
    node: yaml.MappingNode, path: str, prefix: str, hints: Mapping[str, Any], places: dict[str, str]
) -> None:
    """Check the keys of one level of a file, and of those below it; note where each stands."""
    for key_node, value in node.value:
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
        key = f"{prefix}{name}"
        place = f"{path}, line {key_node.start_mark.line + 1}"
        is_group = any(known.startswith(f"{key}.") for known in hints)
        if key in places:
            # YAML would let the second silently replace the first.
            raise Refused(f"{key}: expected once, got it again ({place})")
        if not is_group and key not in hints:
            raise Refused(f"{key}: no such setting ({place}){nearest(key, hints)}")
        places[key] = place
        is_null = value.tag == "tag:yaml.org,2002:null"
        if is_null and not is_group and type(None) not in alternatives(hints[key]):
            raise Refused(f"{mismatch(key, hints[key], 'null')} ({place})")
        if isinstance(value, yaml.MappingNode) and is_group:
            _check_mapping(value, path, f"{key}.", hints, places)
        elif is_group:
            got = (value.value or "nothing") if isinstance(value, yaml.ScalarNode) else "a list"
            raise Refused(f"{key}: expected lines of `name: value` below it, got {got} ({place})")
