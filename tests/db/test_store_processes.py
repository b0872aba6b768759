"""Several processes and threads on one store: nothing is lost, torn or stuck."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_records import DEVICE, decision, request, start, steps

from autofuse.db.store import Store

APPEND = """
import sys
from pathlib import Path
from autofuse.db.store import Store
from autofuse.ir.records import *
path, name, batches = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with Store.open(path) as store:
    run_id = store.runs.start(RunStart(name, DeviceInfo("cpu", "n", 1, "sse"), "v", "off", 1))
    for batch in range(batches):
        store.steps.add(run_id, [StepSample(name, "s", False, 1, batch * 10 + i, 1.0) for i in range(10)])
        store.runs.update_totals(run_id, RunTotals(steps=batch))
print(run_id)
"""


def append(path: Path, name: str, batches: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", APPEND, str(path), name, str(batches)], stdout=subprocess.PIPE, text=True
    )


def test_two_writers_and_a_reader(path: Path) -> None:
    writers = [append(path, name, 60) for name in ("one", "two")]  # they race for the creation, too
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if not path.exists():
            continue
        with Store.open(path) as reader:
            for run in reader.runs.recent():
                found = reader.steps.of_run(run.id)
                assert len(found) % 10 == 0  # whole transactions only
                assert [sample.index for sample in found] == list(range(len(found)))
                seen += 1
    assert seen
    with Store.open(path, readonly=True) as store:
        for writer, name in zip(writers, ("one", "two"), strict=True):
            output, _ = writer.communicate()
            assert writer.returncode == 0
            assert store.runs.get(int(output)).command == name
            assert [sample.index for sample in store.steps.of_run(int(output))] == list(range(600))


KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import text
from autofuse.db.store import Store
store = Store.open(Path(sys.argv[1]))
with store.file.write() as connection:
    connection.execute(text("INSERT INTO events (kind, message, data, at) VALUES ('half', '', '{}', 0)"))
    connection.execute(text("UPDATE run_totals SET \\"values\\" = '{}'"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_mid_transaction_leaves_no_trace(store: Store, path: Path) -> None:
    run_id = store.runs.start(start())
    store.steps.add(run_id, steps(10))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert killed.returncode == -signal.SIGKILL
    assert store.notes.events() == []
    store.results.put_decision(decision())  # its lock is gone with it
    assert len(store.steps.of_run(run_id)) == 10
    store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def killed_half_way(path: Path, code: str) -> None:
    """Open a store in a process that ``code`` has end at the wrong moment."""
    code = f"""
import os, signal
from pathlib import Path
def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
{code}
from autofuse.db.store import Store
Store.open(Path({str(path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def test_a_store_killed_half_made_is_an_empty_file(path: Path) -> None:
    code = """
from sqlalchemy import event
from autofuse.db.models import Base
event.listen(Base.metadata.sorted_tables[5], "after_create", kill)
"""
    killed_half_way(path, code)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    with Store.open(path) as store:
        assert store.runs.recent() == []


def test_an_upgrade_killed_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    connection = sqlite3.connect(path)
    connection.executescript((Path(__file__).with_name("assets") / "schema_0001.sql").read_text())
    before = connection.execute("SELECT name, sql FROM sqlite_master").fetchall()
    connection.close()
    path.chmod(0o600)
    killed_half_way(path, "from alembic import op; op.create_table = kill")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name, sql FROM sqlite_master").fetchall() == before
    connection.close()
    with Store.open(path) as store:
        assert store.runs.get(1).command == "train.py"


def test_a_request_is_taken_once(path: Path) -> None:
    code = """
import sys
from pathlib import Path
from autofuse.db.store import Store
with Store.open(Path(sys.argv[1])) as store:
    sys.stdin.readline()
    while (taken := store.queue.take(sys.argv[2])) is not None:
        print(taken.key.fusion_id)
"""
    ids = [f"{i:064x}" for i in range(40)]
    with Store.open(path) as store:
        store.queue.add([request(fusion_id) for fusion_id in ids])
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), DEVICE.key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    taken = [line for taker in takers for line in taker.communicate("\n")[0].split()]
    assert sorted(taken) == ids


def test_one_object_shared_by_threads(store: Store) -> None:
    run_ids = [store.runs.start(start()) for _ in range(4)]
    failures: list[BaseException] = []

    def work(run_id: int) -> None:
        try:
            for batch in range(20):
                store.steps.add(run_id, steps(5, first=batch * 5))
                store.data_version()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(run_id,)) for run_id in run_ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(len(store.steps.of_run(run_id)) == 100 for run_id in run_ids)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_gets_a_connection_of_its_own(store: Store) -> None:
    run_id = store.runs.start(start())
    child = os.fork()
    if child == 0:  # as a worker of a DataLoader
        try:
            store.steps.add(run_id, steps(3))
            os._exit(0)
        except BaseException:
            os._exit(1)
    store.results.put_decision(decision())
    assert os.waitpid(child, 0)[1] == 0
    assert len(store.steps.of_run(run_id)) == 3
