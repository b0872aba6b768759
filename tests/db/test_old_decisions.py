"""Old decisions: those that count, in which order, and what becomes of their requests."""

from __future__ import annotations

import time
from dataclasses import replace

from sqlalchemy import update
from store_records import DEVICE, VERSIONS, bucket, decision, request, start, use

from autofuse.db import models
from autofuse.db.old_decisions import OldDecision
from autofuse.db.store import Store
from autofuse.ir.records import Candidate, ObservedShape

DAY = 86_400.0
WON, LOST = ("won",), ("won", "no_gain")


def decided(store: Store, name: str, days_ago: float, calls: int = 10, reason: str = "won") -> None:
    """A request that was answered so many days ago."""
    asked = request(name * 64, calls=calls)
    store.queue.add([asked])
    assert store.queue.take(DEVICE.key) == asked
    number = store.results.put_decision(replace(decision(name * 64), reason=reason))
    store.queue.finish(asked.key, "done")
    with store.file.write() as connection:
        made = update(models.DecisionRow).where(models.DecisionRow.id == number)
        connection.execute(made.values(at=models.DecisionRow.at - days_ago * DAY))


def used(store: Store, *names: str) -> None:
    """A run of today."""
    store.nodes.put_uses(store.runs.start(start()), [use(name * 64) for name in names])


def take(store: Store, *known: OldDecision, reasons: tuple[str, ...] = WON, days: float = 30.0) -> OldDecision | None:
    digests = [old.request.key.digest for old in known]
    return store.old_decisions.take(
        DEVICE.key, versions=[VERSIONS], age_seconds=days * DAY, reasons=reasons, known=digests
    )


def test_the_most_used_first_and_of_equals_the_oldest(both: Store) -> None:
    for name, days, calls in (("a", 40, 10), ("b", 31, 99), ("c", 50, 10), ("d", 29, 1000)):
        decided(both, name, days, calls)
    used(both, *"abcd")
    taken = []
    while (old := take(both, *taken)) is not None:
        taken.append(old)
        assert old.age_seconds > 30 * DAY and old.decision == decision(old.request.key.fusion_id)
        both.queue.finish(old.request.key, "done")
    assert [old.request.key.fusion_id[0] for old in taken] == ["b", "c", "a"], "d is not old yet"


def test_in_work_it_is_not_taken_twice_and_asking_goes_on(both: Store) -> None:
    decided(both, "a", 40)
    used(both, "a")
    old = take(both)
    assert old is not None and old.request.calls == 10 and take(both) is None
    assert both.queue.add([request(calls=77)]) == 0 and both.queue.take(DEVICE.key) is None, "its decision stands"
    both.queue.finish(old.request.key, "done")
    assert (found := take(both)) is not None and found.decision == old.decision


def test_what_no_run_has_used_since_stays_as_it_is(both: Store) -> None:
    used(both, "a")
    decided(both, "a", 0)
    both.nodes.put_uses(both.runs.start(start()), [use("a" * 64, of=bucket(1, 64))])
    assert take(both, days=-1.0) is None, "that run came before, and this one used another bucket"
    used(both, "a")
    assert take(both, days=-1.0) is not None


def test_those_that_were_raced_beside_others(both: Store) -> None:
    """Unused ones too: a day old, or made since the daemon began."""
    for name in "abc":
        decided(both, name, 0)
    for name in "bc":
        both.results.put_decision(replace(decision(name * 64), raced_threads=1))

    def beside_others(since: float, age: float = DAY, *known: str) -> OldDecision | None:
        digests = [request(name * 64).key.digest for name in known]
        found = both.old_decisions.take(
            DEVICE.key, versions=[VERSIONS], age_seconds=age, reasons=WON, is_used=False, known=digests,
            beside_others_since=since,
        )  # fmt: skip
        if found is not None:
            both.queue.finish(found.request.key, "done")
        return found

    assert beside_others(since=time.time() + DAY) is None, "they are an earlier daemon's, of today"
    assert beside_others(since=time.time() + DAY, age=-DAY) is not None, "of an earlier day"
    found = beside_others(time.time() - DAY)
    assert found is not None and found.decision == replace(decision("b" * 64), raced_threads=1)
    both.results.put_decision(decision("b" * 64))
    found = beside_others(time.time() - DAY)
    assert found is not None and found.request.key.fusion_id == "c" * 64, "b has been raced on all threads since"
    assert beside_others(time.time() - DAY, DAY, "c") is None


def test_only_what_stands_and_was_raced(both: Store) -> None:
    decided(both, "a", 40, reason="no_gain")
    decided(both, "b", 40)
    used(both, "a", "b")
    both.results.put_decision(replace(decision("b" * 64), candidate=Candidate("eager")))
    assert take(both) is None
    found = take(both, reasons=LOST)
    assert found is not None and found.request.key.fusion_id[0] == "a"


def test_of_other_devices_and_versions_none(both: Store) -> None:
    decided(both, "a", 40)
    used(both, "a")
    assert both.old_decisions.take("cuda:", versions=[VERSIONS], age_seconds=DAY, reasons=WON) is None
    assert both.old_decisions.take(DEVICE.key, versions=["torch 9"], age_seconds=DAY, reasons=WON) is None
    assert both.old_decisions.take("cpu:", versions=[VERSIONS], age_seconds=DAY, reasons=WON) is not None


def used_with(store: Store, *shapes: tuple[int, int], name: str = "a") -> int:
    """A run of now, with calls of these sizes."""
    run = store.runs.start(start())
    calls = sum(count for _, count in shapes)
    seen = tuple(ObservedShape((size,), count) for size, count in shapes)
    store.nodes.put_uses(run, [replace(use(name * 64, calls), shapes=seen)])
    return run


def drifted(store: Store, factor: float = 1.4, calls: int = 1000) -> OldDecision | None:
    return store.old_decisions.take_drifted(
        DEVICE.key, versions=[VERSIONS], factor=factor, calls=calls, reasons=WON, known=()
    )


def test_other_sizes_than_a_decision_was_made_for(both: Store) -> None:
    used_with(both, (66, 5000))
    decided(both, "a", 0)  # for calls of 128
    assert drifted(both) is None, "that run came before"
    used_with(both, (128, 600), (100, 600))
    assert drifted(both) is None, "the mean is 113"
    used_with(both, (70, 9000))
    assert drifted(both, calls=20_000) is None
    found = drifted(both)
    assert found is not None and 0.55 < found.drift < 0.59
    assert set(found.request.shapes) == {
        ObservedShape((128,), 600),
        ObservedShape((100,), 600),
        ObservedShape((70,), 9000),
    }
    assert drifted(both) is None, "it is in work"
    both.queue.finish(found.request.key, "done")
    assert drifted(both) is None, "its request knows these sizes now"
    used_with(both, (127, 99_000))
    assert (again := drifted(both)) is not None and again.drift > 1.4


def test_a_request_that_a_run_has_not_counted_is_no_drift(both: Store) -> None:
    decided(both, "a", 0)
    both.nodes.put_uses(both.runs.start(start()), [replace(use("a" * 64, 5000), shapes=())])
    assert drifted(both) is None
