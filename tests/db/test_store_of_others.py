"""A store, or a folder around one, that somebody else may have written to: refused in one line with what mends it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_records import TRITON_FILES, decision, kernel, key, request, start

from autofuse import private_files
from autofuse.db import seals
from autofuse.db.store import Store
from autofuse.errors import StoreError

ATTACKER = 2002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making files of another user takes root's rights")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A store of ours."""
    folder = tmp_path / "data"
    with Store.open(folder / "store.db") as store:
        store.runs.start(start())
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
            store.runs.start(start())
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
        assert len(store.runs.recent()) == 1


def test_no_folder_is_made_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match=f"chmod go-w {tmp_path}"):
        Store.open(tmp_path / "new" / "store.db")
    assert os.listdir(tmp_path) == []


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
        store.runs.start(start())
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


# ---- copies -----------------------------------------------------------------------------------------


@pytest.fixture
def copied(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a decision, its kernel and Triton's files that another user has made, copied and given to us."""
    theirs = tmp_path / "theirs.key"
    theirs.write_bytes(bytes(32))
    theirs.chmod(0o600)
    with monkeypatch.context() as other:
        other.setattr(seals, "seal", lambda name, data: private_files.seal(name, data, theirs))
        with Store.open(place) as store:
            record = kernel()
            store.kernels.put(record)
            store.kernels.put_triton_files("KEY", TRITON_FILES)
            store.results.put_decision(replace(decision(), compile_key=record.key.digest))
            assert store.kernels.get(record.key.digest) == record
    return place


def test_a_copied_store_brings_decisions_and_no_code(copied: Path) -> None:
    digest = kernel().key.digest
    with Store.open(copied) as store:
        assert [found.compile_key for _, found in store.results.decisions()] == [digest]
        assert store.kernels.get(digest) is None and store.kernels.get_triton_files("KEY") is None
        assert [row.event.kind for row in store.notes.events()] == [
            "damaged_kernel"
        ] * 2 and store.kernels.refused() == 1
        assert store.queue.add([request()]) == 1, "it is tuned again"
        store.kernels.put(kernel())
        assert store.kernels.get(digest) == kernel()
        store.queue.finish(key(), "done")
        assert store.queue.add([request()]) == 0


def test_a_kernel_under_another_name_or_key_is_refused(place: Path) -> None:
    with Store.open(place) as store:
        store.kernels.put(kernel("a"))
        store.kernels.put(kernel("b"))
        with sqlite3.connect(place) as raw:
            query = "SELECT binary, checksum FROM kernels WHERE source = 'a'"
            raw.execute("UPDATE kernels SET binary = ?, checksum = ? WHERE source = 'b'", raw.execute(query).fetchone())
            raw.execute("UPDATE kernels SET name = '../../af' WHERE source = 'a'")
        raw.close()
        assert store.kernels.get(kernel("a").key.digest) is None and store.kernels.get(kernel("b").key.digest) is None


def test_without_a_place_for_a_key_it_says_so(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(private_files, "default_store", lambda: tmp_path / "file" / "autofuse" / "store.sqlite3")
    with Store.open(place) as store, pytest.raises(StoreError, match="XDG_DATA_HOME=PATH"):
        store.kernels.put(kernel())
