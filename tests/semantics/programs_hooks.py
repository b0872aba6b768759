"""Programs with hooks of every kind: which are called, in which order, with what, and what they change."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as all_modules

from tests.semantics.states import EAGER, GRAPHS, Run, program

T = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: T) -> T:
        return self.second(F.gelu(self.first(x)) * 2.0)


def inputs() -> T:
    return torch.linspace(-1, 1, 24).view(4, 6)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def train(run: Run, model: nn.Module, steps: int = 4) -> None:
    """Steps of gradient descent by hand, each shown."""
    for step in range(steps):
        model.zero_grad()
        out = model(inputs())
        loss = out.square().mean()
        loss.backward()
        run.show(f"step {step}", out, loss, gradients(model))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad


@program(is_kept=True)
def no_hooks(run: Run) -> None:
    train(run, Net())


@program()
def forward_hook_sees_arguments(run: Run) -> None:
    model = Net()
    model.first.register_forward_hook(lambda module, args, out: run.show("hook", type(module).__name__, args, out))
    train(run, model)


@program()
def forward_hook_replaces_the_result(run: Run) -> None:
    model = Net()
    model.first.register_forward_hook(lambda module, args, out: out.clamp(min=0))
    model.register_forward_hook(lambda module, args, out: {"logits": out, "top": out.argmax(-1)}["logits"] + 1)
    train(run, model)


@program()
def forward_pre_hook_replaces_arguments(run: Run) -> None:
    model = Net()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model.second.register_forward_pre_hook(lambda module, args: args[0].tanh())
    train(run, model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: T, *, scale: float = 1.0, shift: T | None = None) -> T:
        y = torch.sigmoid(self.inner(x)) * scale
        return y if shift is None else y + shift


@program()
def hooks_with_kwargs(run: Run) -> None:
    model = Scaled()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "scale": kwargs.get("scale", 1.0) + 1.0}

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(lambda module, args, kwargs, out: run.show("hook", args, kwargs, out), with_kwargs=True)
    for scale in (1.0, 1.0, 2.0, 3.0):
        run.show("out", model(inputs(), scale=scale, shift=torch.ones(6)))


@program()
def hooks_that_come_and_go(run: Run) -> None:
    model, x = Net(), inputs()
    for _ in range(3):
        run.show("before", model(x))
    handle = model.first.register_forward_hook(lambda module, args, out: out * 0)
    for _ in range(2):
        run.show("with", model(x))
    handle.remove()
    for _ in range(2):
        run.show("after", model(x))
    with model.register_forward_hook(lambda module, args, out: out + 5):
        run.show("inside", model(x))
    run.show("outside", model(x))


@program()
def hooks_first_and_last(run: Run) -> None:
    model: nn.Module = Net()
    order: list[str] = []
    model.register_forward_hook(lambda *_: order.append("b"))
    model.register_forward_hook(lambda *_: order.append("a"), prepend=True)
    model.register_forward_hook(lambda *_: order.append("c"))
    for _ in range(4):
        model(inputs())
        run.show("order", list(order))
        order.clear()


@program(comes_to=GRAPHS)
def forward_hook_is_always_called(run: Run) -> None:
    class Fails(nn.Module):
        def forward(self, x: T) -> T:
            y = x * 2
            if bad:
                raise ValueError("bad batch")
            return y

    model, bad = Fails(), False
    model.register_forward_hook(lambda m, args, out: run.show("hook", out), always_call=True)
    for bad in (False, False, True, False):  # noqa: B007
        run.raises("call", model, inputs())


@program()
def full_backward_hooks(run: Run) -> None:
    model = Net()
    for name, module in model.named_modules():
        module.register_full_backward_hook(lambda m, gi, go, name=name: run.show(f"backward {name}", gi, go))
    train(run, model)


@program()
def full_backward_hook_replaces_gradients(run: Run) -> None:
    model = Net()
    model.second.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 if g is not None else None for g in gi))
    train(run, model)


@program()
def full_backward_pre_hooks(run: Run) -> None:
    model = Net()
    model.second.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    model.register_full_backward_pre_hook(lambda m, go: run.show("pre", go))
    train(run, model)


@program()
def backward_hook_added_later(run: Run) -> None:
    model = Net()
    train(run, model, 3)
    handle = model.first.register_full_backward_hook(lambda m, gi, go: run.show("hook", len(gi), go))
    train(run, model, 2)
    handle.remove()
    train(run, model, 2)


@program(comes_to=EAGER)
def old_backward_hook(run: Run) -> None:
    model = nn.Linear(6, 3)
    model.register_backward_hook(lambda m, gi, go: run.show("hook", go))
    train(run, model)


@program()
def tensor_hook_on_a_result(run: Run) -> None:
    model = Net()
    for _ in range(4):
        model.zero_grad()
        out = model(inputs())
        out.register_hook(lambda g: run.show("hook", g))
        out.register_hook(lambda g: g * 10)
        out.sum().backward()
        run.show("grads", gradients(model))


@program()
def tensor_hook_on_an_input(run: Run) -> None:
    model = Net()
    for _ in range(4):
        x = inputs().requires_grad_()
        x.register_hook(lambda g: g.clamp(-0.01, 0.01))
        model(x).sum().backward()
        run.show("x.grad", x.grad)


@program()
def tensor_hook_inside_forward(run: Run) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            y = self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda g: g.clamp(-0.05, 0.05))
            return (y * 3).tanh()

    train(run, Clipped())


@program()
def parameter_hooks(run: Run) -> None:
    model = Net()
    handle = model.first.weight.register_hook(lambda g: g.sign())
    train(run, model, 3)
    handle.remove()
    train(run, model, 2)


@program()
def hooks_after_accumulation(run: Run) -> None:
    model, order = Net(), []

    def step(p: T) -> None:
        order.append(tuple(p.shape))
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        model(inputs()).square().mean().backward()
        run.show("parameters", sorted(order), dict(model.named_parameters()), gradients(model))
        order.clear()


@program()
def hooks_of_all_modules(run: Run) -> None:
    model = Net()
    train(run, model, 3)
    handle = all_modules.register_module_forward_hook(lambda m, a, out: run.show("all", type(m).__name__, out))
    before = all_modules.register_module_forward_pre_hook(lambda m, a: run.show("before", type(m).__name__, a))
    train(run, model, 2)
    before.remove()
    handle.remove()
    train(run, model, 2)


@program()
def backward_hooks_of_all_modules(run: Run) -> None:
    model = Net()
    train(run, model, 3)
    handle = all_modules.register_module_full_backward_hook(lambda m, gi, go: run.show("all", type(m).__name__, go))
    train(run, model, 2)
    handle.remove()


@program()
def hook_for_new_parameters(run: Run) -> None:
    seen: list[str] = []
    handle = all_modules.register_module_parameter_registration_hook(lambda m, name, p: seen.append(name))
    model = Net()
    handle.remove()
    train(run, model)
    run.show("registered", seen)


@program()
def state_dict_hooks(run: Run) -> None:
    model = Net()
    model.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update({prefix + "extra": torch.ones(1)}))
    model.register_state_dict_pre_hook(lambda m, prefix, keep: run.show("pre", prefix, keep))
    for _ in range(4):
        model(inputs()).sum().backward()
        run.show("state", model.state_dict())


@program()
def load_hooks(run: Run) -> None:
    model, other = Net(), Net()

    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state["first.weight"] = state.pop("old.weight")

    model.register_load_state_dict_pre_hook(rename)
    model.register_load_state_dict_post_hook(lambda m, keys: run.show("loaded", keys.missing_keys))
    for _ in range(4):
        state = dict(other.state_dict())
        state["old.weight"] = state.pop("first.weight") + 1
        run.show("result", model.load_state_dict(state))
        run.show("out", model(inputs()))


@program()
def hook_reads_a_buffer_that_it_writes(run: Run) -> None:
    model = Net()
    model.register_buffer("running", torch.zeros(3))

    def average(module: Any, args: Any, out: T) -> None:
        module.running.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)

    model.register_forward_hook(average)
    for _ in range(4):
        model(inputs()).sum().backward()
        run.show("running", model.running, gradients(model))
        model.zero_grad()


@program()
def hook_collects_activations(run: Run) -> None:
    model, kept = Net(), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, args, out, name=name: kept.__setitem__(name, out))
    for _ in range(4):
        out = model(inputs())
        (out.sum() + kept["first"].square().mean()).backward()
        run.show("kept", kept, gradients(model))
        model.zero_grad()


@program()
def hook_raises(run: Run) -> None:
    model, calls = Net(), []

    def hook(module: nn.Module, args: Any, out: T) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("stop here")

    model.first.register_forward_hook(hook)
    for _ in range(5):
        run.raises("call", model, inputs())
    run.show("calls", len(calls))


@program()
def backward_hook_raises(run: Run) -> None:
    model = Net()

    def refuse(module: nn.Module, gi: Any, go: Any) -> None:
        raise RuntimeError("no gradient, please")

    for step in range(4):
        if step == 2:
            handle = model.second.register_full_backward_hook(refuse)
        run.raises("backward", model(inputs()).sum().backward)
        run.show("grads", gradients(model))
    handle.remove()


@program()
def hook_calls_another_module(run: Run) -> None:
    model, probe = Net(), nn.Linear(3, 2)
    model.register_forward_hook(lambda m, args, out: run.show("probe", probe(out.detach())))
    train(run, model)


@program()
def hook_is_a_bound_method(run: Run) -> None:
    class Watch:
        def __init__(self) -> None:
            self.norms: list[float] = []

        def __call__(self, module: nn.Module, args: Any, out: T) -> None:
            self.norms.append(out.norm().item())

    model, watch = Net(), Watch()
    model.register_forward_hook(watch)
    train(run, model)
    run.show("norms", watch.norms)


@program()
def hooks_on_the_node_of_a_result(run: Run) -> None:
    model = Net()
    for _ in range(4):
        out = model(inputs())
        out.grad_fn.register_hook(lambda gi, go: run.show("node", go))
        out.sum().backward()


@program()
def retained_gradient_of_a_result(run: Run) -> None:
    model = Net()
    for _ in range(4):
        out = model(inputs())
        out.retain_grad()
        out.square().sum().backward()
        run.show("out.grad", out.grad)


@program()
def retained_gradient_inside(run: Run) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: T) -> T:
            self.hidden = self.a(x).relu()
            self.hidden.retain_grad()
            return self.b(self.hidden)

    model = Keeps()
    for _ in range(4):
        model(inputs()).square().sum().backward()
        run.show("hidden", model.hidden, model.hidden.grad)


@program(comes_to=EAGER)
def hooks_of_all_modules_from_the_start(run: Run) -> None:
    model = Net()
    handle = all_modules.register_module_forward_hook(lambda m, a, out: out + 1 if isinstance(m, Net) else None)
    train(run, model)
    handle.remove()


@program()
def removed_inside_the_hook(run: Run) -> None:
    model = Net()

    def once(module: nn.Module, args: Any, out: T) -> T:
        handle.remove()
        return out * 100

    handle = model.register_forward_hook(once)
    for _ in range(4):
        run.show("out", model(inputs()))


@program()
def multi_gradient_hook(run: Run) -> None:
    model = Net()
    for _ in range(4):
        x = inputs().requires_grad_()
        out = model(x)
        handle = torch.autograd.graph.register_multi_grad_hook([x, out], lambda grads: run.show("both", grads))
        out.sum().backward()
        handle.remove()
