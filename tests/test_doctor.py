"""What doctor says of machines that lack something: each time a command to type, and exit code 1."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from autofuse import doctor
from autofuse.cli.app import parse
from autofuse.daemon import control
from autofuse.db.rows import DaemonState
from autofuse.doctor import Finding, examine
from autofuse.settings.layers import load


@pytest.fixture
def finding(tmp_path: Path) -> Callable[[str], Finding]:
    def check(name: str) -> Finding:
        values = {"run.store": tmp_path / "data" / "store.sqlite3", "run.cc": "/nowhere/cc"}
        (found,) = examine(load(values, environ={}, cwd=tmp_path), [name])
        return found

    return check


def managers(monkeypatch: pytest.MonkeyPatch, *present: str, is_root: bool = False) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in present else None)
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0 if is_root else 1000)


def test_packages_come_from_this_systems_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    managers(monkeypatch, "dnf")
    assert doctor.install_command("gcc") == "sudo dnf install gcc"
    managers(monkeypatch, "apk", is_root=True)
    assert doctor.install_command("gcc") == "apk add gcc"
    managers(monkeypatch)
    assert doctor.install_command("gcc") == "sudo apt-get install gcc"


def test_a_compiler_that_is_not_there(finding: Callable[[str], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    managers(monkeypatch, "pacman")
    found = finding("C compiler")
    assert not found.ok and found.essential and found.remedy.startswith("sudo pacman -S gcc, or name one: export")


def test_packages_in_other_versions(finding: Callable[[str], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding("packages").ok, finding("packages").found
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name.lower() == "rich":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"sqlalchemy": "1.4.54", "pydantic": "3.0.0a1"}.get(name.lower()) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = finding("packages")
    assert not found.ok and found.essential
    assert {part.lower() for part in found.found.split("; ")} == {
        "sqlalchemy 1.4.54", "rich not installed", "pydantic 3.0.0a1",
    }  # fmt: skip
    assert found.remedy.startswith("pip install '") and "<3" in found.remedy


@pytest.mark.parametrize(
    ("version", "operator", "bound", "is_within"),
    [
        ("2.0.44", ">=", "2.0", True), ("2", ">=", "2.0", True), ("1.13.3+cpu", ">=", "1.13", True),
        ("6.0", "<", "6", False), ("5.9.9", "<", "6", True), ("4.1rc1", ">=", "4.2", False),
    ],
)  # fmt: skip
def test_bounds_of_versions(version: str, operator: str, bound: str, is_within: bool) -> None:
    assert doctor._is_within(version, operator, bound) is is_within


def test_a_full_disk(finding: Callable[[str], Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: "/scratch")
    free = {str(tmp_path): 2**40, "/scratch": 2**40}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[str(place)]))
    assert finding("disk").ok
    free[str(tmp_path)] = 2**29
    found = finding("disk")
    assert not found.ok and not found.essential and found.found == f"0.5 GiB free at {tmp_path}"
    assert found.remedy.startswith("autofuse store prune --store ")
    free["/scratch"] = 2**20
    found = finding("disk")
    assert not found.ok and found.essential and "export TMPDIR=PATH" in found.remedy


def test_a_slow_clock(finding: Callable[[str], Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "current_clocksource").write_text("hpet\n")
    (tmp_path / "available_clocksource").write_text("hpet tsc acpi_pm\n")
    monkeypatch.setattr(doctor, "CLOCK_FILES", str(tmp_path))
    monkeypatch.setattr(doctor, "SLOW_CLOCK_US", 0.0)
    found = finding("clock")
    assert not found.ok and not found.essential and found.found.startswith("source hpet, ")
    assert found.remedy == f"echo tsc | sudo tee {tmp_path}/current_clocksource"
    (tmp_path / "current_clocksource").unlink()
    assert finding("clock").found.startswith("source unknown, ") and "nothing to do" in finding("clock").remedy
    monkeypatch.setattr(doctor, "SLOW_CLOCK_US", 1e9)
    assert finding("clock").ok


def test_a_daemon_that_hangs(finding: Callable[[str], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    def beat(ago: float) -> None:
        state = DaemonState(pid=7, host="here", started_at=1.0, state="tuning", heartbeat_at=time.time() - ago)
        monkeypatch.setattr(control, "status", lambda settings: state)

    beat(3.0)
    assert finding("daemon").ok and finding("daemon").found.startswith("process 7, tuning")
    beat(5_000.0)
    found = finding("daemon")
    assert not found.ok and "no sign of life for 50" in found.found and found.remedy.startswith("autofuse daemon stop")


# ---- the command -----------------------------------------------------------------------------------------

FINDINGS = [
    Finding("Python", True, "3.11.7 at /usr/bin/python"),
    Finding("C compiler", False, "found none of cc, gcc, clang", "sudo apt-get install gcc"),
    Finding("clock", False, "source hpet, 1200 ns a call", "echo tsc", False),
]


@pytest.mark.parametrize("columns", [40, 80])
def test_what_is_missing_is_shown_with_its_command(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("autofuse.cli.doctor.examine", lambda settings: iter(FINDINGS))
    assert parse(["doctor"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    assert any("-> sudo apt-get install gcc" in line for line in lines), lines
    assert " ".join(lines[-2:]).endswith("1 of 3 checks failed; scripts run, but on eager's kernels.")


def test_what_is_only_worth_a_note_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autofuse.cli.doctor.examine", lambda settings: iter((FINDINGS[0], FINDINGS[2])))
    assert parse(["doctor"]) == 0
    assert "note" in capsys.readouterr().out
