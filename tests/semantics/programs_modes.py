"""Programs about what changes autograd: modes, hooks on what is saved, checkpoints, functions of the script."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.semantics.programs_gradients import Net, gradients, inputs
from tests.semantics.states import EAGER, GRAPHS, Run, program

T = torch.Tensor


# ---- modes ----------------------------------------------------------------------------------------------------------


@program()
def gradients_on_and_off(run: Run) -> None:
    model = Net()
    for on in (True, False, True, False, True):
        with torch.set_grad_enabled(on):
            out = model(inputs())
        run.show(f"{on}", out)
        run.raises("backward", out.sum().backward)


@program()
def inference_mode(run: Run) -> None:
    model = Net()
    for _ in range(3):
        with torch.inference_mode():
            out = model(inputs())
            run.show("inside", out, torch.is_inference_mode_enabled())
        run.raises("written", out.add_, 1)
        run.raises("used", lambda out: (out * model.second.bias).sum().backward(), out)
    model(inputs()).sum().backward()
    run.show("grads", gradients(model))


@program()
def inference_tensors_as_inputs(run: Run) -> None:
    model = Net()
    for step in range(4):
        with torch.inference_mode(step % 2 == 0):
            x = inputs() * 2
        run.raises("call", lambda x: model(x).sum().backward(), x)
        run.show("grads", gradients(model))


@program()
def no_grad_around_a_function(run: Run) -> None:
    def wrapped(model: nn.Module) -> Any:
        print("wrapped")  # breaks the graph
        return lambda x: model(x)

    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            model = torch.no_grad()(wrapped(self.net))
            return torch.stack([model(x) for _ in range(3)]) + self.net(x)

    model = Predicts()
    for _ in range(4):
        out = model(inputs())
        run.show("out", out, torch.is_grad_enabled())
        out.sum().backward()
    run.show("grads", gradients(model.net))


@program(comes_to=EAGER)
def no_grad_around_a_module(run: Run) -> None:
    class Predicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.no_grad()(self.net)(x)

    model = Predicts()
    for _ in range(4):
        run.show("out", model(inputs()), torch.is_grad_enabled())


@program()
def no_grad_inside(run: Run) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: T) -> tuple[T, T]:
            with torch.no_grad():
                target = (self.net(x) * 3).softmax(-1)
            out = self.net(x)
            return (out.log_softmax(-1) * target).sum(), target

    model = Half()
    for _ in range(4):
        loss, target = model(inputs())
        loss.backward()
        run.show("loss", loss, target, gradients(model))
        model.zero_grad()


@program()
def no_grad_as_a_decorator(run: Run) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        @torch.no_grad()
        def forward(self, x: T) -> T:
            return self.net(x).relu()

    model = Half()
    for _ in range(4):
        run.show("out", model(inputs()), torch.is_grad_enabled())


@program()
def enable_grad_inside_no_grad(run: Run) -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: T) -> T:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.net(x).sum(), x)[0]

    model = Slope()
    for _ in range(4):
        with torch.no_grad():
            run.show("slope", model(inputs()))
        run.show("slope", model(inputs()))


@program()
def gradients_switched_off_for_good_inside(run: Run) -> None:
    class Off(nn.Module):
        def forward(self, x: T) -> T:
            torch.set_grad_enabled(False)
            return x * 2 + 1

    model = Off()
    for _ in range(4):
        x = inputs().requires_grad_()
        out = model(x)
        run.show("out", out, torch.is_grad_enabled())
        torch.set_grad_enabled(True)


@program()
def requires_grad_inside(run: Run) -> None:
    class Leaf(nn.Module):
        def forward(self, x: T) -> tuple[T, T]:
            y = x.detach().clone().requires_grad_()
            return (y * 2).sin(), y

    model = Leaf()
    for _ in range(4):
        out, leaf = model(inputs())
        out.sum().backward()
        run.show("leaf", out, leaf, leaf.grad)


@program()
def backward_inside_forward(run: Run) -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: T) -> T:
            loss = self.net(x).square().mean()
            loss.backward()
            return loss.detach()

    model = Trains()
    for _ in range(4):
        run.show("loss", model(inputs()), gradients(model))


@program()
def saved_tensor_hooks(run: Run) -> None:
    model = Net()
    for step in range(5):
        packed: list[Any] = []

        def pack(t: T, packed: list[Any] = packed) -> T:
            packed.append(tuple(t.shape))
            return t.clone()

        if step % 2:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t * 2):
                out = model(inputs())
        else:
            out = model(inputs())
        out.sum().backward()
        run.show("grads", packed, gradients(model))
        model.zero_grad()


@program()
def saved_tensors_on_disk_or_cpu(run: Run) -> None:
    model = Net()
    for step in range(6):
        with torch.autograd.graph.save_on_cpu() if step % 2 else torch.enable_grad():
            loss = model(inputs()).square().sum()
        loss.backward()
        run.show("grads", gradients(model))
        model.zero_grad()


@program()
def anomaly_mode(run: Run) -> None:
    model = Net()
    for step in range(4):
        with torch.autograd.set_detect_anomaly(step % 2 == 1):
            model(inputs()).sum().backward()
        run.show("grads", gradients(model))


@program()
def anomaly_mode_of_backward_alone(run: Run) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: T) -> T:
            return (x * self.scale).sqrt()

    model = Root()
    for sign in (1.0, 1.0, -1.0):
        out = model(sign * inputs().abs()).sum()
        with warnings.catch_warnings(record=True) as said, torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("always")
            run.raises("backward", out.backward)
        run.show("told", any("SqrtBackward0. No forward pass information" in str(line.message) for line in said))
        run.show("grads", gradients(model))


@program(comes_to=EAGER)
def checkpointed_modules(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5))
    for _ in range(4):
        x = inputs().requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        run.show("grads", x.grad, gradients(model))
        model.zero_grad()


@program()
def checkpoints_inside(run: Run) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

        def forward(self, x: T) -> T:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) + x
            return x * 2

    model = Deep()
    for _ in range(4):
        out = model(inputs())
        out.square().sum().backward()
        run.show("grads", out, gradients(model))
        model.zero_grad()


@program()
def reentrant_checkpoints(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    for _ in range(4):
        x = inputs().requires_grad_()
        checkpoint(model, x, use_reentrant=True).sum().backward()
        run.show("grads", x.grad, gradients(model))


@program(comes_to=EAGER)
def forward_mode(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    for step in range(5):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(inputs(), torch.ones(4, 6)) if step % 2 else inputs()
            run.show("dual", tuple(forward_ad.unpack_dual(model(x))))


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: T, scale: float) -> T:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


@program()
def autograd_function_inside(run: Run) -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            return Straight.apply(self.inner(x), 8.0) * 2 + 1

    model = Rounds()
    for _ in range(4):
        out = model(inputs())
        out.square().sum().backward()
        run.show("out", out, gradients(model))
        model.zero_grad()


class Switch(torch.autograd.Function):
    """Several results, one of which has no gradient; says when it runs."""

    said: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: T) -> Any:
        Switch.said.append("forward")
        ctx.set_materialize_grads(False)
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * 2, x * 3, index

    @staticmethod
    def backward(ctx: Any, a: T | None, b: T | None, index: None) -> Any:
        Switch.said.append(f"backward {a is not None} {b is not None}")
        return sum(g * k for g, k in ((a, 2), (b, 3)) if g is not None)


@program()
def autograd_function_with_counters(run: Run) -> None:
    class Uses(nn.Module):
        def forward(self, x: T) -> Any:
            return Switch.apply(x.sin() + 1)

    model = Uses()
    for use in (0, 1, 0, 1):
        Switch.said.clear()
        x = inputs().requires_grad_()
        out = model(x)
        out[use].sum().backward()
        run.show("out", out, x.grad, list(Switch.said))


@program(comes_to=GRAPHS)
def autograd_function_that_raises(run: Run) -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T) -> T:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: T) -> T:
            raise RuntimeError("there is no way back")

    class Uses(nn.Module):
        def forward(self, x: T) -> T:
            return Refuses.apply(x + 1).relu()

    model = Uses()
    for _ in range(4):
        run.raises("backward", model(inputs().requires_grad_()).sum().backward)


@program()
def gradient_clipping_and_norms(run: Run) -> None:
    model = Net()
    for _ in range(4):
        model.zero_grad()
        model(inputs()).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        run.show("grads", norm, gradients(model))


@program()
def straight_through_by_detach(run: Run) -> None:
    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            soft = self.inner(x).softmax(-1)
            hard = F.one_hot(soft.argmax(-1), 6).to(soft.dtype)
            return hard - soft.detach() + soft

    model = Hard()
    for _ in range(4):
        out = model(inputs())
        (out * inputs()).sum().backward()
        run.show("out", out, gradients(model))
        model.zero_grad()


@program()
def a_result_that_needs_no_gradient(run: Run) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> Any:
            y = self.inner(x)
            return y.relu() * 2, x * 3 + 1, y.argmax(-1), y > 0, None, 5

    model = Two()
    for _ in range(4):
        run.show("out", model(inputs()))


@program()
def no_loss_at_all(run: Run) -> None:
    model = Net()
    for _ in range(4):
        out = model(inputs())
        run.show("out", out, gradients(model))
    del out
    model(inputs()).sum().backward()
    run.show("grads", gradients(model))
