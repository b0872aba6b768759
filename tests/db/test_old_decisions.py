"""Old decisions: those that count, in which order, and what becomes of their requests."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from store_records import DEVICE, VERSIONS, bucket, decision, request, start, use

from autofuse.db.old_decisions import OldDecision
from autofuse.db.store import Store
from autofuse.ir.records import Candidate

DAY = 86_400.0
WON, LOST = ("won",), ("won", "no_gain")


def decided(store: Store, name: str, days_ago: float, calls: int = 10, reason: str = "won") -> None:
    """A request that was answered so many days ago."""
    asked = request(name * 64, calls=calls)
    store.queue.add([asked])
    assert store.queue.take(DEVICE.key) == asked
    number = store.results.put_decision(replace(decision(name * 64), reason=reason))
    store.queue.finish(asked.key, "done")
    with sqlite3.connect(store.path) as raw:
        raw.execute("UPDATE decisions SET at = at - ? WHERE id = ?", (days_ago * DAY, number))
    raw.close()


def used(store: Store, *names: str) -> None:
    """A run of today."""
    store.nodes.put_uses(store.runs.start(start()), [use(name * 64) for name in names])


def take(store: Store, *known: OldDecision, reasons: tuple[str, ...] = WON, days: float = 30.0) -> OldDecision | None:
    digests = [old.request.key.digest for old in known]
    return store.old_decisions.take(
        DEVICE.key, versions=[VERSIONS], age_seconds=days * DAY, reasons=reasons, known=digests
    )


def test_the_most_used_first_and_of_equals_the_oldest(store: Store) -> None:
    for name, days, calls in (("a", 40, 10), ("b", 31, 99), ("c", 50, 10), ("d", 29, 1000)):
        decided(store, name, days, calls)
    used(store, *"abcd")
    taken = []
    while (old := take(store, *taken)) is not None:
        taken.append(old)
        assert old.age_seconds > 30 * DAY and old.decision == decision(old.request.key.fusion_id)
        store.queue.finish(old.request.key, "done")
    assert [old.request.key.fusion_id[0] for old in taken] == ["b", "c", "a"], "d is not old yet"


def test_in_work_it_is_not_taken_twice_and_asking_goes_on(store: Store) -> None:
    decided(store, "a", 40)
    used(store, "a")
    old = take(store)
    assert old is not None and old.request.calls == 10 and take(store) is None
    assert store.queue.add([request(calls=77)]) == 0 and store.queue.take(DEVICE.key) is None, "its decision stands"
    store.queue.finish(old.request.key, "done")
    assert (found := take(store)) is not None and found.decision == old.decision


def test_what_no_run_has_used_since_stays_as_it_is(store: Store) -> None:
    used(store, "a")
    decided(store, "a", 0)
    store.nodes.put_uses(store.runs.start(start()), [use("a" * 64, of=bucket(1, 64))])
    assert take(store, days=-1.0) is None, "that run came before, and this one used another bucket"
    used(store, "a")
    assert take(store, days=-1.0) is not None


def test_only_what_stands_and_was_raced(store: Store) -> None:
    decided(store, "a", 40, reason="no_gain")
    decided(store, "b", 40)
    used(store, "a", "b")
    store.results.put_decision(replace(decision("b" * 64), candidate=Candidate("eager")))
    assert take(store) is None
    found = take(store, reasons=LOST)
    assert found is not None and found.request.key.fusion_id[0] == "a"


def test_of_other_devices_and_versions_none(store: Store) -> None:
    decided(store, "a", 40)
    used(store, "a")
    assert store.old_decisions.take("cuda:", versions=[VERSIONS], age_seconds=DAY, reasons=WON) is None
    assert store.old_decisions.take(DEVICE.key, versions=["torch 9"], age_seconds=DAY, reasons=WON) is None
    assert store.old_decisions.take("cpu:", versions=[VERSIONS], age_seconds=DAY, reasons=WON) is not None
