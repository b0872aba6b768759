"""What is kept of timed calls of a graph: when each node began, in the call in which it did."""

import json
from types import SimpleNamespace

import pytest
import torch

from autofuse.ir.records import CALL_RECORD
from autofuse.runtime import call_records
from autofuse.runtime.call_records import CallRecords, Stopwatch, post_records
from tests.runtime.test_routed_graphs import Tiny, Undecided, routed


def plan(fused=(), count=1, nodes=3):
    return SimpleNamespace(
        count=count, nodes=[SimpleNamespace(tag="k" * (i in fused), covered=False) for i in range(nodes)]
    )


def add(records, which, seconds):
    watch = Stopwatch()
    watch.begin()
    watch[0] = watch[0] + 0.25 * seconds
    records.add(which, watch, watch.began + seconds)


def test_the_quickest_call_is_kept_with_and_without_kernels():
    records, which = CallRecords(), plan()
    for seconds in (3.0, 1.0, 2.0):
        add(records, which, seconds)
    which.nodes[1].tag = "k"
    for seconds in (0.9, 0.5, 0.7):
        add(records, which, seconds)
    assert (records.eager.seconds, records.fused.seconds) == pytest.approx((1.0, 0.5))
    which.nodes[2].tag = "k"
    add(records, which, 0.8)
    assert records.fused.seconds == pytest.approx(0.8) and records.fused.fused == {1, 2}, "of the present kernels"


def test_the_calls_are_of_the_plan_that_is_called_most():
    records, often, seldom = CallRecords(), plan(count=9), plan(fused=[0], count=3)
    add(records, often, 1.0)
    add(records, seldom, 0.1)
    assert records.plan is often and records.fused is None
    seldom.count = 10
    add(records, seldom, 0.1)
    assert records.plan is seldom and records.eager is None and records.fused is not None


def test_a_group_begins_no_later_than_its_parts():
    stretch = call_records.Stretch
    one, two, group, after = (
        stretch(0, 1.0, 0.5), stretch(1, 2.0, 0.9), stretch(2, 2.1, 1.59), stretch(3, 3.0, 0.4),
    )  # fmt: skip
    assert call_records._starts([one, two, group, after]) == pytest.approx([0.5, 1.1, 0.5, 2.6])


def test_a_training_step_leaves_an_event_for_each_graph_in_the_order_of_the_step():
    torch._dynamo.reset()
    catalogue, model = Undecided(), Tiny(blocks=1)
    fast = routed(model, catalogue, timed=True)
    for _ in range(2):
        fast(torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8))).backward()
    events = []
    post_records(catalogue.routers[::-1], lambda node: 1.0, lambda fusion_id: "line", events.append)
    assert [event.kind for event in events] == [CALL_RECORD] * 2
    assert [event.data["phase"] for event in events] == ["forward", "backward"]
    for event in events:
        data = json.loads(json.dumps(event.data))
        assert data["fused"] is None and data["is_recorded"] and data["calls"] == 2
        rows = data["eager"]["nodes"]
        assert rows and {slot for slot, *_ in rows} <= set(range(len(data["nodes"])))
        assert all(start >= 0.0 and us > 0.0 and start + us <= data["eager"]["us"] + 1.0 for _, start, us, _ in rows)


def test_graphs_beyond_a_bound_are_left_out(monkeypatch):
    def router(first_at, nodes):
        records = CallRecords()
        records.plan, records.first_at = plan(nodes=nodes), first_at
        return SimpleNamespace(records=records, phase="forward")

    monkeypatch.setattr(call_records, "_told", lambda router, plan, speedup, sources: {"nodes": len(plan.nodes)})
    monkeypatch.setattr(call_records, "MOST_NODES", 10)
    events = []
    routers = [router(3.0, 4), router(2.0, 7), router(1.0, 3), router(4.0, 1)]
    post_records(routers, lambda node: 1.0, lambda fusion_id: "", events.append)
    assert [event.data["nodes"] for event in events] == [3, 7]
