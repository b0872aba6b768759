"""Stores that cannot be used: one clear error each, and nothing of anybody's is touched."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import decision, start, steps

from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.records import Event

NOBODY = 65534


def test_parents_are_made_private(path: Path) -> None:
    Store.open(path).close()
    assert path.parent.stat().st_mode & 0o777 == 0o700


@given(st.binary(min_size=1, max_size=3000))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.db"
    path.write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(StoreError, match=r"expected a store of autofuse at .*garbage\.db") as caught:
            Store.open(path, readonly=readonly)
        assert f"autofuse store reset --store {path}" in str(caught.value) and "--store PATH" in str(caught.value)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["garbage.db"]


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "firefox.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="found a database of another program"):
        Store.open(path)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    with Store.open(path) as store:
        assert store.runs.recent() == []


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="found a directory"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match=r"found no such file; fill one with: autofuse run SCRIPT\.py"):
        Store.open(tmp_path / "none.db", readonly=True)
    with pytest.raises(StoreError, match="expected a store that can be written"):
        (tmp_path / "file").touch()
        Store.open(tmp_path / "file" / "store.db")
    assert os.listdir(tmp_path) == ["file"]


def test_a_damaged_store_is_an_error(store: Store, path: Path) -> None:
    run_id = store.runs.start(start())
    store.steps.add(run_id, steps(3000))
    store.close()
    content = bytearray(path.read_bytes())
    content[-20 * 4096 :] = b"\xaa" * (20 * 4096)  # steps
    path.write_bytes(content)
    with Store.open(path) as damaged:
        with pytest.raises(StoreError, match="found a damaged one"):
            damaged.steps.of_run(run_id)
        assert damaged.runs.get(run_id).command == "train.py"
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="found a damaged one"):
        Store.open(path)


def test_a_row_with_broken_json_is_an_error(store: Store, path: Path) -> None:
    run_id = store.runs.start(start())
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET settings = '{'")
    connection.close()
    with pytest.raises(StoreError, match="refused a request"):
        store.runs.get(run_id)


def test_a_locked_store_is_an_error_after_its_timeout(store: Store, path: Path) -> None:
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with Store.open(path, timeout_seconds=0.1) as other:
        assert other.runs.recent() == []  # readers do not wait
        with pytest.raises(StoreError, match="found it locked by another process"):
            other.results.put_decision(decision())
        blocker.execute("ROLLBACK")
        other.results.put_decision(decision())
    blocker.close()


# ---- read-only places: as another user, because root may write everywhere ---------------------------


@pytest.fixture
def shared_folder(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/tmp") / f"autofuse-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def without_rights(work: Callable[[], list[str]]) -> list[str]:
    """The lines that ``work`` gives when a user runs it who may write nowhere."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, "\n".join(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        lines = file.read().split("\n")
    os.waitpid(child, 0)
    return lines


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_readonly_directory(shared_folder: Path) -> None:
    kept, missing = shared_folder / "kept.db", shared_folder / "missing.db"
    with Store.open(kept) as store:
        store.runs.start(start())
    kept.chmod(0o444)
    (shared_folder / "kept.db.lock").unlink()
    closed = shared_folder / "closed"
    closed.mkdir(mode=0o500)
    shared_folder.chmod(0o555)

    def work() -> list[str]:
        lines = []
        for path in (missing, kept, closed / "store.db"):
            try:
                with Store.open(path) as opened:
                    opened.notes.add_event(None, Event("a", "b"))
                lines.append("written")
            except StoreError as error:
                lines.append(str(error))
        with Store.open(kept, readonly=True) as opened:
            return [*lines, *(run.command for run in opened.runs.recent()), str(opened.kernels.get("0"))]

    *messages, command, kernel = without_rights(work)
    assert len(messages) == 3
    for line in messages:
        assert "expected a store that can be written at" in line and "--store PATH" in line
    assert (command, kernel) == ("train.py", "None")
    assert sorted(os.listdir(shared_folder)) == ["closed", "kept.db"]


# ---- a full disk ------------------------------------------------------------------------------------

FILL = """
import sys
from pathlib import Path
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.records import DeviceInfo, RunStart, StepSample
path = Path(sys.argv[1])
stored = 0
try:
    with Store.open(path) as store:
        while stored < 10_000_000:
            run_id = store.runs.start(RunStart("x", DeviceInfo("cpu", "n", 1, "sse"), "v", "off", 1))
            store.steps.add(run_id, [StepSample("R", "s", False, 1, i, 1.0) for i in range(1000)])
            stored += 1000
except StoreError as error:
    print(error)
print(stored)
"""


def check_filled(output: str, path: Path) -> None:
    message, stored = output.splitlines()
    assert f"expected to write the store {path}, found no room or a failing disk" in message
    assert "--store PATH" in message and int(stored) > 0
    with Store.open(path, readonly=True) as store:
        assert sum(len(store.steps.of_run(run.id)) for run in store.runs.recent()) == int(stored)


def test_a_file_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "store.db"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run([sys.executable, "-c", FILL, str(path)], preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_filled(done.stdout, path)


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root's rights")
    try:
        path = disk / "store.db"
        done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        check_filled(done.stdout, path)
        (disk / "full").write_bytes(b"")
        for size in (1 << 16, 1 << 10, 1):  # what is left
            with pytest.raises(OSError), open(disk / "full", "ab", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        with pytest.raises(StoreError, match="found no room"):
            Store.open(disk / "second.db")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
