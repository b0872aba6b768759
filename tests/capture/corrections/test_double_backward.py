"""Backward passes that are run twice, vectorised or differentiated themselves, through captured graphs: as eager's."""

import contextlib
import copy
import inspect
import textwrap

import pytest
import torch
from torch import nn

from autofuse.capture.backend import boxed, compile_with


def captured(module):
    torch._dynamo.reset()
    return torch.compile(
        module,
        backend=lambda graph, inputs: compile_with(graph, inputs, lambda aten, phase, times: boxed(aten.forward)),
    )


class Odd(nn.Module):
    """Several outputs, views of one tensor among them; a part without gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x).tanh()
        with torch.no_grad():
            scale = self.linear(x).sum()
        return y[:, :4], y[:, 4:], (y * y * scale).view(-1)


MODELS = {
    "perceptron": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 1)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3, bias=False),
        nn.BatchNorm1d(4),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(24, 1),
    ),
    "odd": Odd,
}


def penalty_gradients(model, call, batch, autocast=False):
    """Gradients of a penalty on the gradient of the input, what the model keeps, and the generator's next number."""
    torch.manual_seed(batch)
    x = torch.randn(batch, 8, requires_grad=True)
    inner = x * 1.5
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = call(inner)
        total = sum(o.float().square().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))
    (gradient,) = torch.autograd.grad(total, inner, create_graph=True)
    model.zero_grad()
    (gradient.square().sum() + total).backward()
    return [gradient.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_gradients(name, autocast):
    torch.manual_seed(0)
    eager = MODELS[name]()
    model = copy.deepcopy(eager)
    call = captured(model)
    for batch in (3, 5, 5):
        wanted = penalty_gradients(eager, eager, batch, autocast)
        found = penalty_gradients(model, call, batch, autocast)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).double().norm() <= (3e-2 if autocast else 1e-5) * other.double().norm()
    assert any(g.abs().sum() > 0 for g in found)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Exponential(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad


class SineSquared(torch.autograd.Function):
    """Saves a value that is neither input nor output: a constant to the second pass, in eager, too."""

    @staticmethod
    def forward(ctx, x):
        sine = x.sin()
        ctx.save_for_backward(sine, x)
        return sine * sine

    @staticmethod
    def backward(ctx, grad):
        sine, x = ctx.saved_tensors
        return 2 * sine * x.cos() * grad


class Two(torch.autograd.Function):
    """Two outputs, one of them without a gradient; a number and a tensor kept on ctx."""

    @staticmethod
    def forward(ctx, x, factor):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.x, ctx.factor = x, factor
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return y * factor, sign

    @staticmethod
    def backward(ctx, grad, _):
        (y,) = ctx.saved_tensors
        return ctx.factor * (1 - y * y) * grad + 0 * ctx.x, None


class Constant(torch.autograd.Function):
    """Turns gradients off itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            slope = 2 * x
        return slope * grad


class Calls(nn.Module):
    """A model with an autograd function inside."""

    def __init__(self, call):
        super().__init__()
        self.linear, self.head, self.call = nn.Linear(8, 8), nn.Linear(8, 1), call

    def forward(self, x):
        return self.head(self.call(self.linear(x).tanh()))


FUNCTIONS = {
    "square": Square.apply,
    "exponential": Exponential.apply,
    "sine": SineSquared.apply,
    "two": lambda x: Two.apply(x, 3.0)[0] * Two.apply(x, 0.5)[1],
    "after one another": lambda x: Exponential.apply(Square.apply(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_gradients_through_functions_of_the_users_own(name):
    torch.manual_seed(0)
    eager = Calls(FUNCTIONS[name])
    model = copy.deepcopy(eager)
    call = captured(model)
    for batch in (3, 5):
        wanted = penalty_gradients(eager, eager, batch)
        found = penalty_gradients(model, call, batch)
        for one, other in zip(found, wanted, strict=True):
            assert other.double().norm() > 0
            assert (one - other).double().norm() <= 1e-5 * other.double().norm()


class Once(torch.autograd.Function):
    """Refuses to be differentiated twice, in eager, too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@torch.no_grad()
def slope_of(x):
    return 2 * x


class Deep(torch.autograd.Function):
    """Calls a function that turns gradients off."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return slope_of(ctx.saved_tensors[0]) * grad


@pytest.mark.parametrize("function", [Constant, Once, Deep])
def test_a_function_that_turns_gradients_off_itself_raises(function):
    """With torch 2.11 Dynamo leaves it to Python, and all is eager's."""
    eager = Calls(function.apply)
    model = copy.deepcopy(eager)
    with contextlib.ExitStack() as stack:
        if torch.__version__ >= (2, 12):
            stack.enter_context(pytest.raises(RuntimeError, match="turns gradients on or off"))
        elif function is Once:
            stack.enter_context(pytest.raises(RuntimeError, match="once_differentiable"))
        found = penalty_gradients(model, captured(model), 3)
        torch.testing.assert_close(found, penalty_gradients(eager, eager, 3))


@pytest.mark.parametrize("function", [Constant, Once, Deep])
def test_its_first_gradients_are_eagers_where_they_may_be_differentiated(function):
    """A script may ask for ``create_graph`` and never differentiate again."""
    eager = Calls(function.apply)
    model = copy.deepcopy(eager)
    found = []
    for call in (eager, captured(model)):
        x = torch.linspace(-1.0, 1.0, 24).view(3, 8).requires_grad_()
        (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        assert gradient.requires_grad
        found.append(gradient.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("function", [Constant, Once, Deep])
def test_its_second_gradients_are_never_left_out_without_a_word(function):
    """The gradient depends on the weights before and behind it, also where that of the loss depends on nothing."""
    model = Calls(function.apply)
    x = torch.linspace(-1.0, 1.0, 24).view(3, 8).requires_grad_()
    (gradient,) = torch.autograd.grad(captured(model)(x).sum(), x, create_graph=True)
    with contextlib.ExitStack() as stack:
        if torch.__version__ >= (2, 12):
            stack.enter_context(pytest.raises(RuntimeError, match="turns gradients on or off"))
        elif function is Once:
            stack.enter_context(pytest.raises(RuntimeError, match="once_differentiable"))
        (model.head.weight.sum() + gradient.square().sum()).backward()


def test_a_function_without_a_source_raises():
    made = {"torch": torch}
    source = textwrap.dedent(inspect.getsource(Square)).replace("class Square", "class Made")
    exec(source, made)
    model = Calls(made["Made"].apply)
    with pytest.raises(RuntimeError, match="AUTOFUSE_DISABLE"):
        penalty_gradients(model, captured(model), 3)


def test_hessian_and_vectorised_jacobian():
    torch.manual_seed(0)
    model = MODELS["perceptron"]().eval()
    call, x = captured(model), torch.randn(8)
    functional = torch.autograd.functional
    for _ in range(2):
        wanted = functional.hessian(lambda v: model(v).sum(), x)
        assert wanted.abs().max() > 1e-3  # torch's own way through AOTAutograd gives zeros
        torch.testing.assert_close(functional.hessian(lambda v: call(v).sum(), x), wanted)
        wanted = functional.jacobian(model, x, vectorize=True)
        torch.testing.assert_close(functional.jacobian(call, x, vectorize=True), wanted)


def test_a_graph_kept_for_a_second_backward_pass():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
    call = captured(model)
    loss = call(torch.randn(4, 8)).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for gradient, parameter in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
@pytest.mark.parametrize("used", [[0, 1, 2], [0], [2]])
@pytest.mark.parametrize("is_watched", [False, True])
def test_a_second_backward_pass_raises_as_in_eager(is_watched, used):
    model = Odd()
    for call in (model, captured(model)):
        outputs = call(torch.randn(4, 8))
        loss = sum(outputs[i].sum() for i in used)  # which keeps nothing itself
        loss.backward()
        with torch.autograd.set_detect_anomaly(is_watched), pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, model.linear.weight, create_graph=True)


def test_a_graph_kept_after_one_that_was_not():
    """AOTAutograd compiles the backward graph for the first pass, which frees what it reads."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
    call = captured(model)
    call(torch.randn(4, 8)).sum().backward()
    model.zero_grad()
    x = torch.randn(4, 8)
    loss = call(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, 2 * parameter.grad)


def test_a_weight_changed_in_between_raises_as_in_eager():
    model = MODELS["perceptron"]()
    x = torch.randn(3, 8, requires_grad=True)
    loss = captured(model)(x).sum()
    with torch.no_grad():
        model[4].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_model_that_writes_to_what_it_reads_is_differentiated_as_it_was_read():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 1)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.linear(x * self.mean)

    x = torch.randn(3, 8, requires_grad=True)
    model = Average()
    twin = copy.deepcopy(model)
    found = []
    for call in (captured(model), twin):
        call(x).sum().backward()
        (gradient,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        found.append([gradient, *torch.autograd.grad(gradient.square().sum(), x)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(model.mean, twin.mean)


def test_a_gradient_of_the_users_own_that_is_no_derivative():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * (3 * x)

    class Model(nn.Module):
        def forward(self, x):
            return Triple.apply(x.sin())

    x = torch.randn(3, 8, requires_grad=True)
    found = []
    for call in (Model(), captured(Model())):
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


def test_deterministic_algorithms_asked_for_between_forward_and_backward():
    eager = MODELS["convolution"]()
    model = copy.deepcopy(eager)
    x = torch.randn(3, 8)
    losses = [call(x).square().sum() for call in (eager, captured(model))]
    torch.use_deterministic_algorithms(True)
    try:
        for loss in losses:
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
