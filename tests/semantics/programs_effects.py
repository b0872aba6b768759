"""Programs about control flow, what a forward does besides computing, and functions that are asked for."""

from __future__ import annotations

import inspect
import logging
import random
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.programs_calls import Body, four_calls, inputs
from tests.semantics.states import EAGER, GRAPHS, NOT_RELEASED, Run, program

T = torch.Tensor


# ---- control flow ---------------------------------------------------------------------------------------------------


@program()
def branches_on_values(run: Run) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            y = self.inner(x).relu()
            if x.sum() > 0:
                return y * 2
            return y.tanh() - 1

    model = Branches()
    for sign in (1, 1, -1, 1, -1):
        x = (inputs() + sign).requires_grad_()
        out = model(x)
        out.sum().backward()
        run.show(f"{sign}", out, x.grad)


@program()
def loops_until_a_value(run: Run) -> None:
    def shrink(inner: Any, x: T) -> tuple[T, int]:
        steps = 0
        while x.abs().max() > 0.5 and steps < 9:
            x = x * 0.5 + 0.01
            steps += 1
        return inner(x), steps

    model = Body(shrink)
    for scale in (1.0, 4.0, 1.0, 16.0):
        run.show(f"{scale}", model(inputs() * scale))


@program()
def items(run: Run) -> None:
    def scale(inner: Any, x: T) -> Any:
        largest = x.abs().max().item()
        return inner(x / largest).relu(), largest, int(x.argmax()), float(x.sum()), bool(x.any()), x[0].tolist()

    model = Body(scale)
    for factor in (1.0, 2.0, 2.0, 3.0):
        run.show(f"{factor}", model(inputs() * factor))


@program()
def sizes_from_values(run: Run) -> None:
    model = Body(
        lambda inner, x, n: (inner(x)[: int(n)].relu(), torch.zeros(int(n)) + 1, x[x > 0], torch.nonzero(x > 0.9))
    )
    for n in (2, 2, 3, 1):
        run.show(f"{n}", model(inputs(), torch.tensor(n)))


@program()
def branches_on_shapes(run: Run) -> None:
    model = Body(lambda inner, x: inner(x).relu() if x.shape[0] > 3 else inner(x).tanh() * x.shape[0])
    for rows in (4, 2, 4, 3, 1, 4):
        run.show(f"{rows}", model(inputs()[:rows]))


@program(comes_to=EAGER)
def routed_rows(run: Run) -> None:
    """A mixture of experts as people write it."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: T) -> T:
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = torch.where(chosen == index)[0]
                if rows.numel():
                    out[rows] = expert(x[rows]).relu() * weights[rows, None]
            return out

    model = Mixture()
    for sign in (1, -1, 1, 3):
        out = model(inputs() * sign)
        out.sum().backward()
        run.show(f"{sign}", out, {name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()


# ---- what a forward does besides ------------------------------------------------------------------------------------

COUNTS = {"calls": 0}
LOG: list[str] = []


class Noisy(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(6, 6), what

    def forward(self, x: T) -> T:
        self.what(x)
        return self.inner(x).relu() * 2


def count(x: T) -> None:
    COUNTS["calls"] += 1
    LOG.append(f"call {COUNTS['calls']}")


@program()
def global_counters(run: Run) -> None:
    COUNTS["calls"] = 0
    LOG.clear()
    model = Noisy(count)
    for _ in range(5):
        run.show("out", model(inputs()), COUNTS, LOG)


@program()
def prints(run: Run) -> None:
    model = Noisy(lambda x: print("rows:", x.shape[0], end=";\n"))
    four_calls(run, model, inputs())
    model = Noisy(lambda x: print(x.sum()))
    four_calls(run, model, inputs())


@program()
def prints_to_stderr(run: Run) -> None:
    four_calls(run, Noisy(lambda x: print("careful", file=sys.stderr)), inputs())


@program()
def warnings_from_forward(run: Run) -> None:
    four_calls(run, Noisy(lambda x: warnings.warn("careful", UserWarning, stacklevel=1)), inputs())


@program(differs="what torch's own Python code warns of is said when it is traced, and not at each call")
def warnings_of_torch(run: Run) -> None:
    four_calls(run, Body(lambda inner, x, y: F.mse_loss(inner(x), y) * 2), inputs(), torch.ones(1, 6))


@program()
def logs(run: Run) -> None:
    records: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("script"), Keeps()
    logger.addHandler(handler)
    model = Noisy(lambda x: logger.warning("rows %d", x.shape[0]))
    four_calls(run, model, inputs())
    logger.removeHandler(handler)
    run.show("records", records)


@program(
    differs="lines that a logger does not write when a module is captured are left out of its graph for good",
    differs_in=NOT_RELEASED,  # it is back in eager when the level is lowered
)
def log_level_that_is_lowered_later(run: Run) -> None:
    records: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger, handler = logging.getLogger("script.quiet"), Keeps()
    logger.addHandler(handler)
    model = Noisy(lambda x: logger.info("rows %d", x.shape[0]))
    for level in (logging.WARNING, logging.WARNING, logging.INFO, logging.INFO):
        logger.setLevel(level)
        run.show("out", model(inputs()))
    logger.removeHandler(handler)
    run.show("records", records)


@program()
def random_numbers_of_torch(run: Run) -> None:
    model = Body(lambda inner, x: (inner(x) + torch.randn_like(x) * 0.1, torch.rand(3), torch.randint(9, (2,))))
    four_calls(run, model, inputs())
    run.show("next", torch.rand(2))


@program()
def random_numbers_of_python_and_numpy(run: Run) -> None:
    def jitter(inner: Any, x: T) -> Any:
        if random.random() < 0.5:
            x = x.flip(0)
        return inner(x).relu() * random.uniform(1, 2), float(np.random.rand())

    four_calls(run, Body(jitter), inputs())
    run.show("next", random.random(), float(np.random.rand()))


@program()
def dropout_with_a_fixed_seed(run: Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Dropout(0.1), nn.Linear(6, 6), nn.AlphaDropout(0.2))
    for seed in (0, 1, 0, 1, 0):
        torch.manual_seed(seed)
        out = model(inputs())
        out.sum().backward()
        run.show(f"{seed}", out, model[0].weight.grad, torch.rand(1))
        model.zero_grad()


@program(comes_to=GRAPHS)
def a_generator_of_the_script(run: Run) -> None:
    generator = torch.Generator().manual_seed(3)

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            return self.inner(x).relu() + torch.rand(4, 6, generator=generator)

    four_calls(run, Draws(), inputs())
    run.show("next", torch.rand(1, generator=generator))


@program(comes_to=GRAPHS)
def seeds_set_inside(run: Run) -> None:
    def seeded(inner: Any, x: T) -> T:
        torch.manual_seed(5)
        return F.dropout(inner(x), 0.5)

    four_calls(run, Body(seeded), inputs())


@program(comes_to=EAGER)
def forked_generators(run: Run) -> None:
    def draw(inner: Any, x: T) -> T:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            noise = torch.randn(6)
        return inner(x).relu() + noise + torch.rand(6)

    four_calls(run, Body(draw), inputs())


@program()
def time_in_forward(run: Run) -> None:
    def timed(inner: Any, x: T) -> Any:
        began = time.perf_counter()
        y = inner(x).relu() * 2
        return y, time.perf_counter() >= began, time.time() > 1e9

    four_calls(run, Body(timed), inputs())


@program()
def frames_and_names(run: Run) -> None:
    def look(inner: Any, x: T) -> Any:
        return inner(x).relu() * 2, sys._getframe().f_code.co_name, type(inner).__name__, __name__

    four_calls(run, Body(look), inputs())


@program()
def files_written_in_forward(run: Run) -> None:
    path = run.folder / "log.txt"
    path.unlink(missing_ok=True)

    def write(x: T) -> None:
        with open(path, "a") as file:
            file.write(f"{x.shape[0]}\n")

    four_calls(run, Noisy(write), inputs())
    run.show("file", path.read_text())


@program()
def errors_behind_a_break(run: Run) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6)

        def forward(self, x: T) -> T:
            y = torch.rand(()) + self.first(x).relu() * 2.0
            print(len(y))  # breaks the graph
            return self.last(y if len(x) % 2 else y.mean(0, keepdim=True)).tanh()

    model = Counts()
    for rows in (3, 3, 4, 5, 4):  # a batch norm of one row raises: what came before it is done once
        x = torch.randn(rows, 6)
        if rows % 2:
            run.show("out", model(x))
        else:
            run.raises("out", model, x)
        run.show("buffers", *model.buffers())


# ---- functions and methods ------------------------------------------------------------------------------------------


@program()
def a_function_asked_for(run: Run) -> None:
    def gate(x: T, scale: float = 1.0, *, bias: T | None = None) -> T:
        y = torch.sigmoid(x) * scale
        return y if bias is None else y + bias

    fast = run.optimize(gate)
    for scale in (1.0, 1.0, 2.0, 1.0):
        x = inputs().requires_grad_()
        fast(x, scale, bias=torch.ones(6)).sum().backward()
        run.show("out", x.grad, fast(x), fast.__name__, str(inspect.signature(fast)))
    run.raises("missing", fast)


@program()
def a_function_that_trains(run: Run) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: T) -> T:
        optimizer.zero_grad()
        loss = model(x).tanh().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = run.optimize(train_step)
    for _ in range(5):
        run.show("loss", fast(inputs()), dict(model.named_parameters()))


@program()
def a_module_asked_for(run: Run) -> None:
    model = Body(lambda inner, x: inner(x).relu() * 2)
    fast = run.optimize(model)
    run.show("same", fast is model)
    for _ in range(4):
        out = fast(inputs())
        out.sum().backward()
        run.show("out", out, model.inner.weight.grad)


@program(comes_to=EAGER)
def forward_called_by_name(run: Run) -> None:
    model = Body(lambda inner, x: inner.forward(x).relu() * 2)
    for _ in range(4):
        run.show("out", model.forward(inputs()))


@program()
def static_and_class_methods(run: Run) -> None:
    class Helps(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        @staticmethod
        def gate(x: T) -> T:
            return x.sigmoid() * x

        @classmethod
        def scaled(cls, x: T) -> T:
            return x * cls.factor

        def forward(self, x: T) -> T:
            return self.scaled(self.gate(self.inner(x)))

    model = Helps()
    for factor in (2.0, 2.0, 3.0, 2.0):
        Helps.factor = factor
        run.show(f"{factor}", model(inputs()))
