"""Programs with compilers, transforms and modes of torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.semantics.states import EAGER, GRAPHS, Run, program

T = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: T) -> T:
        return self.second(F.gelu(self.first(x)))


def inputs() -> T:
    return torch.linspace(-1, 1, 24).view(4, 6)


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def step(run: Run, name: str, model: Any) -> None:
    """A call and its backward pass, shown."""
    model.zero_grad()
    out = model(inputs())
    out.square().sum().backward()
    run.show(name, out, gradients(model))


# ---- compilers ------------------------------------------------------------------------------------------------------


@program()
def compiled_around(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
    compiled = torch.compile(model, backend="eager")
    for k in range(3):
        step(run, f"compiled {k}", compiled)
        step(run, f"model {k}", model)


@program()
def compiled_inside(run: Run) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.fast = torch.compile(lambda x: x.sigmoid() * 2, backend="eager")

        def forward(self, x: T) -> T:
            return self.fast(self.net(x)) + 1

    model = Uses()
    for k in range(4):
        step(run, f"{k}", model)


@program(comes_to=EAGER)
def compiled_method(run: Run) -> None:
    model = Net()
    model.compile(backend="eager")
    for k in range(4):
        step(run, f"{k}", model)


@program(comes_to=EAGER)
def compiled_training_step(run: Run) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def loss_of(x: T) -> T:
        return model(x).square().mean()

    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(inputs())
        loss.backward()
        optimizer.step()
        run.show("loss", loss, gradients(model))


@program()
def kept_from_compilers(run: Run) -> None:
    class Net2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        @torch.compiler.disable
        def slow(self, x: T) -> T:
            calls.append(torch.compiler.is_compiling())
            return x.tanh()

        def forward(self, x: T) -> T:
            return self.slow(self.inner(x)) * 2 + 1

    calls: list[bool] = []
    model = Net2()
    for k in range(4):
        step(run, f"{k}", model)
    run.show("calls", calls)


@program(differs="a module that asks whether it is being compiled is answered yes, as by torch.compile")
def is_compiling_asked_in_forward(run: Run) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            y = self.inner(x)
            return y.relu() * 2 if torch.compiler.is_compiling() else y.relu() * 2 + 1

    model = Asks()
    for k in range(4):
        step(run, f"{k}", model)


@program()
def exported(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
        program_of = torch.export.export(model, (inputs(),))
        run.show("signature", [str(spec.kind) for spec in program_of.graph_signature.input_specs])
        run.show("out", program_of.module()(inputs()))


@program()
def scripted(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
        run.show("scripted", torch.jit.script(model)(inputs()))
    step(run, "after", model)


@program()
def traced(run: Run) -> None:
    model = Net()
    for k in range(3):
        step(run, f"{k}", model)
        run.show("traced", torch.jit.trace(model, (inputs(),))(inputs() * 2))
    step(run, "after", model)


@program()
def symbolically_traced(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    for k in range(3):
        step(run, f"{k}", model)
        graph = torch.fx.symbolic_trace(model)
        run.show("graph", [str(node) for node in graph.graph.nodes], graph(inputs()))


# ---- transforms -----------------------------------------------------------------------------------------------------


@program()
def functional_calls(run: Run) -> None:
    model = Net()
    for k in range(4):
        step(run, f"{k}", model)
        weights = {name: p.detach() * k for name, p in model.named_parameters()}
        run.show("other weights", functional_call(model, weights, (inputs(),)), gradients(model))


@program()
def gradients_by_function(run: Run) -> None:
    model = Net()
    for k in range(4):
        step(run, f"{k}", model)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        slope = grad(lambda weights, x: functional_call(model, weights, (x,)).square().sum())
        run.show("slope", slope(weights, inputs()))


@program()
def gradients_of_each_sample(run: Run) -> None:
    model = Net()

    def loss_of(weights: Any, x: T) -> T:
        return functional_call(model, weights, (x[None],)).square().sum()

    for k in range(3):
        step(run, f"{k}", model)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        run.show("each", vmap(grad(loss_of), in_dims=(None, 0))(weights, inputs()))


@program()
def mapped_over_rows(run: Run) -> None:
    model = Net()
    for k in range(4):
        step(run, f"{k}", model)
        run.show("rows", vmap(model)(inputs()), vmap(model, out_dims=1)(inputs()))


@program()
def ensembles(run: Run) -> None:
    models = [Net() for _ in range(3)]
    weights, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    for k in range(3):
        step(run, f"{k}", models[0])
        run.show(
            "all", vmap(lambda w, b, x: functional_call(base, (w, b), (x,)), (0, 0, None))(weights, buffers, inputs())
        )


@program()
def forward_derivatives(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    for k in range(4):
        step(run, f"{k}", model)
        run.show("jvp", jvp(model, (inputs(),), (torch.ones(4, 6),)))


@program()
def transforms_inside(run: Run) -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            return vmap(grad(lambda row: self.inner(row).tanh().sum()))(x) * 2

    model = Slopes()
    for _ in range(4):
        run.show("slopes", model(inputs()).detach())


# ---- modes ----------------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(function, "__name__", "?"))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@program()
def function_modes(run: Run) -> None:
    model = Net()
    for k in range(6):
        mode = Functions()
        if k % 2:
            with mode:
                out = model(inputs())
        else:
            out = model(inputs())
        run.show(f"{k}", out, list(mode.seen))


@program()
def dispatch_modes(run: Run) -> None:
    model = Net()
    for k in range(6):
        mode = Operators()
        if k % 2:
            with mode:
                out = model(inputs())
        else:
            out = model(inputs())
        run.show(f"{k}", out, mode.seen)


@program(comes_to=EAGER)
def modes_from_the_start(run: Run) -> None:
    model = Net()
    for k in range(4):
        with Operators() as mode:
            out = model(inputs())
            out.sum().backward()
        run.show(f"{k}", out, mode.seen)


@program()
def default_device(run: Run) -> None:
    class Makes(nn.Module):
        def forward(self, x: T) -> T:
            return x * torch.ones(6) + torch.arange(6)

    model = Makes()
    for device in ("cpu", "cpu", "meta", "cpu"):
        with torch.device(device):
            x = inputs()
            run.show(f"{device}", str(model(x).device))


@program(comes_to=EAGER)
def counted_flops(run: Run) -> None:
    model = Net()
    for k in range(4):
        with FlopCounterMode(display=False) as counter:
            model(inputs()).sum().backward()
        run.show(f"{k}", counter.get_total_flops(), gradients(model))


@program()
def profiled(run: Run) -> None:
    model = Net()
    for k in range(4):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(inputs()).sum().backward()
        run.show(f"{k}", bool(found.key_averages()), gradients(model))


@program(differs="the profiler sees a graph's operators, such as addmm for linear, or a kernel that has none")
def names_in_a_profile(run: Run) -> None:
    model = Net()
    for k in range(4):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(inputs())
        run.show(f"{k}", "aten::linear" in {event.key for event in found.key_averages()})


@program(differs="a captured graph is one node of autograd, which has a name of its own")
def names_of_autograd_nodes(run: Run) -> None:
    model = Net()
    for _ in range(4):
        node = model(inputs()).grad_fn
        run.show("node", type(node).__name__, len(node.next_functions))


@program(precision=torch.bfloat16)
def autocast_on_and_off(run: Run) -> None:
    model = Net()
    for on in (False, True, True, False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out = model(inputs())
            loss = out.float().square().mean()
        loss.backward()
        run.show(f"{on}", out, loss, gradients(model), torch.is_autocast_enabled("cpu"))


@program(precision=torch.bfloat16)
def autocast_around_steps(run: Run) -> None:
    for _ in range(2):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for region in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for k in range(3):
                    loss = model(inputs()).float().square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    run.show(f"{region} {k}", loss, gradients(model))
                    optimizer.step()
    run.show("after", model(inputs()))


@program(precision=torch.bfloat16)
def autocast_inside(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.head = Net(), nn.Linear(3, 2)

        def forward(self, x: T) -> T:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.net(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(y.float()).tanh() * 2

    model = Mixed()
    for k in range(4):
        step(run, f"{k}", model)


@program(precision=torch.bfloat16)
def autocast_around_backward(run: Run) -> None:
    model = Net()
    for k in range(4):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(inputs()).float().sum().backward()
        run.show(f"{k}", gradients(model))


@program(precision=torch.bfloat16)
def autocast_to_other_types(run: Run) -> None:
    model = Net()
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            run.show(f"{dtype}", model(inputs()))


@program()
def thread_counts(run: Run) -> None:
    model = Net()
    for threads in (1, 1, 2, 1, 2):
        torch.set_num_threads(threads)
        step(run, f"{threads}", model)
        run.show("threads", torch.get_num_threads())


@program()
def deterministic_algorithms(run: Run) -> None:
    model = Net()
    for on in (False, True, True, False):
        torch.use_deterministic_algorithms(on)
        step(run, f"{on}", model)
        run.show("on", torch.are_deterministic_algorithms_enabled())


@program()
def precision_of_products(run: Run) -> None:
    model = Net()
    for precision in ("highest", "highest", "high", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        step(run, precision, model)


@program(comes_to=GRAPHS)
def flushed_denormals(run: Run) -> None:
    model, x = nn.Sequential(nn.Identity(), nn.Hardtanh()), torch.full((3,), 1e-39)
    for on in (False, False, True, False):
        torch.set_flush_denormal(on)
        run.show(f"{on}", model(x) * 1.0)
    torch.set_flush_denormal(False)


@program()
def printing_options(run: Run) -> None:
    model = Net()
    for digits in (2, 2, 4, 3):
        torch.set_printoptions(precision=digits)
        print(model(inputs())[0].detach())
    torch.set_printoptions(profile="default")
