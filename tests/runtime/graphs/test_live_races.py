"""Kernels on the script's own calls: which are held out, and which are given up; and a slow one in a real session."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.codegen.c.build import compile_source, flags_for
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.db.store import Store
from autofuse.ir.records import LIVE_RACES, Candidate, Decision, DecisionKey, KernelRecord
from autofuse.report.report import load_report
from autofuse.report.verdict import facts
from autofuse.runtime.graphs.live_races import CONFIRMED, MOST_PAIRS, OPEN, SLOWER, UNSURE, HeldOutPlan, LiveRaces
from autofuse.runtime.rank_agreement import is_alone
from autofuse.sessions import start_session
from autofuse.settings.layers import load
from tests.cases import CASES

FORM = CASES["softmax"].form()
MARGIN = 0.03


def plan_of(*tags: str, device: str = "cpu") -> Any:
    """A plan of nodes of one form, each with a kernel of that name; "" for eager."""
    nodes = []
    for number, tag in enumerate(tags):
        node = SimpleNamespace(label=f"af_{number}")
        slot = SimpleNamespace(device=torch.device(device), node=node)
        nodes.append(
            SimpleNamespace(
                tag=tag, covered=False, fused=object() if tag else None, slot=slot, fusion_id=f"f{number}", form=FORM,
                bucket=SimpleNamespace(label="b"), values=(4, 2, 8), unfused=f"eager {number}",
            )
        )  # fmt: skip
    return SimpleNamespace(nodes=nodes, calls=tuple(node.fused for node in nodes), count=0, skipped=[0], timers={})


def decision_of(node: Any) -> Decision:
    key = DecisionKey("f0", "b", "cpu", 1, "v")
    return Decision(key, SimpleNamespace(), Candidate("c_generic"), "k", 10.0, 5.0, 2.0, 1.9, 2.1, "won")  # type: ignore[arg-type]


def run(ratio: float, noise: float, seed: int, calls: int = 200) -> tuple[str, int, list[Decision]]:
    """The verdict on a kernel that is so many times as fast as eager, the held-out calls, what was given up."""
    given_up: list[Decision] = []
    races, plan, draw, held_out = LiveRaces(MARGIN, decision_of, given_up.append), plan_of("k"), random.Random(seed), 0
    for _ in range(calls):
        held = races.held_out(plan)
        held_out += bool(held)
        seconds = (1.0 if held else 1.0 / ratio) * 1e-5 * (1.0 + noise * draw.random())
        races.add(plan, held, [seconds])
    (race,) = races._races.values()
    assert (race.verdict == OPEN) == bool(race.eager), "samples are kept until there is a verdict"
    return race.verdict, held_out, given_up


@pytest.mark.parametrize(("ratio", "verdict"), [(0.7, SLOWER), (0.9, SLOWER), (1.5, CONFIRMED), (1.0, UNSURE)])
def test_a_verdict_goes_by_pairs(ratio: float, verdict: str) -> None:
    found, held_out, given_up = run(ratio, 0.04, seed=0)
    assert found == verdict and bool(given_up) == (verdict == SLOWER)
    assert held_out <= 2 * MOST_PAIRS
    if given_up:
        (decision,) = given_up
        assert decision.candidate == Candidate("eager") and decision.compile_key is None
        assert decision.reason == "slower_live" and decision.speedup == pytest.approx(ratio, rel=0.05)
        assert decision.speedup_high < 1.0 and decision.fused_us > decision.unfused_us
        assert "pairs of calls of the script; 2.00x in its race" in decision.detail


def test_noise_alone_gives_no_kernel_up() -> None:
    """Of kernels as fast as eager, beside noise that doubles a call's time."""
    verdicts = [run(1.0, 1.0, seed)[0] for seed in range(300)]
    assert verdicts.count(SLOWER) == 0 and verdicts.count(UNSURE) > 200
    assert [run(1.2, 1.0, seed)[0] for seed in range(100)].count(SLOWER) == 0


def test_only_kernels_that_run_as_they_are_take_part() -> None:
    races = LiveRaces(MARGIN, decision_of, lambda decision: None)
    plan = plan_of("a", "", "c", "d")
    plan.nodes[2].covered = True
    plan.calls = (*plan.calls[:3], "checked")
    gpu = plan_of("k", device="cuda")
    for _ in range(3):
        assert races.held_out(plan) in ({0}, frozenset())
        races.add(plan, frozenset(), [1e-5] * 4)
        races.add(gpu, races.held_out(gpu), [1e-5])
    assert races.held_out(plan) == {0} and not races.held_out(gpu)
    assert races.told() is None, "nothing was compared yet"


def test_sizes_of_one_bucket_are_compared_by_element() -> None:
    """Kernels run on sizes twice those of the held-out calls, and are as fast by element."""
    races, given_up = LiveRaces(MARGIN, decision_of, lambda decision: given_up.append(decision)), list[Decision]()
    small, large = plan_of("k"), plan_of("k")
    large.nodes[0].values = (8, 2, 8)
    for _ in range(4 * MOST_PAIRS):
        races.add(large, races.held_out(large) and frozenset(), [2e-5])
        races.add(small, races.held_out(small), [1e-5])
    assert not given_up
    told = races.told()
    assert told is not None and told.kind == LIVE_RACES and told.data[UNSURE] == 1 and told.data[SLOWER] == 0
    assert (
        told.data["rows"][0]["speedup"] == 1.0 and told.data["rows"][0]["pairs"] == MOST_PAIRS and told.data[OPEN] == 0
    )


def test_a_held_out_plan_is_the_plan_but_for_its_callables() -> None:
    plan = plan_of("a", "b")
    held = HeldOutPlan(plan, frozenset({1}))
    held.count += 1
    held.skipped[0] += 1
    assert held.calls == (plan.calls[0], "eager 1") and held.native is None
    assert plan.count == 1 and plan.skipped == [1] and held.timers is plan.timers


def test_ranks_of_a_job_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_alone()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_alone()


# ---- a session ------------------------------------------------------------------------------------------------------

SETTINGS = {
    "run.tune": "off",
    "run.quiet": True,
    "capture.at_once": True,
    "capture.keep_graphs": False,
    "fusion.min_tensor_size": 0,
}
SPIN = "{ for (volatile long af_spin = 0; af_spin < %d; af_spin++) {} "


class Model(nn.Module):
    """One node."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2.0 + 1.0, -1)


def calls(path: Path, count: int, prepare: Any = None, **changes: Any) -> tuple[Any, Any]:
    """A run of its own; the last run's node, and the results."""
    torch._dynamo.reset()
    session = start_session(load(SETTINGS | {"run.store": path} | changes, {}, path.parent), "test")
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    try:
        model, found = Model().eval(), []
        with torch.no_grad():
            for number in range(count):
                found.append(model(x))
                if number == 3 and prepare is not None:
                    prepare(session)
        (router,) = session.context.routers
        (plan,) = router.all_plans()
        return plan.nodes[0], found
    finally:
        session.finish(None)
        torch._dynamo.reset()


def put_slow_kernel(session: Any) -> None:
    """As if the daemon had found a kernel, which takes far longer than eager."""
    (router,) = session.context.routers
    node = next(router.all_plans()).nodes[0]
    generator = FusionKernelGenerator()
    kernel = generator.generate_generic_kernel(node.form)
    begin = kernel.source.index("{", kernel.source.index(f" {kernel.name}("))
    source = kernel.source[:begin] + SPIN % 300_000 + kernel.source[begin + 1 :]
    key, flags = replace(kernel.key, source_hash="5" * 64), flags_for(generator.toolchain, kernel.config)
    context = session.context
    with Store.open(context.settings.run.store) as store:
        store.kernels.put(KernelRecord(key, kernel.name, source, compile_source(source, generator.toolchain, flags)))
        where = DecisionKey(
            node.fusion_id, node.bucket.label, context.device.key, torch.get_num_threads(), context.versions
        )
        won = Decision(where, node.bucket, Candidate("c_generic"), key.digest, 10.0, 5.0, 2.0, 1.9, 2.1, "won")
        store.results.put_decision(won)
    assert session.context.store_thread.absorb_again(60.0)
    node = next(router.all_plans()).nodes[0]
    assert node.tag == key.digest, "the kernel runs"


def test_a_slow_kernel_is_given_up_and_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofuse.runtime.graphs.step_records.TIMED_ONE_IN", 1)
    # With no other node in it the whole module would be released as early.
    monkeypatch.setattr("autofuse.runtime.roots.graph_trial.GraphTrial.compare", lambda *a: None)
    path = tmp_path / "store.sqlite3"

    def until_eager(session: Any) -> None:
        put_slow_kernel(session)
        model, x = Model().eval(), torch.randn(8, 16)
        node = next(session.context.routers[0].all_plans()).nodes[0]
        end = time.monotonic() + 120.0
        while node.tag:  # the decision goes through the store
            assert time.monotonic() < end, "expected the kernel to be given up, found that it still runs"
            model(x)

    node, found = calls(path, 6, until_eager)
    assert not node.tag and not node.broken
    for result in found[1:]:
        torch.testing.assert_close(result, found[0])
    with Store.open(path, readonly=True) as store:
        decision = [stored.decision for stored in store.results.history(node.fusion_id)][-1]
        assert decision.reason == "slower_live" and decision.speedup < 0.9
        report = load_report(store)
        assert ("on real calls", "1 kernel given up") in list(facts(report))
        (line,) = report.nodes
        assert line.reason == "slower_live" and line.variant == "eager"
    node, _ = calls(path, 6)
    assert not node.tag, "the next run starts in eager"


def test_frozen_runs_and_the_setting_leave_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofuse.runtime.graphs.step_records.TIMED_ONE_IN", 1)

    def many(session: Any) -> None:
        put_slow_kernel(session)
        model, x = Model().eval(), torch.randn(8, 16)
        for _ in range(60):
            model(x)
        assert session.live_races is None

    node, _ = calls(tmp_path / "store.sqlite3", 6, many, **{"tuner.live_races": False})
    assert node.tag
    frozen = {"run.frozen": True}
    node, _ = calls(tmp_path / "store.sqlite3", 6, lambda session: _assert_none(session), **frozen)
    assert node.tag, "a frozen run uses what is stored"


def _assert_none(session: Any) -> None:
    assert session.live_races is None
