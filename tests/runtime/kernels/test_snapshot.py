"""A run with a snapshot uses the decisions that a file names, whatever else the store has; else one line and eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autofuse.db.decision_file import lines_of
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Bucket, Candidate, Decision, DecisionKey
from autofuse.runtime.kernels.catalogue import Catalogue
from autofuse.runtime.kernels.device_backends import CPU, Place
from autofuse.runtime.kernels.snapshot import Snapshot
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.groups import RunSettings
from autofuse.settings.layers import load

DEVICE, VERSIONS = cpu_device().key, "v"
HERE = Place(CPU, DEVICE, 2)


def decision(node: str, variant: str, device: str = DEVICE, versions: str = VERSIONS) -> Decision:
    bucket = Bucket(((1, 9),))
    key = DecisionKey(node, bucket.label, device, 2, versions)
    return Decision(key, bucket, Candidate(variant), f"{node}{variant}", 2.0, 1.0, 2.0, 1.9, 2.1, "won")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "kept" / "s.sqlite3") as opened:
        yield opened


def snapshot_of(path: Path, *decisions: Decision) -> Snapshot:
    path.write_text("\n".join(lines_of(decisions)))
    return Snapshot(path, DEVICE, VERSIONS)


def test_later_decisions_change_nothing(tmp_path: Path, store: Store) -> None:
    first = decision("n", "c_generic")
    for made in (first, decision("n", "c_specialised"), decision("m", "c_generic"), decision("n", "other", "cuda:90")):
        store.results.put_decision(made)
    snapshot = snapshot_of(tmp_path / "a.jsonl", first, decision("n", "other", "cuda:90"))
    assert snapshot.read(store) == ""
    failures: list[object] = []
    catalogue = Catalogue(
        RunSettings(), cpu_device(), VERSIONS, lambda *failure: failures.append(failure), None, snapshot
    )
    found = catalogue.absorb(store)
    assert found is not None and found.fusion_ids is not None and found.fusion_ids == {"n"}
    store.results.put_decision(decision("n", "c_last"))
    catalogue.absorb(store)
    assert catalogue.table.find("n", [5], HERE) == first and catalogue.table.find("m", [5], HERE) is None
    assert not failures


def test_a_folder_of_files_is_one(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    for node in "ab":
        store.results.put_decision(decision(node, "c_generic"))
        snapshot_of(folder / f"{node}.jsonl", decision(node, "c_generic"))
    snapshot = Snapshot(folder, DEVICE, VERSIONS)
    assert snapshot.read(store) == "" and [made.key.fusion_id for _, made in snapshot.decisions(DEVICE, 0)] == [
        "a",
        "b",
    ]
    assert len(snapshot.decisions(DEVICE, 1)) == 1, "those that were not read yet"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "expected a file of 'autofuse export', found"),
        (['{"autofuse_decisions": 9}'], "expected format 1, found 9; export it again with this autofuse"),
        (["{"], "line 1: expected a line of JSON"),
        (lines_of([decision("n", "c_generic", "cpu:other")]), "found none; this run stays on eager's kernels. Export"),
        (lines_of([decision("n", "c_generic", versions="w")]), "found none; this run stays on eager's kernels. Export"),
        (lines_of([decision("n", "c_generic")]), "1 of 1 decisions of"),
        (lines_of([decision("known", "c_generic"), decision("n", "x")]), "1 of 2 decisions of"),
        (lines_of([decision("known", "c_other")]), "type: autofuse import"),
    ],
    ids=[
        "gone",
        "another format",
        "no json",
        "another device",
        "another version",
        "unknown",
        "one of two",
        "otherwise",
    ],
)
def test_what_is_in_the_way_is_said(tmp_path: Path, store: Store, lines: Iterator[str] | None, said: str) -> None:
    path = tmp_path / "a.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    store.results.put_decision(decision("known", "c_generic"))
    snapshot = Snapshot(path, DEVICE, VERSIONS)
    problem = snapshot.read(store)
    assert said in problem and str(path) in problem and "\n" not in problem and "AUTOFUSE_SNAPSHOT" in problem
    found = {made.candidate.variant for _, made in snapshot.decisions(DEVICE, 0)}
    assert found == ({"c_generic"} if "of 2" in said else set())


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "kept" / "of_a_run.sqlite3"))
    monkeypatch.setenv("AUTOFUSE_SNAPSHOT", str(tmp_path / "gone.jsonl"))
    started = start_session(load(), "test")
    yield started
    started.finish(None)


def test_a_run_whose_snapshot_is_gone_goes_on(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    session.context.store_thread.absorb_again(10.0)
    assert session.context.mode == "off", "nothing is queued"
    assert session.context.store_thread.usable
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("autofuse: expected a file of 'autofuse export', found") and "gone.jsonl" in line
