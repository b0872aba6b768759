"""A store that a process of its own keeps: it answers as the store does, and ends with whoever has started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from store_records import DEVICE, VERSIONS, decision, kernel, request, start, steps

from autofuse.db import client as client_module
from autofuse.db.client import StoreClient
from autofuse.db.store import Store
from autofuse.db.wire import Wire
from autofuse.errors import StoreError, StoreVersionError
from autofuse.ir.records import RunTotals


@pytest.fixture
def client(path: Path) -> Iterator[StoreClient]:
    made = StoreClient(path, 5.0)
    yield made
    made.close()


def process_of(client: StoreClient) -> psutil.Process:
    client.data_version()  # it runs
    return next(p for p in psutil.process_iter(["cmdline"]) if str(client.path) in (p.info["cmdline"] or ()))


def test_it_answers_as_the_store_does(client: StoreClient, path: Path) -> None:
    assert not client.was_there
    run = client.runs.start(start())
    client.steps.add(run, steps(3))
    client.queue.add([request()])
    client.kernels.put(kernel())
    client.results.put_decision(decision())
    client.runs.finish(run, RunTotals(steps=3))
    assert client.kernels.refused() == 0
    with Store.open(path) as store:
        assert client.runs.recent() == store.runs.recent() and client.steps.of_run(run) == store.steps.of_run(run)
        assert client.queue.length() == store.queue.length() and client.queue.length().queued == 1
        found = store.results.decisions(DEVICE.key, VERSIONS, 0)
        assert client.results.decisions(DEVICE.key, VERSIONS, 0) == found and len(found) == 1
        digest = kernel().key.digest
        assert client.kernels.get(digest) == store.kernels.get(digest) and store.kernels.get(digest) is not None
    assert StoreClient(path, 5.0).was_there


def test_its_errors_are_the_stores(client: StoreClient, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected run 77"):
        client.runs.get(77)
    with pytest.raises(StoreError, match="no_such_method"):
        client.no_such_method()
    with pytest.raises(StoreError, match="no_such_method"):
        client.queue.no_such_method()
    with pytest.raises(AttributeError):
        client.queue._file.write()
    run = client.runs.start(start())  # and it goes on
    assert client.runs.get(run).command == "train.py"
    garbage = tmp_path / "garbage.sqlite3"
    garbage.write_bytes(b"not a database" * 100)
    garbage.chmod(0o600)
    with pytest.raises(StoreError, match=r"garbage\.sqlite3"):
        StoreClient(garbage, 5.0).runs.start(start())
    assert garbage.read_bytes() == b"not a database" * 100
    newer = tmp_path / "newer.sqlite3"
    with Store.open(newer) as store, store.file.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreVersionError, match="9999"):
        StoreClient(newer, 5.0).runs.start(start())


def test_an_answer_that_comes_too_late_is_no_other_questions(client: StoreClient) -> None:
    with pytest.raises(StoreError, match="expected an answer"):
        client.ask("trials.standing", DEVICE.key, within_seconds=0.0)  # it still imports
    assert client.data_version() >= 0 and client.runs.recent() == []


def test_it_ends_with_whoever_has_started_it(path: Path) -> None:
    client = StoreClient(path, 5.0)
    process = process_of(client)
    assert os.getpid() not in [parent.pid for parent in process.parents()], "a script may wait for all of its children"
    child = os.fork()
    if child == 0:
        signal.pause()
    client.close()
    process.wait(30.0)  # though the child was there
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    code = "import sys, os; from pathlib import Path; from autofuse.db.client import StoreClient\n"
    code += "StoreClient(Path(sys.argv[1]), 5.0).data_version(); os.kill(os.getpid(), 9)"
    killed = path.with_name("killed.sqlite3")
    assert subprocess.run([sys.executable, "-c", code, str(killed)]).returncode == -signal.SIGKILL
    left = [p for p in psutil.process_iter(["cmdline"]) if str(killed) in (p.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, 30.0)[1]


def test_where_it_has_died_the_next_call_says_so(client: StoreClient) -> None:
    process_of(client).kill()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"process that keeps the store .* has ended"):
            client.data_version()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_script_does_not_end_it(client: StoreClient, number: signal.Signals) -> None:
    process_of(client).send_signal(number)
    assert client.runs.start(start()) == 1


BEGIN = """
import contextlib, os, signal, sys
from pathlib import Path
from autofuse.db.client import StoreClient
from autofuse.errors import StoreError
def refused():
    try:
        client.data_version()
    except StoreError:
        return True
"""
SCRIPTS = {
    "signals of broken pipes end the script, and the process has died": """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
client = StoreClient(Path(sys.argv[1]), 5.0)
client.data_version()
for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # another process that has ended meanwhile
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"-m\\0autofuse.db.serve" in (line := file.read()) and sys.argv[1].encode() in line:
                os.kill(int(pid), signal.SIGKILL)
assert refused() and refused()
client.close()
""",
    "the script closes what it does not know and opens a file there": """
client = StoreClient(Path(sys.argv[1]), 5.0)
client.data_version()
os.closerange(3, 256)
files = [open(sys.argv[1] + str(number), "w+b", 0) for number in range(100)]
assert refused()
client.close()
assert not any(os.fstat(file.fileno()).st_size for file in files)
""",
    "it has no standard files": """
os.closerange(0, 3)
client = StoreClient(Path(sys.argv[1]), 5.0)
assert client.data_version() >= 0
number = os.open("/dev/null", os.O_RDONLY)
assert number == 0 and all(int(n) in (number, 1) or int(n) >= 64 for n in os.listdir("/proc/self/fd"))
client.close()
""",
    "it adopts orphans": """
import ctypes
from autofuse.detached import adopts_orphans
assert not adopts_orphans()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
assert adopts_orphans()
""",
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_scripts_of_all_kinds(path: Path, what: str) -> None:
    path.parent.mkdir()
    done = subprocess.run([sys.executable, "-c", BEGIN + SCRIPTS[what], str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_brings_no_sqlalchemy() -> None:
    code = f"import sys, {client_module.__name__}; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_message_that_was_sent_in_part_is_completed_before_the_next() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    large = b"x" * 4_000_000  # more than the socket holds
    with pytest.raises(TimeoutError):
        ours.send(large, 0.05)
    sender = threading.Thread(target=lambda: ours.send("next", 60.0))
    sender.start()
    assert theirs.receive(60.0) == large and theirs.receive(60.0) == "next"
    sender.join()
    ours.close(), theirs.close()


def test_a_message_that_was_not_begun_is_not_sent_later() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    with pytest.raises(TimeoutError):
        ours.send(b"x" * 4_000_000, 0.05)
    with pytest.raises(TimeoutError):
        ours.send("told to have failed", 0.05)
    sender = threading.Thread(target=lambda: ours.send("next", 60.0))
    sender.start()
    assert len(theirs.receive(60.0)) == 4_000_000 and theirs.receive(60.0) == "next"
    sender.join()
    ours.close(), theirs.close()


def test_a_function_is_called_where_the_store_is(client: StoreClient, path: Path) -> None:
    run = client.runs.start(start())
    with Store.open(path) as store:
        assert store.apply("autofuse.report.report:run_of", run) == client.apply("autofuse.report.report:run_of", run)
    for function in ("operator:nothing", "no_such_module:name", "json:loads"):
        with pytest.raises(StoreError):
            client.apply(function)
    assert client.runs.latest() is not None, "the process goes on"
