"""The list of torch's private names: complete, and able to find that one is gone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import autofuse
from autofuse import doctor, torch_compat
from autofuse.settings.layers import Settings
from autofuse.torch_compat import PRIVATE, count, missing

PACKAGE = Path(autofuse.__file__).parent


def _names_of(text: str) -> Iterator[str]:
    """All names of torch that a module imports or reaches through an import, in full."""
    tree = ast.parse(text)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and _is_torch(node.module):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    yield from known.values()
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            parts, owner = [], node
            while isinstance(owner, ast.Attribute):
                parts.append(owner.attr)
                owner = owner.value
                inner.add(owner)
            if isinstance(owner, ast.Name) and owner.id in known:
                yield ".".join([known[owner.id], *reversed(parts)])


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _used() -> dict[str, set[str]]:
    """Private names, with the files that use them; a module is left out where more than it is named."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "torch_compat.py":
            continue
        for name in _names_of(path.read_text()):
            if _is_private(name):
                found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return {name: files for name, files in found.items() if not any(other.startswith(name + ".") for other in found)}


def test_the_list_is_complete_and_names_nothing_else():
    listed = [name for group in PRIVATE for name in group.names]
    assert len(listed) == len(set(listed))
    used = _used()
    assert {name: used[name] for name in used.keys() - set(listed)} == {}, "to be listed in torch_compat.py"
    assert set(listed) - used.keys() == set(), "listed in torch_compat.py, and used by nothing"


def test_this_torch_has_them_all():
    assert missing() == {}


@pytest.mark.parametrize("gone", ["torch._no_such_name", "torch._no_such_module.name", "torch.nn.Module._no_such_name"])
def test_a_name_that_is_gone_is_found(gone, monkeypatch):
    group = replace(PRIVATE[0], names=(*PRIVATE[0].names, gone))
    monkeypatch.setattr(torch_compat, "PRIVATE", (group, *PRIVATE[1:]))
    assert missing() == {group: (gone,)}


def test_doctor_says_what_is_gone_and_what_is_lost():
    (sound,) = doctor.examine(Settings(), ["torch's private names"])
    assert sound.ok and sound.found == f"all {count()} that autofuse uses are there"
    lost = doctor.names_finding(
        count(), [doctor.Lack("kept traces", "each run traces anew", False, ["torch._x", "torch._y"])]
    )
    assert not lost.ok and not lost.essential
    assert lost.found == "torch._x, torch._y gone (kept traces): each run traces anew"
    assert "pip install" in lost.remedy
    assert doctor.names_finding(1, [doctor.Lack("observing", "nothing is observed", True, ["torch._x"])]).essential


def test_names_are_read_through_any_import():
    text = (
        "import torch\nimport torch._a.b as c\nfrom torch._d import e as f\n"
        "def g():\n    from torch._h import i\n    return torch.x._y.z, c.one._two, f(i.three)\n"
    )
    assert {n for n in _names_of(text) if _is_private(n)} == {
        *("torch._a.b", "torch._d.e", "torch._h.i", "torch.x._y.z", "torch._a.b.one._two", "torch._h.i.three"),
    }
