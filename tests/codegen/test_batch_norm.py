"""Batch norm in training: one kernel with what surrounds it, as near to float64 as eager's, running statistics too.

Kernels in C and, interpreted, in Triton; whole residual networks whose every node is a kernel, shape after shape.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.call import allocate
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, bind_shapes
from autofuse.ir.records import make_config
from autofuse.runtime.graphs import router as router_module
from autofuse.runtime.graphs.choice import Choice
from autofuse.wrapper.node_call import NodeCall, empty_like_spec, expected_outputs
from tests.codegen.compare import problems
from tests.runtime.graphs.test_routed_graphs import Undecided, routed
from tests.tracing import trace

aten = torch.ops.aten
CHANNELS = 6


def _parameters(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Weight, bias, running mean, running variance."""
    return tuple(torch.rand(CHANNELS, dtype=dtype) + 0.5 for _ in range(4))


def _train(x: torch.Tensor, w: Any, b: Any, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, *statistics = aten._native_batch_norm_legit_functional.default(x, w, b, m, v, True, 0.3, 1e-5)
    return aten.relu(out), *statistics


def _plain(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(_train(x, None, None, m, v))


def _run(form: NodeForm, inputs: Sequence[torch.Tensor], target: Any) -> Sequence[torch.Tensor]:
    """The outputs of a node's kernel: in C with a generator, in Triton with None."""
    if target is not None:
        return target.generate_generic_kernel(form)(*inputs)
    values: dict[str, int] = {}
    for item, tensor in zip(form.inputs, inputs, strict=True):
        values |= item.spec.shape.unify(tuple(tensor.shape))
    outputs = [allocate(form.spec(ref), values, poison=True) for ref in form.outputs]
    kernel = lower(form)
    load_interpreted(print_triton(kernel, default_config(triton_knobs(kernel, values, values))))(
        values, [*inputs, *outputs]
    )
    return outputs


def _check(form: NodeForm, inputs: Sequence[torch.Tensor], target: Any, loose: bool = False) -> None:
    values: dict[str, int] = {}
    for item, tensor in zip(form.inputs, inputs, strict=True):
        values |= item.spec.shape.unify(tuple(tensor.shape))
    eager = run_unfused(form, inputs, values)
    exact = run_unfused(to_float64(form), widen(inputs), values)
    wrong = problems(_run(form, inputs, target), eager, exact, loose)
    assert not wrong, (values, wrong)


@pytest.fixture(params=["c", "triton"])
def target(request: pytest.FixtureRequest, generator: FusionKernelGenerator) -> FusionKernelGenerator | None:
    return generator if request.param == "c" else None


SHAPES = ((4, CHANNELS, 7), (3, CHANNELS, 5, 7), (2, CHANNELS, 3, 4, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_outputs(shape: tuple[int, ...], dtype: torch.dtype, target: Any) -> None:
    """Result and statistics; other sizes run through the same kernel, one element a channel among them."""
    # Eager is its own reference in float64; of one element, whose result is the bias, it is off by 1e-14.
    others: list[tuple[int, ...]] = [(3, CHANNELS, *(11 for _ in shape[2:]))]
    if dtype == torch.float32:
        others.append((1, CHANNELS, *(1 for _ in shape[2:])))
    x = torch.randn(shape, dtype=dtype)
    parameters = _parameters(dtype)
    for function, rest in ((_train, parameters), (_plain, parameters[2:])):
        form = trace(function, (x, *rest), static=(CHANNELS,))
        assert len(form.outputs) == 5
        _check(form, (x, *rest), target)
        for other in others if len(shape) < 4 else ():  # sizes that differ are symbols that differ
            _check(form, (torch.randn(other, dtype=dtype), *rest), target)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5])
def test_offsets_that_dwarf_the_deviation(offset: float, target: Any) -> None:
    """The mean itself is rounded; what that leaves out must not reach the variance."""
    x = offset + torch.randn(4, CHANNELS, 9, 31) * torch.tensor([0.0, 1e-3, 1e-2, 0.1, 1.0, 30.0])[:, None, None]
    parameters = _parameters(torch.float32)
    _check(trace(_train, (x, *parameters), static=(CHANNELS,)), (x, *parameters), target)


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test_nan_and_infinity_stay_in_their_channel(special: float, target: Any) -> None:
    x = torch.randn(3, CHANNELS, 5, 7)
    x[1, 2, 3, 4] = special
    parameters = _parameters(torch.float32)
    form = trace(_train, (x, *parameters), static=(CHANNELS,))
    _check(form, (x, *parameters), target)
    out, mean, *_ = _run(form, (x, *parameters), target)
    assert out[:, 2].isnan().all() and out[:, [0, 1, 3, 4, 5]].isfinite().all()
    assert torch.equal(mean[2:3], torch.tensor([special])) or special != special


@pytest.mark.parametrize("weight", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels_last"])
def test_an_infinite_weight(is_last: bool, weight: float, generator: FusionKernelGenerator) -> None:
    """aten's kernel multiplies the mean by it too: NaN for elements of the mean's sign, infinity for the others."""
    x = _neighbours(3, CHANNELS, 5, 7) if is_last else torch.randn(3, CHANNELS, 5, 7)
    parameters = _parameters(torch.float32)
    parameters[0][2] = weight
    w, b, m, v = parameters

    def biased(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten._native_batch_norm_legit_functional.default(*inputs, True, 0.3, 1e-5)

    def unbiased(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return biased(x, w, None, m, v)  # type: ignore[arg-type]

    for function, inputs in ((biased, (x, w, b, m, v)), (unbiased, (x, w, m, v))):
        form = trace(function, inputs, static=(CHANNELS,))
        _check(form, inputs, generator)
        found = _run(form, inputs, generator)[0][:, 2]
        assert found.isnan().any() and (weight != weight or found.isinf().any())


def test_statistics_whose_traced_dtype_was_not_corrected_are_refused() -> None:
    """Of 16-bit tensors torch traces them with another dtype than its CPU kernel gives them."""
    x, parameters = torch.randn(3, CHANNELS, 5, 7).bfloat16(), _parameters(torch.float32)
    with pytest.raises(LoweringError, match="expected statistics of float32, found them traced as bfloat16"):
        lower(trace(_train, (x, *parameters), static=(CHANNELS,)))


def _gradients(g: torch.Tensor, y: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Through the ReLU whose result is ``y``; the rest is weight, mean, 1/deviation."""
    g, (w, m, r) = aten.threshold_backward(g, y, 0), rest
    return tuple(aten.native_batch_norm_backward.default(g, x, w, None, None, m, r, True, 1e-5, [True, True, True]))


def _neighbours(*shape: int) -> torch.Tensor:
    """A tensor whose channels are stored last."""
    x = torch.randn(shape)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


@pytest.mark.parametrize(("channels", "offset"), [(3, 0.0), (CHANNELS, -1e5), (70, 0.0)])
@pytest.mark.parametrize("sizes", [(), (5, 7)], ids=["2-d", "channels_last"])
def test_channels_that_are_neighbours(sizes: tuple[int, ...], channels: int, offset: float, target: Any) -> None:
    """Forward and backward; more channels than a vector has, fewer, and too few to be lanes; one element a channel."""
    if target is None and channels == 70:
        pytest.skip("the same tiles as for 6 channels")
    scale = torch.logspace(-3, 1, channels).view(-1, *(1 for _ in sizes))
    x = _neighbours(11, channels, *sizes) * scale + offset
    x = x if not sizes else x.contiguous(memory_format=torch.channels_last)
    parameters = tuple(torch.rand(channels) + 0.5 for _ in range(4))
    form = trace(_train, (x, *parameters), static=(channels,))
    _check(form, (x, *parameters), target)
    _check(form, (_neighbours(1, channels, *(1 for _ in sizes)), *parameters), target)
    w, m, r = (t.detach() for t in parameters[:3])
    some = (_neighbours(*x.shape), _neighbours(*x.shape), _neighbours(*x.shape), w, m, r)
    form = trace(_gradients, some, static=(channels,))
    _check(form, some, target)


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 2])
def test_nan_and_infinity_among_neighbours(row: int, special: float, target: Any) -> None:
    """The first element, from which the others are counted, may be one itself."""
    x = torch.randn(5, CHANNELS)
    x[row, 2] = special
    parameters = _parameters(torch.float32)
    form = trace(_train, (x, *parameters), static=(CHANNELS,))
    _check(form, (x, *parameters), target)
    out, mean, *_ = _run(form, (x, *parameters), target)
    assert out[:, 2].isnan().all() and out[:, [0, 1, 3, 4, 5]].isfinite().all()
    assert torch.equal(mean[2:3], torch.tensor([special])) or special != special


@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize("shape", [(300, 130), (2, 70, 11, 13), (5, 2100), (3, 40, 1, 1)], ids=str)
def test_threads_share_neighbours(shape: tuple[int, ...], block: int, generator: FusionKernelGenerator) -> None:
    """Blocks of rows for each thread, or parts of the columns: the same as one thread makes, but for rounding."""
    x, parameters = _neighbours(*shape), tuple(torch.rand(shape[1]) + 0.5 for _ in range(4))
    form = trace(_train, (x, *parameters), static=(shape[1],))
    config = dict(default_config(knobs_for(lower(form)))) | {"lane_block": block, "threads": "parallel"}
    kernel = generator.generate_generic_kernel(form, make_config(config))
    exact = run_unfused(
        to_float64(form), widen((x, *parameters)), values := bind_shapes(form, [shape, *[(shape[1],)] * 4])
    )
    eager = run_unfused(form, (x, *parameters), values)
    for threads in (1, 2, 3, 5):
        found = kernel(x, *parameters, threads=threads)
        assert problems(found, eager, exact, False) == []
        assert all(torch.equal(a, b) for a, b in zip(found, kernel(x, *parameters, threads=threads), strict=True))


def test_a_softmax_over_a_leading_dim(target: Any) -> None:
    """Rows beside each other under a maximum that keeps NaN, and under a test of the place."""
    x = torch.randn(5, 9, 67)
    x[1, 2, 3], x[2, :, 4] = float("nan"), float("-inf")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masked = torch.where(torch.arange(x.shape[1]).view(-1, 1) < 7, x, float("-inf"))
        return torch.softmax(masked, 1), aten._safe_softmax.default(x, 1), x - x.amax(1, keepdim=True)

    _check(trace(function, (x,)), (x,), target)


# ---- whole networks ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose shortcut is a convolution with a norm of its own where the width changes."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(width, out, 1), nn.BatchNorm2d(out)) if width != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.one(x)).relu()
        return (self.norm2(self.two(y)) + self.short(x)).relu()


class Network(nn.Module):
    """A stem, two residual blocks, pooling, a linear head with a norm of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.blocks = nn.MaxPool2d(2), nn.Sequential(Block(8, 8), Block(8, 12))
        self.head, self.out = nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.pool(self.norm(self.stem(x)).relu()))
        return self.out(self.head(x.mean((2, 3))))


class AllInC(Undecided):
    """Every node has a kernel: its form, which the launcher compiles."""

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        forms = {s.node.fusion_id: s.node.form for r in self.routers for s in r.program.slots}
        return Choice(known=True, entry=forms.get(fusion_id), tag="c")


def _lowerable(form: NodeForm) -> tuple[str, str] | None:
    try:
        lower(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


@pytest.fixture
def catalogue(generator: FusionKernelGenerator, monkeypatch: pytest.MonkeyPatch) -> AllInC:
    made: dict[str, Any] = {}

    def launcher(form: NodeForm, entry: Any, values: Sequence[int], threads: int, **options: Any) -> NodeCall:
        kernel = made.setdefault(form.text(), None) or generator.generate_generic_kernel(form)
        made[form.text()] = kernel

        def call(*inputs: torch.Tensor) -> Any:
            for tensor, item in zip(inputs, form.inputs, strict=True):
                assert str(tensor.dtype) == f"torch.{item.spec.dtype}"
            outputs = kernel(*inputs)
            for tensor, layout in zip(outputs, expected_outputs(form, values), strict=True):
                expected = empty_like_spec(*layout)
                assert tensor.shape == expected.shape and tensor.stride() == expected.stride()
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return call

    monkeypatch.setattr(router_module, "make_launcher", launcher)
    return AllInC()


def _state(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().double().clone() for t in (loss, *grads, *model.buffers())]


def _assert_as_near(
    found: Iterable[torch.Tensor], eager: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]
) -> None:
    """An element that is 0 but for rounding may pass a ReLU in one and not in the other, hence the wide bound.

    Over 14 seeds the worst relative error is 3e-6 to 3e-4, of eager 3e-6 to 1e-4.

    The gradient of a bias in front of a norm is 0 (1e-16 in float64): what is found is the rounding of a sum whose
    terms are as large as other gradients are, and no size of its own to compare with.
    """
    found, eager, exact = list(found), list(eager), list(exact)
    largest = max(reference.abs().max().item() for reference in exact)
    for ours, theirs, reference in zip(found, eager, exact, strict=True):
        scale, own = reference.abs().max().item(), (theirs - reference).abs().max().item()
        if scale < 1e-12 * largest:
            assert (ours - reference).abs().max().item() <= 1e-6 * largest
            continue
        assert (ours - reference).abs().max().item() <= 4 * own + 1e-4 * scale


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_a_residual_network_over_spatial_sizes(is_training: bool, catalogue: AllInC) -> None:
    """Losses, gradients and running statistics; each norm is one kernel with its activation and its residual."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Network().train(is_training)
    exact, fast = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    compiled = routed(fast, catalogue, lowerable=_lowerable)
    for size in ((4, 3, 16, 16), (3, 3, 10, 22), (5, 3, 14, 6)):
        x = torch.randn(size)
        torch._dynamo.maybe_mark_dynamic(x, [0, 2, 3])
        states = []
        for module, owner in ((compiled, fast), (eager, eager), (exact, exact)):
            owner.zero_grad()
            with torch.set_grad_enabled(is_training):
                loss = module(x.double() if owner is exact else x).square().mean()
            if is_training:
                loss.backward()
            states.append(_state(owner, loss))
        _assert_as_near(*states)
    assert catalogue.failed == []
    plans = [plan for r in catalogue.routers for plan in r.all_plans()]
    assert plans and all(plan.fused_nodes == len(plan.nodes) for plan in plans)
    if not is_training:
        norm = "native_batch_norm_legit_no_training"
        assert Counter(s.node.operation_names for s in catalogue.routers[0].program.slots) == {
            f"{norm} + relu": 3,
            f"{norm} + add + relu": 1,
            f"{norm} + {norm} + add + relu + mean + {norm}": 1,
            "max_pool2d_with_indices": 1,
        }
    else:
        forward, backward = ([s.node.operation_names for s in r.program.slots] for r in catalogue.routers[:2])
        norm = "native_batch_norm_legit_functional"
        assert Counter(forward) == {
            f"{norm} + relu": 3, f"{norm} + add + relu": 1, f"{norm} + {norm} + add + relu": 1, norm: 1,
            "max_pool2d_with_indices": 1, " + ".join(["add"] * 7): 1,  # seven counts of batches
        }  # fmt: skip
        gradient = "threshold_backward + native_batch_norm_backward"
        assert Counter(backward) == {
            gradient: 2, f"add + {gradient}": 1, f"div + {gradient} + native_batch_norm_backward": 1,
            f"add + max_pool2d_with_indices_backward + {gradient}": 1, "native_batch_norm_backward": 1,
        }  # fmt: skip


@pytest.mark.parametrize("is_mixed", [True, False], ids=["autocast", "all of 16 bits"])
def test_a_residual_network_of_16_bits(is_mixed: bool, catalogue: AllInC) -> None:
    """Each norm is in a kernel, forward and backward; the kernels get what their specs say (`catalogue`)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Network()
    exact, fast = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    if not is_mixed:
        eager, fast = eager.bfloat16(), fast.bfloat16()
        exact = copy.deepcopy(eager).double()
    compiled, errors = routed(fast, catalogue, lowerable=_lowerable), torch.zeros(2, dtype=torch.float64)
    for size in ((24, 3, 16, 16), (23, 3, 10, 22), (25, 3, 14, 6), (26, 3, 8, 8)):
        x = torch.randn(size).bfloat16()
        torch._dynamo.maybe_mark_dynamic(x, [0, 2, 3])
        outputs = []
        for module, owner in ((compiled, fast), (eager, eager), (exact, exact)):
            owner.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed and owner is not exact):
                outputs.append(module(x.double() if owner is exact else x))
            outputs[-1].float().square().mean().backward()
        errors += torch.stack([(found.double() - outputs[2]).square().sum().detach() for found in outputs[:2]])
        for ours, theirs, reference in zip(fast.buffers(), eager.buffers(), exact.buffers(), strict=True):
            own = (theirs.double() - reference).abs().max()
            assert (ours.double() - reference).abs().max() <= 1.5 * own + 0.004 * reference.abs().max()
    assert errors[0] <= 2.0 * errors[1]
    assert catalogue.failed == []
    for router, norm in zip(catalogue.routers[:2], ("batch_norm_legit_functional", "batch_norm_backward"), strict=True):
        assert sum(slot.node.operation_names.count(norm) for slot in router.program.slots) == 7


def _nodes(model: nn.Module, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """What the planner makes of a model's graphs, forward and backward."""
    torch._dynamo.reset()
    found = Undecided()
    torch._dynamo.maybe_mark_dynamic(x, [0, 2, 3])
    routed(model, found, lowerable=_lowerable)(x).square().mean().backward()
    forward, backward = ([s.node.operation_names for s in r.program.slots] for r in found.routers)
    return forward, backward


Layers: Any = Callable[[], nn.Module]


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (lambda: nn.BatchNorm2d(8), "native_batch_norm_legit_functional + relu"),
        (lambda: nn.BatchNorm2d(8, affine=False), "native_batch_norm_legit_functional + relu"),
        (lambda: nn.BatchNorm2d(8, track_running_stats=False), "native_batch_norm_legit + relu"),
    ],
)
def test_a_convolution_its_norm_and_its_activation_are_two_kernels(layer: Layers, forward: str) -> None:
    """Forward and backward, at sizes that the convolution cuts at the edges."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer(), nn.ReLU())
    found = _nodes(model, torch.randn(4, 3, 9, 11))
    assert found == ([forward], ["threshold_backward + native_batch_norm_backward"])
