"""Sealed files: what was written comes back, and nothing that another user could have written ever does."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest

from autofuse import private_files
from autofuse.private_files import PrivateFolder, Untrusted

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and permissions are POSIX's")


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    found = PrivateFolder(tmp_path / "data" / "graphs", tmp_path / "own" / "seal.key")
    found.write("a", b"content")
    return found


def mode(path):
    return path.stat().st_mode & 0o777


def test_what_was_written_comes_back_in_another_process(folder, tmp_path):
    assert folder.read("a") == b"content" and folder.names() == ["a"]
    text = (
        "import sys; from pathlib import Path; from autofuse.private_files import PrivateFolder as F;"
        "print(F(Path(sys.argv[1]), Path(sys.argv[2])).read('a'))"
    )
    command = [sys.executable, "-c", text, str(folder.path), str(tmp_path / "own" / "seal.key")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "b'content'"


def test_it_is_made_for_its_owner_alone(folder, tmp_path):
    assert mode(folder.path) == 0o700 and mode(folder.path / "a") == 0o600
    assert mode(tmp_path / "own") == 0o700 and mode(tmp_path / "own" / "seal.key") == 0o600
    with pytest.raises(FileNotFoundError):
        folder.read("b")


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "longer", "seal", "pickle"])
def test_what_is_not_as_it_was_written_is_refused(folder, damage):
    path = folder.path / "a"
    whole = path.read_bytes()
    changed = {
        "cut": whole[:-1],
        "empty": b"",
        "bit": whole[:-1] + bytes([whole[-1] ^ 1]),
        "longer": whole + b" ",
        "seal": whole[:12] + bytes([whole[12] ^ 1]) + whole[13:],
        "pickle": pickle.dumps("as another program writes it"),
    }[damage]
    path.write_bytes(changed)
    with pytest.raises(Untrusted, match="cut, altered or copied"):
        folder.read("a")
    path.write_bytes(whole)
    assert folder.read("a") == b"content"


def test_a_file_under_another_name_is_refused(folder):
    (folder.path / "a").rename(folder.path / "b")
    with pytest.raises(Untrusted, match="cut, altered or copied"):
        folder.read("b")


def test_a_file_of_another_users_key_is_refused(folder, tmp_path):
    other = PrivateFolder(folder.path, tmp_path / "other" / "seal.key")
    with pytest.raises(Untrusted, match="cut, altered or copied"):
        other.read("a")


@pytest.mark.parametrize("where", ["file", "folder", "parent"])
@pytest.mark.parametrize("bits", [0o002, 0o022])
def test_where_others_may_write_nothing_is_read_or_written(folder, where, bits):
    path = {"file": folder.path / "a", "folder": folder.path, "parent": folder.path.parent}[where]
    path.chmod(path.stat().st_mode | bits)
    with pytest.raises(Untrusted, match="may be written to by others"):
        folder.read("a")
    if where != "file":
        with pytest.raises(Untrusted, match="may be written to by others"):
            folder.write("b", b"")
        assert folder.names() == ["a"]


def test_a_shared_folder_above_is_fine_only_where_it_is_roots_and_sticky(folder, monkeypatch):
    folder.path.parent.chmod(0o1777)  # as /tmp, which lies above this one as well
    if os.geteuid() == 0:
        assert folder.read("a") == b"content"
        folder.path.parent.chmod(0o777)
    with pytest.raises(Untrusted, match="may be written to by others"):
        folder.read("a")


def test_links_are_refused(folder, tmp_path):
    path = folder.path / "a"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Untrusted, match="is a link"):
        folder.read("a")
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(Untrusted, match="no real folder"):
        PrivateFolder(tmp_path / "link", tmp_path / "own" / "seal.key").read("a")
    path.unlink()
    path.mkdir()
    with pytest.raises((Untrusted, IsADirectoryError)):
        folder.read("a")
    path.rmdir()
    os.mkfifo(path)  # reading it would wait for a writer
    with pytest.raises(Untrusted, match="no regular file"):
        folder.read("a")


def test_what_belongs_to_another_user_is_refused(folder, monkeypatch):
    if os.geteuid() == 0:
        os.chown(folder.path / "a", 65534, -1)
    else:
        monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Untrusted, match="belongs to another user"):
        folder.read("a")
    if os.geteuid() == 0:
        os.chown(folder.path / "a", 0, -1)
        assert folder.read("a") == b"content"
        for path in (folder.path, folder.path.parent):
            os.chown(path, 65534, -1)
            with pytest.raises(Untrusted, match="belongs to another user"):
                folder.read("a")
            os.chown(path, 0, -1)


@pytest.mark.parametrize("damage", ["readable", "short", "link"])
def test_a_key_that_others_may_know_is_not_used(folder, tmp_path, damage):
    key = tmp_path / "another" / "seal.key"  # the same, which this process has not read yet
    key.parent.mkdir(mode=0o700)
    shutil.copy2(tmp_path / "own" / "seal.key", key)
    if damage == "readable":
        key.chmod(0o640)
    elif damage == "short":
        key.write_bytes(b"1234")
    else:
        key.rename(tmp_path / "elsewhere")
        key.symlink_to(tmp_path / "elsewhere")
    damaged = PrivateFolder(folder.path, key)
    with pytest.raises(Untrusted, match=r"seal\.key"):
        damaged.read("a")
    with pytest.raises(Untrusted, match=r"seal\.key"):
        damaged.write("b", b"")


def test_files_that_are_not_ours_stay(folder, tmp_path):
    """A user's own folder of that name, and a link to one."""
    theirs = tmp_path / "thesis"
    theirs.mkdir()
    for number in range(9):
        (theirs / f"chapter{number}").write_text("precious")
        (folder.path / f"note{number}").write_text("precious")
    (tmp_path / "link").symlink_to(theirs)
    for place in (tmp_path / "link", theirs):
        PrivateFolder(place, tmp_path / "own" / "seal.key").prune(2, 1)
    folder.prune(0)
    assert len(list(theirs.iterdir())) == 9 and folder.names() == [f"note{number}" for number in range(9)]


def test_the_oldest_go(folder):
    folder.remove("a")
    for number in range(6):
        folder.write(f"key{number}", b"x" * 100)
        os.utime(folder.path / f"key{number}", (number, number))
    folder.prune(4)
    assert folder.names() == ["key2", "key3", "key4", "key5"]
    folder.prune(10, 350)
    assert folder.names() == ["key4", "key5"]
    PrivateFolder(folder.path / "nowhere").prune()
    assert PrivateFolder(folder.path / "nowhere").names() == []


@pytest.fixture
def uid_map(tmp_path, monkeypatch):
    """Writes a user namespace's map of user numbers, as an ordinary user of it sees that."""
    monkeypatch.setattr(private_files, "UID_MAP", tmp_path / "uid_map")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: 1234)

    def write(text):
        private_files.root_stand_in.cache_clear()
        (tmp_path / "uid_map").write_text(text)
        return private_files.root_stand_in()

    yield write
    private_files.root_stand_in.cache_clear()


def test_who_stands_for_root(uid_map):
    owner = os.stat("/").st_uid
    assert uid_map("      1234       1234          1\n") == owner
    assert uid_map("         0          0 4294967295\n") is None
    assert uid_map("         1     100000      65536\n         0       1000          1\n") is None
    assert uid_map("") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="making folders of another user takes root's rights")
def test_a_namespace_without_root(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    shared, theirs = tmp_path / "tmp", tmp_path / "tmp" / "theirs"
    theirs.mkdir(parents=True)
    for path in (shared, theirs):
        os.chown(path, 65534, 65534)
    shared.chmod(0o1777)
    (shared / "mine").mkdir()
    with pytest.raises(Untrusted, match="another user"):
        private_files.check_above(shared / "mine" / "store")
    monkeypatch.setattr(private_files, "root_stand_in", lambda: 65534)
    private_files.check_above(shared / "mine" / "store")
    with pytest.raises(Untrusted, match="another user"):  # who stands for root stands for all others too
        private_files.check_above(theirs / "store")
    shared.chmod(0o777)
    with pytest.raises(Untrusted, match="may be written to by others"):
        private_files.check_above(shared / "mine" / "store")
    with pytest.raises(Untrusted, match="another user"):
        private_files.check_folder(shared)
