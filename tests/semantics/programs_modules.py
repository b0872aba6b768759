"""Programs that change a module between its calls: switches, weights, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.semantics.states import Run, program

T = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: T) -> T:
        return self.second(self.drop(F.gelu(self.first(x))))


def inputs() -> T:
    return torch.sin(torch.arange(24.0) * 1.7).view(4, 6)


def step(run: Run, name: str, model: Any, x: T | None = None) -> None:
    """A call and its backward pass, shown; parameters move."""
    out = model(inputs() if x is None else x)
    (out.square() * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
    run.show(name, out, {key: p.grad for key, p in model.named_parameters()})
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
                p.grad = None


# ---- switches -------------------------------------------------------------------------------------------------------


@program(is_kept=True)
def training_and_evaluation(run: Run) -> None:
    model = Net()
    for training in (True, True, False, False, True, False, True):
        model.train(training)
        step(run, f"{training}", model)


@program()
def evaluation_of_a_part(run: Run) -> None:
    model = Net()
    for part in (None, None, "drop", None, "drop"):
        model.train()
        if part:
            getattr(model, part).eval()
        step(run, f"{part}", model)


@program()
def dropout_rate_that_changes(run: Run) -> None:
    model = Net()
    for rate in (0.5, 0.5, 0.1, 0.0, 1.0, 0.5):
        model.drop.p = rate
        step(run, f"{rate}", model)


@program()
def batch_norm_statistics(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU())
    for training in (True, True, False, True, False, True):
        model.train(training)
        step(run, f"{training}", model)
        run.show("statistics", dict(model.named_buffers()))
    model[1].reset_running_stats()
    model[1].momentum = None
    step(run, "averaged", model)
    run.show("statistics", dict(model.named_buffers()))


@program()
def batch_norm_of_one_row(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5))
    for rows in (4, 4, 1, 3, 1):
        run.raises(f"{rows}", step, run, f"{rows}", model, inputs()[:rows])


@program()
def attributes_that_change(run: Run) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale, self.kind = nn.Linear(6, 6), 1.0, "relu"

        def forward(self, x: T) -> T:
            y = self.inner(x) * self.scale
            return y.relu() if self.kind == "relu" else y.tanh()

    model = Scaled()
    for scale, kind in ((1.0, "relu"), (1.0, "relu"), (2.0, "relu"), (2.0, "tanh"), (0.5, "tanh"), (1.0, "relu")):
        model.scale, model.kind = scale, kind
        step(run, f"{scale} {kind}", model)


@program()
def globals_that_change(run: Run) -> None:
    model = UsesGlobals()
    for value in (1.0, 1.0, 3.0, 2.0, 1.0):
        SETTINGS["scale"] = value
        step(run, f"{value}", model)


SETTINGS = {"scale": 1.0}


class UsesGlobals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: T) -> T:
        return self.inner(x).relu() * SETTINGS["scale"]


# ---- weights --------------------------------------------------------------------------------------------------------


@program()
def data_of_parameters_replaced(run: Run) -> None:
    model = Net().eval()
    for k in range(5):
        model.first.weight.data = torch.full((8, 6), 0.1 * k)
        model.second.bias.data.fill_(k)
        step(run, f"{k}", model)


@program()
def data_of_another_shape(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    for rows in (4, 4, 3, 5, 4):
        model[0].weight.data = torch.full((rows, 6), 0.5)
        model[0].bias.data = torch.zeros(rows)
        out = model(inputs())
        run.show(f"{rows}", out)


@program()
def parameters_replaced(run: Run) -> None:
    model = Net().eval()
    for k in range(5):
        if k >= 2:
            model.first.weight = nn.Parameter(torch.full((8, 6), 0.1 * k), requires_grad=k % 2 == 0)
        step(run, f"{k}", model)


@program()
def modules_replaced(run: Run) -> None:
    model = Net().eval()
    for k in range(6):
        if k == 2:
            model.second = nn.Linear(8, 3, bias=False)
        if k == 4:
            model.drop = nn.Sequential(nn.LayerNorm(8), nn.ReLU())
        step(run, f"{k}", model)


@program()
def parameter_added_and_deleted(run: Run) -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.register_parameter("scale", None)

        def forward(self, x: T) -> T:
            y = self.inner(x).tanh()
            return y if self.scale is None else y * self.scale

    model = Maybe()
    for k in range(6):
        model.scale = nn.Parameter(torch.full((6,), float(k))) if k % 3 == 2 else None
        step(run, f"{k}", model)


@program()
def state_loaded(run: Run) -> None:
    model, other = Net().eval(), Net()
    for assign in (False, False, True, False, True):
        state = {key: value.clone() for key, value in other.state_dict().items()}
        before = model.first.weight
        run.show("keys", model.load_state_dict(state, assign=assign))
        run.show(
            "same", model.first.weight is before, model.first.weight.data_ptr() == state["first.weight"].data_ptr()
        )
        step(run, f"{assign}", model)


@program()
def state_that_does_not_fit(run: Run) -> None:
    model = Net().eval()
    for k in range(4):
        state = model.state_dict()
        del state["second.bias"]
        state["first.weight"] = torch.ones(2, 2)
        state["third.weight"] = torch.ones(1)
        run.raises("strict", model.load_state_dict, state)
        state["first.weight"] = torch.full((8, 6), 0.1 * k)
        run.show("lax", model.load_state_dict(state, strict=False))
        step(run, f"{k}", model)


@program()
def state_dict_and_its_aliases(run: Run) -> None:
    model = Net().eval()
    for k in range(4):
        state = model.state_dict()
        step(run, f"{k}", model)
        run.show("state", list(state), state, state["first.weight"].data_ptr() == model.first.weight.data_ptr())
        state["first.bias"].fill_(k)


@program()
def tied_weights(run: Run) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: T) -> T:
            return self.head(self.embed(tokens).tanh()).log_softmax(-1)

    model, tokens = Tied(), torch.tensor([[0, 1, 6], [2, 2, 3]])
    for k in range(6):
        if k == 3:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        step(run, f"{k}", model, tokens)
        run.show("tied", model.head.weight is model.embed.weight)


@program()
def tied_later(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    for k in range(6):
        if k == 3:
            model[2].weight = model[0].weight
        step(run, f"{k}", model)


@program()
def one_module_in_two_places(run: Run) -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    for k in range(4):
        step(run, f"{k}", model)


@program()
def parametrized_weights(run: Run) -> None:
    class Symmetric(nn.Module):
        def forward(self, x: T) -> T:
            return x.triu() + x.triu(1).t()

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    for k in range(6):
        if k == 2:
            parametrize.register_parametrization(model[0], "weight", Symmetric())
        if k == 5:
            parametrize.remove_parametrizations(model[0], "weight")
        step(run, f"{k}", model)
        run.show("weight", model[0].weight)


@program()
def normalised_weights(run: Run) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.ReLU())
    for k in range(4):
        step(run, f"{k}", model)
    run.show("state", model.state_dict())


@program()
def spectral_norm(run: Run) -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4)), nn.ReLU())
    for k in range(6):
        model.train(k != 3)
        step(run, f"{k}", model)
        run.show("buffers", dict(model.named_buffers()))


@program()
def pruned_weights(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    for k in range(6):
        if k == 2:
            prune.l1_unstructured(model[0], "weight", amount=0.5)
        if k == 5:
            prune.remove(model[0], "weight")
        step(run, f"{k}", model)


@program()
def weights_swapped_between_modules(run: Run) -> None:
    a, b = Net().eval(), Net().eval()
    for k in range(6):
        if k % 2:
            a.first, b.first = b.first, a.first
        step(run, f"a {k}", a)
        step(run, f"b {k}", b)


@program()
def initialised_again(run: Run) -> None:
    model = Net().eval()
    for k in range(4):
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        nn.init.orthogonal_(model.first.weight)
        step(run, f"{k}", model)


# ---- buffers --------------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: T) -> T:
        self.calls += 1
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.inner(x - self.mean).sigmoid()


@program(is_kept=True)
def buffers_changed_in_forward(run: Run) -> None:
    model = Counts()
    for k in range(6):
        model.train(k != 3)
        step(run, f"{k}", model)
        run.show("buffers", dict(model.named_buffers()), model.state_dict().keys())


@program()
def buffers_replaced_in_forward(run: Run) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.register_buffer("last", torch.zeros(6))

        def forward(self, x: T) -> T:
            out = self.inner(x + self.last).tanh()
            self.last = out.detach().mean(0)
            return out

    model = Replaces()
    for k in range(5):
        before = model.last
        step(run, f"{k}", model)
        run.show("last", model.last, model.last is before, list(model.state_dict()))


@program()
def buffers_replaced_between_calls(run: Run) -> None:
    model = Counts()
    for k in range(5):
        if k >= 2:
            model.mean = torch.full((6,), float(k))
        step(run, f"{k}", model)
        run.show("mean", model.mean)


@program()
def a_cache_that_grows(run: Run) -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cache = nn.Linear(6, 6), None

        def forward(self, x: T) -> T:
            key = self.inner(x)
            self.cache = key if self.cache is None else torch.cat([self.cache, key])
            return (x @ self.cache.t()).softmax(-1) @ self.cache

    model = Caches()
    for k in range(5):
        with torch.no_grad():
            run.show(f"{k}", model(inputs()[:1] + k), model.cache)
    model.cache = None
    with torch.no_grad():
        run.show("fresh", model(inputs()[:1]))


@program()
def attributes_set_in_forward(run: Run) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.calls, self.seen, self.last = 0, [], None

        def forward(self, x: T) -> T:
            self.calls += 1
            self.seen.append(x.shape[0])
            self.last = self.inner(x)
            return self.last.relu() * 2

    model = Remembers()
    for rows in (4, 4, 3, 4, 2):
        step(run, f"{rows}", model, inputs()[:rows])
        run.show("kept", model.calls, model.seen, model.last)
