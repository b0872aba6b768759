"""The queue: what is asked for, merged, taken, finished and taken up again."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update
from store_records import DEVICE, VERSIONS, bucket, decision, key, request, start

from autofuse.db import models, tune_queue
from autofuse.db.rows import QueueStatus
from autofuse.db.store import Store
from autofuse.db.tune_queue import FAILED_SECONDS, MAX_ATTEMPTS, NOT_READY, Prefer
from autofuse.errors import StoreError
from autofuse.ir.records import Candidate, Decision, DeviceInfo, ObservedShape


def test_largest_expected_saving_first(both: Store) -> None:
    small, large, unknown = request("a" * 64, calls=10), request("b" * 64, calls=99), request("c" * 64, unfused_us=0.0)
    assert both.queue.add([small, unknown, large]) == 3
    assert both.queue.largest(2) == [large.key.digest, small.key.digest]
    taken = [both.queue.take(DEVICE.key) for _ in range(4)]
    assert taken == [large, small, unknown, None] and both.queue.largest(2) == []
    assert both.queue.length(DEVICE.key) == QueueStatus(running=3)


def test_a_damaged_request_fails_and_the_others_go_on(both: Store) -> None:
    damaged, sound = request("a" * 64, calls=99), request("b" * 64, calls=10)
    both.queue.add([damaged, sound])
    with both.file.write() as connection:
        of_damaged = update(models.BucketRow).where(models.BucketRow.fusion_id == "a" * 64)
        connection.execute(of_damaged.values(ranges=[["1, system(1)", 2]]))
    assert both.queue.take(DEVICE.key) == sound
    assert [(row.status, row.message.partition(":")[0]) for row in both.queue.requests("a" * 64)] == [
        ("failed", "not a request")
    ]


@pytest.mark.parametrize("prefer", [None, lambda waiting: float(waiting.calls)], ids=["plain", "preferred"])
@pytest.mark.parametrize("table", ["buckets", "nodes"])
def test_a_request_whose_rows_are_lost_does_not_keep_others_waiting(
    store: Store, table: str, prefer: Prefer | None
) -> None:
    damaged, sound = request("a" * 64, calls=99), request("b" * 64, calls=10)
    store.queue.add([damaged, sound])
    with sqlite3.connect(store.path) as raw:
        raw.execute(f"DELETE FROM {table} WHERE fusion_id = ?", ("a" * 64,))
    raw.close()
    assert store.queue.take(DEVICE.key, prefer=prefer) == sound
    assert store.queue.take(DEVICE.key, prefer=prefer) is None


def test_requests_of_other_devices_and_versions_wait(both: Store) -> None:
    other = DeviceInfo("cpu", "Other", 8, "avx2")
    both.queue.add([replace(request(), key=key(device=other))])
    assert both.queue.take(DEVICE.key) is None
    assert both.queue.take(other.key, versions=["torch 9"]) is None
    assert both.queue.take(other.key, versions=["torch 9", VERSIONS]) is not None


def test_a_run_replaces_its_own_counters_and_runs_add_up(both: Store) -> None:
    first, second = both.runs.start(start()), both.runs.start(start())
    assert both.queue.add([request(calls=10, run_id=first, shapes=((100, 10),))]) == 1
    assert both.queue.add([request(calls=30, run_id=first, shapes=((100, 20), (70, 10)))]) == 0
    assert both.queue.add([request(calls=5, run_id=second, shapes=((70, 5),), unfused_us=0.0)]) == 0
    taken = both.queue.take(DEVICE.key)
    assert taken is not None
    assert (taken.calls, taken.unfused_us, taken.run_id) == (35, 50.0, second)
    assert taken.shapes == (ObservedShape((100,), 20), ObservedShape((70,), 15))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(64, 67), st.integers(1, 9)), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merging_loses_no_shape(both: Store, sent: list[tuple[int, int, int]]) -> None:
    """Each run sends its histogram so far again and again; the sum of the last ones must come out."""
    runs = {number: both.runs.start(start()) for number in (1, 2, 3)}
    fusion_id = f"{runs[1]:064d}"  # a key of its own for each example
    counts: dict[int, dict[int, int]] = {number: {} for number in runs}
    for number, size, calls in sent:
        counts[number][size] = counts[number].get(size, 0) + calls
        shapes = tuple(counts[number].items())
        both.queue.add([request(fusion_id, sum(counts[number].values()), run_id=runs[number], shapes=shapes)])
    expected: dict[int, int] = {}
    for histogram in counts.values():
        for size, calls in histogram.items():
            expected[size] = expected.get(size, 0) + calls
    taken = both.queue.take(DEVICE.key)
    assert taken is not None and taken.key.fusion_id == fusion_id
    assert {shape.symbol_values[0]: shape.calls for shape in taken.shapes} == expected
    assert taken.calls == sum(expected.values())
    assert [shape.calls for shape in taken.shapes] == sorted(expected.values(), reverse=True)


def test_what_is_running_keeps_running(both: Store) -> None:
    both.queue.add([request()])
    assert both.queue.take(DEVICE.key) is not None
    assert both.queue.add([request(calls=500)]) == 0
    assert both.queue.add([request(calls=500)], force=True) == 0
    assert both.queue.length() == QueueStatus(running=1)


def without_kernel(won: Decision) -> Decision:
    return replace(won, candidate=Candidate("eager"), compile_key=None)


def test_decided_and_failed_requests_are_not_asked_again_unless_forced(both: Store) -> None:
    both.queue.add([request(), request("b" * 64)])
    both.results.put_decision(without_kernel(decision()))
    both.queue.finish(key(), "done")
    both.queue.finish(key("b" * 64), "failed", "gcc died")
    assert both.queue.add([request(), request("b" * 64)]) == 0
    assert both.queue.take(DEVICE.key) is None
    assert [row.message for row in both.queue.requests("b" * 64)] == ["gcc died"]
    assert both.queue.add([request(), request("b" * 64)], force=True) == 2
    assert both.queue.length() == QueueStatus(queued=2)


def test_a_decision_without_a_request_is_enough(both: Store) -> None:
    both.results.put_decision(without_kernel(decision()))
    assert both.queue.add([request(), request(of=bucket(129, 256))]) == 1


def test_finish_can_put_back(both: Store) -> None:
    both.queue.add([request()])
    both.queue.take(DEVICE.key)
    both.queue.finish(key(), "requeued", "budget spent")
    assert both.queue.length() == QueueStatus(queued=1)
    with pytest.raises(StoreError, match="expected a request for"):
        both.queue.finish(key("d" * 64), "done")


def test_queue_of_one_run(both: Store) -> None:
    first, second = both.runs.start(start()), both.runs.start(start())
    both.queue.add([request(run_id=first), request("b" * 64, run_id=second)])
    both.queue.add([request("b" * 64, run_id=first)])
    assert both.queue.length(DEVICE.key, run_id=first) == QueueStatus(queued=2)
    assert both.queue.length(DEVICE.key, run_id=second) == QueueStatus(queued=1)
    assert both.queue.length(DEVICE.key, run_id=99) == QueueStatus()


def test_requests_of_a_dead_daemon_wait_again_until_they_look_guilty(both: Store) -> None:
    both.queue.add([request()])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert both.queue.take(DEVICE.key, pid=12345) is not None
        assert both.queue.requeue_stale() == (1 if attempt < MAX_ATTEMPTS else 0)
    assert both.queue.length() == QueueStatus(failed=1)
    assert "daemons ended" in both.queue.requests()[0].message


def test_a_request_that_a_container_took_with_it_waits_again(both: Store) -> None:
    both.queue.add([request()])
    assert both.queue.take(DEVICE.key) is not None
    with both.file.write() as connection:
        connection.execute(update(models.Request).values(host="c0ffee123456"))  # each container has a name of its own
    assert both.queue.requeue_stale() == 1
    assert both.queue.length() == QueueStatus(queued=1)


@pytest.mark.parametrize(("message", "seconds"), [("KeyError: 'x'", FAILED_SECONDS), (f"{NOT_READY}no room", 60.0)])
def test_a_failure_is_not_for_ever(both: Store, monkeypatch: pytest.MonkeyPatch, message: str, seconds: float) -> None:
    both.queue.add([request()])
    both.queue.finish(key(), "failed", message)
    began = tune_queue.now()
    for later, added in ((seconds - 1.0, 0), (seconds + 1.0, 1)):
        monkeypatch.setattr(tune_queue, "now", lambda later=later: began + later)
        assert both.queue.add([request()]) == added
    assert both.queue.length() == QueueStatus(queued=1)


def test_what_has_failed_is_queued_again_when_asked_for(both: Store) -> None:
    both.queue.add([request(), request("b" * 64)])
    both.queue.finish(key(), "failed", f"{NOT_READY}no room")
    both.queue.finish(key("b" * 64), "failed", "KeyError")
    assert both.queue.requeue_failed(NOT_READY) == 1 and both.queue.length() == QueueStatus(queued=1, failed=1)
    assert both.queue.requeue_failed() == 1 and both.queue.length() == QueueStatus(queued=2)


def test_a_decision_is_charged_to_the_run_that_asked_last(both: Store) -> None:
    first, second = both.runs.start(start()), both.runs.start(start())
    both.queue.add([request(run_id=first)])
    both.results.put_decision(decision())
    both.queue.add([request(run_id=second)])  # decided already: not this run's work
    assert [row.run_id for row in both.results.history()] == [first]
    assert both.results.history(run_id=second) == []


def test_open_requests_are_told_again_once_they_have_changed(both: Store) -> None:
    other = replace(request("b" * 64), key=key("b" * 64, device=DeviceInfo("cpu", "Other", 8, "avx2")))
    both.queue.add([request(calls=1), other, request("c" * 64)])
    both.queue.finish(key("c" * 64), "done")
    told = both.queue.open_requests({}, 10)
    assert {found.key: found for _, found in told} == {key(): request(calls=1), other.key: other}
    known = {found.key.digest: at for at, found in told}
    assert both.queue.open_requests(known, 10) == [] and len(both.queue.open_requests({}, 1)) == 1
    both.queue.add([request(calls=9)])
    ((_, found),) = both.queue.open_requests(known, 10)
    assert (found.key, found.calls) == (key(), 9)
    assert both.queue.devices() == sorted({DEVICE.key, other.key.device})
