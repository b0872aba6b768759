"""Which graphs are never recorded, and when nothing may happen: recordings of the user, modes, threads, streams."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from autofuse.pipeline import route_graph
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.replays.plan_replay import PlanReplay
from autofuse.wrapper import replayable
from tests.runtime.graphs.test_gpu_graphs import GPU, planned, session_with, traced
from tests.runtime.replays.bench import (
    UNTIL_KEPT,
    inputs,
    net,
    one_by_one,
    replayed,
    same,
    settle,
    weights,
)

__all__ = ["session_with"]  # a fixture

# ---- when nothing may happen -----------------------------------------------------------------------------


def test_inside_of_the_users_own_recording_everything_is_launched(bench, settled):
    router, w, b, _ = settled
    bench.player.capturing = True
    try:
        before, launches = bench.player.replays, bench.player.launches
        found = router([inputs(1), w, b])
        assert bench.player.replays == before and bench.player.launches > launches
        assert len(found) == 2
    finally:
        bench.player.capturing = False
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_nothing_is_recorded_while_the_user_records(bench):
    w, b = weights()
    router = bench.router(net, inputs(0), w, b)
    router([inputs(0), w, b])
    bench.player.capturing = True
    for seed in range(40):
        router([inputs(seed), w, b])
    assert not bench.player.recordings
    bench.player.capturing = False


def test_nothing_is_recorded_while_operators_are_watched(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.left_alone = False
    settle(router, lambda seed: (inputs(seed), w, b), plain, 40)
    assert not bench.player.recordings
    bench.player.left_alone, bench.player.may_wait = True, False
    settle(router, lambda seed: (inputs(seed), w, b), plain, 40)
    assert not bench.player.recordings
    bench.player.may_wait = True
    settle(router, lambda seed: (inputs(seed), w, b), plain, UNTIL_KEPT)
    assert bench.player.recordings == 1
    bench.player.left_alone = False
    assert not replayed(bench, lambda: router([inputs(1), w, b]))[0]
    bench.player.left_alone = True
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_under_anomaly_detection_and_other_switches_calls_are_launched(bench, settled):
    router, w, b, plain = settled
    with torch.autograd.set_detect_anomaly(True):
        assert not replayed(bench, lambda: router([inputs(1), w, b]))[0]
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]
    bench.player.numerics = "fewer bits"
    x = inputs(1)
    hit, found = replayed(bench, lambda: router([x, w, b]))
    assert not hit
    same(found, plain(x, w, b))
    bench.player.numerics = "as usual"
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_two_streams(bench, settled):
    """Calls on another stream are launched one by one; a graph that moves there for good is recorded there."""
    router, w, b, plain = settled
    for seed in range(20):
        bench.player.current_stream = 0x5000 if seed % 2 else 0x6000
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit == bool(seed % 2)
        same(found, want)
    bench.player.current_stream = 0x6000
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.player.recordings == 2 and len(bench.player.pools) == 2
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_another_device_is_current(bench, settled):
    router, w, b, _ = settled
    bench.player.device = 1
    assert bench.replays.kept[0].owner._enter([inputs(1), w, b]) is None
    bench.player.device = 0
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_call_inside_of_a_call(bench, settled):
    """From a hook, say: memory in use is not touched."""
    router, w, b, plain = settled
    pool = bench.replays.kept[0].pool
    with pool.lock:
        x = inputs(1)
        hit, found = replayed(bench, lambda: router([x, w, b]))
        assert not hit
        same(found, plain(x, w, b))
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_threads(bench, settled):
    """Several threads replay one graph, each with its own inputs, and nothing more is recorded."""
    router, w, b, plain = settled
    other, its_plain = bench.router(net, inputs(0, 4), w, b), one_by_one(bench, net, inputs(0, 4), w, b)
    settle(other, lambda seed: (inputs(seed, 4), w, b), its_plain, 2)
    wanted = {
        (seed, rows): (plain if rows == 8 else its_plain)(inputs(seed, rows), w, b)
        for seed in range(60)
        for rows in (8, 4)
    }
    recordings, wrong = bench.player.recordings, []

    def run(number):
        try:
            for seed in range(60):
                rows = 8 if (seed + number) % 2 else 4
                same((router if rows == 8 else other)([inputs(seed, rows), w, b]), wanted[seed, rows])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and bench.player.recordings == recordings
    assert "several threads" in bench.replays.why_not_now()


# ---- which graphs ------------------------------------------------------------------------------------------


def of_two_devices(x):
    return (x + 1).relu() @ x.t(), (x * 2).to("cuda:1").exp()


def drawing(x):
    kept, mask = torch.ops.aten.native_dropout((x @ x.t()).relu() * 2, 0.5, True)
    return kept @ x, mask


def writing(x):
    torch.ops.aten.add_.Tensor(x, 1)
    return (x @ x.t()).relu() @ x, x.exp()


def looking(x):
    return torch.as_strided(x, (4, 4), (1, 4), 2) @ x.narrow(0, 0, 4).exp() @ x.t(), x.exp() @ x.t()


def tiny(x):
    return ((x + 1).relu() * 2,)


def attending(x):
    heads = x.reshape(1, 1, 8, 16)
    aten = torch.ops.aten
    return aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, False, 0.0)[
        0
    ].exp() @ x.t(), x @ x.t()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (of_two_devices, "tensors on cuda:0, cuda:1"),
        (drawing, "draws random numbers by"),
        (writing, "writes to a tensor by add_"),
        (looking, "as_strided"),
        (tiny, "1 launches"),
        (attending, ""),
    ],
)
def test_which_graphs_are_never_recorded(function, says):
    with torch._dynamo.utils.preserve_rng_state():
        _, program = planned(function, GPU)
    assert (says in program.one_by_one) if says else not program.one_by_one, program.one_by_one
    assert ("af_plan.native" in program.source) == (not says)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (torch.ops.aten.nonzero.default, "waits for the device"),
        (torch.ops.aten._local_scalar_dense.default, "waits for the device"),
        (torch.ops.mkldnn._linear_pointwise.default, "not torch's own"),
        (time.sleep, "calls sleep"),
        (torch.ops.aten.mm.default, ""),
    ],
)
def test_which_operators_are_never_recorded(target, says):
    graph = torch.fx.Graph()
    problem = replayable._problem(graph.call_function(target, (graph.placeholder("x"),)))
    assert (says in problem) if says else not problem


def test_a_graph_of_a_cpu_is_as_before():
    _, program = planned(lambda x, y: (((x + y).relu() * 2) @ y.t() @ x,), "cpu", "cpu")
    assert program.one_by_one == "is on a CPU" and program.native


def test_a_session_replays_only_where_it_is_told_to(session_with):
    for settings, is_on in (({}, False), ({"AUTOFUSE_REPLAY_ENABLED": "1"}, True), ({"AUTOFUSE_CHECK": "1"}, False)):
        session = session_with(**settings)
        router = route_graph(traced(lambda x: (((x @ x.t()).relu() * 2) @ x,), GPU), "inference", session)
        assert isinstance(router, GraphRouter), session.context.said
        plan = router.plan_for(())
        assert isinstance(plan.native, PlanReplay) == is_on
        router.run_in_c()
        assert isinstance(plan.native, PlanReplay) == is_on
