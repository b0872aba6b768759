"""Programs about gradients: which there are, which are None, when graphs are kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.states import Run, program

T = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: T) -> T:
        return self.second(F.gelu(self.first(x)))


class Heads(nn.Module):
    """Two results, of which a loss may leave one out; and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: T) -> tuple[T, T]:
        y = self.body(x).tanh() * 2
        return self.left(y), self.right(y)


def inputs() -> T:
    return torch.linspace(-1, 1, 24).view(4, 6)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


# ---- which there are ------------------------------------------------------------------------------------------------


@program(is_kept=True)
def a_result_the_loss_leaves_out(run: Run) -> None:
    model = Heads()
    for use in ("left", "right", "both", "left", "right"):
        model.zero_grad()
        left, right = model(inputs())
        loss = (left.sum() if use != "right" else 0) + (right.square().sum() if use != "left" else 0)
        loss.backward()
        run.show(use, gradients(model))


@program()
def unused_parameters_in_an_optimizer(run: Run) -> None:
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(5):
        optimizer.zero_grad()
        left, right = model(inputs())
        (left if step % 2 else right).square().mean().backward()
        optimizer.step()
        run.show(f"step {step}", dict(model.named_parameters()), len(optimizer.state))


@program()
def gradients_set_to_zero_or_none(run: Run) -> None:
    model = Net()
    for to_none in (True, False, False, True, False):
        model.zero_grad(set_to_none=to_none)
        run.show("cleared", gradients(model))
        model(inputs()).sum().backward()
        run.show("grads", gradients(model))


@program()
def gradients_that_add_up(run: Run) -> None:
    model = Net()
    for step in range(4):
        (model(inputs() + step).square().mean() / 4).backward()
        run.show("grads", gradients(model))


@program()
def gradients_are_the_same_object(run: Run) -> None:
    model = Net()
    model(inputs()).sum().backward()
    first = model.first.weight.grad
    for _ in range(4):
        model(inputs()).sum().backward()
        run.show("grad", model.first.weight.grad is first, first)
    model.first.weight.grad = torch.zeros_like(first)
    model(inputs()).sum().backward()
    run.show("grad", model.first.weight.grad is first, gradients(model))


@program()
def frozen_parameters(run: Run) -> None:
    model = Net()
    for frozen in (False, False, True, True, False):
        model.first.requires_grad_(not frozen)
        model.zero_grad()
        out = model(inputs())
        out.sum().backward()
        run.show(f"frozen {frozen}", out, gradients(model))


@program()
def all_frozen(run: Run) -> None:
    model = Net().requires_grad_(False)
    for _ in range(4):
        out = model(inputs())
        run.show("out", out)
        run.raises("backward", out.sum().backward)
    x = inputs().requires_grad_()
    model(x).sum().backward()
    run.show("x", x.grad, gradients(model))


@program()
def inputs_that_need_gradients_or_not(run: Run) -> None:
    model = Net()
    for needs in (False, True, False, True, True):
        x = inputs().requires_grad_(needs)
        model(x).square().sum().backward()
        run.show(f"{needs}", x.grad, x.is_leaf)


@program()
def inputs_with_a_history(run: Run) -> None:
    before, model = nn.Linear(6, 6), Net()
    for _ in range(4):
        hidden = before(inputs()).relu()
        hidden.retain_grad()
        model(hidden).sum().backward()
        run.show("grads", hidden.grad, before.weight.grad)
        before.zero_grad()


@program()
def loss_inside_the_module(run: Run) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: T, target: T | None = None) -> dict[str, T]:
            logits = self.net(x)
            found = {"logits": logits}
            if target is not None:
                found["loss"] = F.cross_entropy(logits, target, ignore_index=-1)
            return found

    model = WithLoss()
    for target in ([0, 1, 2, 0], [0, -1, 2, -1], None, [-1, -1, -1, -1], [1, 1, 1, 1]):
        found = model(inputs(), None if target is None else torch.tensor(target))
        if "loss" in found:
            found["loss"].backward()
        run.show("found", found, gradients(model))
        model.zero_grad()


@program()
def gradients_of_named_tensors(run: Run) -> None:
    model = Net()
    for _ in range(4):
        x = inputs().requires_grad_()
        out = model(x)
        wanted = [x, model.second.bias, model.first.weight]
        run.show("grads", torch.autograd.grad(out.sum(), wanted), gradients(model), x.grad)


@program()
def gradients_of_what_was_not_used(run: Run) -> None:
    model = Heads()
    for _ in range(3):
        left, _ = model(inputs())
        run.raises("strict", torch.autograd.grad, left.sum(), [model.unused], retain_graph=True)
        wanted = [model.unused, model.right.weight, model.left.weight]
        run.show("grads", torch.autograd.grad(left.sum(), wanted, allow_unused=True, retain_graph=True))
        run.show("zeros", torch.autograd.grad(left.sum(), wanted, materialize_grads=True))
    left, _ = model(inputs())
    run.raises("other head", torch.autograd.grad, left.sum(), [model.right.weight])


@program()
def backward_for_some_inputs_only(run: Run) -> None:
    model = Net()
    for _ in range(4):
        model.zero_grad()
        model(inputs()).sum().backward(inputs=[model.first.weight])
        run.show("grads", gradients(model))


@program()
def backward_with_a_gradient(run: Run) -> None:
    model = Net()
    for step in range(4):
        model.zero_grad()
        out = model(inputs())
        out.backward(torch.full_like(out, float(step)))
        run.show("grads", gradients(model))
    run.raises("no gradient", model(inputs()).backward)
    run.raises("of another shape", model(inputs()).backward, torch.ones(2))


@program()
def backward_of_several_results(run: Run) -> None:
    model = Heads()
    for _ in range(4):
        model.zero_grad()
        left, right = model(inputs())
        torch.autograd.backward([left, right], [torch.ones_like(left), torch.ones_like(right) * 2])
        run.show("grads", gradients(model))


@program()
def expanded_gradients(run: Run) -> None:
    model = Net()
    for _ in range(4):
        model.zero_grad()
        out = model(inputs())
        out.backward(torch.ones(()).expand_as(out))
        model(inputs()).backward(torch.ones(3, 4).t())
        run.show("grads", gradients(model))


# ---- graphs that are kept -------------------------------------------------------------------------------------------


@program()
def backward_twice(run: Run) -> None:
    model = Net()
    for _ in range(4):
        loss = model(inputs()).square().sum()
        run.raises("first", loss.backward)
        run.raises("second", loss.backward)
        run.show("grads", gradients(model))


@program()
def retained_graph(run: Run) -> None:
    model = Net()
    for _ in range(4):
        loss = model(inputs()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        run.show("grads", gradients(model))
        model.zero_grad()


@program()
def two_calls_before_one_backward(run: Run) -> None:
    model = Net()
    for step in range(4):
        a, b = model(inputs()), model(inputs() + step)
        (a * b).sum().backward()
        run.show("grads", a, b, gradients(model))
        model.zero_grad()


@program()
def calls_whose_backward_comes_in_another_order(run: Run) -> None:
    model = Net()
    for _ in range(3):
        losses = [model(inputs() * k).sum() for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
            run.show("grads", gradients(model))
        model.zero_grad()


@program()
def module_called_on_its_own_result(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    for _ in range(4):
        x = inputs()
        for _ in range(3):
            x = model(x)
        x.square().sum().backward()
        run.show("grads", x, gradients(model))
        model.zero_grad()


@program()
def gradients_of_gradients(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    for _ in range(4):
        x = inputs().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        penalty.backward()
        run.show("penalty", slope, penalty, gradients(model))
        model.zero_grad()


@program(rounds="gradients of gradients add up in another order")
def gradients_of_gradients_of_a_spectral_norm(run: Run) -> None:
    """Whose vectors each call writes to; twice before one backward pass, as discriminators are called."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 1))
    for _ in range(4):
        x, other = inputs().requires_grad_(), inputs()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + model(other).mean()
        loss.backward()
        run.show("loss", slope, loss, gradients(model), dict(model.named_buffers()))
        model.zero_grad()


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@program(rounds="each graph adds up its own share of a gradient")
def weights_used_twice_in_each_of_several_calls(run: Run) -> None:
    model = _UsedTwice()
    for _ in range(4):
        model(model(model(inputs()))).square().sum().backward()
        run.show("gradients", gradients(model))
        model.zero_grad()


@program(rounds="gradients of gradients add up in another order")
def created_graph_in_backward(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid())
    for _ in range(4):
        x = inputs().requires_grad_()
        model(x).square().sum().backward(create_graph=True)
        run.show("first", x.grad)
        x.grad.sum().backward()
        run.show("second", x.grad, gradients(model))
        model.zero_grad()


@program(rounds="gradients of gradients add up in another order")
def hessian(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    for _ in range(4):
        run.show("hessian", torch.autograd.functional.hessian(lambda x: model(x).square().sum(), torch.ones(3)))


@program()
def jacobian(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    for vectorize in (False, True, False, True):
        run.show("jacobian", torch.autograd.functional.jacobian(model, torch.ones(3), vectorize=vectorize))


@program()
def result_kept_over_steps(run: Run) -> None:
    model, kept = Net(), []
    for _ in range(4):
        kept.append(model(inputs()))
        with torch.no_grad():
            model.second.bias += 1
    for out in kept:
        out.sum().backward()
        run.show("kept", out, gradients(model))


@program()
def state_carried_from_step_to_step(run: Run) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(9, 3)

        def forward(self, x: T, state: T) -> T:
            return torch.tanh(self.inner(torch.cat([x, state], 1)))

    model, state = Cell(), torch.zeros(4, 3)
    for step in range(6):
        state = model(inputs(), state)
        if step % 3 == 2:
            state.sum().backward()
            run.show("grads", state, gradients(model))
            state = state.detach()


@program()
def carried_state_that_is_not_detached(run: Run) -> None:
    model, state = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.zeros(4, 3)
    for _ in range(4):
        state = model(state)
        run.raises("backward", state.sum().backward)
