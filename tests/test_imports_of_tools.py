"""Benchmarks, fuzzers and examples import names that autofuse has: most of them run too rarely to show it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "examples", "faults", "fuzz", "ptx", "scripts")


def missing(path: Path) -> list[str]:
    """Names that a file imports from autofuse, and that are not there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autofuse":
            module = importlib.import_module(str(node.module))
            names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            found += [name for name in names if not is_module(f"{node.module}.{name}")]
    return [f"{path.relative_to(ROOT)}: {name}" for name in found]


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_every_name_that_is_imported_from_autofuse_exists() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    assert [line for path in paths for line in missing(path)] == []


def test_benchmarks_find_the_tests_that_they_import() -> None:
    """A benchmark is run by its path, with its own folder on Python's path and not the checkout."""
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    run = [name for name, text in texts.items() if "__main__" in text and ("from tests" in text or "from ptx" in text)]
    assert "gpu_static.py" in run
    assert [name for name in run if "sys.path.insert" not in texts[name]] == []
