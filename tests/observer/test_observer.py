"""Whole scripts under tracker and observer: same results, and what is learnt is right."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autofuse.observer.config import ObserverConfig
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import root_key
from tests.observer.harness import EVERY_STEP, MLP, Blocks, Watch, watching
from tests.observer.test_mode import Count, CountFunctions

Script = Callable[[], list[torch.Tensor]]


def plain_loop() -> list[torch.Tensor]:
    model, loss_of = Blocks(), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        x = torch.randn(4, 3 + step % 3, 8)
        loss = loss_of(model(x)["out"], x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def accumulation() -> list[torch.Tensor]:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def gan() -> list[torch.Tensor]:
    generator, critic = MLP(), nn.Sequential(MLP(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
    for _ in range(4):
        fake = generator(torch.randn(4, 8))
        (critic(fake.detach()).mean() - critic(torch.randn(4, 8)).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(fake).mean()).backward()
        optimizers[0].step()
        [o.zero_grad() for o in optimizers]
    return [p.detach() for m in (generator, critic) for p in m.parameters()]


def gradient_penalty() -> list[torch.Tensor]:
    critic = MLP()
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
    return [p.grad for p in critic.parameters() if p.grad is not None]


def recurrent_cells() -> list[torch.Tensor]:
    cell, head = nn.LSTMCell(8, 8), nn.Linear(8, 1)
    for _ in range(3):
        state = None
        for x in torch.randn(5, 2, 8):
            state = cell(x, state)
        head(state[0]).sum().backward()
    return [p.grad for p in cell.parameters()]


def evaluation() -> list[torch.Tensor]:
    model = Blocks().eval()
    with torch.no_grad():
        first = [model(torch.randn(2, 3, 8))["out"] for _ in range(3)]
    with torch.inference_mode():
        second = [model(torch.randn(2, 3, 8))["out"].clone() for _ in range(3)]
    return first + second


def checkpointed() -> list[torch.Tensor]:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([MLP(), MLP()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.inner:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Outer()
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    return [p.grad for p in model.parameters()]


def modes_in_mid_step() -> list[torch.Tensor]:
    """A mode entered in one step and left in a later one, from both sides of our own comings and goings."""
    model = MLP()
    results = []
    for step in range(6):
        modes: list[Any] = [Count(), CountFunctions()]
        out = model(torch.randn(2, 8))
        modes[step % 2].__enter__()
        loss = out.pow(2).sum()
        if step % 3 == 0:
            modes[step % 2].__exit__(None, None, None)
        loss.backward()
        results.append(model(torch.randn(2, 8)).detach())
        if step % 3:
            modes[step % 2].__exit__(None, None, None)
        assert (modes[0].ops if step % 2 == 0 else modes[1].calls) > 0
    return results


def exceptions_in_mid_step() -> list[torch.Tensor]:
    model = Blocks()
    caught = 0
    for step in range(6):
        try:
            out = model(torch.randn(2, 8 if step % 2 else 7))["out"]
            out.sum().backward()
        except RuntimeError:
            caught += 1
    assert caught == 3
    return [p.grad for p in model.parameters()]


def recurrent_modules() -> list[torch.Tensor]:
    model = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
    for length in (3, 5, 4):
        model(torch.randn(2, length, 8))[0].sum().backward()
    return [p.grad for p in model.parameters()]


def several_threads() -> list[torch.Tensor]:
    models = [MLP().eval() for _ in range(3)]
    inputs = [torch.randn(4, 8) for _ in models]
    results: list[Any] = [None] * len(models)

    def work(index: int) -> None:
        for _ in range(5):
            models[index].zero_grad()
            models[index](inputs[index]).sum().backward()
        results[index] = models[index].first.weight.grad

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(models))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


def transformer() -> list[torch.Tensor]:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    for length in (4, 6, 5):
        model(torch.randn(2, length, 16), torch.randn(2, 3, 16)).sum().backward()
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(2, 4, 16), torch.ones(2, 3, 16))
    return [out, *[p.grad for p in model.parameters()]]


SCRIPTS = [
    plain_loop, accumulation, gan, gradient_penalty, recurrent_cells, evaluation, checkpointed, modes_in_mid_step,
    exceptions_in_mid_step, recurrent_modules, several_threads, transformer,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_scripts_are_bit_identical(script: Script) -> None:
    torch.manual_seed(0)
    expected = script()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with watching() as watch:
        found = script()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert watch.calls
    assert watch.observer.profiles()


def test_inputs_of_different_ranks_vary() -> None:
    """As a loss has them, of sequences and of single labels."""
    loss = nn.CrossEntropyLoss()
    with watching() as watch:
        for rows in (3, 4, 5):
            loss(torch.randn(rows, 6, 7, requires_grad=True), torch.zeros(rows, 7, dtype=torch.long)).backward()
            loss(torch.randn(rows, 2, requires_grad=True), torch.zeros(rows, dtype=torch.long)).backward()
    assert watch.observer.varying_sizes(root_key(loss)) >= 1


def test_what_is_learnt_of_a_plain_loop() -> None:
    with watching() as watch:
        plain_loop()
    observer, key = watch.observer, root_key(Blocks())
    assert observer.dynamic_dims(key) == (("args[0]", 1),)
    assert observer.calls(key) == 6
    assert observer.sampled_steps(key) == 6
    # Blocks: per block linear 2 (t, addmm) or more, gelu, dropout, add, mul; layer norm.
    assert 15 <= (observer.ops_in_forward(key) or 0) <= 60
    assert (observer.backward_ratio(key) or 0.0) > 0.0
    assert {count for _, count in observer.shapes(key)} == {2}
    records = observer.histograms()
    (sequence,) = [r for r in records if r.owner == key and r.argument == "args[0]" and r.dim == 1]
    assert dict(sequence.counts) == {3: 2, 4: 2, 5: 2}
    assert any(r.owner == "aten.gelu.default" for r in records)
    profiles = observer.profiles()
    assert {p.phase for p in profiles} == {"forward", "backward", "other"}
    gelu = [p for p in profiles if p.overload == "aten.gelu.default"]
    assert {p.module for p in gelu} == {"Blocks.registered.0.rest.0", "Blocks.registered.1.rest.0"}
    assert sum(p.calls for p in gelu) == 12
    assert all(p.device == "cpu" and p.dtypes == ("float32",) and p.time_us > 0 for p in gelu)
    backward = [p for p in profiles if p.overload == "aten.gelu_backward.default"]
    assert {p.module for p in backward} == {p.module for p in gelu}
    assert any("aten.addmm.default" in p.producers or "aten.view.default" in p.producers for p in gelu)


def test_backward_belongs_to_its_own_root() -> None:
    with watching() as watch:
        gan()
    observer = watch.observer
    for module in (MLP(), nn.Sequential(MLP(), nn.Linear(8, 1))):
        assert (observer.backward_ratio(root_key(module)) or 0.0) > 0.0


def test_backward_ratio_of_many_calls_before_one_backward() -> None:
    with watching() as watch:
        recurrent_cells()
    key = root_key(nn.LSTMCell(8, 8))
    assert watch.observer.calls(key) == 15
    samples = watch.observer.samples(key)
    assert {(s.calls, s.forward_ops > 0, s.backward_ops > s.forward_ops) for s in samples} == {(5, True, True)}
    assert (watch.observer.backward_ratio(key) or 0.0) > 0.0
    assert 2 <= (watch.observer.ops_in_forward(key) or 0) <= 30


def test_forward_only_has_no_backward() -> None:
    model = MLP()
    with watching() as watch, torch.no_grad():
        for _ in range(4):
            model(torch.randn(2, 8))
    assert watch.observer.backward_ratio(root_key(model)) == 0.0
    assert watch.observer.sampled_steps(root_key(model)) == 4


def test_gradients_without_a_backward_do_not_hold_the_step_open() -> None:
    model = MLP()
    with watching() as watch:
        for _ in range(200):
            model(torch.randn(2, 8))
    key = root_key(model)
    assert watch.observer.sampled_steps(key) > 100
    assert watch.observer.backward_ratio(key) is None


def test_unknown_roots_have_no_answers() -> None:
    observer = Observer()
    assert observer.ops_in_forward("x") is None
    assert observer.backward_ratio("x") is None
    assert observer.typical_seconds("x") is None
    assert observer.dynamic_dims("x") == ()
    assert observer.shapes("x") == []
    assert observer.profiles() == []
    observer.stop()


def test_decided_roots_are_not_sampled_and_modes_are_gone() -> None:
    model = MLP()
    with watching() as watch:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
        watch.observer.decide(root_key(model))
        model(torch.randn(2, 8)).sum().backward()
        assert not watch.observer.is_sampling
        assert torch._C._len_torch_dispatch_stack() == 0
        before = watch.observer.sampled_steps(root_key(model))
        for _ in range(20):
            model(torch.randn(2, 8))
        assert watch.observer.sampled_steps(root_key(model)) == before


def test_deciding_the_root_of_the_step_ends_it() -> None:
    model = MLP()
    with watching() as watch:
        model(torch.randn(2, 8)).sum().backward()
        assert torch._C._len_torch_dispatch_stack() == 1
        watch.observer.decide(root_key(model))
        assert torch._C._len_torch_dispatch_stack() == 0
        assert watch.observer.ops_in_forward(root_key(model))


def test_a_root_that_is_called_no_more_does_not_hold_the_step_open() -> None:
    model, other = MLP(), nn.ReLU()
    config = ObserverConfig(first_steps=1, skip_steps=0, max_calls_per_step=1, max_overhead_percent=100.0)
    with watching(config) as watch, torch.no_grad():
        model(torch.randn(2, 8))
        for _ in range(12):
            other(torch.randn(2, 8))
        assert watch.observer.sampled_steps(root_key(model)) == 1


def test_the_users_profiler_keeps_the_mode_away() -> None:
    model = MLP()
    with watching() as watch:
        model(torch.randn(2, 8)).sum().backward()
        with torch.profiler.profile() as profile:
            for _ in range(3):
                model(torch.randn(2, 8))
            assert not watch.observer.is_sampling
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::addmm"] == 6


def test_a_step_abandoned_by_its_thread_does_not_block_others() -> None:
    config = ObserverConfig(
        first_steps=1000,
        skip_steps=0,
        sample_every=1,
        max_overhead_percent=100.0,
        burst_seconds=1e3,
        max_step_seconds=0.0,
    )
    model = MLP()
    with watching(config) as watch:
        thread = threading.Thread(target=lambda: model(torch.randn(2, 8)))
        thread.start()
        thread.join()
        assert watch.observer.is_sampling
        for _ in range(3):
            model(torch.randn(2, 8))
    assert watch.observer.sampled_steps(root_key(model)) >= 2


def test_a_fault_ends_the_observation_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from autofuse.observer import observer as module

    def broken(*args: Any) -> None:
        raise LookupError("ours")

    monkeypatch.setattr(module, "aggregate", broken)
    watch, model = Watch(EVERY_STEP), MLP()
    watch.tracker.install()
    try:
        for _ in range(5):
            model(torch.randn(2, 8)).sum().backward()
    finally:
        watch.tracker.uninstall()
        watch.observer.stop()
    assert watch.observer.fault is not None
    assert "LookupError" in watch.observer.fault
    assert watch.calls == ["MLP"] * 5
    assert torch._C._len_torch_dispatch_stack() == 0


def test_arguments_that_cannot_be_described() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            return torch.ones(1)

    class Hostile(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise ZeroDivisionError

    with watching() as watch:
        Odd()(Hostile())
        Odd()(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged))
        Odd()(torch.ones(3))
    assert watch.observer.skipped_calls == 0
    assert watch.calls == ["Odd"] * 3


def test_own_cost_is_counted_and_small() -> None:
    model = MLP(64)
    with watching(ObserverConfig(max_overhead_percent=1.0, burst_seconds=0.02, sample_every=5)) as watch:
        for _ in range(60):
            model(torch.randn(32, 64)).sum().backward()
    assert watch.observer.cost_seconds > 0.0
    assert watch.observer.sampled_steps(root_key(model)) >= 1


def test_stop_in_mid_step_takes_everything_off() -> None:
    watch, model = Watch(EVERY_STEP), MLP()
    watch.tracker.install()
    model(torch.randn(2, 8))
    assert torch._C._len_torch_dispatch_stack() == 1
    watch.observer.stop()
    watch.observer.stop()
    watch.tracker.uninstall()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert nn.Module._compiled_call_impl is None
    model(torch.randn(2, 8))
    assert watch.observer.profiles()


def test_a_root_inside_a_custom_op() -> None:
    """Our own handler is running further up: the mode cannot be taken off the stack there, and is later."""
    inner = MLP().eval()

    @torch.library.custom_op("autofuse_test::through_module", mutates_args=())
    def through_module(x: torch.Tensor) -> torch.Tensor:
        return inner(x).clone()

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.autofuse_test.through_module(x) + 1

    def script() -> list[torch.Tensor]:
        outer = Outer()
        with torch.no_grad():
            return [
                torch.ops.autofuse_test.through_module(x) + outer(x) + inner(x) for x in torch.randn(4, 2, 8).unbind()
            ]

    torch.manual_seed(0)
    expected = script()
    torch.manual_seed(0)
    with watching() as watch:
        found = script()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert {"Outer", "MLP"} <= set(watch.calls)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.model = MLP().eval()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            row = self.model(torch.full((1, 8), float(index)))[0]
        return row, torch._C._len_torch_dispatch_stack()


def test_data_loader_workers_are_not_watched() -> None:
    rows, model = Rows(), MLP()
    expected = torch.stack([rows[index][0] for index in range(6)])
    with watching() as watch:
        model(torch.randn(2, 8)).sum().backward()
        assert watch.observer.is_sampling
        found = list(torch.utils.data.DataLoader(rows, batch_size=2, num_workers=2))
    assert torch.equal(torch.cat([batch for batch, _ in found]), expected)
    assert all(int(depth.max()) == 0 for _, depth in found)
    assert watch.calls == ["MLP"]


ENDS = {
    "with an exception": "raise ValueError('mine')",
    "with an exit code": "import sys; sys.exit(3)",
    "inside a mode": "Count().__enter__(); threading.Thread(target=model, args=(torch.ones(2, 8),)).start()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_in_mid_step(end: str) -> None:
    text = (
        "import threading, torch; from tests.observer.harness import *; from tests.observer.test_mode import Count\n"
        "watch = Watch(); watch.tracker.install(); model = MLP()\n"
        "model(torch.ones(2, 8)).sum().backward(); assert watch.observer.is_sampling; print('ran')\n" + ENDS[end]
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n"
    assert done.returncode == {"with an exception": 1, "with an exit code": 3}.get(end, 0), done.stderr
    assert ("ValueError: mine" in done.stderr) == (end == "with an exception")
