"""Decisions travel as lines of JSON: the same on both sides, and anything else is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_records import decision

from autofuse.cli.app import parse
from autofuse.db.decision_file import decisions_of, lines_of
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.records import Bucket, Candidate, Decision

SIZES = st.tuples(st.integers(1, 9), st.integers(10, 1 << 40))
VALUES = st.one_of(st.integers(), st.booleans(), st.text("abc"))
CONFIGS = st.dictionaries(st.sampled_from(("threads", "blocks", "staging")), VALUES)
REASONS = st.sampled_from(("won", "no_gain", "below_margin"))


@given(st.lists(SIZES, max_size=3), CONFIGS, st.floats(0.5, 99.0), REASONS)
def test_what_is_written_is_read(
    sizes: list[tuple[int, int]], config: dict[str, Any], speedup: float, reason: str
) -> None:
    bucket, candidate = Bucket(tuple(sizes)), Candidate("c_generic", tuple(config.items()))
    made = replace(decision(), bucket=bucket, candidate=candidate, speedup=speedup, reason=reason)
    made = replace(made, key=replace(made.key, bucket=bucket.label))
    (found,) = decisions_of(lines_of([made]), "file")
    assert found == replace(made, compile_key=None, detail="")


def test_what_a_machine_cannot_know_of_another_stays() -> None:
    """A crash or a full memory may be this machine's own."""
    assert len(list(lines_of([replace(decision(), reason="crashed"), decision()]))) == 2


def row(**changes: object) -> list[str]:
    head, line = lines_of([decision()])
    return [head, json.dumps({**json.loads(line), **changes})]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "expected decisions as 'autofuse export' writes them, found an empty file"),
        (["{"], "file, line 1: expected a line of JSON"),
        (["[1]"], "line 1: expected an object, found [1]"),
        (['{"other": 1}'], "line 1: expected the head"),
        (['{"autofuse_decisions": 9}'], "expected format 1, found 9; export it again with this autofuse"),
        (row(device=7), "line 2: expected device to be a short text, found 7"),
        (row(reason="crashed"), "expected reason to be one of won"),
        (row(speedup="fast"), "expected speedup to be a number of 0 or more, found 'fast'"),
        (row(threads=True), "expected threads to be a whole number, found True"),
        (row(ranges=[[5, 2]]), "expected ranges to be pairs of sizes"),
        (row(config=[["a; b", 1]]), "expected config to be pairs of a knob's name and its value"),
        (row(config=[["a", {"code": 1}]]), "expected config to be pairs"),
        (row(variant="x" * 300), "expected variant to be a short text"),
    ],
)
def test_other_lines_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(StoreError) as caught:
        decisions_of(lines, "file")
    assert message in str(caught.value)


def write(path: Path, *decisions: Decision) -> None:
    with Store.open(path) as store:
        for item in decisions:
            store.results.put_decision(item)


def test_from_one_store_to_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, folder = tmp_path / "one.sqlite3", tmp_path / "other.sqlite3", tmp_path / "kept"
    folder.mkdir()
    foreign = replace(decision(), key=replace(decision().key, device="cuda:90 H100"))
    write(one, decision(), foreign)
    assert parse(["export", str(folder / "a.jsonl"), "--store", str(one)]) in (0, None)
    assert "has 2 decisions" in capsys.readouterr().out
    assert parse(["import", str(folder), "--store", str(other)]) in (0, None)
    said = capsys.readouterr().out
    assert "2 decisions read, 2 to be tried" in said and "1 for device cuda:90 H100" in said
    with Store.open(other) as store:
        found = store.proposals.get(decision().key)
        assert found is not None and found.candidate == decision().candidate and found.reason == decision().reason
        assert not store.results.decisions()
    write(other, decision())
    parse(["import", str(folder), "--store", str(other)])
    assert "1 to be tried; 1 known or decided here already" in capsys.readouterr().out


def test_of_a_file_with_one_wrong_line_nothing_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "s.sqlite3"
    (tmp_path / "a.jsonl").write_text("\n".join([*row(), row(device=7)[1]]))
    assert parse(["import", str(tmp_path / "a.jsonl"), "--store", str(store)])
    assert "a.jsonl, line 3: expected device" in capfd.readouterr().err and not store.exists()
    assert parse(["import", str(tmp_path / "nothing"), "--store", str(store)])
    assert "expected a file of 'autofuse export', found" in capfd.readouterr().err and not store.exists()
