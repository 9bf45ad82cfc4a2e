"""Refuse answers that can't become a project, before a file is written.

Cookiecutter renders this file with Jinja and runs the result alone, from a temporary
directory: standard library only, no imports from this repository. The tables below are
plain literals, because the tests and the docs read them too.

Python before 3.10 must be able to parse it: it is refused in a sentence as well.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import unicodedata
from importlib.metadata import PackageNotFoundError, version

# The oldest release that this template was tried with.
OLDEST_COOKIECUTTER = (2, 6)

# Older ones don't know the names of their own modules.
OLDEST_PYTHON = (3, 10)

SLUG_LENGTHS = (2, 40)

# The answers of cookiecutter.json, once more: a replay file is not checked by cookiecutter.
CHOICES: dict[str, list[str] | list[bool]] = {
    "backend": ["nccl", "gloo", "mpi"],
    "nodes": ["single", "multi"],
    "cluster": ["none", "slurm", "kubernetes"],
    "amp": ["bf16", "fp16", "off"],
    "accumulation": [True, False],
    "checkpoint": ["rank0", "per_rank", "sharded"],
    "ema": [False, True],
    "example": ["digits", "bytes"],
    "tracker": ["tensorboard", "wandb", "mlflow", "none"],
    "ci": ["github", "gitlab", "none"],
}

# How cookiecutter renders, from cookiecutter.json once more: the settings of a person, or a replay
# file, can say something else.
FIXED: dict[str, object] = {
    "_jinja2_env_vars": {"trim_blocks": True, "lstrip_blocks": True},
    "_new_lines": "\n",
}

# What can't be rendered: answers that must all be given for a row to apply, and why not.
UNSUPPORTED: list[tuple[dict[str, str], str]] = [
    (
        {"backend": "mpi", "nodes": "multi", "cluster": "kubernetes"},
        "mpirun enters other machines by ssh, which pods don't let in: choose another backend",
    ),
]

# A package of one of these names would hide the one that the project imports.
IMPORTED: list[str] = [
    "absl",
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "alembic",
    "annotated_doc",
    "annotated_types",
    "anyio",
    "ast_serialize",
    "attr",
    "attrs",
    "blinker",
    "cachetools",
    "certifi",
    "cffi",
    "cfgv",
    "charset_normalizer",
    "click",
    "cloudpickle",
    "colorama",
    "contourpy",
    "coreweave_evaluations",
    "cryptography",
    "cuda",
    "cycler",
    "databricks",
    "dateutil",
    "distlib",
    "distro",
    "docker",
    "dotenv",
    "fastapi",
    "filelock",
    "flask",
    "flask_cors",
    "fonttools",
    "frozenlist",
    "fsspec",
    "functorch",
    "git",
    "gitdb",
    "google",
    "graphene",
    "graphql",
    "graphql_relay",
    "grpc",
    "gunicorn",
    "h11",
    "httpcore",
    "httpx",
    "huey",
    "hypothesis",
    "identify",
    "idna",
    "importlib_metadata",
    "iniconfig",
    "isympy",
    "itsdangerous",
    "jinja2",
    "joblib",
    "jsonargparse",
    "kiwisolver",
    "librt",
    "mako",
    "markdown",
    "markupsafe",
    "matplotlib",
    "mlflow",
    "mpi4py",
    "mpl_toolkits",
    "mpmath",
    "multidict",
    "mypy",
    "mypy_extensions",
    "mypyc",
    "narwhals",
    "networkx",
    "nodeenv",
    "numpy",
    "nvidia",
    "opentelemetry",
    "packaging",
    "pandas",
    "pathspec",
    "pil",
    "pip",
    "pkg_resources",
    "platformdirs",
    "pluggy",
    "pre_commit",
    "prettytable",
    "propcache",
    "psutil",
    "py",
    "pyarrow",
    "pyasn1",
    "pyasn1_modules",
    "pycparser",
    "pydantic",
    "pydantic_core",
    "pygments",
    "pylab",
    "pyparsing",
    "pytest",
    "python_discovery",
    "requests",
    "ruff",
    "safetensors",
    "scipy",
    "sentry_sdk",
    "setuptools",
    "six",
    "sklearn",
    "skops",
    "smmap",
    "sniffio",
    "sortedcontainers",
    "sqlalchemy",
    "sqlparse",
    "starlette",
    "sympy",
    "tensorboard",
    "tensorboard_data_server",
    "threadpoolctl",
    "torch",
    "torchaudio",
    "torchgen",
    "torchvision",
    "tqdm",
    "triton",
    "typing_extensions",
    "typing_inspection",
    "urllib3",
    "uvicorn",
    "virtualenv",
    "waitress",
    "wandb",
    "wcwidth",
    "werkzeug",
    "wheel",
    "xxhash",
    "yaml",
    "yarl",
    "zipp",
]

# What those are called where they are installed from: a project of one of these names would be
# taken for the package that it needs.
INSTALLED: list[str] = [
    "absl_py",
    "cwevals",
    "databricks_sdk",
    "gitpython",
    "google_auth",
    "googleapis_common_protos",
    "grpcio",
    "mlflow_skinny",
    "mlflow_tracing",
    "opentelemetry_api",
    "opentelemetry_exporter_http_transport",
    "opentelemetry_exporter_otlp_common",
    "opentelemetry_exporter_otlp_proto_common",
    "opentelemetry_exporter_otlp_proto_http",
    "opentelemetry_proto",
    "opentelemetry_sdk",
    "opentelemetry_semantic_conventions",
    "pillow",
    "protobuf",
    "python_dateutil",
    "python_dotenv",
    "pyyaml",
    "scikit_learn",
    "types_pyyaml",
]

# Python's own modules, in some of its releases only: not always in the one that runs this. Two
# that it imports when it starts, where there are any.
MODULES: list[str] = [
    "aifc",
    "annotationlib",
    "asynchat",
    "asyncore",
    "audioop",
    "binhex",
    "cgi",
    "cgitb",
    "chunk",
    "compression",
    "crypt",
    "distutils",
    "imghdr",
    "imp",
    "lib2to3",
    "mailcap",
    "msilib",
    "nis",
    "nntplib",
    "ossaudiodev",
    "pipes",
    "profiling",
    "sitecustomize",
    "smtpd",
    "sndhdr",
    "spwd",
    "sunau",
    "telnetlib",
    "tomllib",
    "usercustomize",
    "uu",
    "xdrlib",
]

# Directories of the project that git ignores, that tools take for their own or don't look into.
TAKEN: list[str] = [
    "build",
    "conftest",
    "dist",
    "gnumakefile",
    "makefile",
    "node_modules",
    "runs",
    "setup",
    "test",
    "tests",
]

# What Windows takes for a device, in every directory and with every suffix.
DEVICES = re.compile(r"aux|con|nul|prn|(com|lpt)[0-9]")


def check_cookiecutter() -> str | None:
    """Say why this cookiecutter can't render the template; None where it can."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(str(number) for number in OLDEST_PYTHON)
        return f"cookiecutter runs on Python {sys.version.split()[0]}, use {oldest} or newer"
    try:
        found = version("cookiecutter")
    except PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers >= OLDEST_COOKIECUTTER:
        return None
    oldest = ".".join(str(number) for number in OLDEST_COOKIECUTTER)
    return f"cookiecutter {found} is too old, install {oldest} or newer"


def check_slug(slug: str) -> str | None:
    """Say why the slug can't be the name of a Python package; None where it can."""
    shortest, longest = SLUG_LENGTHS
    if re.fullmatch(r"[a-z][a-z0-9_]*", slug) is None:
        reason = "is no import name, use lower-case letters, digits and underscores"
    elif slug.endswith("_"):
        reason = "ends with an underscore, which no package to install may, leave it out"
    elif not shortest <= len(slug) <= longest:
        reason = f"has {len(slug)} characters, use {shortest} to {longest}"
    elif keyword.iskeyword(slug):
        reason = "is a word of the Python language, choose another name"
    elif slug in sys.stdlib_module_names or slug in MODULES:
        reason = "would hide Python's own module, choose another name"
    elif slug in IMPORTED:
        reason = "would hide a package of that name, choose another name"
    elif slug in INSTALLED:
        reason = "would be taken for a package that it needs, choose another name"
    elif DEVICES.fullmatch(slug):
        reason = "is a device on Windows, choose another name"
    elif slug in TAKEN:
        reason = "is a directory that tools use, choose another name"
    else:
        return None
    return f"project_slug {slug!r} {reason}"


def check_text(key: str, text: object) -> str | None:
    """Say why a free text can't stand in a file; None where it can."""
    if not isinstance(text, str):  # YAML and JSON have more types
        return f"{key} is {text!r}, which is no text, put it in quotes"
    if not text.strip():
        return f"{key} is empty, type at least one character"
    for character in text:
        # Control characters, lone surrogates, line and paragraph separators, no characters.
        # Others are not asked about: this Python may be older than an emoji.
        is_none = ord(character) % 0x10000 >= 0xFFFE or 0xFDD0 <= ord(character) <= 0xFDEF
        if is_none or unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}:
            return f"{key} {text!r} holds {character!r}, use one line of printable text"
    for second in "%#{":  # never whole tags here: this file is a template itself
        if "{" + second in text:
            return f"{key} {text!r} holds a tag of the template engine, leave it out"
    return None


def check_choice(key: str, answer: object) -> str | None:
    """Say which answers the question has; None where this is one of them."""
    # 1 == True in Python, and a replay file can hold either.
    if any(type(answer) is type(known) and answer == known for known in CHOICES[key]):
        return None
    allowed = ", ".join(str(known).lower() for known in CHOICES[key])
    return f"{key}={answer!r} is no answer, choose from: {allowed}"


def check_private(answers: dict[str, object]) -> str | None:
    """Say what is no question and was answered all the same; None where nothing was."""
    dns_name = str(answers["project_slug"]).replace("_", "-")
    for key, expected in {"__dns_name": dns_name, **FIXED}.items():
        if answers.get(key, expected) != expected:
            return f"{key}={answers[key]!r} answers no question, leave it out"
    return None


def check(answers: dict[str, object]) -> str | None:
    """Give the first reason to refuse these answers, None where there is none."""
    if (too_old := check_cookiecutter()) is not None:
        return too_old
    reasons = [check_slug(str(answers["project_slug"]))]
    reasons += [check_text(key, answers[key]) for key in ("project_name", "author")]
    reasons += [check_choice(key, answers[key]) for key in CHOICES]
    reasons.append(check_private(answers))
    for row, reason in UNSUPPORTED:
        if all(answers[key] == answer for key, answer in row.items()):
            named = ", ".join(f"{key}={answer}" for key, answer in row.items())
            reasons.append(f"{named}: {reason}")
    return next((reason for reason in reasons if reason is not None), None)


def main() -> None:
    """End with one sentence and exit code 1 where the answers are refused."""
    # JSON in a raw string: no answer can end the string, and none is run as Python.
    answers = json.loads(r"""{{ cookiecutter | tojson }}""")
    reason = check(answers)
    if reason is not None:
        sys.exit(f"ERROR: {reason}.")


if __name__ == "__main__":
    main()
