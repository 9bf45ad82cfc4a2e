"""The commands of docs/regenerate.md, as a newcomer would type them."""

import os
import re
from pathlib import Path

import pytest

from tests.conftest import Count
from tests.rendering import ROOT, run, succeed
from tests.update.edits import put
from tests.update.projects import WHO, Repository, Workshop, copy_template

pytestmark = pytest.mark.update

PAGE = ROOT / "docs" / "regenerate.md"


def blocks() -> list[tuple[str, str]]:
    """Give the commands of the page, each block with its mark."""
    return re.findall(r"^```sh ?(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


class Newcomer:
    """Somebody with a home and a clone of the template in it, who types what the page says."""

    def __init__(self, workshop: Workshop, tmp_path: Path, count: Count) -> None:
        self.upstream = copy_template(workshop, tmp_path / "org" / "ddp-template")
        self.home = tmp_path / "home"
        self.clone = self.home / ".cookiecutters" / "ddp-template"
        succeed("git", "clone", "--quiet", self.upstream.path, self.clone)
        self._count = count

    def type(self, commands: str, cwd: Path, flags: str = "-euc") -> tuple[int, str]:
        """Run a block of commands, to the first that fails; exit code and output."""
        script = commands.replace("TEMPLATE", str(self.clone))
        # What cookiecutter has cloned before: there is no network here.
        script = script.replace("gh:org/ddp-template", str(self.clone))
        done = run("bash", flags, script, cwd=cwd, env={**WHO, "HOME": str(self.home)})
        self._count("blocks of commands in the documentation run", 1)
        return done.returncode, done.stdout


def test_commands_of_the_page_work(workshop: Workshop, tmp_path: Path, count: Count) -> None:
    newcomer = Newcomer(workshop, tmp_path, count)
    marks = [mark for mark, _ in blocks()]
    assert marks == ["", "", "", "", "conflict", "conflict", "", "from", "cruft"]
    begin, dry_run, change, newer, look, resolve, push, older, cruft = (
        text for _, text in blocks()
    )
    project = tmp_path / "my_project"
    mine = Repository(project, workshop)

    code, output = newcomer.type(begin, tmp_path)
    assert code == 0, output
    assert "The template changes nothing" in output
    assert "template" in mine.git("branch")

    code, output = newcomer.type(dry_run, project)
    assert code == 0
    assert "Answer: amp=bf16 becomes fp16" in output
    assert mine.git("log", "-1", "--format=%s", "template") == "Render my_project as it began"
    code, output = newcomer.type(change, project)
    assert code == 0
    assert "GradScaler" in (project / "my_project" / "engine" / "state.py").read_text()

    # The newer template changes a line that was edited here.
    line = 'logger.info("nothing left to do: step'
    (source,) = newcomer.upstream.path.glob("{{*/{{*/train.py")
    source.write_text(put(line, 'logger.info("nothing is left: step')(source.read_text()))
    newcomer.upstream.commit("Second version")
    mine.edit({"my_project/train.py": put(line, 'logger.info("I have nothing left: step')})
    assert newcomer.type(newer, project)[0] == 1  # at the dry run
    code, output = newcomer.type(newer, project, "-uc")
    assert code == 1
    assert "Conflict: my_project/train.py" in output

    code, output = newcomer.type(look, project)
    assert code == 0
    assert "both modified:   my_project/train.py" in output
    mine.git("checkout", "--theirs", "my_project/train.py")
    code, output = newcomer.type(resolve, project)
    assert code == 0
    assert mine.git("status", "--porcelain") == ""
    assert "nothing is left: step" in (project / "my_project" / "train.py").read_text()

    mine.git("init", "--quiet", "--bare", str(tmp_path / "origin.git"))
    mine.git("remote", "add", "origin", str(tmp_path / "origin.git"))
    code, output = newcomer.type(push, project)
    assert code == 0
    assert mine.git("rev-parse", "origin/template") == mine.git("rev-parse", "template")

    # Made by the first version, and never regenerated.
    old = workshop.begin(tmp_path / "old")
    assert newcomer.type(change, old.path)[0] == 2
    code, output = newcomer.type(older, old.path)
    assert code == 0, output
    assert "autocast" not in (old.path / "demo" / "train.py").read_text()

    code, output = newcomer.type(cruft, tmp_path)
    assert code == 0, output
    assert "Good work!" in output
    assert os.access(tmp_path / "other" / "other" / "tests" / "test_fp16.py", os.R_OK)
