"""Captured graphs on eager's kernels: bit-identical to eager, forward, backward, random numbers, odd scripts.

A catalogue of the test's own stands in for the session, so that no store and no daemon is needed.
"""

import copy
import logging
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofuse.capture.backend import compile_with
from autofuse.capture.dynamo import capture_settings
from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from autofuse.fusion import FusionEngine
from autofuse.ir.optable import OpKind, info
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.wrapper.graph_call_builder import build_program


class Undecided:
    """Nothing is decided: every node runs unfused."""

    threads = 1

    def __init__(self):
        self.routers, self.failed = [], []

    def choose(self, fusion_id, values, device):
        return UNKNOWN

    def node_failed(self, node, problem):
        self.failed.append(problem)

    def settle_plan(self, plan):
        return True

    def new_plan(self, plan):
        pass

    live_races = None

    def sample_due(self, graph):
        return False

    def note_call(self, call):
        pass

    def note_timed(self, has_held):
        pass

    def wrap(self, node, fused):
        return fused

    def keeps_own(self, node, fused, tag):
        return False


def routed(target, catalogue, timed=False, lowerable=None):
    """``target`` compiled through capture, planner and router."""
    if timed:
        catalogue.sample_due = lambda graph: True

    def compile_graph(module, phase, times):
        split_dropout(module)
        imported = import_graph(module)
        graph = imported.for_fusion()
        nodes = FusionEngine(lowerable=lowerable).fuse(graph)
        router = GraphRouter(build_program(imported, nodes), catalogue, phase, perf_counter)
        catalogue.routers.append(router)
        return router

    return torch.compile(target, backend=lambda gm, inputs: compile_with(gm, inputs, compile_graph))


def check_training(model, make_inputs, sizes, catalogue=None, dynamic=()):
    """Loss, gradients and generator state are bit-identical to eager's, shape after shape."""
    torch._dynamo.reset()
    catalogue = catalogue or Undecided()
    twin = copy.deepcopy(model)
    fast = routed(model, catalogue)
    for seed, size in enumerate(sizes):
        results = []
        for module in (fast, twin):
            torch.manual_seed(seed)
            inputs = make_inputs(size)
            if module is fast:
                for tensor, dim in dynamic:
                    torch._dynamo.maybe_mark_dynamic(inputs[tensor], dim)
            loss = module(*inputs)
            loss = loss if loss.dim() == 0 else loss.square().mean()
            loss.backward()
            results.append((loss.detach(), torch.get_rng_state()))
        (loss, state), (expected, expected_state) = results
        assert torch.equal(loss, expected), (size, loss, expected)
        assert torch.equal(state, expected_state)
        for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
            p.grad = q.grad = None
    return catalogue


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm(x)).split(c, 2)
        )
        scores = (q @ k.transpose(-2, -1)) * 0.3
        mask = torch.tril(torch.ones(t, t)) == 0
        weights = self.drop(F.softmax(scores.masked_fill(mask, float("-inf")), -1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Tiny(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 50), targets.view(-1), ignore_index=-1)


class Constants(nn.Module):
    """One constant is read by several nodes and returned; another by one node."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        zero = torch.zeros(())
        kept = torch.where(x > 0, x, zero) * 2
        mapped = torch.where(self.linear(kept) > 0, self.linear(kept), zero).relu()
        return (mapped + torch.scalar_tensor(3.0)).exp().sum() + zero


def tokens(size):
    b, t = size
    return torch.randint(0, 50, (b, t)), torch.randint(-1, 50, (b, t))


def test_transformer_with_dropout_and_varying_shapes():
    catalogue = check_training(Tiny(), tokens, [(2, 7), (3, 5), (4, 16)], dynamic=[(0, 0), (0, 1), (1, 0), (1, 1)])
    assert [r.phase for r in catalogue.routers] == ["forward", "backward"]
    nodes = [s.node.operation_names for r in catalogue.routers for s in r.program.slots]
    # What the planner is for: softmax with mask and dropout, residual with norm, cross-entropy, their backwards.
    assert any("masked_fill + softmax + dropout_scale" in n for n in nodes)
    assert any("dropout_scale + add + native_layer_norm" in n for n in nodes)
    assert any("log_softmax + nll_loss_forward" in n for n in nodes)
    assert any("nll_loss_backward + log_softmax_backward_data" in n for n in nodes)
    assert any("native_layer_norm_backward + add + native_dropout_backward + sum" in n for n in nodes)
    assert any("softmax_backward_data + masked_fill" in n for n in nodes)


def test_timed_calls_give_the_same_result():
    torch._dynamo.reset()
    catalogue = Undecided()
    model = Tiny(1).eval()
    fast = routed(model, catalogue, timed=True)
    inputs = tokens((2, 9))
    assert torch.equal(fast(*inputs), model(*inputs))
    plan = next(catalogue.routers[0].all_plans())
    assert plan.count == 1 and plan.graph_us() > 0
    assert all(plan.live_us(i) > 0 for i in range(len(plan.nodes)))


@pytest.mark.parametrize("train", [True, False])
def test_convolution_and_batch_norm(train):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Tanh()).train(train)
    check_training(net, lambda n: (torch.randn(n, 3, 10, 10),), [2, 2, 5, 6])


def test_constants_that_several_nodes_read():
    catalogue = check_training(Constants(), lambda n: (torch.randn(n, 8, requires_grad=True),), [3, 4, 7])
    nodes = [slot.node for router in catalogue.routers for slot in router.program.slots]
    assert any(op.short_name == "zeros" for node in nodes for op in node.operations)


def test_graph_breaks_and_python_control_flow():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            y = self.parts["a"](x).tanh()
            if y.sum().item() > 0:  # a graph break
                y = y * self.scale
            for _ in range(int(x.shape[0]) % 3):
                y = torch.relu(self.parts["b"](y)) + x
            return y

    check_training(Odd(), lambda n: (torch.randn(n, 8),), [3, 4, 5, 7])


class AfterProducts(nn.Module):
    """Dropout over what a product, a view of one and a convolution give."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(5, 7), nn.Conv1d(3, 4, 3)

    def forward(self, flat, deep, image):
        flat = F.dropout(self.linear(flat).relu(), 0.3)
        deep = F.dropout(F.gelu(self.linear(deep)), 0.4)
        image = F.dropout(self.conv(image).relu(), 0.5)
        return F.dropout(flat.sum() + deep.sum() + image.exp().sum(), 0.1)


@pytest.mark.parametrize("dynamic", [[], [(0, 0), (1, 0), (1, 1), (2, 2)]], ids=["static", "dynamic"])
def test_masks_do_not_wait_for_the_products_that_they_follow(dynamic):
    def inputs(size):
        return torch.randn(size, 5), torch.randn(size + 1, size, 5), torch.randn(2, 3, size + 3)

    sizes = [3, 8, 5] if dynamic else [4]
    catalogue = check_training(AfterProducts(), inputs, sizes, dynamic=dynamic)
    forward = catalogue.routers[0].program.source.partition("def timed_call")[0]
    drawn = [line.partition("(")[2] for line in forward.splitlines() if "random_ops_bernoulli_mask" in line]
    assert len(drawn) == 4
    assert [arguments.startswith("[") for arguments in drawn] == [True, True, not dynamic, False]


def test_dropout_keeps_its_place_in_the_stream():
    class Random(nn.Module):
        def forward(self, x):
            a = F.dropout(x.exp(), 0.3)
            noise = torch.rand_like(x)
            b = F.dropout((a + noise).tanh(), 0.5)
            return (a * b + torch.randn(x.shape)).sum()

    model = nn.Sequential(nn.Linear(6, 6), Random())
    check_training(model, lambda n: (torch.randn(n, 6),), [4, 4, 9])


def test_views_in_place_ops_and_non_contiguous_inputs():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            y = x.t().mul(2.0)
            y.add_(1.0)
            z = y[1:].clone()
            z[:, 0].mul_(3.0)
            return (z @ self.w.t()[:, : z.shape[1]].t()).softmax(0)

    check_training(Views(), lambda n: (torch.randn(n, 6, 2)[:, :, 0].expand(n, 6),), [6, 6])


def test_autocast_checkpointing_accumulation():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def inner(self, x):
            return F.gelu(self.b(F.dropout(x, 0.2)))

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.a(x)
                x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return x.float()

    check_training(Mixed(), lambda n: (torch.randn(n, 16),), [4, 4, 8])


def test_random_numbers_of_checkpoints_between_residuals():
    """A checkpoint's dropout is an operator of torch's that holds two values in one of its outputs. What a node reads
    of them depends on what the operator reads: else one node of all residuals would have to run before itself."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    check_training(Blocks(), lambda n: (torch.randn(n, 16),), [4, 4, 8])


def test_inference_modes():
    torch._dynamo.reset()
    catalogue = Undecided()
    model = Tiny(1).eval()
    fast = routed(model, catalogue)
    inputs = tokens((2, 6))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(fast(*inputs), model(*inputs))


def test_every_fusible_op_keeps_a_kind():
    assert info("aten.add.Tensor").kind is OpKind.POINTWISE and info("aten.mm.default").kind is OpKind.OPAQUE


class Decided(Undecided):
    """One kernel for every node: it runs the node unfused but counts, or misbehaves as told."""

    def __init__(self, entry):
        super().__init__()
        self.entry = entry

    def choose(self, fusion_id, values, device):
        return Choice(True, self.entry, "kernel")


def test_a_kernel_that_raises_falls_back_to_eager_for_good():
    def broken(*args):
        raise RuntimeError("no such kernel")

    catalogue = check_training(Tiny(1), tokens, [(2, 7), (2, 7)], Decided(broken))
    assert catalogue.failed and all("no such kernel" in f for f in catalogue.failed)
    plans = [p for r in catalogue.routers for p in r.all_plans()]
    assert all(node.broken and not node.tag for p in plans for node in p.nodes)


def test_counters_over_swaps():
    torch._dynamo.reset()
    catalogue = Undecided()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    fast = routed(model, catalogue)
    x = torch.randn(4, 8)
    for _ in range(3):
        fast(x)
    (plan,) = catalogue.routers[0].all_plans()
    (node,) = plan.nodes
    expected = torch.full((4, 8), 7.0)

    def kernel(sizes, source, target):
        import ctypes

        ctypes.memmove(target, expected.data_ptr(), 4 * 8 * 4)

    catalogue.choose = lambda fusion_id, values, device: Choice(True, kernel, "k1")
    assert catalogue.routers[0].refresh(plan) and not catalogue.routers[0].refresh(plan)
    with torch.no_grad():
        assert torch.equal(fast(x).detach() * 0 + 7.0, expected)
    catalogue.choose = lambda fusion_id, values, device: Choice(True)
    catalogue.routers[0].refresh(plan)
    fast(x)
    plans = [p for r in catalogue.routers for p in r.all_plans()]
    assert sum(p.count for p in plans) == 5
    assert plan.fused_calls(node) == plan.count - 4 if plan.count > 4 else plan.fused_calls(node) <= 1


def test_sizes_that_no_polynomial_gives_stay_on_eagers_kernels():
    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv2d(2, 2, 3, stride=2)

        def forward(self, x):
            x = F.interpolate(x, scale_factor=1.5, mode="bilinear")
            gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
            return F.relu(self.mix(x * gate) + 1)

    def can_lower(form):
        try:
            lower(form)
        except LoweringError as error:
            return error.code, str(error)
        return None

    catalogue = Undecided()
    torch._dynamo.reset()
    model = Resized()
    fast = routed(model, catalogue, lowerable=can_lower)
    for size in (8, 9, 12, 15, 8):
        x = torch.randn(1, 2, size, size)
        torch._dynamo.maybe_mark_dynamic(x, 2)
        torch._dynamo.maybe_mark_dynamic(x, 3)
        torch.testing.assert_close(fast(x), model(x))
    assert catalogue.routers and not catalogue.failed


def test_sizes_of_a_quotient_need_no_tensor():
    """An upsampled picture has twice half the size, and its indices, which a node keeps, are asked for theirs."""

    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

        def forward(self, x):
            fine = F.avg_pool2d(self.first(x), 2)
            coarse = F.interpolate(torch.tanh(F.avg_pool2d(fine, 2)), scale_factor=2.0)
            return self.last(torch.cat([coarse, fine], 1))

    catalogue = check_training(
        Down(), lambda n: (torch.randn(2, 2, n, n + 8),), (24, 32, 40, 24), dynamic=((0, 2), (0, 3))
    )
    assert catalogue.routers and not catalogue.failed


def test_quotients_of_quotients():
    """Half of a half: its size follows from a symbol that follows from another."""

    class Quarters(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            half = torch.tanh(self.first(x).chunk(2, 0)[0])
            return torch.cat([torch.tanh(half.chunk(2, 0)[0]), torch.tanh(x).chunk(2, 0)[-1]], 0).tanh()

    catalogue = check_training(Quarters(), lambda n: (torch.randn(n, 4),), (8, 12, 13, 15, 8), dynamic=((0, 0),))
    assert catalogue.routers and not catalogue.failed


def test_torch_says_nothing_of_traces_that_nobody_asked_for():
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    try:
        with capture_settings(8):
            logger.warning("a limit is reached")
        assert not said
        logger.warning("of the user's own")
        assert [record.getMessage() for record in said] == ["of the user's own"]
    finally:
        logger.removeHandler(handler)
