"""The floors of the package: a module imports from lower floors only, and no modules import each other in a circle.

Imports inside functions and under ``TYPE_CHECKING`` count. Strings that name modules (`startup.deferred_imports`, the
tables of lazy attributes) do not: they point upwards on purpose.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import autofuse

PACKAGE = Path(autofuse.__file__).parent

# The top one first. What stands on one floor does not import each other. The longest entry that fits a module counts.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__.py",),
    ("api.py", "cli/"),
    ("integrations/",),
    ("doctor.py", "sessions.py"),
    ("pipeline.py",),
    ("runtime/",),
    ("daemon/",),
    ("optim/",),
    ("tuner/",),
    ("wrapper/",),
    ("strategies/",),
    ("capture/",),
    ("gpu/",),
    ("report/", "process/"),
    ("fusion/",),
    ("codegen/generator.py", "codegen/triton/generator.py"),
    ("codegen/c/templates/", "codegen/triton/templates/"),
    ("codegen/c/", "codegen/triton/"),
    ("codegen/in_place.py", "codegen/matmul_operands.py"),
    ("codegen/lowering/",),
    ("codegen/",),
    ("observer/", "db/"),
    ("startup/",),
    ("settings/",),
    ("private_files.py",),
    ("ir/", "debug.py"),
    ("__init__.py",),
    ("dynamo_skip.py", "preserve_rng.py", "stderr.py", "detached.py", "job_ranks.py", "torch_compat.py"),
    ("hidden_thread.py", "script_signals.py", "warning_filters.py"),
    ("library_operators.py", "locks.py"),
    ("errors.py",),
)

# A library, and where alone it is imported.
HOMES: dict[str, tuple[str, ...]] = {
    "sqlalchemy": ("db/",),
    "alembic": ("db/",),
    "psycopg": (),
    "optuna": ("tuner/search.py",),
    "rich": ("report/", "cli/", "api.py", "integrations/"),
    "jinja2": ("report/html/",),
    "pygments": ("report/html/",),
    "typer": ("cli/",),
    "triton": ("codegen/triton/", "gpu/", "doctor.py", "daemon/workers/"),
}
WITHOUT_TORCH = (
    *("daemon/control.py", "daemon/loop.py", "daemon/files.py", "daemon/peers.py", "daemon/scheduler.py"),
    *("daemon/devices.py", "daemon/open_runs.py", "daemon/request_queue.py", "daemon/request_tuner.py"),
    *(
        "daemon/throttle.py",
        "daemon/tuning_results.py",
        "daemon/process_id.py",
        "daemon/fleet.py",
        "daemon/gpus.py",
        "report/",
        "db/",
        "settings/",
        "ir/",
    ),
)


class Import(NamedTuple):
    line: int
    name: str  # of a module, in full


@cache
def imports(text: str) -> tuple[Import, ...]:
    """All of a module's, wherever they stand. ``from a import b`` names ``a.b``, which may be a module or in one."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += (Import(node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return tuple(found)


@cache
def sources() -> dict[str, str]:
    """The package's modules, by their paths in it."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def file_of(name: str, files: Mapping[str, str]) -> str | None:
    """The module that a dotted name is of, or is in; None where it is none of ours."""
    parts = name.split(".")
    if parts[0] != "autofuse":
        return None
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[1:end])
        found = [p for p in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if p in files]
        if found:
            return found[0]
    return None


def place_of(path: str) -> tuple[int, str]:
    """The floor of a module, and the entry there that it belongs to."""
    fitting = [
        (len(entry), number, entry)
        for number, floor in enumerate(FLOORS)
        for entry in floor
        if path == entry or (entry.endswith("/") and path.startswith(entry))
    ]
    if not fitting:
        raise AssertionError(f"{path} stands on no floor: add it to FLOORS")
    _, number, entry = max(fitting)
    return number, entry


def edges(files: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Who imports whom, at which line."""
    for path, text in files.items():
        for found in imports(text):
            target = file_of(found.name, files)
            if target is not None and target != path:
                yield path, target, found.line


def upward(files: Mapping[str, str]) -> list[str]:
    """Imports of the same floor or a higher one."""
    wrong = []
    for path, target, line in edges(files):
        (floor, entry), (below, other) = place_of(path), place_of(target)
        if entry != other and below <= floor:
            wrong.append(f"{path}:{line} imports {target}, which stands no lower")
    return wrong


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Sets of modules each of which reaches all others, largest first (Tarjan, 1972)."""
    graph: dict[str, set[str]] = {path: set() for path in files}
    for path, target, _ in edges(files):
        graph[path].add(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(path: str) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for target in sorted(graph[path]):
            if target not in index:
                visit(target)
                low[path] = min(low[path], low[target])
            elif target in stack:
                low[path] = min(low[path], index[target])
        if low[path] == index[path]:
            at = stack.index(path)
            members, stack[at:] = sorted(stack[at:]), []
            if len(members) > 1:
                found.append(members)

    for path in sorted(graph):
        if path not in index:
            visit(path)
    return sorted(found, key=len, reverse=True)


def test_a_module_imports_from_lower_floors_only() -> None:
    assert not upward(sources())


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles(sources())


def test_an_import_turned_round_is_found() -> None:
    below = "ir/shape.py"
    turned = {
        **sources(),
        below: sources()[below] + "\ndef late():\n    from autofuse.fusion.graph import FusionGraph\n",
    }
    assert [line for line in upward(turned) if line.startswith(f"{below}:")]
    assert any(below in circle and "fusion/graph.py" in circle for circle in circles(turned))
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from autofuse.runtime.session import Session\n"
    assert len(upward({**sources(), "ir/buckets.py": checked})) == len(upward(sources())) + 1


def test_every_floor_has_modules() -> None:
    present = {place_of(path)[1] for path in sources()}
    assert present == {entry for floor in FLOORS for entry in floor}


def test_libraries_stay_at_home() -> None:
    wrong = [
        f"{path}:{found.line} imports {found.name}"
        for path, text in sources().items()
        for found in imports(text)
        for homes in (HOMES.get(found.name.partition(".")[0]),)
        if homes is not None and not path.startswith(homes)
    ]
    assert not wrong


def test_daemon_reports_and_store_import_no_torch() -> None:
    wrong = [
        f"{path}:{found.line} imports {found.name}"
        for path, text in sources().items()
        if path.startswith(WITHOUT_TORCH)
        for found in imports(text)
        if found.name.partition(".")[0] == "torch"
    ]
    assert not wrong
