"""Which rendered packages to type: few, in which each module meets whatever it can meet.

What mypy says of a module depends on its text, and on what the modules that it imports show to
others. Everything is annotated, so that is their text without the bodies of functions. The packages
taken hold each text of a module beside each such outside of each module that it reaches: an error
between two modules is found whatever else was chosen.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from tests.rendering import Rendered

Module = tuple[str, ...]
Seen = tuple[int, ...]


class _Outside(ast.NodeTransformer):
    """Leaves of each function what others see: its signature, and the attributes that it sets."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kept: list[ast.stmt] = [
            statement
            for statement in ast.walk(node)
            if (isinstance(statement, ast.Assign) and _sets_attribute(*statement.targets))
            or (isinstance(statement, ast.AnnAssign) and _sets_attribute(statement.target))
        ]
        node.body = [*kept, ast.Pass()]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node  # a docstring


def _sets_attribute(*targets: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) for target in targets for node in ast.walk(target))


@functools.cache
def _outside(text: str) -> int:
    return hash(ast.dump(_Outside().visit(ast.parse(text))))


@functools.cache
def _imports(text: str) -> frozenset[tuple[int, Module]]:
    """Give what a text may import of its own package: levels up, and the path from there."""
    found: set[tuple[int, Module]] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = tuple((node.module or "").split(".")) if node.module else ()
            found.update([(node.level, base), *((node.level, (*base, a.name)) for a in node.names)])
    return frozenset(found)


def _reached(module: Module, texts: dict[Module, str]) -> set[Module]:
    """Give the modules that a module imports, and that these import, and so on."""
    reached: set[Module] = set()
    left = [module]
    while left:
        importer = left.pop()
        for level, path in _imports(texts[importer]):
            imported = importer[:-level] + path
            for candidate in (imported, (*imported, "__init__")):
                if candidate in texts and candidate not in reached:
                    reached.add(candidate)
                    left.append(candidate)
    return reached


def _meetings(rendered: Rendered) -> Iterator[Seen]:
    """Give each module's text alone, and beside each outside that it reaches, as hashes."""
    texts = {
        PurePosixPath(name).with_suffix("").parts[1:]: text
        for name, text in rendered.texts.items()
        if name.startswith("P/") and name.endswith(".py")
    }
    for module, text in texts.items():
        yield hash(module), hash(text)
        for other in _reached(module, texts):
            yield hash(module), hash(text), hash(other), _outside(texts[other])


def covering(packages: Iterable[Rendered]) -> list[Rendered]:
    """Give few of these packages in which everything meets that meets in any of them."""
    meetings = [(rendered, set(_meetings(rendered))) for rendered in packages]
    missing = set().union(*(met for _, met in meetings))
    chosen: list[Rendered] = []
    while missing:
        best, met = max(meetings, key=lambda pair: len(pair[1] & missing))
        missing -= met
        chosen.append(best)
    return chosen
