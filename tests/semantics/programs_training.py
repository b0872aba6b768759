"""Programs with optimizers, threads, processes and replicas."""

from __future__ import annotations

import contextvars
import gc
import multiprocessing
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, Dataset

from tests.semantics.programs_tools import Net, gradients, inputs, step
from tests.semantics.states import Run, program

T = torch.Tensor


# ---- optimizers -----------------------------------------------------------------------------------------------------


def trained(run: Run, optimizer: Any, model: nn.Module, steps: int = 4, scheduler: Any = None) -> None:
    for k in range(steps):
        optimizer.zero_grad()
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        run.show(f"step {k}", loss, dict(model.named_parameters()), [group["lr"] for group in optimizer.param_groups])
    run.show("state", optimizer.state_dict())


@program()
def sgd_with_momentum(run: Run) -> None:
    model = Net()
    trained(run, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), model)


@program()
def adamw_with_groups(run: Run) -> None:
    model = Net()
    groups = [
        {"params": model.first.parameters(), "lr": 0.01},
        {"params": model.second.parameters(), "weight_decay": 0},
    ]
    trained(run, torch.optim.AdamW(groups, lr=0.1, amsgrad=True), model)


@program()
def state_of_optimizers_loaded(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(run, optimizer, model)
    other = torch.optim.Adam(model.parameters(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    trained(run, other, model)


@program()
def group_added_later(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.first.parameters(), lr=0.1)
    trained(run, optimizer, model)
    optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.2})
    trained(run, optimizer, model)


@program()
def schedulers(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    trained(run, optimizer, model, 6, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [2]))


@program()
def scheduler_before_step(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for k in range(3):
        model(inputs()).sum().backward()
        scheduler.step()
        optimizer.step()
        run.show(f"{k}", optimizer.param_groups[0]["lr"])


@program()
def hooks_of_optimizers(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: run.show("before", len(args), len(o.state)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: run.show("after", len(o.state)))
    trained(run, optimizer, model)


@program()
def closures_of_optimizers(run: Run) -> None:
    model = Net()
    for kind in (torch.optim.LBFGS, torch.optim.SGD):
        optimizer = kind(model.parameters(), lr=0.1)
        for k in range(2):

            def closure(optimizer: Any = optimizer) -> T:
                optimizer.zero_grad()
                loss = model(inputs()).square().mean()
                loss.backward()
                return loss

            run.show(f"{k}", optimizer.step(closure), gradients(model))


@program()
def an_optimizer_of_the_script(run: Run) -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])
                        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1

    model = Net()
    trained(run, Signs(model.parameters()), model)


@program(precision=torch.bfloat16)
def scaled_gradients(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for k in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(inputs()).float().square().mean()
        scaler.scale(loss * (float("inf") if k == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.show(f"{k}", norm, scaler.get_scale(), dict(model.named_parameters()))


@program()
def moving_averages(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(4):
        optimizer.zero_grad()
        model(inputs()).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        run.show(f"{k}", average.state_dict())
    swa_utils.update_bn([inputs(), inputs() * 2], average)
    run.show("updated", average.state_dict(), average(inputs()))


@program()
def accumulated_gradients(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for k in range(8):
        (model(inputs() + k).square().mean() / 4).backward()
        if k % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        run.show(f"{k}", dict(model.named_parameters()), gradients(model))


@program()
def nan_in_a_step(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for k in range(4):
        optimizer.zero_grad()
        loss = model(inputs() * (float("nan") if k == 3 else 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        run.show(f"{k}", loss, gradients(model), dict(model.named_parameters()))


# ---- threads and processes ------------------------------------------------------------------------------------------


@program()
def threads_one_after_the_other(run: Run) -> None:
    model = Net()
    for k in range(4):
        found: list[T] = []
        thread = threading.Thread(target=lambda found=found: found.append(model(inputs())))
        thread.start()
        thread.join()
        found[0].sum().backward()
        run.show(f"{k}", found, gradients(model))


@program()
def a_pool_of_threads(run: Run) -> None:
    model = Net()
    with torch.no_grad():
        run.show("first", model(inputs()))

    def call(k: int) -> T:
        with torch.no_grad():
            return model(inputs() + k)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            run.show("all", list(pool.map(call, range(8))))


@program()
def gradients_in_threads(run: Run) -> None:
    models = [Net() for _ in range(3)]

    def train(model: nn.Module) -> Any:
        for _ in range(4):
            model(inputs()).square().mean().backward()
        return gradients(model)

    with ThreadPoolExecutor(3) as pool:
        run.show("all", list(pool.map(train, models)))


@program()
def state_of_threads(run: Run) -> None:
    model, local, variable = Net(), threading.local(), contextvars.ContextVar("variable", default=0)

    class Reads(nn.Module):
        def forward(self, x: T) -> T:
            return model(x) * getattr(local, "scale", 1.0) + variable.get()

    reads = Reads()
    for k in range(4):
        local.scale = float(k)
        variable.set(k)
        run.show(f"{k}", reads(inputs()))


def child_calls(model: nn.Module, pipe: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads are the parent's: a child that waits for them waits for ever
    out = model(inputs())
    out.sum().backward()
    pipe.send((out.tolist(), [p.grad.tolist() for p in model.parameters()]))
    pipe.close()


@program()
def forked_children(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
        model.zero_grad()
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=child_calls, args=(model, theirs))
        child.start()
        out, grads = ours.recv()
        child.join()
        run.show("child", torch.tensor(out), [torch.tensor(g) for g in grads], child.exitcode)


@program()
def forked_by_hand(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
        pid = os.fork()
        if pid == 0:
            code = 1
            torch.set_num_threads(1)
            try:
                code = 7 if model(inputs()).shape == (4, 3) else 2
            finally:
                os._exit(code)
        run.show("exit code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Rows(Dataset[T]):
    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> T:
        row = torch.full((6,), float(index)) + torch.rand(()) * 0
        if self.model is None:
            return row
        with torch.no_grad():
            return torch.cat([self.model(row[None])[0], torch.zeros(3)])


@program()
def loaders(run: Run) -> None:
    model = Net()
    for workers in (0, 2):
        loader = DataLoader(Rows(), batch_size=3, shuffle=True, num_workers=workers)
        for _ in range(2):
            for batch in loader:
                model.zero_grad()
                out = model(batch)
                out.sum().backward()
                run.show("batch", batch, out, gradients(model))


@program()
def workers_that_call_the_model(run: Run) -> None:
    model = Net()
    for k in range(2):
        step(run, f"{k}", model)
    with torch.no_grad():
        model(inputs()[:1])
    for batch in DataLoader(Rows(model), batch_size=4, num_workers=1):
        run.show("batch", batch)
    step(run, "after", model)


@program(is_slow=True)
def spawned_children(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    for k in range(3):
        step(run, f"{k}", model)
    model.zero_grad()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=child_calls, args=(model, theirs))
    child.start()
    out, grads = ours.recv()
    child.join()
    run.show("child", torch.tensor(out), [torch.tensor(g) for g in grads], child.exitcode)


# ---- the rest -------------------------------------------------------------------------------------------------------


@program()
def data_parallel(run: Run) -> None:
    model = nn.DataParallel(Net())
    for k in range(4):
        step(run, f"{k}", model)
    run.show("state", list(model.state_dict()))


@program()
def replicas(run: Run) -> None:
    model = Net()
    for k in range(4):
        step(run, f"{k}", model)
        replica = model._replicate_for_data_parallel()
        replica.first = nn.Linear(6, 8)
        run.show("replica", replica(inputs()))


@program()
def references_and_memory(run: Run) -> None:
    model = Net()
    for k in range(4):
        x = inputs()
        out = model(x)
        out.sum().backward()
        seen = weakref.ref(x), weakref.ref(out)
        del x, out
        run.show(f"{k}", [ref() is None for ref in seen])
    ref = weakref.ref(model)
    del model
    gc.collect()
    run.show("model", ref() is None)


@program()
def garbage_collector_switched_off(run: Run) -> None:
    gc.disable()
    try:
        model = Net()
        for k in range(4):
            step(run, f"{k}", model)
            run.show("on", gc.isenabled())
    finally:
        gc.enable()


@program()
def torch_and_dynamo_settings_stay(run: Run) -> None:
    config = torch._dynamo.config
    names = ("recompile_limit", "suppress_errors", "cache_size_limit", "specialize_int", "automatic_dynamic_shapes")
    model = Net()
    before = [getattr(config, name) for name in names]
    for k in range(4):
        step(run, f"{k}", model)
        run.show("same", before == [getattr(config, name) for name in names], torch.is_grad_enabled())


@program()
def dynamo_reset_between_calls(run: Run) -> None:
    model = Net()
    for k in range(6):
        if k == 3:
            torch.compiler.reset()
        step(run, f"{k}", model)


@program()
def several_models_in_a_gan(run: Run) -> None:
    maker, judge = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    for k in range(4):
        fake = maker(inputs())
        judge.zero_grad()
        (judge(inputs()).log().mean() + (1 - judge(fake.detach())).log().mean()).neg().backward()
        run.show(f"judge {k}", gradients(judge))
        maker.zero_grad()
        judge.requires_grad_(False)
        judge(fake).log().mean().neg().backward()
        judge.requires_grad_(True)
        run.show(f"maker {k}", gradients(maker), gradients(judge))


@program()
def attention_and_recurrent_modules(run: Run) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.cell = nn.MultiheadAttention(6, 2, batch_first=True), nn.GRUCell(6, 6)
            self.lstm = nn.LSTM(6, 3, batch_first=True)

        def forward(self, x: T) -> Any:
            y, weights = self.attend(x, x, x)
            out, (hidden, _) = self.lstm(y)
            return self.cell(x[:, 0], out.mean(1).repeat(1, 2)), weights, hidden

    model = Both()
    for k in range(4):
        model.zero_grad()
        out = model(inputs().view(2, 2, 6))
        out[0].square().sum().backward()
        run.show(f"{k}", out, gradients(model))


@program()
def a_transformer_layer(run: Run) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1)
    mask = torch.tensor([[False, False], [False, True]])
    for training in (True, True, False, False, True):
        model.train(training)
        with torch.set_grad_enabled(training):
            run.show(f"{training}", model(inputs().view(2, 2, 6), src_key_padding_mask=mask))
