"""Groups in the daemon: parts first, then the ways against each other; cuts of one kernel; tiles in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.templates import MATMUL
from autofuse.daemon import control, request_tuner
from autofuse.db.store import Store
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import TuneRequest
from autofuse.settings.layers import Settings, load
from autofuse.strategies import bundle
from autofuse.strategies.bundle import is_bundle
from autofuse.strategies.enumeration import GENERATED, strategies_of
from autofuse.strategies.strategy import kernel_id
from autofuse.tuner import decide_node
from autofuse.tuner import strategy_provider as strategies
from autofuse.wrapper.load_strategy import unpack
from tests.db.store_records import start
from tests.strategies.harness import plan
from tests.tuner.nodes import request

T = torch.Tensor


@pytest.fixture
def quick(tmp_path: Path) -> Settings:
    cli = {"run.store": tmp_path / "store.sqlite3", "run.profile": "quick", "tuner.trials": 2, "tuner.rounds": 5}
    return load(cli, environ={}, cwd=tmp_path)


def drain(settings: Settings, *requests: TuneRequest) -> None:
    with Store.open(settings.run.store) as store:
        store.queue.add(requests)
    control.drain(settings, lambda done, total: None)


def linear_gelu() -> NodeForm:
    """[s0, 16] x [16, 24], gelu and a scale after it."""
    inputs = [torch.randn(40, 16), torch.randn(24, 16), torch.randn(24)]
    with torch.no_grad():
        (planned,) = plan(lambda x, w, b: F.gelu(F.linear(x, w, b)) * 0.5 + 1.0, inputs, [(0, 0)])
    (group,) = planned.groups
    return group.node.form


def normalised() -> NodeForm:
    def function(x: T, w: T, b: T) -> T:
        return F.gelu(F.layer_norm(torch.tanh(x * 2.0 + 1.0), (32,), w, b)) * 0.5 + x

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(16, 32), torch.randn(32), torch.randn(32)], [(0, 0)])
    (node,) = planned.nodes
    return node.form


def test_a_group_is_tuned_part_by_part_and_then_way_by_way(quick: Settings) -> None:
    form = linear_gelu()
    parts, vendor, product, apart, blocks, generated = strategies_of(form)
    assert blocks.rows is not None and blocks.rows.count > 64, "not tried at a size that one block holds"
    (kernel,) = parts.kernels
    asked = request(form, (40,), unfused_us=1000.0)
    own = request(kernel.node.form, (40,), unfused_us=1.0)
    own = replace(own, key=replace(own.key, fusion_id=kernel.node.fusion_id, bucket="s0=33..64"))
    drain(quick, asked, own)
    with Store.open(quick.run.store) as store:
        assert store.queue.length().done == 2
        rows = store.results.measurements(asked.key.fusion_id)
        strategies = {dict(row.measurement.candidate.config)["way"] for row in rows}
        found = {d.key.fusion_id: d for _, d in store.results.decisions()}
        lost = {kernel_id(k.node.form, "loop") for s in (parts, apart) for k in s.kernels}
        lost = {part for part in lost if found[part].reason in ("no_gain", "below_margin")}
        raced = {s.name for s in (parts, apart) if kernel_id(s.kernels[0].node.form, "loop") not in lost}
        assert strategies == {vendor.name, *raced}, f"{product.name} is for longer ones"
        assert kernel.node.fusion_id == kernel_id(kernel.node.form, "loop")
        assert kernel.node.fusion_id in found  # tuned as a part; the request of its own asked for nothing more
        assert len(store.results.history(kernel.node.fusion_id)) == 1
        assert not store.results.measurements(kernel_id(generated.kernels[0].node.form, "matmul")), (
            "too short to be generated"
        )
        decision = found[asked.key.fusion_id]
        assert "the others: " in decision.detail and vendor.name in decision.detail
        if decision.reason == "won":
            record = store.kernels.get(decision.compile_key or "")
            assert record is not None and is_bundle(record.binary)
            loaded = unpack(record.binary, lambda digest, name, binary: lambda *pointers: None)
            assert loaded.strategy.name == dict(decision.candidate.config)["way"]


def test_parts_that_are_undecided_are_raced_inside_of_their_strategies(
    quick: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = decide_node.decide
    monkeypatch.setattr(
        decide_node, "decide", lambda found, margin, again: replace(lost(found, margin, again), is_won=False)
    )
    monkeypatch.setattr(decide_node, "why_eager", lambda comparison, margin: "undecided")
    form = linear_gelu()
    parts, vendor, _, apart, *_ = strategies_of(form)
    asked = request(form, (40,), unfused_us=1000.0)
    drain(quick, asked)
    with Store.open(quick.run.store) as store:
        decisions = [decision for _, decision in store.results.decisions()]
        assert len(decisions) > 2 and {d.reason for d in decisions} == {"undecided"}
        rows = store.results.measurements(asked.key.fusion_id)
        assert {dict(r.measurement.candidate.config)["way"] for r in rows} == {parts.name, vendor.name, apart.name}


def test_a_short_product_by_itself_is_not_raced(quick: Settings) -> None:
    with torch.no_grad():
        (planned,) = plan(torch.mm, [torch.randn(5, 96), torch.randn(96, 32)], [(0, 0)])
    asked = request(planned.groups[0].node.form, (5,), unfused_us=1000.0)
    drain(quick, asked)
    with Store.open(quick.run.store) as store:
        ((_, decision),) = store.results.decisions()
        assert (decision.candidate.variant, decision.reason) == ("eager", "too_small")
        assert "fewer operations" in decision.detail and not store.results.measurements(asked.key.fusion_id)


def test_a_long_product_is_generated_and_tuned_by_itself(quick: Settings) -> None:
    inputs = [torch.randn(160, 96), torch.randn(128, 96), torch.randn(128)]
    with torch.no_grad():
        (planned,) = plan(lambda x, w, b: torch.relu(F.linear(x, w, b)), inputs, [(0, 0)])
    form = planned.groups[0].node.form
    (generated,) = [strategy for strategy in strategies_of(form) if strategy.name == GENERATED]
    (part,) = [k.node.form for k, p in zip(generated.kernels, generated.parts, strict=True) if p.printer == MATMUL]
    with Store.open(quick.run.store) as store:
        run_id = store.runs.start(start())
    asked = replace(request(form, (160,), unfused_us=1000.0), run_id=run_id)
    drain(quick, asked)
    with Store.open(quick.run.store) as store:
        tried = [row.measurement for row in store.results.measurements(kernel_id(part, MATMUL))]
        assert len({dict(m.candidate.config)["tile"] for m in tried if m.status in ("ok", "pruned")}) > 1
        assert not [m for m in tried if m.status not in ("ok", "pruned")]
        (decision,) = store.results.history(kernel_id(part, MATMUL))
        every = store.results.history()
        assert len(every) > 1 and {row.run_id for row in every} == {run_id}, "parts count for the run, too"
        names = {
            dict(row.measurement.candidate.config)["way"] for row in store.results.measurements(asked.key.fusion_id)
        }
        assert (GENERATED in names) == (decision.decision.reason == "won")


def test_a_kernel_that_gains_little_is_also_cut(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tuner, "CUT_BELOW", 1e9)
    packed = []
    monkeypatch.setattr(strategies, "pack", lambda *strategy: packed.append(bundle.pack(*strategy)) or packed[-1])
    asked = request(normalised(), (16,))
    drain(quick, asked)
    assert packed and {record.key.target for record in packed} == {find_toolchain(None).target}
    with Store.open(quick.run.store) as store:
        rows = store.results.measurements(asked.key.fusion_id)
        names = {dict(r.measurement.candidate.config).get("way") for r in rows}
        assert "one_kernel" in names and any(str(name).startswith("cut_") for name in names)
        (decision,) = [d for _, d in store.results.decisions() if d.key.fusion_id == asked.key.fusion_id]
        assert "cut" in decision.detail and "one_kernel" in decision.detail


def attention() -> NodeForm:
    q, k, v = (torch.randn(2, 3, 12, 16) for _ in range(3))
    function = lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.25, -1) @ v  # noqa: E731
    with torch.no_grad():
        (planned,) = plan(function, [q, k, v], [(0, 2), (1, 2), (2, 2)])
    (group,) = planned.groups
    return group.node.form


@pytest.mark.parametrize(("make", "printer"), [(linear_gelu, "matmul"), (attention, "attention")])
def test_a_generated_tile_is_a_way_where_triton_prints(
    quick: Settings, make: Callable[[], NodeForm], printer: str
) -> None:
    form = make()
    assert (
        [strategy.name for strategy in strategies_of(form)][-1]
        != "tiled"
        == [strategy.name for strategy in strategies_of(form, has_tiles=True)][-1]
    )
    asked = request(form, (10,) * len(form.symbols), threads=0)
    asked = replace(asked, key=replace(asked.key, device="interpreter:test"))
    drain(quick, asked)
    with Store.open(quick.run.store) as store:
        (decision,) = [
            d for _, d in store.results.decisions("interpreter:test") if d.key.fusion_id == asked.key.fusion_id
        ]
        assert decision.reason in ("no_gain", "below_margin", "undecided", "won"), decision
        tiled = kernel_id(form, printer)
        rows = [row.measurement for row in store.results.measurements(tiled)]
        assert rows and all(row.status in ("ok", "pruned") for row in rows), rows
        assert max(row.error_ratio or 0.0 for row in rows) < 4.0
