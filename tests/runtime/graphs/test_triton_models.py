"""Whole models whose every node runs as a Triton kernel, in Triton's interpreter: losses and gradients are eager's.

The nodes are those that the planner makes of real graphs, forward and backward, shape after shape; the kernels are the
generic ones, so one text serves all shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.runtime.graphs import router as router_module
from autofuse.runtime.graphs.choice import Choice
from autofuse.wrapper.node_call import NodeCall, empty_like_spec, expected_outputs
from tests.runtime.graphs.test_routed_graphs import Tiny, Undecided, routed, tokens


class AllInterpreted(Undecided):
    """Every node has a kernel: its form, which `launcher` makes one of."""

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        forms = {s.node.fusion_id: s.node.form for r in self.routers for s in r.program.slots}
        return (
            Choice(known=True, entry=forms[fusion_id], tag="interpreted") if fusion_id in forms else Choice(known=True)
        )


def lowerable(form: NodeForm) -> tuple[str, str] | None:
    """The planner splits what has no loop form."""
    try:
        kernel = lower(form)
    except LoweringError as error:
        return error.code, str(error)
    return ("device_bounds", "stages, which a GPU has no kernel for") if kernel.stages else None


def launcher(form: NodeForm, entry: Any, values: Sequence[int], threads: int, **options: Any) -> NodeCall:
    assert entry.text() == form.text()  # but for the user's lines
    table = dict(zip(form.symbols, values, strict=True))
    high = {name: max(value, 64) for name, value in table.items()}
    kernel = lower(form)
    run = load_interpreted(print_triton(kernel, default_config(triton_knobs(kernel, table, high))))
    layouts = expected_outputs(form, values)

    def call(*inputs: torch.Tensor) -> Any:
        outputs = tuple(empty_like_spec(*layout) for layout in layouts)
        for tensor in outputs:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        run(table, [*inputs, *outputs])
        return outputs if len(outputs) > 1 else outputs[0]

    return call


class Gated(nn.Module):
    """RMS norm, gate and up projections, a mean over tokens, a residual of another shape: what GPT does not have."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, (x.shape[-1],), self.scale)
        y = x + self.down(F.silu(self.gate(y)) * self.up(y))
        pooled = self.norm(y.transpose(1, 2)).mean(-1)
        return torch.log_softmax(pooled + y[:, 0], -1)


def images(size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*size, 24),)


@pytest.mark.parametrize(
    ("model", "make_inputs", "sizes", "dynamic"),
    [
        (Tiny, tokens, [(2, 7), (3, 5)], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (Gated, images, [(3, 6), (2, 9)], [(0, 0), (0, 1)]),
    ],
)
def test_losses_and_gradients_of_models_on_triton_kernels(
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[], nn.Module],
    make_inputs: Callable[[tuple[int, int]], tuple[torch.Tensor, ...]],
    sizes: Sequence[tuple[int, int]],
    dynamic: Sequence[tuple[int, int]],
) -> None:
    monkeypatch.setattr(router_module, "make_launcher", launcher)
    torch._dynamo.reset()
    torch.manual_seed(0)
    twin = model()
    exact = copy.deepcopy(twin).double()
    catalogue = AllInterpreted()
    fast = routed(copy.deepcopy(twin), catalogue, lowerable=lowerable)
    for size in sizes:
        found = []
        for module in (fast, twin, exact):
            torch.manual_seed(7)
            inputs = make_inputs(size)
            if module is exact:
                inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
            if module is fast:
                for tensor, dim in dynamic:
                    torch._dynamo.maybe_mark_dynamic(inputs[tensor], dim)
            module.zero_grad()
            loss = module(*inputs).square().mean()
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in module.parameters())])
        for ours, theirs, reference in zip(*found, strict=True):
            scale = reference.abs().max().item()
            own = (theirs - reference).abs().max().item()
            assert (ours - reference).abs().max().item() <= 4 * own + 1e-5 * scale
    plans = [plan for r in catalogue.routers for plan in r.all_plans()]
    assert catalogue.failed == [] and plans
    assert sum(plan.fused_nodes for plan in plans) == sum(len(plan.nodes) for plan in plans) > 4
