"""Remove directories that stayed empty, then print the answers and the next commands.

Cookiecutter makes a directory even where the name of its only file rendered empty. Only
`os.rmdir` is used: a directory that holds anything is left as it is.
"""

import contextlib
import json
import os


def remove_empty_directories() -> None:
    """Remove the workflow directories of a project without workflows."""
    for directory in (".github/workflows", ".github"):
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def say(*lines: str) -> None:
    """Print lines. Where nobody reads them, no error: cookiecutter would remove the project."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is printed again at the end


def main() -> None:
    """Say what was rendered and how to go on; a mistyped question shows as its default."""
    # JSON in a raw string: no answer can end the string, and none is run as Python.
    answers = json.loads(r"""{{ cookiecutter | tojson }}""")
    slug = answers["project_slug"]
    remove_empty_directories()

    named = (
        f"{key}={str(answer).lower() if isinstance(answer, bool) else answer}"
        for key, answer in answers.items()
        if not key.startswith("_") and key not in {"project_name", "author"}
    )
    texts = (f"{key}={json.dumps(answers[key])}" for key in ("project_name", "author"))
    say(
        f"Answers: {' '.join(named)}",
        f"Texts: {' '.join(texts)}",
        "Next:",
        f"  cd {slug}",
        "  make install   # in a virtual environment",
        "  make test",
        f"  make debug     # a few steps; then: make train, {slug}/launch/",
    )


if __name__ == "__main__":
    main()
