"""What doctor says of stores that cannot be used as they are, or not at their best."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofuse.db import file_systems
from autofuse.db.store import Store
from autofuse.doctor import Finding, examine
from autofuse.settings.layers import load


def check(path: Path) -> Finding:
    (found,) = examine(load({"run.store": path}, environ={}, cwd=path.parent.parent), ["store"])
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "data" / "store.sqlite3"
    Store.open(place).close()
    return place


def test_a_store_that_others_may_write_to_is_no_sound_one(path: Path) -> None:
    assert check(path).ok and check(path).found == str(path)
    path.chmod(0o666)
    found = check(path)
    assert not found.ok and found.essential and f"chmod go-w {path}" in found.found
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert not check(path).ok and f"chmod go-w {path.parent}" in check(path).found
    path.unlink()
    assert not check(path).ok, "nor a place for one"


def test_a_store_on_a_network_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = path.parent / "mountinfo"
    mounts.write_text(f"31 27 0:41 / {path.parent} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(file_systems, "MOUNTS", mounts)
    found = check(path)
    assert found.ok and f"{path} on nfs4, which other machines may share" in found.found
