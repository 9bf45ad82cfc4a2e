"""Which branches of the Jinja templates were rendered, and which never were.

While `recorded()` is open, each template that Jinja parses gets a marker at the start of every
branch of its conditions, a missing `else` included. A branch that exists and was never entered
by any rendered variant is dead text in the template.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from jinja2 import Environment, nodes
from jinja2.defaults import DEFAULT_NAMESPACE

_MARKER = "__branch_entered"


@dataclass
class Branches:
    """Branches by label, `where:line: condition`, and the templates that were parsed."""

    known: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    templates: set[str] = field(default_factory=set)

    def save(self, path: Path) -> None:
        """Write them where another process finds them."""
        lists = {name: sorted(values) for name, values in vars(self).items()}
        path.write_text(json.dumps(lists))

    @classmethod
    def load(cls, path: Path) -> "Branches":
        """Read what `save` wrote."""
        return cls(**{name: set(values) for name, values in json.loads(path.read_text()).items()})

    def enter(self, label: str) -> str:
        """Note a branch; what a template prints in its place."""
        self.entered.add(label)
        return ""

    def mark(
        self, template: nodes.Template, source: str, name: str | None, environment: Environment
    ) -> None:
        """Put a marker at the start of each branch of a parsed template."""
        self.templates.add(name or source)
        where = name or source.lstrip().splitlines()[0]
        lines = source.splitlines()
        conditions = list(template.find_all(nodes.If))
        # The else of a chain belongs to its first condition.
        later = {id(other) for condition in conditions for other in condition.elif_}
        for condition in conditions:
            line = condition.test.lineno
            label = f"{where}:{line}: {lines[line - 1].strip()}"
            condition.body.insert(0, self._marker(f"{label} [taken]"))
            if id(condition) not in later:
                condition.else_.insert(0, self._marker(f"{label} [else]"))
        template.set_environment(environment)

    def _marker(self, label: str) -> nodes.Node:
        self.known.add(label)
        call = nodes.Call(
            nodes.Name(_MARKER, "load"), [nodes.Const(label)], [], None, None, lineno=1
        )
        return nodes.Output([call], lineno=1)


@contextmanager
def recorded() -> Iterator[Branches]:
    """Record the branches of everything that is rendered meanwhile, in this process."""
    branches = Branches()
    parse = Environment._parse

    def marked(
        self: Environment, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        template = parse(self, source, name, filename)
        branches.mark(template, source, name, self)
        return template

    # An environment begins with these names, whether it parses a template or has it from another.
    names = mock.patch.dict(DEFAULT_NAMESPACE, {_MARKER: branches.enter})
    with mock.patch.object(Environment, "_parse", marked), names:
        yield branches
