"""Norms of 16-bit tensors: their statistics have the dtypes that aten's kernels return, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from autofuse.capture.backend import boxed, compile_with
from tests.codegen.conftest import generator  # noqa: F401  # a fixture
from tests.codegen.test_batch_norm import AllInC, _lowerable, catalogue  # noqa: F401  # a fixture
from tests.runtime.graphs.test_routed_graphs import routed

NORMS = {
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "layer_norm": lambda: nn.LayerNorm(8),
    "group_norm": lambda: nn.GroupNorm(2, 6),
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_mixed", [True, False], ids=["float32 parameters", "all of 16 bits"])
@pytest.mark.parametrize("name", NORMS)
def test_every_traced_dtype_is_the_kernels(name: str, is_mixed: bool, half: torch.dtype) -> None:
    torch._dynamo.reset()
    model = NORMS[name]() if is_mixed else NORMS[name]().to(half)
    seen: list[str] = []

    class Compared(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            for real, traced in zip(
                *(v if isinstance(v, tuple) else (v,) for v in (result, node.meta.get("val"))), strict=False
            ):
                if isinstance(real, torch.Tensor) and isinstance(traced, torch.Tensor):
                    assert real.dtype == traced.dtype, node.format_node()
                    seen.append(node.name)
            return result

    def compile_graph(graph: fx.GraphModule, phase: str, times: int) -> Any:
        return boxed(lambda *args: Compared(graph).run(*args))

    call = torch.compile(model, backend=lambda graph, inputs: compile_with(graph, inputs, compile_graph))
    x = torch.randn(4, 6, 8, dtype=half, requires_grad=True)
    call(x).square().sum().backward()
    assert "native_" + name in " ".join(seen) and f"native_{name}_backward" in seen


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.same, self.second = (
            nn.Linear(12, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
        )
        self.groups, self.out = nn.GroupNorm(4, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.up(x)).relu()
        x = self.second(self.same(x) + x).relu()
        return self.out(self.groups(x.transpose(1, 2)).relu().mean(2))


def test_layer_and_group_norms_under_autocast_are_in_kernels(catalogue: AllInC) -> None:  # noqa: F811
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Network()
    exact, fast = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    compiled, errors = routed(fast, catalogue, lowerable=_lowerable), torch.zeros(2, dtype=torch.float64)
    for size in ((6, 9, 12), (5, 14, 12), (8, 7, 12)):
        x = torch.randn(size)
        torch._dynamo.maybe_mark_dynamic(x, [0, 1])
        found: list[list[torch.Tensor]] = []
        for module, owner in ((compiled, fast), (eager, eager), (exact, exact)):
            owner.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=owner is not exact):
                output = module(x.double() if owner is exact else x)
            output.float().square().mean().backward()
            found.append([output.detach(), *(p.grad for p in owner.parameters() if p.grad is not None)])
        for ours, theirs, reference in zip(*found, strict=True):
            scale = reference.square().sum()
            errors += torch.stack([(t.double() - reference).square().sum() / scale for t in (ours, theirs)])
    assert errors[0] <= 1.5 * errors[1]
    assert catalogue.failed == []
    for router, direction in zip(catalogue.routers[:2], ("", "_backward"), strict=True):
        names = " ".join(slot.node.operation_names for slot in router.program.slots)
        assert names.count(f"native_layer_norm{direction}") == 2 and names.count(f"native_group_norm{direction}") == 1
    plans = [plan for r in catalogue.routers for plan in r.all_plans()]
    assert plans and all(plan.fused_nodes == len(plan.nodes) for plan in plans)
