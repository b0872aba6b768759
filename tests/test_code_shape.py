"""Functions can be seen whole, take few parameters, and hand on records whose fields have names.

Migrations are left out: they say once what a schema was. ``*args`` and ``**kwargs`` are one thing each, which a record
may be made of. Exceptions are listed here, each with its reason, and must still be ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.test_layers import sources

MAX_LINES = 60
MAX_PARAMETERS = 8  # beside self or cls
MAX_ELEMENTS = 3  # of a tuple

MIGRATIONS = "db/migrations/versions/"

# Keys of dictionaries, made and hashed for each operator of a sampled step: a named record would slow that down.
KEYS = {"observer/op_statistics.py: _Kind", "observer/profile.py: OpKey"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(files: Mapping[str, str]) -> Iterator[tuple[str, ast.Module]]:
    for path, text in files.items():
        if not path.startswith(MIGRATIONS):
            yield path, ast.parse(text)


def functions(files: Mapping[str, str]) -> Iterator[tuple[str, Function]]:
    for path, tree in trees(files):
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{path}: {node.name}", node


def long_functions(files: Mapping[str, str]) -> set[str]:
    """Without their decorators."""
    return {name for name, node in functions(files) if (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES}


def broad_functions(files: Mapping[str, str]) -> set[str]:
    """With more parameters than a caller can keep in mind."""
    found = set()
    for name, node in functions(files):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        if len(names) - (names[:1] in (["self"], ["cls"])) > MAX_PARAMETERS:
            found.add(name)
    return found


def nameless_records(files: Mapping[str, str]) -> set[str]:
    """Types of tuples with so many elements that a reader cannot tell which is which."""
    found = set()
    for path, tree in trees(files):
        for statement in ast.walk(tree):
            if not isinstance(statement, Function | ast.AnnAssign | ast.Assign):
                continue
            if any(_is_broad_tuple(node) for part in _types(statement) for node in ast.walk(part)):
                found.add(f"{path}: {_name(statement)}")
    return found


def _types(statement: Function | ast.AnnAssign | ast.Assign) -> list[ast.expr]:
    """Annotations, and what may be an alias of a type."""
    if isinstance(statement, ast.Assign):
        return [statement.value]
    if isinstance(statement, ast.AnnAssign):
        return [statement.annotation]
    given = statement.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [x for x in (*(a and a.annotation for a in arguments), statement.returns) if x is not None]


def _is_broad_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name) or node.value.id != "tuple":
        return False
    return isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > MAX_ELEMENTS


def _name(statement: Function | ast.AnnAssign | ast.Assign) -> str:
    if isinstance(statement, Function):
        return statement.name
    return ast.unparse(statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0])


def test_functions_can_be_seen_whole() -> None:
    assert long_functions(sources()) == set()


def test_functions_take_few_parameters() -> None:
    assert broad_functions(sources()) == set()


def test_records_have_names_for_their_fields() -> None:
    assert nameless_records(sources()) == KEYS


def test_what_breaks_a_rule_is_found() -> None:
    body = "\n".join(["    x = 1"] * MAX_LINES)
    files = {
        "a.py": f"def long():\n{body}\n",
        "b.py": "class C:\n    def broad(self, a, b, c, d, /, e, f, *args, g, h, i, **rest): ...\n",
        "c.py": "def narrow(self, a, b, c, d, /, e, f, *args, g, h, **rest): ...\n",
        "d.py": "def f(x: list[tuple[int, str, int, str]]) -> tuple[int, ...]: ...\nRow = tuple[int, int, int, int]\n",
        "e.py": "x: dict[tuple[int, int, int, int], str] = {}\n",
        f"{MIGRATIONS}0001.py": f"def long():\n{body}\n",
    }
    assert long_functions(files) == {"a.py: long"}
    assert broad_functions(files) == {"b.py: broad"}
    assert nameless_records(files) == {"d.py: f", "d.py: Row", "e.py: x"}
