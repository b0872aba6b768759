"""The order of the queue: what a node has brought in other buckets decides, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.daemon.expectations import LEAST_GAIN, Expectations
from autofuse.db.store import Store
from autofuse.db.tune_queue import WaitingRequest
from autofuse.ir.records import EAGER, Candidate, Decision, DeviceInfo
from tests.db.store_records import DEVICE, bucket, decision, key, request


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.sqlite3") as opened:
        yield opened


def found(fusion_id: str, speedup: float, seconds: float, is_eager: bool = False) -> Decision:
    made = replace(decision(fusion_id, speedup), tuning_seconds=seconds)
    return replace(made, candidate=Candidate(EAGER), compile_key=None) if is_eager else made


def waiting(fusion_id: str, estimated: float = 2.0) -> WaitingRequest:
    return WaitingRequest(key(fusion_id), 10, 100.0, estimated)


def test_the_estimate_counts_until_something_is_known(store: Store) -> None:
    expectations = Expectations(store.results)
    assert expectations.saving_a_second(waiting("a", 4.0)) > expectations.saving_a_second(waiting("b", 2.0)) > 0.0
    assert expectations.saving_a_second(waiting("c", 0.5)) == 0.0


def test_what_eager_keeps_comes_last_and_what_gains_first(store: Store) -> None:
    expectations = Expectations(store.results)
    for name in "abc":
        expectations.saving_a_second(waiting(name))
    expectations.note([found("a", 0.8, 0.5, is_eager=True), found("b", 5.0, 0.5)])
    ranks = [expectations.saving_a_second(waiting(name)) for name in "bca"]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[2] == pytest.approx(10 * 100.0 * (1.0 - 1.0 / LEAST_GAIN) / 0.5)


def test_of_equal_gains_the_shorter_job_comes_first(store: Store) -> None:
    expectations = Expectations(store.results)
    for name in "ab":
        expectations.saving_a_second(waiting(name))
    expectations.note([found("a", 2.0, 4.0), found("b", 2.0, 0.25)])
    assert expectations.saving_a_second(waiting("b")) == 16 * expectations.saving_a_second(waiting("a"))


def test_the_past_is_read_from_the_store_and_counted_once(store: Store) -> None:
    past = found("a", 3.0, 0.5)
    store.queue.add([request("a")])
    store.results.put_decision(past)
    fresh, told = Expectations(store.results), Expectations(store.results)
    told.note([past])  # stored already, and nobody has asked for the node: it is read when somebody does
    expected = 10 * 100.0 * (1.0 - 1.0 / 3.0) / 0.5
    assert fresh.saving_a_second(waiting("a")) == told.saving_a_second(waiting("a")) == pytest.approx(expected)


def test_other_devices_and_thread_counts_say_nothing(store: Store) -> None:
    other = found("a", 9.0, 0.1)
    device = DeviceInfo("cpu", "Other", 8, "avx2")
    store.results.put_decision(replace(other, key=replace(other.key, device=device.key)))
    store.results.put_decision(replace(other, key=replace(other.key, threads=other.key.threads + 1)))
    assert Expectations(store.results).saving_a_second(waiting("a")) == 10 * 100.0 * 0.5 / 0.5


def test_the_queue_gives_what_is_preferred(store: Store) -> None:
    small = bucket(33, 64)
    store.queue.add([request("a"), request("b"), request("a", of=small), request("b", of=small)])
    expectations = Expectations(store.results)
    taken = []
    while (taking := store.queue.take(DEVICE.key, prefer=expectations.saving_a_second)) is not None:
        taken.append((taking.key.fusion_id, taking.bucket))
        gain = {"a": 0.9, "b": 4.0}[taking.key.fusion_id]
        made = found(taking.key.fusion_id, gain, 0.2, is_eager=gain < 1.0)
        expectations.note([replace(made, key=taking.key, bucket=taking.bucket)])
    assert [name for name, _ in taken].index("b") <= 1
    assert [name for name, _ in taken][-1] == "a"
    assert len(taken) == 4
