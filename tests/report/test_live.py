"""What a report says of kernels on the script's own calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofuse.ir.records import LIVE_RACES, Event
from autofuse.report.live import live_verdicts
from tests.report.report_records import fill, open_store


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"confirmed": 14, "slower": 1, "unsure": 3, "open": 0}, "14 kernels confirmed, 1 given up, 3 not told apart"),
        ({"confirmed": 0, "slower": 1}, "1 kernel given up"),
        ({"open": 1200}, "1,200 kernels open"),
    ],
)
def test_it_is_one_sentence(tmp_path: Path, data: dict[str, int], sentence: str) -> None:
    store = open_store(tmp_path / "store.sqlite3")
    run = fill(store)
    assert live_verdicts(store.notes.events(run)) is None
    store.notes.add_event(run, Event(LIVE_RACES, "", data))
    found = live_verdicts(store.notes.events(run))
    store.close()
    assert found is not None and found.sentence.startswith(sentence)
