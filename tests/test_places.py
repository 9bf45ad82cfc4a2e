"""Rendering anywhere: paths, what is missing on a machine, what is there already."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.rendering import (
    ROOT,
    SLUG,
    TEMPLATE,
    contents_of,
    files_of,
    render,
    run,
    succeed,
)

PARTS = ("cookiecutter.json", "hooks", "templates", TEMPLATE.name)
STRANGE = "with blank, é漢 'q' $x"

Contents = dict[str, tuple[bytes, bool]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    return contents_of(render({}, tmp_path_factory.mktemp("expected")))


def _copy(dest: Path) -> Path:
    """Copy what cookiecutter reads of this repository."""
    dest.mkdir(parents=True)
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, dest / name)
        else:
            shutil.copy2(source, dest / name)
    return dest


def _command(template: Path, out: Path, *more: str) -> list[str | Path]:
    words = ["--no-input", "--output-dir", str(out), *more, f"project_slug={SLUG}"]
    return [sys.executable, "-m", "cookiecutter", template, *words]


def test_paths_with_blanks_and_other_letters(tmp_path: Path, expected: Contents) -> None:
    template = _copy(tmp_path / STRANGE / "template")
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    succeed(*_command(template, tmp_path / STRANGE / "out"), env=home)
    project = tmp_path / STRANGE / "out" / SLUG
    assert contents_of(project) == expected
    for script in (project / SLUG / "launch").glob("*.sh"):
        output = succeed(script, "--dry-run", cwd=tmp_path)
        assert "Traceback" not in output


def test_without_git_home_or_network(tmp_path: Path, expected: Contents) -> None:
    """With an environment that names nothing but an empty PATH, in a network without a device."""
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    # Cookiecutter itself remembers the answers of a rendering, in the home or in this place.
    own = tmp_path / "settings.yaml"
    own.write_text(f"replay_dir: {tmp_path}/replay\ncookiecutters_dir: {tmp_path}/tmp\n")
    env = [f"PATH={tmp_path / 'bin'}", f"TMPDIR={tmp_path / 'tmp'}"]
    alone = ["unshare", "--net"] if os.geteuid() == 0 else []
    succeed(
        *(*alone, "env", "--ignore-environment", *env),
        *_command(ROOT, tmp_path / "out", "--config-file", str(own)),
    )
    assert contents_of(tmp_path / "out" / SLUG) == expected


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "POSIX", "LANG": ""},
    ],
    ids=["C", "ASCII", "POSIX"],
)
def test_without_a_locale(locale: dict[str, str], tmp_path: Path, expected: Contents) -> None:
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    succeed(*_command(ROOT, tmp_path / "out"), env={**locale, **home})
    assert contents_of(tmp_path / "out" / SLUG) == expected


@pytest.mark.parametrize("way", ["words", "file"])
def test_letters_that_a_locale_lacks(way: str, tmp_path: Path) -> None:
    """On the command line Python takes C for UTF-8; of a file it doesn't matter."""
    text = "漢字 é \N{GRINNING FACE}"
    own = tmp_path / "settings.yaml"
    own.write_text(f"replay_dir: {tmp_path}\ncookiecutters_dir: {tmp_path}\n")
    env = {"LC_ALL": "C", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    if way == "file":
        env |= {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        with own.open("a", encoding="utf-8") as file:
            file.write(f'default_context: {{"author": "{text}"}}\n')
    words = [f"author={text}"] if way == "words" else []
    out = tmp_path / "out"
    output = succeed(*_command(ROOT, out, "--config-file", str(own)), *words, env=env)
    assert json.dumps(text) in output  # in ASCII
    assert contents_of(out / SLUG) == contents_of(render({"author": text}, tmp_path / "expected"))


def test_a_refusal_can_be_read_without_a_locale(tmp_path: Path) -> None:
    """Also of a text that can't be printed there."""
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    env |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    result = run(*_command(ROOT, tmp_path / "out"), "author=漢\t字", env=env)
    assert result.returncode == 1
    assert result.stdout.startswith("ERROR: author "), result.stdout
    assert not files_of(tmp_path / "out")


def test_a_template_with_the_line_ends_of_windows(tmp_path: Path, expected: Contents) -> None:
    """Whatever brought them: git doesn't (tests/test_checkout.py), editors and archives may."""
    template = _copy(tmp_path / "template")
    for path in files_of(template).values():
        content = path.read_bytes()
        assert b"\0" not in content
        path.write_bytes(content.replace(b"\n", b"\r\n"))
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    succeed(*_command(template, tmp_path / "out"), env=home)
    assert contents_of(tmp_path / "out" / SLUG) == expected


@pytest.mark.parametrize("end", ["> /dev/full", "| true", ">&-"])
def test_closing_lines_that_nobody_reads(end: str, tmp_path: Path, expected: Contents) -> None:
    """Cookiecutter removes a project whose hook fails."""
    env = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = shlex.join(map(str, _command(ROOT, tmp_path / "out")))
    succeed("bash", "-o", "pipefail", "-c", f"{command} {end}", env=env)
    assert contents_of(tmp_path / "out" / SLUG) == expected


@pytest.mark.parametrize("flags", [["-f"], ["-f", "-s"], ["-s"], []], ids=" ".join)
def test_a_directory_with_files_of_the_user(
    flags: list[str], tmp_path: Path, expected: Contents
) -> None:
    project = tmp_path / "out" / SLUG
    mine = {"mine.txt": b"mine", f"{SLUG}/mine.py": b"mine", "Makefile": b"mine"}
    for name, content in mine.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(content)
    home = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    result = run(*_command(ROOT, tmp_path / "out", *flags), env=home)
    found = {name: content for name, (content, _) in contents_of(project).items()}
    if "-f" not in flags:  # nothing is touched
        assert result.returncode == 1
        assert re.search("already exists", result.stdout)
        assert found == mine
        return
    assert result.returncode == 0, result.stdout
    rendered = {name: content for name, (content, _) in expected.items()}
    assert found == (rendered | mine if "-s" in flags else mine | rendered)
