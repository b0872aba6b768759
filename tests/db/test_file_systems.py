"""Stores where other machines may write too: told by the file system, and kept without a log in shared memory."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from store_records import start

from autofuse.db import file_systems
from autofuse.db.file_systems import network_type
from autofuse.db.store import Store

LOCAL = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"


def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: tuple[Path, str]) -> None:
    rows = [f"3{n} 27 0:4{n} / {str(path).replace(' ', chr(92) + '040')} rw,relatime shared:1 - {kind} server:/x rw\n"
            for n, (path, kind) in enumerate(lines)]  # fmt: skip
    (tmp_path / "mountinfo").write_text(LOCAL + "".join(rows))
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mountinfo")


def test_the_deepest_mount_and_of_equals_the_last_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my home"
    below = [("scratch", "xfs"), ("ssh", "fuse.sshfs"), ("x", "ext4"), ("x", "9p")]
    mounts(tmp_path, monkeypatch, (home, "nfs4"), *((home / name, kind) for name, kind in below))
    places = ("a", "scratch/a", "ssh/a", "x/a", "scratches/a")
    assert [network_type(home / place) for place in places] == ["nfs4", "", "fuse.sshfs", "9p", "nfs4"]
    assert network_type(tmp_path / "elsewhere") == ""
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "none")
    assert network_type(home) == ""


@pytest.mark.parametrize("name", ["d\xe4t\xe4", "d\udce4t", "a b"], ids=["utf-8", "bytes", "blank"])
def test_names_of_mounts_are_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = b"31 27 0:41 / %s rw - nfs4 server:/x rw\n" % os.fsencode(f"/mnt/{name}").replace(b" ", rb"\040")
    (tmp_path / "mountinfo").write_bytes(LOCAL.encode() + row)
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "mountinfo")
    assert network_type(Path(f"/mnt/{name}/x")) == "nfs4"
    assert network_type(tmp_path) == ""


@pytest.mark.parametrize("kind", ["fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.glusterfs", "fuse.new", "fuse"])
def test_file_systems_of_fuse_that_others_may_write_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(tmp_path, monkeypatch, (tmp_path, kind))
    assert network_type(tmp_path) == kind


@pytest.mark.parametrize("kind", ["fuseblk", "fuseblk.ntfs-3g", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fusectl"])
def test_file_systems_of_fuse_on_disks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts(tmp_path, monkeypatch, (tmp_path, kind))
    assert network_type(tmp_path) == ""


def journal(path: Path) -> str:
    with sqlite3.connect(path) as raw:
        (mode,) = raw.execute("PRAGMA journal_mode").fetchone()
    raw.close()
    return str(mode)


def test_a_store_of_a_network_has_no_shared_log_and_one_that_moves_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / "store.db"
    mounts(tmp_path, monkeypatch, (tmp_path, "nfs"))
    with Store.open(path) as store, Store.open(path) as other:
        store.runs.start(start())
        assert len(other.runs.recent()) == 1
        assert sorted(os.listdir(path.parent)) == ["store.db", "store.db.lock"]
    assert journal(path) == "delete"
    mounts(tmp_path, monkeypatch)
    Store.open(path).close()
    assert journal(path) == "wal"
    mounts(tmp_path, monkeypatch, (tmp_path, "lustre"))
    with Store.open(path) as store:
        assert len(store.runs.recent()) == 1
    assert journal(path) == "delete"
