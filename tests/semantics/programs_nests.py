"""Programs with modules that are built in odd ways, copied, saved and dropped."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from tests.semantics.programs_modules import Net, inputs, step
from tests.semantics.states import GRAPHS, STATES, Run, program

T = torch.Tensor


# ---- nests ----------------------------------------------------------------------------------------------------------


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@program(comes_to=GRAPHS)
def sequential_of_lambdas(run: Run) -> None:
    model = nn.Sequential(
        Lambda(lambda x: x * 2), nn.Linear(6, 3), Lambda(lambda x: (x, x.sum())), Lambda(lambda t: t[0])
    )
    for k in range(4):
        step(run, f"{k}", model)


@program()
def sequential_that_is_edited(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    for k in range(6):
        if k == 2:
            model.append(nn.Linear(6, 4))
        if k == 4:
            model[1] = nn.Tanh()
            del model[2]
        step(run, f"{k}", model)


@program()
def experts_in_a_dict(run: Run) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Sequential(nn.Linear(6, 3), nn.ReLU())})

        def forward(self, x: T, which: str) -> T:
            return self.experts[which](x) * 2

    model = Experts()
    for which in ("a", "b", "a", "b", "a"):
        model(inputs(), which).sum().backward()
        run.show(which, {key: p.grad for key, p in model.named_parameters()})
    run.raises("unknown", model, inputs(), "c")


@program()
def lists_of_parameters(run: Run) -> None:
    class Basis(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(torch.full((6,), float(k)) for k in range(3))
            self.named = nn.ParameterDict({"bias": torch.zeros(6)})
            self.plain = [nn.Linear(6, 6)]

        def forward(self, x: T) -> T:
            for row in self.rows:
                x = (x * row).tanh() + self.named["bias"]
            return self.plain[0](x)

    model = Basis()
    for k in range(4):
        step(run, f"{k}", model)


@program()
def recursion(run: Run) -> None:
    class Tree(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.child = Tree(depth - 1) if depth else None

        def forward(self, x: T, left: int = 9) -> T:
            y = self.inner(x).relu()
            return y if self.child is None or not left else y + self.child(y, left - 1)

    model = Tree(2)
    for k in range(4):
        step(run, f"{k}", model)
    run.show("shallow", model(inputs(), 1))


@program()
def recursion_into_itself(run: Run) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T, times: int = 2) -> T:
            y = self.inner(x).tanh()
            return self(y, times - 1) if times else y

    model = Again()
    for k in range(4):
        step(run, f"{k}", model)
    run.show("deep", model(inputs(), 4))


@program()
def inherited_and_super(run: Run) -> None:
    class Child(Net):
        def forward(self, x: T, *, twice: bool = False) -> T:
            y = super().forward(x)
            return y * 2 if twice else y

    model = Child().eval()
    for k in range(4):
        step(run, f"{k}", model)
        run.show("twice", model(inputs(), twice=True))


@program()
def forward_replaced_on_the_instance(run: Run) -> None:
    model = Net().eval()
    original = model.forward
    model.forward = lambda x: original(x) * 10
    for k in range(4):
        step(run, f"{k}", model)


@program()
def forward_replaced_later(run: Run) -> None:
    model = Net().eval()
    for k in range(6):
        if k == 3:
            model.forward = lambda x: model.second(model.first(x).sigmoid())
        if k == 5:
            del model.forward
        step(run, f"{k}", model)


@program()
def call_overridden(run: Run) -> None:
    class Loud(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            run.show("called", len(args))
            return super().__call__(*args, **kwargs)

    model = nn.Sequential(Loud(6, 6), nn.Tanh())
    for k in range(4):
        step(run, f"{k}", model)
    loud = Loud(6, 3)
    for k in range(4):
        step(run, f"alone {k}", loud)


@program()
def lazy_modules(run: Run) -> None:
    model = nn.Sequential(nn.LazyLinear(5, bias=False), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    for k in range(5):
        step(run, f"{k}", model)
    run.show("model", model, [type(m).__name__ for m in model])


@program()
def methods_besides_forward(run: Run) -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(6, 2), nn.Linear(2, 6)

        def encode(self, x: T) -> T:
            return self.down(x).tanh()

        def forward(self, x: T) -> T:
            return self.up(self.encode(x))

    model = Coder()
    for k in range(4):
        step(run, f"{k}", model)
        run.show("code", model.encode(inputs()))


@program()
def slots_properties_and_getattr(run: Run) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.extra = {"gain": 2.0}

        @property
        def gain(self) -> float:
            return self.extra["gain"]

        def __getattr__(self, name: str) -> Any:
            if name == "magic":
                return 3.0
            return super().__getattr__(name)

        def forward(self, x: T) -> T:
            return self.inner(x).tanh() * self.gain + self.magic

    model = Odd()
    for gain in (2.0, 2.0, 4.0, 1.0, 2.0):
        model.extra["gain"] = gain
        step(run, f"{gain}", model)
    run.raises("missing", lambda: model.missing)


# ---- copies ---------------------------------------------------------------------------------------------------------


@program()
def deep_copies(run: Run) -> None:
    model = Net().eval()
    for k in range(3):
        step(run, f"{k}", model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.zero_()
    for k in range(4):
        step(run, f"twin {k}", twin)
        step(run, f"model {k}", model)


@program()
def shallow_copies(run: Run) -> None:
    model = Net().eval()
    for k in range(3):
        step(run, f"{k}", model)
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin.second = nn.Linear(8, 2)
    for k in range(3):
        step(run, f"twin {k}", twin)
        step(run, f"model {k}", model)


@program()
def pickled_modules(run: Run) -> None:
    model = Net().eval()
    for k in range(4):
        step(run, f"{k}", model)
        again = pickle.loads(pickle.dumps(model))
        step(run, "again", again)
        run.show("same attributes", sorted(again.__dict__) == sorted(model.__dict__))


@program()
def saved_and_loaded(run: Run) -> None:
    model = Net().eval()
    for k in range(3):
        step(run, f"{k}", model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        step(run, "whole", torch.load(file, weights_only=False))
        torch.save(model.state_dict(), path := run.folder / "state.pt")
        other = Net().eval()
        other.load_state_dict(torch.load(path))
        step(run, "state", other)


@program()
def averaged_copies(run: Run) -> None:
    model = Net().eval()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for k in range(4):
        step(run, f"{k}", model)
        average.update_parameters(model)
        run.show("average", average(inputs()))


@program()
def what_a_module_says_of_itself(run: Run) -> None:
    model = Net()
    for _ in range(3):
        step(run, "call", model)
    run.show("said", model, list(dict(model.named_modules())), [*model.state_dict()])
    run.show("equal", model == model, hash(model) == hash(model), model.training, type(model).__call__.__qualname__)


@program()
def many_modules_of_one_class(run: Run) -> None:
    models = [Net().eval() for _ in range(4)]
    for k in range(3):
        for model in models:
            step(run, f"{k}", model)


@program()
def module_dropped_and_made_anew(run: Run) -> None:
    for k in range(5):
        model = Net().eval()
        with torch.no_grad():
            model.first.weight.fill_(0.1 * k)
        step(run, f"{k}", model)
        step(run, f"{k}", model)
        del model


@program(
    differs="a module that is watched has an attribute of its own, `_compiled_call_impl`",
    differs_in=STATES,  # cold is watched, too
)
def attributes_of_a_module(run: Run) -> None:
    model = Net().eval()
    for k in range(3):
        step(run, f"{k}", model)
    run.show("attributes", list(vars(model)), list(vars(copy.deepcopy(model))))
