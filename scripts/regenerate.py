#!/usr/bin/env python3
"""Render a project anew, with other answers or a newer template, and keep what was edited in it.

    python TEMPLATE/scripts/regenerate.py [--dry-run] [KEY=ANSWER …]

Called anywhere in the project's repository. What the template renders goes to the branch
`template`, which holds nothing else; git merges it. Exit codes: 0 merged, 1 the merge is for you
to finish, 2 refused, and nothing was changed. Needs git, and cookiecutter on the PATH.
"""

import argparse
import ast
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

if sys.version_info < (3, 10):  # noqa: UP036 - any Python may be called, also an older one
    print("Refused: this needs Python 3.10 or newer", file=sys.stderr)
    sys.exit(2)

TEMPLATE = Path(__file__).resolve().parent.parent
ANSWERS_FILE = "cookiecutter.yaml"

# The template's own: where it was unpacked into another repository, that one is not meant.
HISTORY = f"--git-dir={TEMPLATE / '.git'}"

# In the message of each commit that this script makes on the branch: it holds a pure render. A
# commit that was amended, rebased or squashed has the line still, but is another tree.
MARK = "Rendered-tree:"

# What only this script makes must be the same under all settings of users; and what was moved
# keeps its changes, whatever is set.
RENDERING = ("core.fileMode=true", "core.safecrlf=false", "core.sparseCheckout=false")
MERGING = ("merge.renames=true", "merge.directoryRenames=true")

Answer = str | bool
Answers = dict[str, Answer]
YES = ("1", "true", "t", "yes", "y", "on")
NO = ("0", "false", "f", "no", "n", "off")


class Refused(Exception):  # noqa: N818 - it says what happened
    """Nothing was changed, for this reason."""


@dataclass(frozen=True)
class Git:
    """Commands of git in one repository."""

    top: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(
        self, *words: str, settings: tuple[str, ...] = (), stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, whatever its exit code."""
        flags = [word for setting in settings for word in ("-c", setting)]
        return subprocess.run(
            ["git", *flags, *words],
            cwd=self.top,
            env=os.environ | self.environment,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )

    def __call__(self, *words: str, settings: tuple[str, ...] = (), stdin: str = "") -> str:
        """Give the output of a command that must succeed.

        Raises:
            Refused: it did not, with the reason in a line.
        """
        done = self.run(*words, settings=settings, stdin=stdin)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
            reasons = [line for line in lines if line.startswith(("fatal: ", "error: "))]
            raise Refused(f"git: {(reasons or lines)[-1]}")
        return done.stdout.rstrip("\n")

    def having(self, **environment: str) -> "Git":
        """Give the same with more in the environment."""
        return replace(self, environment=self.environment | environment)

    def find(self, revision: str) -> str | None:
        """Give the object that a revision names, or None."""
        done = self.run("rev-parse", "--quiet", "--verify", revision)
        return done.stdout.strip() or None

    def names(self, *words: str) -> list[str]:
        """Give the names that a command lists with -z."""
        return [name for name in self(*words).split("\0") if name]

    def holds(self, revision: str, commit: str) -> bool:
        """Whether the history of a revision holds a commit."""
        return self.run("merge-base", "--is-ancestor", commit, revision).returncode == 0


@dataclass(frozen=True)
class Project:
    """A rendered project in a repository, or its package directory alone."""

    git: Git
    parent: PurePosixPath
    """The directory that holds the package, from the top of the repository."""
    slug: str

    @property
    def package(self) -> PurePosixPath:
        """The package directory, from the top of the repository."""
        return self.parent / self.slug

    def is_whole_in(self, revision: str) -> bool:
        """Whether the files around the package are the template's as well.

        In a repository that was there before, its pyproject.toml has a name of its own.
        """
        file = self.git.run("cat-file", "blob", f"{revision}:{self.parent / 'pyproject.toml'}")
        name = re.compile(rf"""^name\s*=\s*["']{self.slug}["']""", re.MULTILINE)
        return name.search(file.stdout) is not None

    def answers_in(self, revision: str) -> Answers:
        """Give the answers that the project was rendered with."""
        return parse(self.git("cat-file", "blob", f"{revision}:{self.package / ANSWERS_FILE}"))


def parse(text: str) -> Answers:
    """Read the answers from a file of the project, which a formatter may have gone over."""
    answers: Answers = {}
    for line in text.splitlines():
        key, colon, value = line.strip().partition(":")
        value = value.strip()
        if line.startswith((" ", "\t")) and colon and value and not key.startswith("#"):
            answers[key] = scalar(value)
    return answers


def scalar(value: str) -> Answer:
    """Read a string or a boolean of YAML, in any quotes or none."""
    if value[0] == '"':
        with contextlib.suppress(json.JSONDecodeError):
            return str(json.JSONDecoder().raw_decode(value)[0])
    if value[0] == "'":
        return value[1:-1].replace("''", "'")
    value = value.partition(" #")[0].strip()
    return {"true": True, "false": False}.get(value.lower(), value)


def in_words(answer: Answer) -> str:
    """Give an answer as it is written on the command line."""
    return str(answer).lower() if isinstance(answer, bool) else answer


def projects_in(git: Git, revision: str) -> list[Project]:
    """Find the packages in which the file of answers lies, and names them."""
    names = git.names("ls-tree", "-r", "-z", "--name-only", "--full-tree", revision)
    found = (PurePosixPath(name).parent for name in names if name.endswith(f"/{ANSWERS_FILE}"))
    projects = [Project(git, package.parent, package.name) for package in found]
    return [one for one in projects if one.answers_in(revision).get("project_slug") == one.slug]


def find_project(git: Git, here: Path) -> Project:
    """Find the one project in the current directory, else in the repository.

    Raises:
        Refused: there is none, or more than one.
    """
    everywhere = projects_in(git, "HEAD")
    near = [one for one in everywhere if (git.top / one.package).is_relative_to(here.resolve())]
    found = near or everywhere
    if len(found) == 1:
        return found[0]
    if not found:
        raise Refused(
            f"this repository holds no project with its {ANSWERS_FILE}, under its own name"
        )
    listed = ", ".join(str(one.package) for one in found)
    raise Refused(f"there is more than one project, go into the one that you mean: {listed}")


def place_in(tip: str, project: Project) -> Project | None:
    """Find the project on the branch, where it lies as it was before the user moved anything."""
    others = [one.package for one in projects_in(project.git, "HEAD") if one != project]
    held = [one for one in projects_in(project.git, tip) if one.package not in others]
    same = [one for one in held if one == project] or held
    return same[0] if len(same) == 1 else None


def questions_of(template: Path) -> dict[str, object]:
    """Give the questions of a template with their answers, the default first."""
    questions = json.loads((template / "cookiecutter.json").read_text("utf-8"))
    return {key: value for key, value in questions.items() if key[0] != "_"}


def read_change(questions: dict[str, object], word: str) -> tuple[str, Answer]:
    """Read `key=answer`. Cookiecutter itself drops a key that it does not know.

    Raises:
        Refused: the question or the answer is unknown.
    """
    key, equals, answer = word.partition("=")
    if not equals:
        raise Refused(f"expected key=answer, got {word!r}")
    if key not in questions:
        raise Refused(f"{key}: expected a question ({', '.join(questions)}), got {word!r}")
    known = questions[key]
    if isinstance(known, list) and answer not in known:
        raise Refused(f"{key}: expected one of {', '.join(known)}, got {answer!r}")
    if isinstance(known, bool):
        if answer.lower() not in YES + NO:
            raise Refused(f"{key}: expected true or false, got {answer!r}")
        return key, answer.lower() in YES
    return key, answer


def choose_answers(old: Answers, words: list[str], template: Path) -> Answers:
    """Give the answers to render with: the old ones, the changes, defaults for what is new.

    Raises:
        Refused: a change is not understood, or an old answer is none any more.
    """
    questions = questions_of(template)
    answers = {key: answer for key, answer in old.items() if key in questions}
    answers |= dict(read_change(questions, word) for word in words)
    for key, answer in answers.items():
        read_change(questions, f"{key}={in_words(answer)}")
    return answers


def render(template: Path, answers: Answers, directory: Path) -> Path:
    """Render a project with these answers, whatever the user's own settings of cookiecutter are.

    Raises:
        Refused: the template refused them, or made something else of them.
    """
    program = shutil.which("cookiecutter")
    if program is None:
        raise Refused("cookiecutter is not on the PATH: install it, as with pipx or pip")
    directory.mkdir()
    # An answer is a template itself: braces stand for themselves only when they are quoted.
    literal = {
        key: answer.replace("{{", "{{ '{{' }}") if isinstance(answer, str) else answer
        for key, answer in answers.items()
    }
    settings = {
        "default_context": literal,
        "replay_dir": str(directory / "replay"),
        "cookiecutters_dir": str(directory / "clones"),
    }
    config = directory / "config.yaml"
    # JSON is YAML, but for characters that it would write as two halves.
    config.write_text(json.dumps(settings, ensure_ascii=False), "utf-8")
    output = directory / "projects"
    command = [program, str(template), "--no-input", "--config-file", str(config)]
    done = subprocess.run(
        [*command, "--output-dir", str(output)],
        env=os.environ | {"TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).splitlines()
        reasons = [line for line in lines if line.startswith("ERROR: ")]
        raise Refused("cookiecutter: " + (reasons or lines[-1:] or ["no reason given"])[0])
    (project,) = output.iterdir()
    rendered = parse((project / project.name / ANSWERS_FILE).read_text("utf-8"))
    for key, answer in answers.items():
        if rendered.get(key, answer) != answer:
            raise Refused(f"{key}: cookiecutter made {rendered[key]!r} of {answer!r}")
    return project


@dataclass(frozen=True)
class Renderer:
    """Turns answers into commits that no branch holds yet. No file of the user's is touched."""

    project: Project
    directory: Path
    """For what is temporary."""
    is_whole: bool

    @property
    def place(self) -> str:
        """What the template renders, from the top of the repository."""
        return str(self.project.parent if self.is_whole else self.project.package)

    def tree(self, template: Path, answers: Answers, base: str | None) -> str:
        """Give the tree of `base`, with what these answers render in place of the project."""
        number = len(list(self.directory.iterdir()))
        git = self.project.git.having(GIT_INDEX_FILE=str(self.directory / f"index{number}"))
        rendered = render(template, answers, self.directory / f"render{number}")
        source = rendered if self.is_whole else rendered / rendered.name
        where = f"--git-dir={git('rev-parse', '--absolute-git-dir')}"
        add = (where, "--work-tree=.", "add", "--all", "--force", ".")
        replace(git, top=source)(*add, settings=RENDERING)
        files = git("write-tree")
        target = self.place if self.is_whole else str(self.project.parent / rendered.name)
        if target == ".":
            return files
        git("read-tree", base or "--empty")
        # A directory may be called `:tools` or `[a]`.
        remove = ("--literal-pathspecs", "rm", "-r", "-q", "-f", "--cached", "--ignore-unmatch")
        git(*remove, "--", self.place, settings=RENDERING)
        git("read-tree", f"--prefix={target}/", files)
        return git("write-tree")

    def commit(self, tree: str, parents: list[str], message: str) -> str:
        """Give a new commit."""
        words = [word for parent in parents for word in ("-p", parent)]
        return self.project.git("commit-tree", tree, *words, "-m", message)

    def commit_render(self, tree: str, parents: list[str], subject: str, version: str) -> str:
        """Give a new commit of the branch."""
        made = f"Rendered-with: {version}\n{MARK} {tree}"
        return self.commit(tree, parents, f"{subject}\n\n{made}")

    def require_alike(self, commit: str, tree: str) -> None:
        """Refuse a base that is not what the user began with: their differences would be lost.

        Raises:
            Refused: beside the format, files of the tree are others in the commit, or missing.
        """
        git = self.project.git
        inside = "" if self.place == "." else self.place
        sides = [f"{one}:{inside}" for one in (commit, tree)]
        command = ["diff-tree", "-r", "-z", "--no-renames", "--name-only", "--diff-filter=AM"]
        wrong = []
        for name in git.names(*command, *sides):
            path = f"{inside}/{name}" if inside else name
            texts = [git.run("cat-file", "blob", f"{c}:{path}") for c in (commit, tree)]
            if texts[0].returncode or not is_alike(texts[0].stdout, texts[1].stdout, name):
                wrong.append(name)
        if not wrong:
            return
        date = git("log", "-1", "--no-show-signature", "--format=%cI", commit)
        then = (
            Git(TEMPLATE).run(HISTORY, "rev-list", "-1", f"--before={date}", "HEAD").stdout.strip()
        )
        raise Refused(
            f"commit {commit[:10]}, where the project begins, is not what this template renders "
            f"for its answers, as in {', '.join(wrong[:3])}. Give --from REVISION, the template's "
            f"that made it ({then[:10] or 'none'} was its newest on {date[:10]}); or --from HEAD, "
            "if those differences are your edits"
        )


def version_of(revision: str | None = None) -> str:
    """Say which version of the template this is, or a revision of it."""
    done = Git(TEMPLATE).run(HISTORY, "describe", "--always", "--tags", revision or "--dirty")
    return f"{TEMPLATE.name} {done.stdout.strip() or '(no repository)'}"


def template_at(revision: str, directory: Path) -> Path:
    """Give the template as it was.

    Raises:
        Refused: it has no such revision.
    """
    target = directory / TEMPLATE.name
    target.mkdir()
    git = Git(target, {"GIT_INDEX_FILE": str(directory / "index")})
    done = git.run(HISTORY, "--work-tree=.", "checkout", "--quiet", revision, "--", ".")
    if done.returncode != 0:
        reason = done.stderr.strip()
        raise Refused(f"--from: expected a revision of the template, got {revision!r}: {reason}")
    return target


def require_ready(git: Git, branch: str) -> None:
    """Refuse a repository in which a merge could lose something, or can't be understood.

    Raises:
        Refused: with what to do first.
    """
    if git.find("HEAD") is None:
        raise Refused("the repository has no commit yet: git add --all, git commit")
    for name in ("MERGE", "CHERRY_PICK", "REVERT"):
        if git.find(f"{name}_HEAD") is not None:
            what = name.lower().replace("_", "-")
            raise Refused(f"a {what} is under way: finish it, or git {what} --abort")
    if git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no"):
        raise Refused("there are changes that are not committed: commit or stash them first")
    if where := git("for-each-ref", "--format=%(worktreepath)", f"refs/heads/{branch}").strip():
        raise Refused(
            f"{branch} is checked out in {where}, and only this command changes it: git switch to "
            "another branch there, or name one of its own with --branch"
        )
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise Refused("the clone is shallow, and merging needs history: git fetch --unshallow")


def is_marked(git: Git, commit: str) -> bool:
    """Whether this script made the commit, and nobody has changed it."""
    text = git("cat-file", "commit", commit)
    return f"{MARK} {text.split()[1]}" in text.splitlines()


def newest(git: Git, commits: list[str]) -> list[str]:
    """Leave out what the history of another holds."""
    return git("merge-base", "--independent", *commits).split() if commits else []


def merged_renders(project: Project) -> list[str]:
    """Give the newest renders that HEAD holds: several, where people regenerated side by side."""
    git = project.git
    found = git("rev-list", "--fixed-strings", f"--grep={MARK}", "HEAD").split()
    heads = newest(git, [commit for commit in found if is_marked(git, commit)])
    here = [head for head in heads if project in projects_in(git, head)]
    # One that lies elsewhere is the same, moved since, where no other project can be meant.
    is_alone = len(projects_in(git, "HEAD")) == 1
    return here or [head for head in heads if is_alone and place_in(head, project)]


def tips_of(project: Project, branch: str) -> list[str]:
    """Give the newest commits of the branch, here and at origin.

    Raises:
        Refused: one is not of this project.
    """
    git = project.git
    found = (git.find(f"refs/heads/{branch}"), git.find(f"refs/remotes/origin/{branch}"))
    tips = newest(git, [commit for commit in found if commit])
    if not all(place_in(tip, project) for tip in tips):
        raise Refused(
            f"the branch does not hold {project.package}: name one of its own with --branch"
        )
    return tips


def is_merged_elsewhere(git: Git, branch: str, tip: str) -> bool:
    """Whether another branch has renders that HEAD lacks: what follows on them would undo them."""
    missing = git("rev-list", "--first-parent", "--reverse", tip, "^HEAD").split()
    where = ("refs/heads", "refs/remotes")
    holds = [f"--contains={commit}" for commit in missing[:1]]
    names = git("for-each-ref", "--format=%(refname)", *holds, *where).split() if holds else []
    return any(not name.endswith(f"/{branch}") for name in names)


def nearest(project: Project, renders: list[str]) -> str:
    """Give the render from which HEAD differs in the fewest lines, in files that HEAD has."""
    git = project.git
    words = ("--literal-pathspecs", "diff", "--no-renames", "--shortstat", "--diff-filter=AM")

    def lines(commit: str) -> int:
        stat = git(*words, commit, "HEAD", "--", str(project.package))
        return sum(map(int, re.findall(r"\d+", stat)[1:]))

    return min(renders, key=lines)


def renders_before(project: Project, tips: list[str]) -> list[str]:
    """Give all renders of a history, the newest first."""
    return [c for c in project.git("rev-list", *tips).split() if is_marked(project.git, c)]


def was_answered(project: Project, commit: str) -> bool:
    """Whether a render has the answers that HEAD has."""
    place = place_in(commit, project)
    return place is not None and place.answers_in(commit) == project.answers_in("HEAD")


def is_alike(one: str, other: str, name: str) -> bool:
    """Whether two files differ in nothing but their format."""
    if not name.endswith(".py"):
        without_quotes = {ord("'"): None, ord('"'): None}
        one, other = one.translate(without_quotes), other.translate(without_quotes)
        return one.split() == other.split()
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    return False


class Options(argparse.Namespace):
    """What the command line says."""

    changes: list[str]
    dry_run: bool
    branch: str
    revision: str | None


@dataclass(frozen=True)
class Plan:
    """What is to be merged into what."""

    renderer: Renderer
    old: Answers
    new: Answers
    base: str
    """The commit that holds what the project was rendered as."""
    onto: str
    """HEAD; where it didn't come from the base, the same files as its child."""
    tip: str
    """The commit that holds what it is rendered as now."""

    @functools.cached_property
    def foreseen(self) -> list[str] | None:
        """Give the tree that the merge will make, and the files with conflicts."""
        words = ("merge-tree", "--write-tree", "--name-only", "--no-messages", "-z")
        done = self.renderer.project.git.run(*words, self.onto, self.tip, settings=MERGING)
        return done.stdout.split("\0")[:-1] if done.returncode in (0, 1) else None

    def show(self) -> bool:
        """Print what the template changes; whether it can be merged without a conflict."""
        git = self.renderer.project.git
        what = "the whole project" if self.renderer.is_whole else "the package directory alone"
        print(f"Project: {what}, in {self.renderer.place}")
        print(f"Template: {version_of()}")
        for key in sorted({*self.old, *self.new}):
            before, after = (in_words(a[key]) if key in a else None for a in (self.old, self.new))
            if before != after:
                print(f"Answer: {key}={before} becomes {after or 'no question any more'}")
        changes = git("diff", "-M", "--stat=100", "--summary", self.base, self.tip)
        print(changes or "The template changes nothing")
        if self.foreseen is None:
            print("Conflicts can't be foreseen: that needs git 2.38")
            return True
        conflicts = self.foreseen[1:]
        for name in conflicts:
            print(f"Conflict: {name}")
        return not conflicts

    def merge(self, branch: str) -> int:
        """Move the branch and merge it; the exit code: 1 where something is left to be done."""
        git = self.renderer.project.git
        message = f"Merge what the template renders ({words_of(self.old, self.new)})"
        words = ("merge", "--no-ff", "--commit", "--no-edit", "-m", message, self.tip)
        with self.moved(branch):
            done = git.run(*words, settings=MERGING)
            print(done.stdout + done.stderr, end="", flush=True)
            if done.returncode and git.find("MERGE_HEAD") is None:
                raise Refused("git did not merge, for the reason above: call again when it is gone")
        if done.returncode == 0:
            print(f"Merged. If you push, push both: git push origin HEAD {branch}")
            return 0
        if git("ls-files", "--unmerged"):
            print("Resolve the conflicts, then git add and git commit; or git merge --abort")
        else:
            print(
                "Merged, but not committed for the reason above: git commit, or git merge --abort"
            )
        return 1

    @contextlib.contextmanager
    def moved(self, branch: str) -> Iterator[None]:
        """Move HEAD, whose files stay as they are, and the branch; back, if that ends early."""
        git = self.renderer.project.git
        ref = f"refs/heads/{branch}"
        head = git("rev-parse", "HEAD")
        before = git.find(ref) or "0" * len(head)
        moves = f"update HEAD {self.onto} {head}\nupdate {ref} {self.tip} {before}\n"
        git("update-ref", "--stdin", "-m", "regenerate", stdin=moves)
        try:
            yield
        except BaseException:
            git("update-ref", "--stdin", stdin=f"update {ref} {before} {self.tip}\n")
            git("reset", "--quiet", "--merge", head)
            raise


def words_of(old: Answers, new: Answers) -> str:
    """Give the answers that changed, in a line."""
    changed = [f"{key}={in_words(new[key])}" for key in new if new[key] != old.get(key)]
    return " ".join(changed) or "the same answers"


def begin(renderer: Renderer, tip: str | None, project: Project, revision: str | None) -> str:
    """Give the commit that holds what the project was rendered as, where none is marked as such.

    Raises:
        Refused: this template does not render what the project began with.
    """
    git = project.git
    template = TEMPLATE if revision is None else template_at(revision, renderer.directory)
    first = tip or first_commit(project)
    answers = renderer.project.answers_in(first)
    tree = renderer.tree(template, choose_answers(answers, [], template), tip)
    if tip is not None and git("rev-parse", f"{tip}^{{tree}}") == tree:
        return tip
    if revision is None:
        renderer.require_alike(first, tree)
    parents = [tip] if tip else []
    return renderer.commit_render(
        tree, parents, f"Render {project.slug} as it began", version_of(revision)
    )


def find_base(project: Project, branch: str) -> tuple[str | None, list[str]]:
    """Give the commit that HEAD's project was rendered as, if there is one; and what to go on from.

    What was merged says it. The branch is asked where nothing was, as after a squash.

    Raises:
        Refused: the branch is of no use.
    """
    git = project.git
    merged, tips = merged_renders(project), tips_of(project, branch)
    heads = newest(git, merged + tips)
    marked = [head for head in heads if is_marked(git, head)]
    if marked != heads and (merged or len(heads) > 1):
        raise Refused(
            f"{branch}, here or at origin, has commits that this command did not make: take them "
            "away, or name another with --branch"
        )
    ours = [head for head in marked if not is_merged_elsewhere(git, branch, head)]
    if not merged:
        renders = renders_before(project, marked) if marked else []
        return nearest(project, renders) if renders else next(iter(tips), None), ours
    if not any(was_answered(project, one) for one in merged):
        # It may have been taken back, as by git revert.
        earlier = [one for one in renders_before(project, merged) if was_answered(project, one)]
        merged = [nearest(project, merged + earlier)]
    return merged[0], ours


def make_plan(project: Project, directory: Path, options: Options) -> Plan:
    """Render what the project was and what it is to be. Changes no branch and no file.

    Raises:
        Refused: the answers are, or the base is not what the project began with.
    """
    git, branch = project.git, options.branch
    old = project.answers_in("HEAD")
    new = choose_answers(old, options.changes, TEMPLATE)
    base, ours = find_base(project, branch)
    place = (place_in(base, project) if base else None) or project
    renderer = Renderer(place, directory, place.is_whole_in(base or first_commit(project)))
    if base is None or not is_marked(git, base):
        base = begin(renderer, base, project, options.revision)
    elif options.revision is not None:
        raise Refused(f"--from: {branch} knows what the project was: leave it out")
    held = [tip for tip in ours if git.holds("HEAD", tip)]
    if held and base not in held:
        again = git("log", "-1", "--no-show-signature", "--format=%B", base)
        base = renderer.commit(f"{base}^{{tree}}", held, again)
    onto = git("rev-parse", "HEAD")
    if not git.holds(onto, base):
        text = f"Join the branch {branch}, which holds what the template renders"
        onto = renderer.commit("HEAD^{tree}", [onto, base], text)
    tree = renderer.tree(TEMPLATE, new, base)
    parents = newest(git, [base, *ours])
    tip = parents[0]
    if len(parents) > 1 or git("rev-parse", f"{tip}^{{tree}}") != tree or not is_marked(git, tip):
        subject = f"Render {project.slug}: {words_of(old, new)}"
        tip = renderer.commit_render(tree, parents, subject, version_of())
    return Plan(renderer, old, new, base, onto, tip)


def first_commit(project: Project) -> str:
    """Give the commit with which the project came into the repository, which may be a merge."""
    file = str(project.package / ANSWERS_FILE)
    words = ("log", "-m", "--topo-order", "--diff-filter=A", "--format=%H")
    return project.git("--literal-pathspecs", *words, "--", file).split()[-1]


def require_room(plan: Plan, project: Project) -> None:
    """Refuse to write over files that git does not know, or ignores; or into another project.

    Raises:
        Refused: naming them.
    """
    git = plan.renderer.project.git
    command = ["diff", "--no-renames", "--name-only", "-z"]
    sides = (plan.onto, plan.foreseen[0]) if plan.foreseen else (plan.base, plan.tip)
    known = set(git.names("ls-files", "-z"))
    added = git.names(*command, "--diff-filter=A", *sides)
    if lost := [name for name in added if name not in known and os.path.lexists(git.top / name)]:
        raise Refused(f"files that are not committed are in the way: {', '.join(lost)}")
    others = [one.package for one in projects_in(git, "HEAD") if one != project]
    changed = [PurePosixPath(name) for name in git.names(*command, *sides)]
    if mixed := [str(name) for name in changed if {*name.parents} & {*others}]:
        raise Refused(
            f"git would take files of another project for those that were moved or deleted here: "
            f"{', '.join(mixed[:3])}. For a project that was moved, begin anew: --branch NAME "
            "--from HEAD"
        )


def main(argv: list[str] | None = None) -> int:
    """Regenerate the project in whose repository this is called; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("changes", nargs="*", metavar="KEY=ANSWER", help="answers to change")
    parser.add_argument("--dry-run", action="store_true", help="print what would change, only")
    parser.add_argument("--branch", default="template", help="where renders are kept (template)")
    parser.add_argument(
        "--from",
        dest="revision",
        help="the template's revision that made the project, where the branch is not there yet",
    )
    options = parser.parse_args(argv, namespace=Options())
    try:
        return regenerate(options)
    except (Refused, OSError) as error:
        print(f"Refused: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted, and nothing was changed", file=sys.stderr)
        return 130


def regenerate(options: Options) -> int:
    """Do what the command line says; the exit code.

    Raises:
        Refused: nothing was changed.
    """
    git = Git(Path(Git(Path.cwd())("rev-parse", "--show-toplevel")))
    require_ready(git, options.branch)
    with tempfile.TemporaryDirectory(prefix="regenerate-") as name:
        directory = Path(name)
        if options.dry_run:
            aside = directory / "objects"
            aside.mkdir()
            objects = json.dumps(str(git.top / git("rev-parse", "--git-path", "objects")))
            git = git.having(
                GIT_OBJECT_DIRECTORY=str(aside), GIT_ALTERNATE_OBJECT_DIRECTORIES=objects
            )
        project = find_project(git, Path.cwd())
        plan = make_plan(project, directory, options)
        require_room(plan, project)
        is_clean = plan.show()
        return int(not is_clean) if options.dry_run else plan.merge(options.branch)


if __name__ == "__main__":
    sys.exit(main())
