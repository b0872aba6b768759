"""Programs about writes in place, aliases and views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.semantics.states import EAGER, GRAPHS, Run, program

T = torch.Tensor


class Body(nn.Module):
    """Whatever function of a linear layer's result and the input the program is about."""

    def __init__(self, function: Any, width: int = 6) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(width, width), function

    def forward(self, x: T) -> Any:
        return self.function(self.inner(x), x)


def inputs(*sizes: int) -> T:
    sizes = sizes or (4, 6)
    count = torch.Size(sizes).numel()
    return torch.linspace(-1, 1, count).view(sizes)


def four_steps(run: Run, model: nn.Module, x: T | None = None) -> None:
    """Calls with a backward pass each."""
    for step in range(4):
        model.zero_grad()
        out = model(inputs() if x is None else x)
        first = out if isinstance(out, torch.Tensor) else next(iter(out))
        if first.requires_grad:
            (first.square().sum() if not first.is_complex() else first.abs().sum()).backward()
        run.show(f"step {step}", out, [p.grad for p in model.parameters()])


# ---- writes in place ------------------------------------------------------------------------------------------------


def added_in_place(y: T, x: T) -> T:
    y.add_(1.0).mul_(2.0)
    y[0] = 0
    return y.sigmoid()


@program()
def writes_to_what_it_made(run: Run) -> None:
    four_steps(run, Body(added_in_place))


class Doubles(nn.Module):
    def forward(self, x: T) -> T:
        x.mul_(2.0)
        return x.sin() + 1


@program()
def writes_to_its_input(run: Run) -> None:
    model, x = Doubles(), inputs()
    for _ in range(4):
        out = model(x)
        run.show("x", x, out, x._version)


@program()
def writes_to_a_view_of_its_input(run: Run) -> None:
    model, base = Doubles(), inputs(8, 6)
    for _ in range(4):
        out = model(base[2:6])
        run.show("base", base, out)


@program()
def writes_to_an_input_through_a_view(run: Run) -> None:
    class Zeroes(nn.Module):
        def forward(self, x: T) -> T:
            x[:, 0].zero_()
            x.t()[1].fill_(7)
            return (x * 2).exp().sum(0)

    model, x = Zeroes(), inputs()
    for step in range(4):
        x += step
        run.show("x", model(x), x)


@program()
def returns_the_input_that_it_wrote(run: Run) -> None:
    class Same(nn.Module):
        def forward(self, x: T) -> T:
            return x.add_(1).relu_()

    model, x = Same(), inputs()
    for _ in range(4):
        out = model(x)
        run.show("same", out is x, out, x)


@program()
def in_place_on_a_result(run: Run) -> None:
    model = Body(lambda y, x: (y * 2).tanh())
    for _ in range(4):
        model.zero_grad()
        out = model(inputs())
        out += 1
        out[0].mul_(3)
        run.raises("backward", out.sum().backward)
        run.show("grads", out, [p.grad for p in model.parameters()])


@program()
def in_place_on_a_result_that_was_saved(run: Run) -> None:
    model = Body(lambda y, x: y.sigmoid())
    for _ in range(4):
        out = model(inputs())
        out.zero_()
        run.raises("backward", out.sum().backward)


@program()
def in_place_on_a_parameter_before_backward(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    for _ in range(4):
        out = model(inputs())
        with torch.no_grad():
            model[2].weight.mul_(0.5)
        try:
            out.sum().backward()
        except RuntimeError as error:
            run.show("refused", str(error).partition(":")[0], [p.grad for p in model.parameters()])


@program(differs="the tensor that a graph has saved is the parameter, where eager saves a view of it")
def message_about_an_overwritten_parameter(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    for _ in range(4):
        out = model(inputs())
        with torch.no_grad():
            model[2].weight.mul_(0.5)
        run.raises("backward", out.sum().backward)


@program(comes_to=EAGER)
def in_place_on_a_leaf(run: Run) -> None:
    model = Doubles()
    for _ in range(4):
        run.raises("call", model, inputs().requires_grad_())


@program()
def in_place_on_a_result_of_no_grad(run: Run) -> None:
    model = Body(lambda y, x: y.relu() + 1)
    for _ in range(4):
        with torch.no_grad():
            out = model(inputs())
        out.mul_(2).requires_grad_()
        out.sum().backward()
        run.show("out", out, out.grad)


@program()
def set_items_by_index_and_mask(run: Run) -> None:
    def fill(y: T, x: T) -> T:
        y = y.clone()
        y[x > 0.5] = -1.0
        y[:, [0, 2]] += 10
        y[1, ...] = x[1]
        return y.cos()

    four_steps(run, Body(fill))


@program()
def scatter_and_index_put(run: Run) -> None:
    index = torch.tensor([[0, 1, 2, 0, 1, 2]])

    def scatter(y: T, x: T) -> T:
        y = torch.zeros(4, 6).scatter_add_(0, index.expand(4, 6) % 4, y)
        return y.index_add(0, torch.tensor([0, 3]), x[:2]).relu()

    four_steps(run, Body(scatter))


@program()
def out_argument(run: Run) -> None:
    place = torch.empty(4, 6)

    class Into(nn.Module):
        def forward(self, x: T) -> T:
            return torch.exp(x * 2, out=place)

    model = Into()
    for step in range(4):
        out = model(inputs() + step)
        run.show("out", out, place, out.data_ptr() == place.data_ptr())


# ---- aliases and views ----------------------------------------------------------------------------------------------


def shares(a: T, b: T) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@program()
def returns_its_input(run: Run) -> None:
    class Passes(nn.Module):
        def forward(self, x: T) -> tuple[T, T]:
            return x, x * 2 + 1

    model, x = Passes(), inputs()
    for _ in range(4):
        same, other = model(x)
        run.show("same", same is x, shares(same, x), shares(other, x), other)


@program(comes_to=GRAPHS)
def dropout_that_does_nothing(run: Run) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Identity()).eval()
    for rate in (0.5, 0.5, 0.0, 0.5):
        model[0].p = rate
        model.train(rate == 0.0)
        x = inputs()
        out = model(x)
        out.add_(1)
        run.show("out", out is x, shares(out, x), x)


@program()
def results_that_are_their_inputs(run: Run) -> None:
    class Passes(nn.Module):
        def forward(self, x: T) -> Any:
            return x.float(), x.contiguous(), x.to("cpu"), x.reshape(4, 6), x.expand(4, 6), x.type_as(x), x * 2 + 1

    model = Passes()
    for _ in range(4):
        x = inputs()
        out = model(x)
        run.show("out", [o is x for o in out], [shares(o, x) for o in out])
        out[0].add_(1)
        run.show("written", out, x)


@program()
def returns_views_of_its_input(run: Run) -> None:
    class Views(nn.Module):
        def forward(self, x: T) -> tuple[T, ...]:
            return x.view(-1), x.t(), x[1:3, ::2], x.expand(2, 4, 6), x.tanh()

    model, x = Views(), inputs()
    for _ in range(4):
        out = model(x)
        run.show("views", out, [shares(o, x) for o in out], [o._is_view() and o._base is x for o in out])
        out[0].add_(1)
        run.show("x", x)


@program(comes_to=GRAPHS)
def views_of_an_input_that_needs_gradients(run: Run) -> None:
    class Views(nn.Module):
        def forward(self, x: T) -> tuple[T, T]:
            return x.view(-1)[2:], (x * 2).t()

    model = Views()
    for _ in range(4):
        x = inputs().requires_grad_()
        flat, turned = model(x)
        (flat.sum() * 2 + turned.square().sum()).backward()
        run.show("views", flat, turned, x.grad, flat._base is x)


@program(comes_to=GRAPHS)
def results_that_share_memory(run: Run) -> None:
    model = Body(lambda y, x: (y, y.view(-1), y[0], y.t(), y.detach()))
    for _ in range(4):
        out = model(inputs())
        run.show("shares", out, [shares(o, out[0]) for o in out])
        with torch.no_grad():
            out[4][0, 0] = 9.0
        run.show("written", out)


@program()
def the_same_tensor_twice(run: Run) -> None:
    def twice(y: T, x: T) -> Any:
        z = y.relu() * 3
        return z, z, [z]

    model = Body(twice)
    for _ in range(4):
        a, b, (c,) = model(inputs())
        (a.sum() + b.sum() * 2).backward()
        run.show("same", a is b, b is c, a, [p.grad for p in model.parameters()])
        model.zero_grad()


@program()
def returns_a_parameter(run: Run) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: T) -> tuple[T, T, T]:
            return x * self.scale.exp(), self.scale, self.scale.view(2, 3)

    model = Gives()
    for _ in range(4):
        out, scale, view = model(inputs())
        (out.sum() + view.sum()).backward()
        run.show("scale", scale is model.scale, shares(view, model.scale), out, view, model.scale.grad)


@program()
def the_same_input_twice(run: Run) -> None:
    class Two(nn.Module):
        def forward(self, a: T, b: T) -> T:
            return (a * b).sin() + a

    model = Two()
    for step in range(6):
        a = inputs().requires_grad_()
        b = a if step % 2 else inputs().requires_grad_()
        model(a, b).sum().backward()
        run.show("grads", a.grad, b.grad)


@program()
def overlapping_inputs(run: Run) -> None:
    class Writes(nn.Module):
        def forward(self, a: T, b: T) -> T:
            a.add_(1)
            return (b * 2).sin()

    model = Writes()
    for step in range(6):
        base = inputs(10)
        run.show("out", model(base[:5], base[2:7] if step % 2 else inputs(5)), base)
    other = Writes()
    for step in range(4):
        base = inputs(10)
        run.show("overlapped first", other(base[:5], base[2 * step :][:5]), base)


@program()
def chunks_and_splits(run: Run) -> None:
    four_steps(run, Body(lambda y, x: (*y.relu().chunk(3, 1), *y.split([1, 3]))))


@program()
def unbound_and_stacked(run: Run) -> None:
    four_steps(run, Body(lambda y, x: torch.stack([row.tanh() * 2 for row in y.unbind()][::-1], 1)))


@program()
def detached_inside(run: Run) -> None:
    four_steps(run, Body(lambda y, x: (y * y.detach().sigmoid(), y.detach(), (y * 2).detach().relu())))


@program()
def data_inside(run: Run) -> None:
    four_steps(run, Body(lambda y, x: y.tanh() * y.data.abs()))


@program()
def as_strided_windows(run: Run) -> None:
    four_steps(run, Body(lambda y, x: torch.as_strided(y.exp(), (3, 4), (6, 1), 2).sqrt()))


@program()
def unfolded(run: Run) -> None:
    four_steps(run, Body(lambda y, x: y.unfold(1, 3, 1).mean(-1).relu()))


def beside_a_transposed_input(run: Run, function: Callable[[T], T]) -> None:
    """Gradients lie as the input does, which is what ``nn.GRU(batch_first=True)`` gives; fake tensors' do not."""
    model = Body(lambda y, x: x + function(y))
    for step in range(4):
        model.zero_grad()
        x = torch.linspace(-1, 1, 90).view(3, 5, 6).requires_grad_()
        model(x.transpose(0, 1)).square().sum().backward()
        run.show(f"step {step}", x.grad, [p.grad for p in model.parameters()])


@program()
def dropout_beside_a_transposed_input(run: Run) -> None:
    beside_a_transposed_input(run, lambda y: nn.functional.dropout(y, 0.3))


@program()
def activations_beside_a_transposed_input(run: Run) -> None:
    for function in (nn.functional.elu, nn.functional.relu6, nn.functional.hardswish, nn.functional.softplus):
        beside_a_transposed_input(run, function)


@program(comes_to=EAGER)
def results_that_share_memory_are_written_to(run: Run) -> None:
    def share(y: T, x: T) -> tuple[T, T]:
        h = y * 1.0
        h.t()[0].zero_()
        return h, h.view(-1)

    model = Body(share)
    for step in range(4):
        model.zero_grad()
        rows, flat = model(inputs())
        rows.mul_(2.0)
        flat.add_(1.0)
        (rows.square().sum() + flat.sum()).backward()
        run.show(f"step {step}", rows, flat, [p.grad for p in model.parameters()])


@program()
def results_with_strides_of_their_own(run: Run) -> None:
    four_steps(run, Body(lambda y, x: (y.t() * 2, (y.t() + x.t()).relu(), torch.empty_like(x.t()).fill_(1), y.flip(0))))


@program(comes_to=GRAPHS)
def versions_of_what_was_saved(run: Run) -> None:
    model = Body(lambda y, x: y * x)
    for _ in range(4):
        x = inputs()
        out = model(x)
        x.add_(1)
        run.raises("backward", out.sum().backward)
