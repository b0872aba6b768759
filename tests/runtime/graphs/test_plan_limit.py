"""How many plans are kept: counters survive, frequent shapes stay, results do not change."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from autofuse.runtime.graphs.choice import Choice
from autofuse.runtime.graphs.plan_limit import LEAST_SIZE, PlanLimit
from autofuse.runtime.graphs.plans import Plan
from autofuse.runtime.graphs.usage import MAX_SHAPES, Usage
from autofuse.runtime.roots.steps import PlanLog
from autofuse.wrapper.node_call import make_unfused
from tests.runtime.graphs.test_routed_graphs import Undecided, routed


class Limited(Undecided):
    """Keeps so many nodes, and takes note of each plan."""

    def __init__(self, most_nodes: int) -> None:
        super().__init__()
        self.limit = PlanLimit(self.routers, most_nodes)
        self.made: list[Plan] = []

    def new_plan(self, plan: Plan) -> None:
        self.made.append(plan)
        self.limit.add(plan)

    def kept(self) -> list[Plan]:
        return [plan for router in self.routers for plan in router.all_plans()]

    def usage(self) -> Usage:
        usage = Usage()
        for router in self.routers:
            router.add_usage(usage)
        return usage


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()).eval()


def limited(model: nn.Module, plans: int) -> tuple[Any, Limited]:
    """The model as one graph for all numbers of rows, of which so many plans are kept."""
    torch._dynamo.reset()
    catalogue = Limited(plans * LEAST_SIZE)
    fast = routed(model, catalogue)
    x = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        fast(x)
    (router,) = catalogue.routers
    assert len(router.program.slots) == 2
    return fast, catalogue


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(2, 12), max_size=60), plans=st.integers(1, 8))
def test_counters_and_results_are_those_of_unlimited_plans(model: nn.Module, rows: list[int], plans: int) -> None:
    fast, catalogue = limited(model, plans)
    for n in rows:
        x = torch.randn(n, 8)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
        assert 1 <= len(catalogue.kept()) <= plans + 1  # the one that is about to run is kept as well
    (router,) = catalogue.routers
    usage, wanted = catalogue.usage(), Counter([3, *rows])
    assert router.calls() == usage.calls == usage.calls_by_bucket.total() == len(rows) + 1
    for fusion_id in {slot.node.fusion_id for slot in router.program.slots}:
        sums = [total for (found, _), total in usage.nodes.items() if found == fusion_id]
        assert sum(total.calls for total in sums) == len(rows) + 1
        shapes = sum((total.shapes for total in sums), Counter())
        assert {values[0]: calls for values, calls in shapes.items()} == wanted


def test_frequent_shapes_stay_and_others_come_anew(model: nn.Module) -> None:
    fast, catalogue = limited(model, 16)
    frequent, seldom = torch.randn(5, 8), list(range(20, 120))
    with torch.no_grad():
        for n in seldom:
            fast(torch.randn(n, 8))
            for _ in range(2):
                fast(frequent)
        made = [plan.key for plan in catalogue.made]
        assert made.count((5,)) == 1 and len(made) == len(set(made)) == 102
        assert {key for (key,) in (plan.key for plan in catalogue.kept())} <= {5, *seldom[-16:]}
        fast(torch.randn(20, 8))
    assert catalogue.made[-1].key == (20,) and catalogue.kept()[-1] is catalogue.made[-1]


def test_kernels_and_their_counts_come_back_with_a_shape(model: nn.Module) -> None:
    fast, catalogue = limited(model, 2)
    (router,) = catalogue.routers
    calls = {slot.node.fusion_id: [] for slot in router.program.slots}

    class Entry:
        """Runs eager's operations, as a kernel of each node's own."""

        def __init__(self, fusion_id: str) -> None:
            self.fusion_id = fusion_id

    def launcher(form: Any, entry: Entry, values: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        plain = make_unfused(form, values)

        def run(*inputs: torch.Tensor) -> Any:
            calls[entry.fusion_id].append(values[0])
            return plain(*inputs)

        return run

    catalogue.choose = lambda fusion_id, values, device: Choice(True, Entry(fusion_id), "kernel")
    rows = [4, 5, 6, 4, 5, 6, 4]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("autofuse.runtime.graphs.router.make_launcher", launcher)
        for n in rows:
            x = torch.randn(n, 8)
            assert torch.equal(fast(x), model(x))
    assert all(found == rows for found in calls.values())
    fused = Counter[str]()
    for (fusion_id, _), total in catalogue.usage().nodes.items():
        fused[fusion_id] += total.fused_calls
    assert set(fused.values()) == {7}, "all but the call that traced, when nothing was decided"


def test_plans_that_run_are_noted_once_asked_for(model: nn.Module) -> None:
    fast, catalogue = limited(model, 1 << 10)
    (router,) = catalogue.routers
    with torch.no_grad():
        for n in (4, 5):
            fast(torch.randn(n, 8))
        for plan, fused in zip(catalogue.made, (1, 20, 300), strict=True):
            plan.fused_nodes = fused
        one, other = PlanLog(), PlanLog()
        router.note_plans(one)
        fast(torch.randn(4, 8))
        fast(torch.randn(4, 8))
        router.note_plans(other)
        fast(torch.randn(5, 8))
        router.stop_noting(one)
        assert {plan.fused_nodes for plan in one.plans} == {20, 300}
        fast(torch.randn(6, 8))
        catalogue.made[-1].fused_nodes = 4000
        fast(torch.randn(3, 8))
        router.stop_noting(other)
        assert {plan.fused_nodes for plan in other.plans} == {1, 300, 4000} and len(one.plans) == 2
        assert other.ran is not None and other.ran.fused_nodes == 4301
        assert router.lookup is router.plans


def test_a_step_that_nobody_ends_costs_later_calls_nothing(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a model that is gone ends never: it kept each plan that ran after it, evicted ones too."""
    monkeypatch.setattr(PlanLog, "MOST_CALLS", 3)
    fast, catalogue = limited(model, 1 << 10)
    (router,) = catalogue.routers
    log = PlanLog()
    with torch.no_grad():
        fast(torch.randn(4, 8))
        router.note_plans(log)
        for n in (4, 5, 6):
            fast(torch.randn(n, 8))
        assert len(log.plans) == 3 and router.lookup is not router.plans
        fast(torch.randn(7, 8))
    assert log.is_full and log.ran is None and not log.plans
    assert router.lookup is router.plans


def test_a_kernel_that_fails_is_given_up_by_all_that_share_it() -> None:
    """Two layers that are alike; the second one's first call is under way when the first one's fails."""

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.second(torch.tanh(self.first(x)) * 2)) * 2

    model = Alike().eval()
    torch._dynamo.reset()
    catalogue = Limited(1 << 10)
    launches = []

    def broken(*args: Any) -> None:
        launches.append(args)
        raise RuntimeError("no such kernel")

    catalogue.choose = lambda fusion_id, values, device: Choice(True, broken, "kernel")
    fast = routed(model, catalogue)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(fast(x), model(x))
    (router,) = catalogue.routers
    assert [node.alike for node in catalogue.made[0].nodes] == [0, 0]
    assert len(launches) == 2, "once for each that was under way, and never again"
    assert all(node.broken and not node.tag for plan in catalogue.kept() for node in plan.nodes)
    assert len(catalogue.failed) == 1 and "no such kernel" in catalogue.failed[0]
    router.let_go(catalogue.kept())
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    (plan,) = catalogue.kept()
    assert len(launches) == 2 and not plan.fused_nodes and all(node.broken and not node.tag for node in plan.nodes)


def test_memory_that_runs_out_gives_nothing_up(model: nn.Module) -> None:
    fast, catalogue = limited(model, 1 << 10)

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("no memory for this batch")

    catalogue.choose = lambda fusion_id, values, device: Choice(True, full, "kernel")
    x = torch.randn(7, 8)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert not catalogue.failed and not any(node.broken for plan in catalogue.kept() for node in plan.nodes)


def test_of_plans_let_go_the_frequent_shapes_are_told(model: nn.Module) -> None:
    fast, catalogue = limited(model, 4)
    with torch.no_grad():
        for n in range(1000, 1000 + 8 * MAX_SHAPES):
            fast(torch.randn(n, 8))
            if n % 50 == 0:
                fast(torch.randn(1100, 8))
    usage = catalogue.usage()
    total = max(usage.nodes.values(), key=lambda found: found.calls)
    assert len(total.shapes) <= 4 * MAX_SHAPES + 4
    assert total.shapes.most_common(1)[0][0] == (1100,)
