"""Strategies of any kind: switches, records in the store, kernels that are cut in two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofuse.codegen.c.load import load_kernel
from autofuse.errors import CompilerError
from autofuse.fusion.config import FusionConfig
from autofuse.gpu.devices import CPU
from autofuse.ir.device import cpu_device
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.runtime.kernels.device_backends import Backends
from autofuse.strategies import enumeration
from autofuse.strategies.bundle import is_bundle, pack
from autofuse.strategies.enumeration import cut_strategies, strategies_of
from autofuse.strategies.strategy import Strategy
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.verify import GuardedAllocator, Verifier
from autofuse.wrapper.load_strategy import unpack
from autofuse.wrapper.node_call import make_launcher
from autofuse.wrapper.strategy_call import LoadedStrategy
from tests.strategies.harness import GENERATOR, check, one_group, plan, strategy
from tests.strategies.modules import Block, by_hand, heads, linear, qkv

T = torch.Tensor


def test_switches_turn_kinds_off() -> None:
    inputs = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)]
    with torch.no_grad():
        (planned,) = plan(linear(F.relu), inputs, config=FusionConfig(enable_matmul=False))
        assert planned.groups == []
        (planned,) = plan(Block().eval(), [torch.randn(1, 8, 5, 5)], config=FusionConfig(enable_conv=False))
        assert planned.groups == []
        (planned,) = plan(by_hand, qkv(1, 2, 8, 16), config=FusionConfig(enable_attention=False))
        assert all(g.kind != "attention" for g in planned.groups)


def test_a_way_survives_the_store() -> None:
    with torch.no_grad():
        group = one_group(plan(heads(by_hand), qkv(2, 10, 64), [(0, 1), (1, 1), (2, 1)]))
    for kind in strategies_of(group.node.form):
        again = Strategy.from_json(kind.to_json())
        assert again == kind and again.steps == kind.steps
        record = pack(kind, [], "c_generic")
        assert is_bundle(record.binary) and record == pack(again, [], "c_generic")


def test_the_store_says_of_a_strategy_what_its_kernels_take_together() -> None:
    with torch.no_grad():
        group = one_group(plan(linear(F.gelu), [torch.randn(24, 40), torch.randn(56, 40), torch.randn(56)]))
    taken = {"target": "cuda:90", "registers": 28, "spill_bytes": 0, "shared_bytes": 2048, "threads": 128}
    code = {"instructions": 10, "loads": {"4": 1, "16": 2}, "stores": {"16": 2}, "local": 0}
    code |= {"barriers": 1, "shuffles": 0, "special": 3, "matrix": 0}
    key = CompileKey("s", "triton", "", "cuda:90")
    both = [{**taken, "code": code}, {**taken, "registers": 40, "shared_bytes": 0, "code": code}]
    kernels = [KernelRecord(key, "k", "", b"", resources) for resources in both]
    found = pack(strategy(group, "parts"), kernels, "cuda:90").resources
    assert {**found, "code": None} == {**taken, "registers": 40, "code": None}
    assert found["code"] == {name: 2 * n for name, n in code.items() if isinstance(n, int)} | {
        "loads": {"4": 2, "16": 4}, "stores": {"16": 4},
    }  # fmt: skip
    unread = pack(strategy(group, "parts"), [kernels[0], replace(kernels[1], resources=taken)], "cuda:90").resources
    assert unread == taken, "of one kernel nobody has read the code"
    assert pack(strategy(group, "onednn_linear"), [], "c_generic").resources == {}


def test_library_calls_alone_load_on_every_processor() -> None:
    with torch.no_grad():
        group = one_group(plan(linear(F.gelu), [torch.randn(24, 40), torch.randn(56, 40), torch.randn(56)]))
    calls, whole = strategy(group, "onednn_linear"), strategy(group, "parts")
    assert not calls.parts and whole.parts
    backends = Backends("no-such-cc", cpu_device())
    loaded = backends.load(pack(calls, [], "c_generic"), CPU)
    assert isinstance(loaded, LoadedStrategy) and loaded.strategy == calls
    kernel = GENERATOR.generate_generic_kernel(whole.kernels[0].node.form)
    record = KernelRecord(kernel.key, kernel.name, kernel.source, kernel.binary)
    assert isinstance(backends.load(pack(whole, [record], kernel.key.target), CPU), LoadedStrategy)
    for foreign in (pack(whole, [record], "c_generic"), pack(calls, [pack(whole, [record], "x")], "c_generic")):
        with pytest.raises(CompilerError, match="expected a kernel for"):
            backends.load(foreign, CPU)


def test_a_part_may_be_a_way_itself() -> None:
    """The node behind a product may have been decided to run as two kernels."""

    def function(x: T, a: T, c: T, w: T, b: T) -> T:
        y = torch.tanh(torch.relu(F.linear(x, a, c)) * 2.0 + 1.0)
        return F.gelu(F.layer_norm(y, (32,), w, b)) * 0.5 + y

    with torch.no_grad():
        inputs = [torch.randn(16, 24), torch.randn(32, 24), *(torch.randn(32) for _ in range(3))]
        form = one_group(plan(function, inputs)).node.form
    outer = strategies_of(form)[0]
    (part,) = outer.kernels
    inner = cut_strategies(part.node.form)[1]
    kernels = [GENERATOR.generate_generic_kernel(kernel.node.form) for kernel in inner.kernels]
    records = [KernelRecord(kernel.key, kernel.name, kernel.source, kernel.binary) for kernel in kernels]
    record = pack(outer, [pack(inner, records, "c_generic")], "c_generic")
    loaded = unpack(record.binary, lambda digest, name, binary: load_kernel(binary, name).entry)
    (entry,) = loaded.entries
    assert isinstance(entry, LoadedStrategy) and len(entry.entries) == 2

    def make_call(allocator: GuardedAllocator, sizes: Sequence[int]) -> Callable[..., Any]:
        return make_launcher(form, loaded, sizes, 2, allocator)

    assert Verifier(form).check(make_call, [CheckCase((), "normal"), CheckCase((), "special")]) >= 0.0


def test_a_kernel_is_cut_where_the_least_memory_lies_between() -> None:
    def function(x: T, w: T, b: T) -> T:
        y = torch.tanh(x * 2.0 + 1.0)
        return F.gelu(F.layer_norm(y, (32,), w, b)) * 0.5 + x

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(16, 32), torch.randn(32), torch.randn(32)])
    (node,) = planned.nodes
    whole, *cuts = cut_strategies(node.form)
    assert whole.name == "one_kernel" and len(whole.parts) == 1
    assert cuts and all(len(one.parts) == 2 for one in cuts)
    for kind in (whole, *cuts):
        check(node.form, kind, [()])
        covered = {name for part in kind.parts for name in part.operations}
        assert covered == {op.name for op in node.form.operations if op.short_name not in ("view", "expand")}


def test_a_copy_of_the_second_result_of_an_operation_is_planned() -> None:
    def function(x: T, y: T) -> T:
        return torch.tanh(x.chunk(2, 1)[1].contiguous() @ y)

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(8, 16), torch.randn(8, 8)])
    assert [node.operation_names for node in planned.nodes] == ["clone", "tanh"]


class Layers(nn.Module):
    """Equal layers, each a group."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: T) -> T:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return x


def test_the_search_for_groups_looks_at_equal_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[NodeForm] = []
    rewrites = enumeration.rewrites
    monkeypatch.setattr(enumeration, "rewrites", lambda form: looked.append(form) or rewrites(form))
    counts = []
    for layers, width in ((2, 240), (6, 272)):  # of a width each, since what is known of a form is kept
        looked.clear()
        planned = plan(Layers(layers, width), [torch.randn(64, width)])
        assert sum(len(p.groups) for p in planned) >= layers
        counts.append(len(looked))
        for group in (g for p in planned for g in p.groups):
            names = enumeration.generated_names(group.node.form)
            assert sorted(names) == sorted(w.name for w in enumeration.generated_strategies(group.node.form))
    assert 0 < counts[1] <= counts[0] + 1, "the first and the last layer may differ from those between"
