"""When a captured graph is replayed as a CUDA graph, and when it is no longer: measured, decided anew, failed."""

from __future__ import annotations

import threading

import pytest
import torch

from autofuse.runtime.graphs.plans import Untimed
from autofuse.settings.groups import ReplaySettings
from tests.runtime.replays.bench import (
    AFTER,
    FAST,
    SLOW,
    UNTIL_KEPT,
    inputs,
    net,
    one_by_one,
    replayed,
    same,
    settle,
    weights,
)

# ---- the way to a replay ---------------------------------------------------------------------------------


def test_a_graph_is_recorded_compared_timed_and_then_replayed(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    player, seen = bench.player, []
    for seed in range(UNTIL_KEPT):
        args = [inputs(seed), w, b]
        want = plain(*args)
        before = player.replays
        same(router(args), want)
        assert args == []  # emptied, so that the caller keeps nothing alive
        seen.append(player.replays - before)
    first = seen.index(1)
    assert player.recordings == 1 and AFTER <= first <= 2 * AFTER
    assert seen[first + 1] == 1 and 0 in seen[first + 2 : first + 8] and 1 in seen[first + 2 : first + 8]
    assert seen[-20:] == [1] * 20 and bench.disturbed == 2
    assert bench.codes == ["replayed"] and "20.0 us as a CUDA graph, 100.0 us" in bench.refusals[0].detail
    launches = player.launches
    router([inputs(1), w, b])
    assert player.launches == launches and bench.driver.number("count") <= 1
    (plan,) = router.all_plans()
    assert plan.count == UNTIL_KEPT + 1 and plan.fused_calls(plan.nodes[0]) == plan.count


def test_a_replay_that_is_no_faster_is_given_up(bench):
    bench.seconds = [SLOW, SLOW]
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.codes == ["not_replayed"] and "no faster" in bench.refusals[0].detail
    (plan,) = router.all_plans()
    assert plan.native is None and not bench.replays.kept and not replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_small_gain_needs_a_second_race(bench):
    bench.seconds = [1.1 * FAST, FAST]
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.codes == ["replayed"]


def test_what_cannot_be_timed_is_not_kept(bench):
    w, b = weights()
    bench.timer = Untimed
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 4 * UNTIL_KEPT)
    assert bench.codes == ["not_replayed"] and "no call could be timed" in bench.refusals[0].detail


def test_a_recording_that_gives_something_else_is_never_used(bench, settled):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.during = lambda: bench.player.work.pop()  # the last launch is lost
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.codes == ["replayed", "not_replayed"] and "other results" in bench.refusals[1].detail


# ---- decisions, memory, failures ---------------------------------------------------------------------------


def test_a_decision_drops_the_graph(bench, settled):
    router, w, b, plain = settled
    bench.kernels.version = 1
    (plan,) = router.all_plans()
    old = plan.native
    thread = threading.Thread(target=router.refresh, args=(plan,))  # as the session's own does
    thread.start()
    thread.join()
    assert plan.native is not old and not bench.replays.kept and len(bench.replays._retired) == 1
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.player.recordings == 2 and len(bench.replays._retired) == 1  # the device is behind
    bench.player.has_finished = True
    router([inputs(1), w, b])
    assert bench.replays._retired == []
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_decision_in_the_middle_of_a_recording(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)

    def decide():
        bench.kernels.version += 1
        thread = threading.Thread(target=lambda: router.refresh(next(iter(router.all_plans()))))
        thread.start()
        thread.join()
        bench.player.during = lambda: None

    bench.player.during = decide
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.player.recordings == 2 and len(bench.replays.kept) == 1 and bench.codes == ["replayed"]


def test_undecided_nodes_wait_longer(bench):
    bench.kernels.known = False
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 4 * AFTER)
    assert not bench.player.recordings
    settle(router, lambda seed: (inputs(seed), w, b), plain, 5 * AFTER)
    assert bench.player.recordings == 1


def test_only_so_many_are_kept_and_the_oldest_goes(bench):
    bench.session(max_graphs=2)
    w, b = weights()
    routers = {rows: bench.router(net, inputs(0, rows), w, b) for rows in (2, 4, 8)}
    plain = {rows: one_by_one(bench, net, inputs(0, rows), w, b) for rows in routers}
    bench.player.has_finished = True
    for rows in (2, 4, 8):
        settle(routers[rows], lambda seed, rows=rows: (inputs(seed, rows), w, b), plain[rows])
    assert [replayed(bench, lambda rows=rows: routers[rows]([inputs(1, rows), w, b]))[0] for rows in (2, 4, 8)] == [
        False, True, True,
    ]  # fmt: skip
    assert len(bench.replays.kept) == 2 and len(bench.replays._retired) <= 1
    for seed in range(UNTIL_KEPT):  # all in turns, in one pool of memory
        for rows in (2, 4, 8):
            x = inputs(seed, rows)
            same(routers[rows]([x, w, b]), plain[rows](x, w, b))
    assert len(bench.replays.kept) == 2


def test_memory_whose_graphs_are_all_gone_is_not_recorded_into(bench, settled):
    """Torch gives a pool up with the last graph in it."""
    router, w, b, plain = settled
    bench.player.has_finished = True
    for _ in range(2):
        (plan,) = router.all_plans()
        bench.kernels.version += 1
        router.refresh(plan)
        settle(router, lambda seed: (inputs(seed), w, b), plain)
        assert replayed(bench, lambda: router([inputs(1), w, b]))[0]
    assert bench.player.recordings == 3 and not bench.failures


def test_graphs_of_one_pool_use_each_others_memory_and_stay_right(bench):
    w, b = weights()
    routers = {rows: bench.router(net, inputs(0, rows), w, b) for rows in (8, 4, 2)}
    plain = {rows: one_by_one(bench, net, inputs(0, rows), w, b) for rows in routers}
    for rows in routers:
        settle(routers[rows], lambda seed, rows=rows: (inputs(seed, rows), w, b), plain[rows])
    assert bench.codes == ["replayed"] * 3 and len(bench.player.pools) == 1
    for seed in range(30):
        for rows in routers:
            x = inputs(seed, rows)
            want = plain[rows](x, w, b)
            hit, found = replayed(bench, lambda rows=rows, x=x: routers[rows]([x, w, b]))
            assert hit
            same(found, want)


def test_a_graph_that_takes_too_much_memory(bench, monkeypatch):
    monkeypatch.setattr(
        bench.replays, "settings", ReplaySettings.model_construct(after=AFTER, max_graphs=9, max_bytes=64)
    )
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.codes == ["not_replayed"] and "no room" in bench.refusals[0].detail and not bench.replays.kept


@pytest.mark.parametrize("moment", ["begin", "body", "end"])
@pytest.mark.parametrize("error", [RuntimeError("capture was invalidated"), torch.OutOfMemoryError("no memory")])
def test_a_recording_that_raises_is_one_line_and_nothing_else(bench, moment, error):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.fails[moment] = error
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert [(kind, type(e)) for kind, _, e in bench.failures] == [("replay_failed", type(error))]
    assert bench.codes == ["not_replayed"] and not bench.replays.kept and not bench.player.replays


def test_after_failures_of_two_graphs_nothing_is_recorded(bench):
    w, b = weights()
    bench.player.fails["end"] = RuntimeError("broken")
    for rows in (2, 4, 8):
        router, plain = bench.router(net, inputs(0, rows), w, b), one_by_one(bench, net, inputs(0, rows), w, b)
        settle(router, lambda seed, rows=rows: (inputs(seed, rows), w, b), plain, 30)
    assert bench.player.recordings == 2 and bench.replays.is_off


def test_a_replay_that_raises(bench, settled, monkeypatch):
    router, w, b, plain = settled
    graph = bench.replays.kept[0].graph
    monkeypatch.setattr(graph, "replay", lambda: (_ for _ in ()).throw(RuntimeError("lost")))
    for seed in range(5):
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert len(bench.failures) == 1 and not bench.replays.kept


def test_an_error_of_the_users_own_is_raised_once(bench, monkeypatch):
    """Launches one by one that raise, as without enough memory: nothing is said of graphs."""
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * AFTER + 3)
    assert bench.player.recordings == 1
    empty, raised = bench.player.empty, 0
    for seed in range(16):

        def broken(*layout):
            raise torch.OutOfMemoryError("the user's")

        monkeypatch.setattr(bench.player, "empty", broken)
        try:
            router([inputs(seed), w, b])
        except Exception as error:
            assert "user's" in str(error)
            raised += 1
        monkeypatch.setattr(bench.player, "empty", empty)
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))


def test_evicted_plans_let_go_of_their_graphs(bench, settled):
    router, w, b, plain = settled
    router.let_go(list(router.plans.values()))
    assert not bench.replays.kept
    x = inputs(1)
    same(router([x, w, b]), plain(x, w, b))
