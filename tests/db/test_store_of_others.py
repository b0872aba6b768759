"""A store, or a folder around one, that somebody else may have written to: refused in one line with what mends it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_records import start

from autofuse.db.store import Store
from autofuse.errors import StoreError

ATTACKER = 2002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making files of another user takes root's rights")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A store of ours."""
    folder = tmp_path / "data"
    with Store.open(folder / "store.db") as store:
        store.start_run(start())
    yield folder / "store.db"


def refusal(path: Path) -> str:
    found = set()
    for readonly in (False, True):
        with pytest.raises(StoreError) as caught:
            Store.open(path, readonly=readonly)
        found.add(str(caught.value))
    (line,) = found
    assert "\n" not in line and "--store PATH" in line
    return line


def test_it_is_private_from_the_first_byte(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Store.open(tmp_path / "a" / "b" / "store.db") as store:
            store.start_run(start())
            modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "a").rglob("*") if p.name[-5:] != ".lock"}
    finally:
        os.umask(before)
    assert modes == {"b": 0o700, "store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}


@pytest.mark.parametrize("bits", [0o002, 0o022])
@pytest.mark.parametrize("which", ["file", "folder", "parent", "log", "index"])
def test_where_others_may_write_it_is_refused_and_chmod_mends_it(place: Path, which: str, bits: int) -> None:
    names = {"file": place, "folder": place.parent, "parent": place.parent.parent}
    names |= {"log": place.with_name("store.db-wal"), "index": place.with_name("store.db-shm")}
    path = names[which]
    if which in ("log", "index"):
        path.touch(0o600)
    before = path.stat().st_mode & 0o777
    path.chmod(before | bits)
    assert f"chmod go-w {path}" in refusal(place)
    path.chmod(before)
    Store.open(place).close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_links_are_refused(place: Path, suffix: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    if suffix:
        target.touch(0o600)
    else:
        shutil.move(place, target)
    place.with_name(place.name + suffix).symlink_to(target)
    assert "is a link" in refusal(place)


def test_a_folder_of_ours_behind_a_link_of_ours_is_ours(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.parent)
    with Store.open(tmp_path / "link" / place.name) as store:
        assert len(store.runs()) == 1


@needs_root
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_files_of_another_user_are_refused(place: Path, suffix: str) -> None:
    file = place.with_name(place.name + suffix)
    file.touch(0o600)
    os.chown(file, ATTACKER, ATTACKER)
    assert f"{file} belongs to another user" in refusal(place)


@needs_root
def test_a_log_that_another_user_has_put_beside_the_store_changes_nothing(tmp_path: Path) -> None:
    """A store in a folder as /tmp is: SQLite would take its pages from the other user's log."""
    shared = tmp_path / "shared"
    shared.mkdir()
    with Store.open(shared / "store.db") as store:
        store.start_run(start())
    shared.chmod(0o1777)
    tmp_path.chmod(0o755)
    assert not (shared / "store.db-wal").exists()
    with sqlite3.connect(tmp_path / "theirs.db") as raw:
        raw.execute("PRAGMA journal_mode=WAL")
        raw.execute("CREATE TABLE runs (id)")
        shutil.copy(tmp_path / "theirs.db-wal", shared / "store.db-wal")
    raw.close()
    os.chown(shared / "store.db-wal", ATTACKER, ATTACKER)
    before = (shared / "store.db").read_bytes()
    assert f"chmod go-w {shared}" in refusal(shared / "store.db")
    assert (shared / "store.db").read_bytes() == before


@needs_root
def test_a_folder_of_another_user_is_refused(place: Path) -> None:
    os.chown(place.parent, ATTACKER, ATTACKER)
    assert f"{place.parent} belongs to another user" in refusal(place)
    with pytest.raises(StoreError, match="belongs to another user"):
        Store.open(place.with_name("new.db"))
    assert not place.with_name("new.db").exists()
