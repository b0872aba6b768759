"""Ranks change to a kernel at the same step or not at all, whatever each knows when, and whichever is ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from autofuse.cli.app import parse
from autofuse.db.store import Store
from autofuse.runtime import rank_agreement
from autofuse.runtime.rank_agreement import FIRST_LEAD, MOST_ATTEMPTS, Agreement, Ranks, fingerprint

ROOT = Path(__file__).resolve().parents[2]
STEPS = 900
NEVER = STEPS + 1


def run_ranks(
    ready_at: list[int], names: list[str], order: list[int], began: list[int] | None = None
) -> list[int | None]:
    """The step at which each rank changes. ``order``: who goes first in each step, by turns; ``began``: from which step
    on each counts."""
    store = distributed.HashStore()
    ranks = [
        Agreement(Ranks(n, len(ready_at), distributed.PrefixStore("t", store)), "adam/0") for n in range(len(ready_at))
    ]
    begun: list[int | None] = [None] * len(ranks)
    for step in range(1, STEPS):
        first = order[step % len(order)]
        held = str(step)  # parameters change with each step
        for n in [*range(first, len(ranks)), *range(first)]:
            counted = step - (began[n] if began else 0)
            if counted > 0 and begun[n] is None:
                ready = names[n] if step >= ready_at[n] else ""
                begun[n] = step if ranks[n].is_due(counted, ready, lambda held=held: held) else None
    return begun


MOMENTS = st.one_of(st.integers(1, 400), st.just(NEVER))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_or_none(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    ready_at = data.draw(st.lists(MOMENTS, min_size=size, max_size=size))
    names = data.draw(st.lists(st.sampled_from("aaab"), min_size=size, max_size=size))
    order = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=7))
    began = data.draw(st.lists(st.sampled_from((0, 0, 3)), min_size=size, max_size=size))
    begun = run_ranks(ready_at, names, order, began)
    assert len(set(begun)) == 1
    assert begun[0] is None or (len(set(names)) == len(set(began)) == 1 and max(ready_at) <= begun[0])


def test_those_that_are_ready_change_soon() -> None:
    assert run_ranks([1, 1], ["a", "a"], [0]) == [1 + 3 * FIRST_LEAD] * 2
    late = run_ranks([1, 100], ["a", "a"], [1])
    assert late[0] == late[1] is not None and late[0] < 400


def test_a_rank_that_has_another_kernel_keeps_all_from_changing() -> None:
    assert run_ranks([1, 1, 1], ["a", "b", "a"], [0]) == [None] * 3


def test_without_rank_0_the_others_decide_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "WAIT_SECONDS", 0.05)
    store = distributed.HashStore()
    first, other = (Agreement(Ranks(n, 2, store), "t") for n in range(2))
    for step in range(1, 3 * FIRST_LEAD):
        assert not other.is_due(step, "a", lambda: "h")
        assert step > 2 * FIRST_LEAD or not first.is_due(step, "a", lambda: "h")
    assert not other.is_due(1 + 3 * FIRST_LEAD, "a", lambda: "h")
    assert store.get("t/0/decision") == b"no"
    assert not first.is_due(2 + 3 * FIRST_LEAD, "a", lambda: "h")


def test_attempts_end() -> None:
    store = distributed.HashStore()
    alone = Agreement(Ranks(0, 2, store), "t")
    assert not any(alone.is_due(step, "a", lambda: "h") for step in range(1, 3 * FIRST_LEAD << MOST_ATTEMPTS))
    assert not alone.is_due(10**6, "a", lambda: "h") and not store.check([f"t/{MOST_ATTEMPTS}/offer"])


class Distributed(torch.Tensor):
    """Stands for one whose elements other ranks hold."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise AssertionError(f"{function} may be a collective")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_fingerprint_is_of_bits(dtype: torch.dtype) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size in ((3, 0), (), (4, 2, 3), (5,))]
    same, other = [tensor.clone() for tensor in tensors], [tensor.clone() for tensor in tensors]
    other[1].fill_(-0.0)
    assert fingerprint(tensors) == fingerprint(same) != fingerprint(other)
    assert fingerprint([tensors[0], Distributed()]) == fingerprint(tensors[:1])
    assert fingerprint([]) == fingerprint([]) and fingerprint([torch.ones(9)] * 400)


TENSOR_PARALLEL = """
import autofuse, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from autofuse.runtime.roots.repeated_values import shares_values
from autofuse.runtime.session import running_session
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # its collectives do nothing
layers = lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
plan = {"0": ColwiseParallel(use_local_output=True), "2": RowwiseParallel()}
plain, mesh = layers(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
sharded = fully_shard(layers(), mesh=mesh["dp"])
parallel = parallelize_module(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), mesh["tp"], plan)
both = fully_shard(parallelize_module(layers(), mesh["tp"], {"0": ColwiseParallel()}), mesh=mesh["dp"])
print([shares_values(module) for module in (plain, sharded, parallel, both, len)])
for _ in range(40):
    parallel(torch.randn(64, 8))
session = running_session()
print([(root.state, root.reason) for root in session.roots.groups.values() if root.name == "Sequential"])
class Asked(nn.Sequential): pass
asked = autofuse.optimize(parallelize_module(Asked(nn.Linear(8, 16), nn.Linear(16, 8)), mesh["tp"], plan))
print([(root.state, root.reason) for root in session.roots.groups.values() if root.name == "Asked"])
compiled = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
compiled = torch.compile(parallelize_module(compiled, mesh["tp"], plan), backend="autofuse")
compiled(torch.randn(64, 8)).sum().backward()
print([(graph.state, graph.reason) for graph in session.roots.graphs.values()])
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("option", "state"), [((), "eager"), (("--strict",), "captured")])
def test_modules_of_tensor_parallel_ranks_stay_in_eager(tmp_path: Path, option: tuple[str, ...], state: str) -> None:
    script, store = tmp_path / "train.py", tmp_path / "kept" / "s.sqlite3"
    script.write_text(TENSOR_PARALLEL)
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", str(store), *option]
    command += ["--set", "capture.min_root_us=0", "--set", "capture.at_once=true", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shared, roots, asked, compiled = done.stdout.splitlines()
    assert shared == str([False, False, True, True, False])
    for told in (roots, asked, compiled):
        assert f"('{state}', " in told and ("several_ranks" in told) == (state == "eager"), done.stdout


SCRIPT = """
import itertools, json, os, pathlib, signal, sys, time, torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
layers = nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)
net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-6)
if rank == 1:  # it learns late of each decision
    from autofuse.runtime.optimizers.router import OptimizerRouter
    decision = OptimizerRouter._decision
    OptimizerRouter._decision = lambda self, group: decision(self, group) if group.steps > 15 else None
torch.manual_seed(rank)
is_killed = sys.argv[1:] == ["killed"]
from autofuse.runtime.session import running_session
def fused_steps():
    router = running_session().optimizers.router
    return sum(group.fused_steps for group in router.groups.values()) if router is not None else 0
def all_agree_to_end(step):  # a busy machine may be long at tuning
    is_done = (step > 200 and (fused_steps() > 100 or is_killed)) or time.monotonic() > deadline
    return step % 50 == 0 and not dist.all_reduce(done := torch.tensor(int(is_done)), dist.ReduceOp.MAX) and bool(done)
def train(step):
    loss = F.mse_loss(net(torch.randn(32, 16)), torch.randn(32, 4))
    optimizer.zero_grad()
    loss.backward()
    if rank == 3 and step % 40 == 0:  # a slow one: the others are a step ahead
        time.sleep(0.05)
    optimizer.step()
deadline = time.monotonic() + 150.0
for step in itertools.count(1):
    train(step)
    if all_agree_to_end(step):
        break
mine = torch.cat([p.detach().flatten() for p in net.parameters()])
all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all_of_them, mine)
is_equal = all(torch.equal(mine, other) for other in all_of_them)
pathlib.Path(sys.argv[0]).with_name(f"rank{rank}").write_text(json.dumps([is_equal, fused_steps()]))
while is_killed:
    step += 1
    if rank == 1 and step % 50 == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    train(step)
dist.destroy_process_group()
"""


# Ranks 1 and 2 of a job of others: one on another processor, one whose file of decisions is gone.
UNEQUAL = """
import os, runpy
from autofuse.ir import device
if os.environ["RANK"] == "1":
    device._cpuinfo = lambda: ("a processor", frozenset({"sse2", "popcnt"}))
if os.environ["RANK"] == "2":
    os.environ["AUTOFUSE_SNAPSHOT"] += ".gone"
runpy.run_module("autofuse", run_name="__main__")
"""


def launch(
    folder: Path,
    size: int,
    *options: str,
    arguments: Sequence[str] = (),
    program: Sequence[str] = ("-m", "autofuse"),
    snapshot: Path | None = None,
) -> CompletedProcess[str]:
    """So many ranks on this machine, each of which writes what became of it."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    quick = [word for name in ("tuner.trials=2", "tuner.rounds=5", "tuner.margin=0.0") for word in ("--set", name)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *program, "run", *options, *quick]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOFUSE_SNAPSHOT": str(snapshot or "")}
    store = ("--store", str(folder / "kept" / "s.sqlite3"))
    return subprocess.run(
        [*command, *store, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=environment,
    )


def told(folder: Path, size: int) -> list[list[Any]]:
    """Of each rank: whether it has the others' parameters to the bit, and its fused steps."""
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]


def test_replicas_stay_equal_while_a_kernel_comes_in(tmp_path: Path) -> None:
    store, snapshot, program = tmp_path / "kept" / "s.sqlite3", tmp_path / "tuned.jsonl", tmp_path / "unequal.py"
    done = launch(tmp_path, 4, "--tune", "wait")
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = told(tmp_path, 4)
    assert ranks == [[True, ranks[0][1]]] * 4 and ranks[0][1] > 100
    log = store.with_name("s.sqlite3.daemon.log").read_text()
    assert log.count(" serving ") == 1 and "another daemon" not in log, "the ranks of a host start one"
    parse(["export", str(snapshot), "--store", str(store)])
    # In the usual mode, where each rank finds out by itself when to import what makes fused steps.
    done = launch(tmp_path, 2, snapshot=snapshot)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = told(tmp_path, 2)
    assert ranks == [[True, ranks[0][1]]] * 2 and ranks[0][1] > 100
    program.write_text(UNEQUAL)
    done = launch(tmp_path, 3, snapshot=snapshot, program=[str(program)], arguments=["killed"])
    assert done.returncode == 1 and "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]
    assert told(tmp_path, 3) == [[True, 0]] * 3
    with Store.open(store, readonly=True) as opened:
        last = opened.runs.recent(3)
        devices = {run.device.name for run in last}
        said = [row.event for run in last for row in opened.notes.events(run.id) if row.event.kind == "snapshot"]
    assert "a processor" in devices and len(devices) == 2
    assert sum("tuned.jsonl.gone" in event.message for event in said) == 1
