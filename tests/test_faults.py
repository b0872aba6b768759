"""The harness of `faults` finds what it looks for: each of its checks, with something that is wrong on purpose."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.ground import SOURCE
from faults.kinds import Outcome, _damage
from faults.place import Done, Place, Stored, noise_of, wrong_with


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("preload") / "preload.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl"], check=True)
    return str(built)


def python(code: str, **environment: str) -> str:
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment}).stdout


@pytest.mark.parametrize("lasts", [False, True])
def test_a_disk_is_full_at_one_write_or_from_then_on(preload: str, tmp_path: Path, lasts: bool) -> None:
    code = f"""if True:
        import os
        for folder in ({str(tmp_path)!r}, {str(tmp_path.parent)!r}):
            fd = os.open(folder + "/file", os.O_CREAT | os.O_WRONLY)
            for number, write in enumerate((os.write, lambda fd, data: os.pwrite(fd, data, 8)) * 2):
                try:
                    write(fd, b"x")
                except OSError as error:
                    print(number, error.errno)
    """
    said = python(
        code, LD_PRELOAD=preload, FAULT_FOLDER=str(tmp_path), FAULT_WRITE="2", **{"FAULT_LASTS": ""} if lasts else {}
    )
    assert said.split() == (["1", "28", "2", "28", "3", "28"] if lasts else ["1", "28"])


def test_a_clock_is_ahead_and_jumps(preload: str) -> None:
    code = "import time; print([round(time.time()) for _ in range(60)])"
    found = eval(python(code, LD_PRELOAD=preload, FAULT_CLOCK="100000,-100000,40"))
    now = time.time()
    assert found[0] == pytest.approx(now + 100_000, abs=600) and found[-1] == pytest.approx(now - 100_000, abs=600)


def test_a_run_is_wrong_where_anything_is() -> None:
    losses = [1.5, 1.25]
    assert not wrong_with(Done(0, "1.5\n1.25\n", "autofuse: one line\n"), losses)
    assert "2 losses" not in "".join(wrong_with(Done(0, "1.5\n1.25001\n", ""), losses))  # rounding
    for done, words in (
        (Done(0, "1.5\n1.26\n", ""), "loss 1 is 1.26 instead of 1.25"),
        (Done(0, "1.5\nnan\n", ""), "loss 1 is nan"),
        (Done(0, "1.5\n", ""), "1 losses instead of 2"),
        (Done(1, "1.5\n1.25\n", ""), "status 1"),
        (Done(0, "1.5\n1.25\n", "Traceback (most recent call last):\n"), "on stderr"),
    ):
        assert words in "".join(wrong_with(done, losses))


def test_what_a_store_has_lost_is_counted(place: Place) -> None:
    with contextlib.closing(sqlite3.connect(place.store)) as database:
        database.executescript(
            "CREATE TABLE decisions (id); CREATE TABLE requests (key, status);"
            "INSERT INTO decisions VALUES (1), (2); INSERT INTO requests VALUES ('a', 'queued'), ('b', 'done')"
        )
        before = place.stored()
        assert before == Stored(frozenset({1, 2}), frozenset("ab"), frozenset("a"))
        outcome = Outcome()
        outcome.keep(before, place)
        assert not outcome.wrong
        database.executescript("DELETE FROM decisions WHERE id = 1; DELETE FROM requests")
    outcome.keep(before, place)
    assert outcome.wrong == ["1 decisions are lost", "2 requests are lost"]
    place.store.write_bytes(b"no database" * 100)
    outcome.keep(before, place)
    assert "cannot be read" in outcome.wrong[-1]


def test_a_process_that_is_left_is_found_and_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faults.place.GONE_SECONDS", 0.1)
    left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env=place.environment)
    try:
        while left.pid not in [process.pid for process in place.processes()]:  # not yet what it will run
            assert left.poll() is None
            time.sleep(0.01)
        assert any("sleep(60)" in text for text in place.end())
        assert not list(place.processes())
    finally:
        left.kill()


def test_damage_changes_a_file(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / str(number)
        path.write_bytes(bytes(1000))
        _damage(path, random.Random(number))
        found = path.read_bytes()
        assert found != bytes(1000) and len(found) <= 1000


def test_lines_of_autofuse_are_no_noise() -> None:
    assert noise_of(Done(0, "", "autofuse: a\n\nautofuse daemon\n")) == []
    assert noise_of(Done(0, "", "autofuse: a\nSegmentation fault\n")) == ["on stderr: Segmentation fault"]
