"""What the tests of libraries' operators share: an operator with a backward pass, a net, a catalogue of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autofuse import register_unfused
from autofuse.ir.composites import has_librarys
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Event
from autofuse.runtime.graphs import own_kernels
from autofuse.runtime.graphs.choice import Choice
from autofuse.wrapper.node_call import NodeCall
from tests.runtime.graphs.test_routed_graphs import Undecided, routed

CALLS: list[str] = []
_ops = torch.library.Library("autofuse_lib", "FRAGMENT")


def _scaled(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _scaled_back(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    r, h = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), g * w
    return r * h - x * r.pow(3) * (h * x).mean(-1, keepdim=True), (g * x * r).sum(tuple(range(x.dim() - 1)))


@torch.library.custom_op("autofuse_lib::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    CALLS.append("scaled")
    return _scaled(x, w, eps)


@torch.library.custom_op("autofuse_lib::scaled_back", mutates_args=())
def scaled_back(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("scaled_back")
    return _scaled_back(g, x, w, eps)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return (*scaled_back(g, *ctx.saved_tensors, ctx.eps), None)


scaled.register_fake(lambda x, w, eps=1e-6: torch.empty_like(x))
scaled_back.register_fake(lambda g, x, w, eps: (torch.empty_like(x), torch.empty_like(w)))
scaled.register_autograd(_gradients, setup_context=_keep)
scaled.register_vmap(lambda info, dims, x, w, eps=1e-6: (scaled(x, w, eps), 0))


def an_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any] = torch.empty_like) -> Any:
    """One of ``x`` alone; repeated definitions are one."""
    if not hasattr(torch.ops.autofuse_lib, name):
        _ops.define(f"{name}(Tensor x) -> Tensor")
        _ops.impl(name, function, "CPU")
        torch.library.register_fake(f"autofuse_lib::{name}", fake, lib=_ops)
    return getattr(torch.ops.autofuse_lib, name).default


class Fused(Undecided):
    """Every node has a kernel in C; operators of a library are kept where ``keeps`` says so."""

    keeps, tag = False, "c"

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        forms = {s.node.fusion_id: s.node.form for r in self.routers for s in r.program.slots}
        return Choice(known=True, entry=forms.get(fusion_id), tag=self.tag)

    def keeps_own(self, node: Any, fused: NodeCall, tag: str) -> bool:
        return self.keeps

    @property
    def forms(self) -> list[NodeForm]:
        return [slot.node.form for router in self.routers for slot in router.program.slots]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.w = nn.Linear(24, 40), nn.Parameter(torch.rand(40) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scaled(self.up(x), self.w)) * 2 + 1


def compare(model: nn.Module, fast: Callable[..., Any], x: torch.Tensor) -> None:
    """One training step and one call without gradients of both."""
    results = []
    for call in (model, fast):
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        with torch.no_grad():
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), call(x)])  # type: ignore[union-attr]
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def traced(call: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(*inputs)


def with_a_word(name: str, argument: str, function: Callable[..., Any]) -> Any:
    """An operator of ``x`` and one more argument, which does as ``function`` says."""
    if not hasattr(torch.ops.autofuse_lib, name):
        _ops.define(f"{name}(Tensor x, {argument}) -> Tensor")
        _ops.impl(name, function, "CPU")
        torch.library.register_fake(f"autofuse_lib::{name}", lambda x, *a, **k: torch.empty_like(x), lib=_ops)
    return getattr(torch.ops.autofuse_lib, name).default


def node(catalogue: Fused) -> NodeForm:
    register_unfused(scaled, _scaled)
    w = torch.rand(40)
    routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)(torch.randn(6, 40))
    return next(form for form in catalogue.forms if has_librarys(form))


def races_of(catalogue: Fused) -> tuple[own_kernels.OwnKernels, list[Event]]:
    events: list[Event] = []
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(tuner=SimpleNamespace(margin=0.03)),
        store_thread=SimpleNamespace(post_event=events.append),
    )
    return own_kernels.OwnKernels(context), events


def state_of(catalogue: Fused, form: NodeForm) -> Any:
    return next(n for r in catalogue.routers for plan in r.all_plans() for n in plan.nodes if n.form == form)
