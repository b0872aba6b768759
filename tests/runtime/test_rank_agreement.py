"""Ranks change to a kernel at the same step or not at all, whatever each knows when, and whichever is ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from autofuse.runtime import rank_agreement
from autofuse.runtime.rank_agreement import FIRST_LEAD, MOST_ATTEMPTS, Agreement, Ranks

ROOT = Path(__file__).resolve().parents[2]
STEPS = 900
NEVER = STEPS + 1


def run_ranks(ready_at: list[int], names: list[str], order: list[int]) -> list[int | None]:
    """The step at which each rank changes. ``order``: who goes first in each step, by turns."""
    store = distributed.HashStore()
    ranks = [
        Agreement(Ranks(n, len(ready_at), distributed.PrefixStore("t", store)), "adam/0") for n in range(len(ready_at))
    ]
    begun: list[int | None] = [None] * len(ranks)
    for step in range(1, STEPS):
        first = order[step % len(order)]
        for n in [*range(first, len(ranks)), *range(first)]:
            if begun[n] is None and ranks[n].is_due(step, names[n] if step >= ready_at[n] else ""):
                begun[n] = step
    return begun


MOMENTS = st.one_of(st.integers(1, 400), st.just(NEVER))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_or_none(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    ready_at = data.draw(st.lists(MOMENTS, min_size=size, max_size=size))
    names = data.draw(st.lists(st.sampled_from("aaab"), min_size=size, max_size=size))
    order = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=7))
    begun = run_ranks(ready_at, names, order)
    assert len(set(begun)) == 1
    assert begun[0] is None or (len(set(names)) == 1 and max(ready_at) <= begun[0])


def test_those_that_are_ready_change_soon() -> None:
    assert run_ranks([1, 1], ["a", "a"], [0]) == [1 + 2 * FIRST_LEAD] * 2
    late = run_ranks([1, 100], ["a", "a"], [1])
    assert late[0] == late[1] is not None and late[0] < 300


def test_a_rank_that_has_another_kernel_keeps_all_from_changing() -> None:
    assert run_ranks([1, 1, 1], ["a", "b", "a"], [0]) == [None] * 3


def test_without_rank_0_the_others_decide_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "WAIT_SECONDS", 0.05)
    store = distributed.HashStore()
    first, other = (Agreement(Ranks(n, 2, store), "t") for n in range(2))
    for step in range(1, 2 * FIRST_LEAD):
        assert not other.is_due(step, "a") and (step > FIRST_LEAD or not first.is_due(step, "a"))
    assert not other.is_due(1 + 2 * FIRST_LEAD, "a")
    assert store.get("t/0/decision") == b"no"
    assert not first.is_due(2 + 2 * FIRST_LEAD, "a")


def test_attempts_end() -> None:
    store = distributed.HashStore()
    alone = Agreement(Ranks(0, 2, store), "t")
    assert not any(alone.is_due(step, "a") for step in range(1, 2 * FIRST_LEAD << MOST_ATTEMPTS))
    assert not alone.is_due(10**6, "a") and not store.check([f"t/{MOST_ATTEMPTS}/offer"])


SCRIPT = """
import json, pathlib, sys, torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
layers = nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)
net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-6)
if rank == 1:  # it learns late of each decision
    from autofuse.runtime.optim_router import OptimizerRouter
    decision = OptimizerRouter._decision
    OptimizerRouter._decision = lambda self, group: decision(self, group) if group.steps > 40 else None
torch.manual_seed(rank)
for step in range(200):
    loss = F.mse_loss(net(torch.randn(32, 16)), torch.randn(32, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
mine = torch.cat([p.detach().flatten() for p in net.parameters()])
all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all_of_them, mine)
from autofuse.runtime.session import running_session
router = running_session().optimizers.router
fused = sum(group.fused_steps for group in router.groups.values()) if router is not None else 0
is_equal = all(torch.equal(mine, other) for other in all_of_them)
pathlib.Path(sys.argv[0]).with_name(f"rank{rank}").write_text(json.dumps([is_equal, fused]))
dist.destroy_process_group()
"""


def launch(folder: Path, *options: str) -> dict[int, list[Any]]:
    """Two ranks on this machine: whether each has the other's parameters to the bit, and its fused steps."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    quick = [word for name in ("tuner.trials=2", "tuner.rounds=5", "tuner.margin=0.0") for word in ("--set", name)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "autofuse", "run", *options, *quick]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    store = ("--store", str(folder / "kept" / "s.sqlite3"))
    done = subprocess.run(
        [*command, *store, str(script)], capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {rank: json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)}


def test_replicas_stay_equal_while_a_kernel_comes_in(tmp_path: Path) -> None:
    first, again = launch(tmp_path, "--tune", "wait"), launch(tmp_path, "--tune", "wait")
    for ranks in (first, again):
        assert all(is_equal for is_equal, _ in ranks.values())
        assert ranks[0][1] == ranks[1][1]
    assert again[0][1] > 50
