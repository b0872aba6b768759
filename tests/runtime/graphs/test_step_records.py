"""Which steps are timed, and what is kept of them: when each node began, in the step in which it did."""

import json
from types import SimpleNamespace

import pytest
import torch

from autofuse.ir.records import STEP_RECORD
from autofuse.runtime.graphs import step_records
from autofuse.runtime.graphs.step_records import GraphCall, StepRecords, Stretch, starts
from tests.in_threads import call_in_threads
from tests.runtime.graphs.test_routed_graphs import Tiny, Undecided, routed


class Graph:
    def __init__(self, phase, times=1):
        self.phase, self.times, self.on_gpu = phase, times, False
        self.program = SimpleNamespace(symbols=("s0",))


def plan(number=0, count=1, nodes=2):
    node = SimpleNamespace(label="af_x", operation_names="add", fusion_id="f")
    slots = [SimpleNamespace(slot=SimpleNamespace(node=node)) for _ in range(nodes)]
    return SimpleNamespace(number=number, count=count, key=(8,), nodes=slots)


def run(records, graph, which, began, seconds, fused=()):
    """A call of a graph; whether it was timed."""
    if not records.is_due(graph):
        return False
    stretches = [Stretch(0, began + 0.5 * seconds, 0.25 * seconds)]
    records.add(GraphCall(graph, which, began, seconds, stretches, frozenset(fused)))
    return True


def told(records):
    events = []
    records.post(lambda node: 2.0, lambda fusion_id: "line", events.append)
    assert all(event.kind == STEP_RECORD for event in events)
    return [json.loads(json.dumps(event.data)) for event in events]


def test_whole_steps_are_timed_about_one_in_thirty_one_at_first_and_later_more_rarely():
    records, forward, backward, which = StepRecords(), Graph("forward"), Graph("backward"), plan()

    def timed_of(steps):
        timed = [run(records, graph, which, 0.0, 1.0) for _ in range(steps) for graph in (forward, backward)]
        assert timed[::2] == timed[1::2], "a step is timed as a whole or not at all"
        return timed[::2]

    first = timed_of(16 + 310)
    assert all(first[:16]) and 9 <= sum(first[16:]) <= 11
    counts = [sum(timed_of(31 << 5)) for _ in range(16)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 16 and counts[-1] == 2
    records.note_news()
    assert 31 <= sum(timed_of(31 << 5)) <= 33


def test_a_graph_that_a_step_repeats_and_a_model_without_gradients_have_steps_too():
    records, first, block, which = StepRecords(), Graph("inference"), Graph("inference", times=3), plan()
    for at in range(3):
        for number, graph in enumerate((first, block, block, block)):
            run(records, graph, which, 10.0 * at + number, 1.0)
    (data,) = told(records)
    assert [call["graph"] for call in data["eager"]] == [0, 1, 1, 1] and len(data["graphs"]) == 2
    assert [call["start"] for call in data["eager"]] == [0.0, 1e6, 2e6, 3e6]


def test_the_quickest_step_is_kept_with_and_without_kernels():
    records, forward, backward, which = StepRecords(), Graph("forward"), Graph("backward"), plan(count=9)
    for at, (seconds, fused) in enumerate(((3.0, ()), (1.0, ()), (2.0, ()), (0.9, (0,)), (0.5, (0,)), (0.7, (0,)))):
        run(records, forward, which, 100.0 * at, seconds, fused)
        run(records, backward, which, 100.0 * at + 10.0, seconds, fused)
    (data,) = told(records)
    assert data["calls"] == 9 and data["is_recorded"]
    assert [call["us"] for call in data["eager"]] == pytest.approx([1e6, 1e6])
    assert [(call["start"], call["us"]) for call in data["fused"]] == [(0.0, 0.5e6), (10e6, 0.5e6)]
    assert data["fused"][0]["nodes"] == [[0, 125000.0, 125000.0, 2.0]] and data["eager"][0]["nodes"][0][3] is None
    assert data["graphs"][0] == {"phase": "forward", "sizes": {"s0": 8}, "nodes": [["af_x", "add", "line"]] * 2}


def test_other_kernels_begin_anew():
    records, forward = StepRecords(), Graph("inference")
    for at, fused in enumerate(((0,), (0, 1), (0, 1))):
        run(records, forward, plan(), at, 1.0 + at, fused)
    (data,) = told(records)
    assert [call["us"] for call in data["fused"]] == [2e6]


def test_steps_that_take_the_most_time_are_told(monkeypatch):
    records, forward = StepRecords(), Graph("inference")
    for number in range(20):
        run(records, forward, plan(number, count=100 - number), number, 1.0)
    assert [data["calls"] for data in told(records)] == [100, 99, 98]
    monkeypatch.setattr(step_records, "MOST_NODES", 1)
    run(records, forward, plan(1), 0.0, 1.0)
    assert told(records) == []


def test_a_step_of_too_many_calls_is_not_recorded(monkeypatch):
    monkeypatch.setattr(step_records, "MOST_CALLS", 5)
    records, forward, backward, which = StepRecords(), Graph("forward"), Graph("backward"), plan()
    timed = [run(records, graph, which, 0.0, 1.0) for graph in (forward, *[backward] * 20)]
    assert sum(timed) == 5 and told(records) == []


def test_a_group_begins_no_later_than_its_parts():
    one, two, group, after = Stretch(0, 1.0, 0.5), Stretch(1, 2.0, 0.9), Stretch(2, 2.1, 1.59), Stretch(3, 3.0, 0.4)
    assert starts([one, two, group, after]) == pytest.approx([0.5, 1.1, 0.5, 2.6])


def test_times_of_a_gpu_are_medians_of_its_present_kernels():
    gpu = SimpleNamespace(type="cuda")
    nodes = [
        SimpleNamespace(slot=SimpleNamespace(device=gpu, node=None), covered=n == 1, fusion_id="") for n in range(3)
    ]
    which = SimpleNamespace(nodes=nodes, live_us=lambda slot: 10.0 * (slot + 1))
    graph = Graph("forward")
    graph.on_gpu = True
    call = GraphCall(graph, which, 5.0, 1.0, [], frozenset({0}))
    rows = step_records._lane((call, call), [graph], lambda node: 2.0)
    assert [(row["start"], row["us"]) for row in rows] == [(0.0, 40.0), (40.0, 40.0)]
    assert rows[0]["nodes"] == [[0, 0.0, 10.0, 2.0], [2, 10.0, 30.0, None]]


def test_a_training_step_leaves_its_graphs_in_their_order():
    torch._dynamo.reset()
    records, catalogue, model = StepRecords(), Undecided(), Tiny(blocks=1)
    fast = routed(model, catalogue)
    catalogue.sample_due, catalogue.note_call = records.is_due, records.add
    for _ in range(3):
        fast(torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8))).backward()
    (data,) = told(records)
    assert [graph["phase"] for graph in data["graphs"]] == ["forward", "backward"] and data["fused"] is None
    before = 0.0
    for call in data["eager"]:
        rows = call["nodes"]
        assert call["start"] >= before and rows
        assert {slot for slot, *_ in rows} <= set(range(len(data["graphs"][call["graph"]]["nodes"])))
        assert all(start >= 0.0 and us > 0.0 and start + us <= call["us"] + 1.0 for _, start, us, _ in rows)
        before = call["start"] + call["us"]


def test_calls_of_several_threads_keep_their_steps(monkeypatch):
    """What failed here reached the script: its calls of other sizes, from other threads, ended with an error."""
    monkeypatch.setattr(step_records, "KEPT_STEPS", 4)
    records, graphs = StepRecords(), [Graph("inference") for _ in range(3)]

    def call(first):
        for number in range(4000):
            records.note_news()
            run(records, graphs[number % 3], plan(number * 7 % 64 + first, count=number % 5), float(number), 0.5)

    assert not call_in_threads(call, (0, 64, 128, 192))
    assert told(records)
