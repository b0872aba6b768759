"""Putting a store aside: all of it moves together, and the next one begins clean."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_records import start

from autofuse.cli.app import parse
from autofuse.db.archive import set_aside
from autofuse.db.store import Store
from autofuse.errors import StoreError


def test_what_is_in_the_log_moves_too_and_the_next_store_is_sound(path: Path) -> None:
    with Store.open(path) as open_store:  # as a script or a daemon holds it
        open_store.runs.start(start("first.py"))
        path.with_name(path.name + ".graphs").mkdir(mode=0o700)
        aside = set_aside(path)
        assert aside == path.with_name(path.name + ".old") and open_store.was_moved
        assert [p.name for p in path.parent.iterdir() if ".old" not in p.name] == ["store.db.lock"]
        with Store.open(path) as fresh:
            assert fresh.runs.recent() == [] and not fresh.was_moved
            fresh.runs.start(start("second.py"))
            open_store.runs.start(start("late.py"))
            assert [run.command for run in fresh.runs.recent()] == ["second.py"]
    with Store.open(path) as fresh:
        assert [run.command for run in fresh.runs.recent()] == ["second.py"]
    with Store.open(aside) as old:
        assert [run.command for run in old.runs.recent()] == ["late.py", "first.py"]
    assert set_aside(path) == path.with_name(path.name + ".old2")


def test_damaged_and_foreign_files_can_be_put_aside_and_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"this is no database" * 1000)
    aside = set_aside(path)
    assert aside is not None and aside.read_bytes() == b"this is no database" * 1000
    assert set_aside(path) is None
    path.touch(0o666)
    path.chmod(0o666)
    with pytest.raises(StoreError, match="chmod go-w"):
        set_aside(path)


def test_the_command_tells_where_it_lies(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(path).close()
    assert parse(["store", "reset", "--store", str(path)]) == 0
    assert f"The store is now {path}.old." in capsys.readouterr().out
    assert parse(["store", "reset", "--store", str(path)]) == 0
    assert "There is no store" in capsys.readouterr().out
