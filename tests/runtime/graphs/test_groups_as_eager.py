"""A group whose members' kernels lost against eager's operations in their own order runs as eager does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofuse.daemon.request_tuner import parts_lost
from autofuse.ir.records import EAGER, IN_ONE, Candidate, Measurement, Status, make_config
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.tuner.outcome import Outcome
from autofuse.tuner.strategy_provider import STRATEGY
from tests.codegen.test_in_place import Captured, W

RESIDUAL = torch.randn(48, 32)


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ W + RESIDUAL) * 2.0


def test_members_rest_while_their_group_runs_in_one(tmp_path: Any) -> None:
    captured = Captured(function, str(tmp_path / "store.sqlite3"))
    said = {"group": UNKNOWN}
    own = captured.choose

    def choose(fusion_id: str, values: Any, device: Any) -> Choice:
        slots = captured.session.context.routers[0].program.slots
        is_group = next(s.is_group for s in slots if s.node.fusion_id == fusion_id)
        return said["group"] if is_group else own(fusion_id, values, device)

    captured.session.kernels.choose = choose  # type: ignore[method-assign]
    x = torch.randn(48, 32)
    expected = function(x)

    def calls() -> tuple[int, list[tuple[bool, int]]]:
        torch.testing.assert_close(captured.call(x), expected)
        router = captured.session.context.routers[0]
        (plan,) = router.all_plans()
        router.refresh(plan)
        members = [node for node in plan.nodes if not node.slot.is_group]
        return plan.fused_nodes, [(node.covered, plan.fused_calls(node)) for node in members]

    assert calls() == (1, [(False, 1)])
    said["group"] = Choice(known=True, in_one=True)
    calls()
    assert calls() == (0, [(True, 2)])  # its own counter stands still
    assert torch.equal(captured.call(x), expected), "eager's own operations, bit by bit"
    said["group"] = Choice(known=True)  # of another tuning, which found no difference
    calls()
    fused, members = calls()
    assert fused == 1 and not members[0][0]


@pytest.mark.parametrize(("high", "lost"), [(0.97, True), (1.01, False), (None, False)])
def test_parts_lost_only_for_certain(high: float | None, lost: bool) -> None:
    ok: Status = "ok"
    row = Measurement(Candidate("way", make_config({STRATEGY: "parts"})), ok, (8,), speedup=0.9, speedup_high=high)
    other = Measurement(Candidate("way", make_config({STRATEGY: "sdpa"})), ok, (8,), speedup=0.5, speedup_high=0.6)
    assert parts_lost(Outcome(measurements=[other, row])) is lost
    assert Candidate(EAGER, IN_ONE) != Candidate(EAGER)
