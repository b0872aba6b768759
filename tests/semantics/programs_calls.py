"""Programs about calls: arguments of every kind, results, exceptions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.states import EAGER, GRAPHS, Run, program

T = torch.Tensor


class Body(nn.Module):
    """Whatever function of itself and the arguments the program is about, with a linear layer at hand."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.inner, *args, **kwargs)


def inputs() -> T:
    return torch.linspace(-1, 1, 24).view(4, 6)


def four_calls(run: Run, model: Any, *args: Any, **kwargs: Any) -> None:
    for k in range(4):
        run.show(f"{k}", model(*args, **kwargs))


# ---- arguments ------------------------------------------------------------------------------------------------------


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: T, mask: T | None = None, scale: float = 1.0, mode: str = "relu", flag: bool = False) -> T:
        y = self.inner(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, -1.0)
        y = y.relu() if mode == "relu" else y.tanh()
        return y.flip(0) if flag else y


@program(is_kept=True)
def a_mask_or_none(run: Run) -> None:
    model, mask = Optional(), inputs() > 0
    for given in (None, None, mask, None, ~mask, mask, None):
        run.show("out", model(inputs(), given))


@program()
def numbers_that_change(run: Run) -> None:
    model = Optional()
    for scale in (1.0, 1.0, 2.0, 0.5, 3.0, 1, True, 0.0, float("inf"), float("nan"), -0.0):
        run.show(f"{scale}", model(inputs(), scale=scale))


@program()
def numbers_made_of_numbers_that_change(run: Run) -> None:
    def blend(inner: Any, x: T, share: float) -> T:
        y = inner(x)
        return y.mul(share).add_(y.mean(), alpha=1.0 - share).clamp_(max=2.0 - share)

    model = Body(blend)
    for share in (0.8, 0.84, 0.88, 0.92, 1.5, 0.8, 0.3):
        x = inputs().requires_grad_()
        out = model(x, share)
        out.sum().backward()
        run.show(f"{share}", out, x.grad)


@program()
def numbers_that_come_first(run: Run) -> None:
    def sums(inner: Any, x: T) -> T:
        y = torch.add(0, inner(x))
        return torch.mul(3, torch.sub(1.5, y)) + torch.div(2.0, y.exp()) + torch.add(x.shape[0], y, alpha=2)

    four_calls(run, Body(sums), inputs())


@program()
def splits_into_one_part(run: Run) -> None:
    def parts(inner: Any, x: T) -> T:
        y = inner(x)
        (whole,) = y.split(6, dim=1)
        (row,) = y[:1].unbind(0)
        return (whole.exp() * 2 + row.sigmoid()).reshape(-1) + torch.cat(y.chunk(1)).tanh().reshape(-1)

    model = Body(parts)
    for _ in range(4):
        x = inputs().requires_grad_()
        out = model(x)
        out.sum().backward()
        run.show("out", out, x.grad)


@program(is_kept=True)
def ranks_that_change(run: Run) -> None:
    model = nn.Softplus()
    for shape in ((1,), (1, 1), (), (1,), (), (1, 1)):
        x = torch.full(shape, 0.5, requires_grad=True)
        out = model(x)
        (out * 2).sum().backward()
        run.show(f"{shape}", out, x.grad)


@program()
def texts_and_flags_that_change(run: Run) -> None:
    model = Optional()
    for mode, flag in (("relu", False), ("relu", True), ("tanh", True), ("relu", False), ("tanh", False)):
        run.show(f"{mode} {flag}", model(inputs(), mode=mode, flag=flag))


@program()
def integers_that_change(run: Run) -> None:
    model = Body(lambda inner, x, k, dim=0: inner(x).roll(k, dim) * k + k // 2)
    for k in (0, 1, 2, 3, -1, 2, 10**6):
        run.show(f"{k}", model(inputs(), k))
    run.show("dim", model(inputs(), 1, dim=1))


@program()
def places_and_names_of_arguments(run: Run) -> None:
    model = Optional()
    for _ in range(3):
        run.show("out", model(inputs(), None, 2.0), model(x=inputs(), scale=2.0), model(mask=None, x=inputs()))
    run.raises("missing", model)
    run.raises("unknown", model, inputs(), other=1)
    run.raises("too many", model, inputs(), None, 1.0, "relu", False, 5)
    run.raises("twice", model, inputs(), x=inputs())


@program()
def stars(run: Run) -> None:
    model = Body(lambda inner, first, *rest, last=None, **named: (inner(first) + sum(rest)).tanh() * len(named))
    for extra in (0, 0, 1, 2, 0, 3):
        run.show(f"{extra}", model(inputs(), *[torch.ones(6)] * extra, **{f"n{k}": k for k in range(extra + 1)}))


@program()
def default_that_is_mutable(run: Run) -> None:
    class Collects(nn.Module):
        def forward(self, x: T, kept: list[T] = []) -> T:  # noqa: B006
            kept.append(x.sum())
            return (x * len(kept)).sin() + 1

    four_calls(run, Collects(), inputs())
    run.show("kept", len(Collects.forward.__defaults__[0]))


@program(comes_to=GRAPHS)
def lists_and_dicts_of_tensors(run: Run) -> None:
    model = Body(lambda inner, batch: {k: inner(v).relu() for k, v in batch["x"].items()} | {"n": len(batch["rest"])})
    for k in (2, 2, 3, 1, 2):
        run.show("out", model({"x": {str(i): inputs() + i for i in range(k)}, "rest": [torch.ones(1)] * k}))


@program()
def arguments_that_are_changed(run: Run) -> None:
    def change(inner: Any, batch: dict[str, Any], seen: list[Any]) -> T:
        batch["y"] = inner(batch.pop("x")).relu() * 2
        seen.append(batch["y"].shape[0])
        return batch["y"].sum()

    model, seen = Body(change), []
    for _ in range(4):
        batch = {"x": inputs(), "other": 1}
        run.show("out", model(batch, seen), batch, seen)


@dataclasses.dataclass
class Batch:
    x: T
    weight: float = 1.0
    names: tuple[str, ...] = ("a",)


Point = namedtuple("Point", "x y")


class Output(NamedTuple):
    logits: T
    hidden: T | None = None


@dataclasses.dataclass
class Result:
    logits: T
    loss: T | None = None


@program()
def dataclasses_given_and_returned(run: Run) -> None:
    def call(inner: Any, batch: Batch) -> Result:
        logits = inner(batch.x).tanh() * batch.weight
        return Result(logits, logits.square().mean() if batch.weight > 1 else None)

    model = Body(call)
    for weight in (1.0, 2.0, 2.0, 1.0, 3.0):
        found = model(Batch(inputs(), weight))
        run.show(f"{weight}", found, type(found) is Result)


@program()
def namedtuples_given_and_returned(run: Run) -> None:
    model = Body(lambda inner, p: (Point(inner(p.x).relu(), p.y * 2), Output(p.x + p.y)))
    four_calls(run, model, Point(inputs(), inputs()))


@program(comes_to=GRAPHS)
def ordered_dicts_and_odd_keys(run: Run) -> None:
    model = Body(lambda inner, x: OrderedDict([("b", inner(x).relu()), ("a", x * 2), (3, None), ((1, 2), x.sum())]))
    four_calls(run, model, inputs())


class Mapping(OrderedDict):
    """As the results of Hugging Face's models: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@program()
def results_of_a_class_of_the_script(run: Run) -> None:
    model = Body(lambda inner, x: Mapping(logits=inner(x).tanh(), sums=x.sum(0) * 2))
    for _ in range(4):
        found = model(inputs())
        found.logits.sum().backward()
        run.show("found", type(found).__name__, dict(found), found.sums)


class Holder:
    def __init__(self, x: T) -> None:
        self.x = x
        self.out: T | None = None


@program()
def objects_that_are_filled(run: Run) -> None:
    def fill(inner: Any, holder: Holder) -> Holder:
        holder.out = inner(holder.x).relu() + 1
        return holder

    model = Body(fill)
    for _ in range(4):
        holder = Holder(inputs())
        run.show("holder", model(holder) is holder, holder.out)


@program()
def numpy_arguments(run: Run) -> None:
    model = Body(lambda inner, a: (inner(torch.from_numpy(a)).tanh() * 2, a.sum(), a.shape))
    for k in range(4):
        run.show(f"{k}", model(np.full((4, 6), k / 7, dtype=np.float32)))


@program(differs="a scalar that numpy computes inside of a captured forward is an array without dims")
def numpy_inside(run: Run) -> None:
    model = Body(lambda inner, x: (inner(x).relu() / np.sqrt(6), x.numpy().sum()))
    four_calls(run, model, inputs())


@program()
def numpy_numbers(run: Run) -> None:
    model = Body(lambda inner, x: (inner(x).relu() / np.sqrt(x.shape[1])).view(-1, np.prod(x.shape[1:])) * 2)
    for rows in (4, 4, 3, 2, 4):
        run.show(f"{rows}", model(inputs()[:rows]))


@program()
def sets_bytes_enums_and_types(run: Run) -> None:
    model = Body(lambda inner, x, s, b, kind, dtype: (inner(x).to(dtype) * len(s), b + b"!", kind(3), s | {9}))
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float16):
        run.show(f"{dtype}", model(inputs(), {1, 2}, b"ab", float, dtype))


@program()
def functions_as_arguments(run: Run) -> None:
    model = Body(lambda inner, x, f: f(inner(x)) * 2)
    for f in (torch.relu, torch.relu, torch.tanh, lambda t: t + 1, functools.partial(torch.clamp, min=0), torch.relu):
        run.show("out", model(inputs(), f))


@program()
def modules_as_arguments(run: Run) -> None:
    model, heads = (
        Body(lambda inner, x, head: head(inner(x).relu())),
        [nn.Linear(6, 2), nn.Linear(6, 3), nn.Linear(6, 2)],
    )
    for k in (0, 0, 1, 2, 0):
        model(inputs(), heads[k]).sum().backward()
        run.show("grads", heads[k].weight.grad, model.inner.weight.grad)


# ---- what comes back ------------------------------------------------------------------------------------------------


@program(comes_to=GRAPHS)
def everything_but_tensors(run: Run) -> None:
    model = Body(lambda inner, x: (inner(x).relu(), None, 1, 2.5, "text", [x + 1, (x,)], x.shape, x.dtype, {}, True))
    four_calls(run, model, inputs())


@program(comes_to=GRAPHS)
def nothing_comes_back(run: Run) -> None:
    kept: list[T] = []
    model = Body(lambda inner, x: kept.append(inner(x).detach()))
    four_calls(run, model, inputs())
    run.show("kept", kept)


@program()
def generator_from_forward(run: Run) -> None:
    def layers(inner: Any, x: T) -> Iterator[T]:
        for _ in range(3):
            x = inner(x).tanh()
            yield x

    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> Any:
            return layers(self.inner, x)

    model = Yields()
    for _ in range(4):
        outs = list(model(inputs()))
        outs[-1].sum().backward()
        run.show("outs", outs, model.inner.weight.grad)


@program(comes_to=GRAPHS, differs="a generator that a captured forward returns has been run to its end")
def generator_that_is_stopped(run: Run) -> None:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> Any:
            return (self.inner(x) * k for k in range(3))

    model = Yields()
    for _ in range(4):
        found = model(inputs())
        run.show("first", next(found), type(found).__name__)


@program()
def forward_is_a_generator(run: Run) -> None:
    class Yields(nn.Module):
        def forward(self, x: T) -> Iterator[T]:
            for k in range(3):
                x = x * 2 + k
                yield x

    model = Yields()
    for _ in range(4):
        run.show("outs", list(model(inputs())))


@program()
def generators_inside(run: Run) -> None:
    model = Body(lambda inner, x: torch.stack([t.relu() for t in (inner(x) * k for k in range(3))]).sum(0))
    four_calls(run, model, inputs())


@program(comes_to=GRAPHS)
def closures_come_back(run: Run) -> None:
    model = Body(lambda inner, x: lambda scale, y=None: inner(x).relu() * scale)
    for k in range(4):
        run.show(f"{k}", model(inputs())(k))


# ---- exceptions -----------------------------------------------------------------------------------------------------


class Refused(ValueError):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


@program(comes_to=GRAPHS)
def exceptions_of_the_script(run: Run) -> None:
    def check(inner: Any, x: T, limit: int) -> T:
        if x.shape[0] > limit:
            raise Refused(f"more than {limit} rows", limit)
        return inner(x).relu()

    model = Body(check)
    for limit in (9, 9, 3, 9, 2):
        try:
            run.show("out", model(inputs(), limit))
        except Refused as error:
            run.show("refused", str(error), error.code, error.__traceback__ is not None)


@program()
def mistakes_of_the_script(run: Run) -> None:
    def divide(inner: Any, x: T, by: Any) -> T:
        return inner(x).relu() / by

    model = Body(divide)
    for by in (2, 2, None, 2, "2", 2):
        run.raises(f"{by}", model, inputs(), by)
        run.show("out", model(inputs(), 2))


@program(comes_to=EAGER if torch.__version__ < (2, 14) else GRAPHS)  # a newer Dynamo traces the handler
def exceptions_caught_inside(run: Run) -> None:
    def careful(inner: Any, x: T) -> T:
        try:
            return inner(x[:, :5])
        except RuntimeError:
            return inner(x).tanh() * 2

    four_calls(run, Body(careful), inputs())


@program(comes_to=EAGER)
def exceptions_with_a_cause(run: Run) -> None:
    def wrap(inner: Any, x: T) -> T:
        try:
            return inner(x) + {}["missing"]
        except KeyError as error:
            raise LookupError("no such thing") from error

    model = Body(wrap)
    for _ in range(4):
        run.raises("call", model, inputs())


@program()
def finally_and_context_managers(run: Run) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        said.append(f"enter {name}")
        try:
            yield
        finally:
            said.append(f"leave {name}")

    def body(inner: Any, x: T, bad: bool) -> T:
        with noted("outer"):
            try:
                y = inner(x).relu()
                if bad:
                    raise RuntimeError("bad")
                return y * 2
            finally:
                said.append("finally")

    model = Body(body)
    for bad in (False, False, True, False):
        run.raises("call", model, inputs(), bad)
        run.show("said", list(said))
        said.clear()


@program(comes_to=GRAPHS)
def assertions(run: Run) -> None:
    def check(inner: Any, x: T) -> T:
        assert x.shape[1] == 6, f"expected 6 columns, found {x.shape[1]}"
        assert x.dim() == 2
        return inner(x).relu()

    model = Body(check)
    for sizes in ((4, 6), (4, 6), (4, 5), (2, 4, 6), (4, 6)):
        run.raises(f"{sizes}", model, torch.ones(sizes))


@program(comes_to=GRAPHS)
def stop_iteration_and_keyboard_interrupt(run: Run) -> None:
    def stop(inner: Any, x: T, how: str) -> T:
        y = inner(x).relu()
        if how == "stop":
            next(iter(()))
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "exit":
            sys.exit(3)
        return y

    model = Body(stop)
    for how in ("", "", "stop", "interrupt", "exit", ""):
        try:
            run.show("out", model(inputs(), how))
        except BaseException as error:
            run.show(how, error)


@program()
def torch_errors(run: Run) -> None:
    model = nn.Sequential(nn.Embedding(5, 6), nn.Tanh())
    for token in (1, 1, 7, -1, 4):
        run.raises(f"{token}", model, torch.tensor([token]))
    loss = Body(lambda inner, x, t: F.cross_entropy(inner(x), t))
    for target in (1, 1, 9, 2):
        run.raises(f"target {target}", loss, inputs(), torch.full((4,), target))
    run.raises("kind", loss, inputs(), torch.ones(4, dtype=torch.int32))
    run.raises("no tensor", model, "text")


@program(comes_to=EAGER)
def recursion_that_does_not_end(run: Run) -> None:
    class Endless(nn.Module):
        def forward(self, x: T) -> T:
            return self(x + 1)

    model = Endless()
    for _ in range(3):
        try:
            model(inputs())
        except RecursionError as error:
            run.show("error", type(error).__name__)
    run.show("limit", sys.getrecursionlimit())
