"""Programs about shapes, strides, layouts and kinds of elements."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.programs_tensors import Body, four_steps, inputs
from tests.semantics.states import EAGER, GRAPHS, NOT_RELEASED, Run, program

T = torch.Tensor


# ---- shapes and layouts ---------------------------------------------------------------------------------------------


@program()
def shapes_that_change(run: Run) -> None:
    model = Body(lambda y, x: F.softmax(y, -1) * x.mean())
    for rows in (4, 4, 7, 2, 9, 7, 3, 1, 4):
        model.zero_grad()
        out = model(inputs(rows, 6))
        out.square().sum().backward()
        run.show(f"{rows} rows", out, [p.grad for p in model.parameters()])


@program()
def ranks_that_change(run: Run) -> None:
    model = Body(lambda y, x: F.layer_norm(y, (6,)) + 1)
    for sizes in ((4, 6), (4, 6), (2, 3, 6), (6,), (2, 3, 6), (1, 1, 2, 6)):
        out = model(inputs(*sizes))
        out.square().sum().backward()
        run.show(f"{sizes}", out)


@program()
def no_rows_at_all(run: Run) -> None:
    model = Body(lambda y, x: F.gelu(y) + 1)
    for rows in (4, 0, 3, 0, 1, 0):
        model.zero_grad()
        out = model(torch.ones(rows, 6))
        out.sum().backward()
        run.show(f"{rows} rows", out, [p.grad for p in model.parameters()])


@program()
def reductions_of_nothing(run: Run) -> None:
    class Reduces(nn.Module):
        def forward(self, x: T) -> Any:
            return x.sum(), x.mean(), x.prod(), (x * 2).exp().sum(0), x.logsumexp(0)

    model = Reduces()
    for rows in (3, 3, 0, 0, 1, 0):
        run.show(f"{rows} rows", model(torch.ones(rows, 2)))


@program(
    differs="torch prints what kernels in graphs warn of, where eager's kernels call Python's `warnings`",
    differs_in=NOT_RELEASED,  # it is back in eager at the call that warns
)
def warnings_of_kernels(run: Run) -> None:
    class Varies(nn.Module):
        def forward(self, x: T) -> T:
            return x.var() * 2

    model = Varies()
    for rows in (3, 3, 1, 1):
        run.show(f"{rows} rows", model(torch.ones(rows)))


@program()
def maximum_of_nothing(run: Run) -> None:
    class Largest(nn.Module):
        def forward(self, x: T) -> T:
            return (x * 2).amax(0) + 1

    model = Largest()
    for rows in (3, 3, 0, 3):
        run.raises(f"{rows} rows", model, torch.ones(rows, 2))


@program()
def one_element_and_none_at_all(run: Run) -> None:
    class Scalar(nn.Module):
        def forward(self, x: T) -> Any:
            y = x * 2 + 1
            return y.squeeze(), y.reshape(()), y.relu().sum()

    model = Scalar()
    for sizes in ((1,), (1, 1), (), (1,), ()):
        run.show(f"{sizes}", model(torch.full(sizes, 3.0)))


@program()
def broadcasts(run: Run) -> None:
    class Outer(nn.Module):
        def forward(self, a: T, b: T) -> T:
            return (a * b + a).sigmoid()

    model = Outer()
    for left, right in (((4, 1), (1, 6)), ((4, 1), (6,)), ((1, 1), (4, 6)), ((), (4, 6)), ((4, 6), (4, 6))):
        a, b = inputs(*left).requires_grad_(), inputs(*right).requires_grad_()
        model(a, b).sum().backward()
        run.show("grads", a.grad, b.grad)


@program()
def shapes_that_do_not_fit(run: Run) -> None:
    model = Body(lambda y, x: y.relu() + 1)
    for sizes in ((4, 6), (4, 6), (4, 5), (4, 6), (3, 7), (4, 6)):
        run.raises(f"{sizes}", model, torch.ones(sizes))


@program()
def strides_that_change(run: Run) -> None:
    model = Body(lambda y, x: (x * 2).relu() + y.mean())
    base = inputs(6, 8)
    for x in (base[:4, :6].contiguous(), base[:4, :6], base[:6, :4].t(), base[::2, ::2][:, :1].expand(3, 6), inputs()):
        out = model(x)
        out.sum().backward()
        run.show("out", out)


@program()
def expanded_inputs(run: Run) -> None:
    model = Body(lambda y, x: (x + y).exp())
    for _ in range(4):
        x = torch.ones(1, 6, requires_grad=True)
        out = model(x.expand(4, 6))
        out.sum().backward()
        run.show("out", out, x.grad)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x: T) -> T:
        return self.body(x) * 2.0


@program()
def images_row_by_row(run: Run) -> None:
    model = Picture()
    four_steps(run, model, inputs(2, 2, 4, 4))
    run.show("statistics", dict(model.named_buffers()))


@program()
def images_channels_last(run: Run) -> None:
    model = Picture().to(memory_format=torch.channels_last)
    x = inputs(2, 2, 4, 4).to(memory_format=torch.channels_last)
    four_steps(run, model, x)
    four_steps(run, model, x.contiguous())


@program()
def numpy_shares_memory(run: Run) -> None:
    model = Body(lambda y, x: (x * 2).cos())
    for _ in range(4):
        x = inputs()
        array = model(x).detach().numpy()
        array[0] = 5
        run.show("array", torch.from_numpy(array), array.strides)


# ---- kinds of elements ----------------------------------------------------------------------------------------------


@program()
def nan_and_inf(run: Run) -> None:
    model = Body(lambda y, x: (F.relu(x) * 2 + 1, F.softmax(x, -1), torch.maximum(x, y), x.clamp(-1, 1), x.sign() * 2))
    with torch.no_grad():
        model.inner.weight.copy_(torch.eye(6))
        model.inner.bias.zero_()
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 1, inf, -inf, 0.0, -0.0], [inf, inf, 1, 2, 3, 4], [-inf] * 6, [nan] * 6])
    for _ in range(4):
        run.show("out", model(x))


@program()
def nan_in_gradients(run: Run) -> None:
    model = Body(lambda y, x: torch.where(x > 0, x.sqrt() * y, y))
    for _ in range(4):
        x = inputs().requires_grad_()
        model(x).sum().backward()
        run.show("grads", x.grad, [p.grad for p in model.parameters()])


@program()
def integers_and_booleans(run: Run) -> None:
    class Counts(nn.Module):
        def forward(self, x: T, mask: T) -> Any:
            return (x * 3 + 1) // 2, x % 3, x / 2, x > 2, mask & (x < 3), ~mask, x << 1, mask.sum(), x.float().mean()

    model = Counts()
    for dtype in (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int16, torch.int64):
        run.show(f"{dtype}", model(torch.arange(6).to(dtype), torch.arange(6) % 2 == 0))


@program()
def promoted_dtypes(run: Run) -> None:
    class Mixes(nn.Module):
        def forward(self, a: T, b: T) -> Any:
            return a + b, a * 2.5, (a * b).sum(), torch.where(b > 1, a, b)

    model = Mixes()
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool)
    for a, b in zip(kinds, kinds[1:] + kinds[:1], strict=True):
        for _ in range(2):
            run.show(f"{a} {b}", model(torch.arange(4).to(a), torch.arange(4).to(b)))


@program()
def bfloat16(run: Run) -> None:
    four_steps(run, Body(lambda y, x: F.gelu(y) * x).bfloat16(), inputs().bfloat16())


@program()
def float16(run: Run) -> None:
    four_steps(run, Body(lambda y, x: F.softmax(y, -1) + x).half(), inputs().half())


@program()
def double(run: Run) -> None:
    four_steps(run, Body(lambda y, x: F.layer_norm(y, (6,)) + x).double(), inputs().double())


@program()
def dtype_that_changes(run: Run) -> None:
    model, x = Body(lambda y, x: F.silu(y) * 2), inputs()
    for dtype in (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32):
        out = model.to(dtype)(x.to(dtype))
        out.sum().backward()
        run.show(f"{dtype}", out, model.inner.weight.grad)
        model.zero_grad()


@program(comes_to=GRAPHS)
def complex_numbers(run: Run) -> None:
    def turn(y: T, x: T) -> T:
        z = torch.complex(y, x)
        return z * z.conj() + torch.fft.fft(z)

    four_steps(run, Body(turn))


@program()
def complex_inputs(run: Run) -> None:
    class Turns(nn.Module):
        def forward(self, z: T) -> Any:
            return z.conj(), z.abs() * 2 + 1, z * 1j, z.real, z.imag * 2

    model, z = Turns(), torch.complex(inputs(), inputs().flip(0))
    for _ in range(4):
        run.show("out", model(z))


@program()
def spectrum(run: Run) -> None:
    four_steps(run, Body(lambda y, x: torch.fft.rfft(y.tanh()).abs().log1p()))


@program(differs="the strides are those that torch's fake tensors have", differs_in=("tuned", "grouped"))
def a_norm_of_two_layouts(run: Run) -> None:
    """The sum of an image and of a turned sequence: with one image, its strides are not those of a fake tensor."""

    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8, 8)

        def forward(self, x: T) -> T:
            h = self.first(x)
            t = self.last(h.flatten(2).transpose(1, 2))
            return F.silu(self.norm(t.transpose(-1, -2).reshape(h.shape) + h))

    model = Encodes()
    for images in (1, 1, 2, 1):
        x = torch.linspace(-1, 1, images * 48).view(images, 3, 4, 4).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        run.show(f"{images}", out, x.grad)


@program(comes_to=EAGER)
def masks_that_are_written_to(run: Run) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.embedding = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: T, mask: T) -> T:
            h = self.inner(x)
            h[mask] = self.embedding.exp()
            return h.tanh() * 2

    model = Masks()
    for rows in (1, 2, 2, 3):
        out = model(inputs(), torch.arange(4) < rows)
        out.sum().backward()
        run.show(f"{rows}", out, model.embedding.grad)


@program()
def arrays_that_become_tensors(run: Run) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: T) -> T:
            mask = np.zeros((4, 6), dtype=bool)
            mask[np.arange(4), np.arange(4)] = True
            return self.inner(x).masked_fill(torch.tensor(mask), 0.5).tanh()

    four_steps(run, Drops())


@program(comes_to=EAGER)
def sparse_inputs(run: Run) -> None:
    class Weighs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 2))

        def forward(self, x: T) -> T:
            return torch.sparse.mm(x, self.weight.exp()).relu()

    model, x = Weighs(), torch.eye(6).to_sparse()
    for _ in range(4):
        model.zero_grad()
        out = model(x)
        out.sum().backward()
        run.show("out", out, model.weight.grad)


@program(comes_to=EAGER)
def sparse_gradients(run: Run) -> None:
    model = nn.Embedding(8, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.tensor([1, 2, 2])) * 2).tanh().sum().backward()
        run.show("grad", model.weight.grad)
        optimizer.step()
    run.show("weight", model.weight)


@program(comes_to=EAGER)
def nested_tensors(run: Run) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: T) -> T:
            return self.inner(x) * 2.0

    model = Scales()
    for layout in (torch.strided, torch.jagged, torch.jagged, torch.strided, torch.jagged, torch.jagged):
        x = torch.nested.nested_tensor([inputs(2, 4), inputs(3, 4)], layout=layout)
        run.show(f"{layout}", model(x))


@program(comes_to=EAGER)
def quantised_tensors(run: Run) -> None:
    class Opens(nn.Module):
        def forward(self, x: T) -> Any:
            return x.dequantize() * 2 + 1, x.int_repr()

    model = Opens()
    for _ in range(4):
        run.show("out", model(torch.quantize_per_tensor(inputs(), 0.1, 3, torch.quint8)))


class Named(torch.Tensor):
    """A subclass as people make them: plain, with a method more."""

    def doubled(self) -> Any:
        return self * 2


@program()
def subclasses(run: Run) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Any) -> Any:
            return (x * self.scale + 1).relu()

    model = Uses()
    for step in range(6):
        x = inputs()
        out = model(x.as_subclass(Named) if step % 2 else x)
        out.sum().backward()
        run.show("out", out)


class Units(torch.Tensor):
    """A subclass that says what is done with it."""

    said: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.said.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@program(comes_to=EAGER)
def subclasses_with_a_function_of_their_own(run: Run) -> None:
    class Uses(nn.Module):
        def forward(self, x: Any) -> Any:
            return (x * 2 + 1).relu()

    model = Uses()
    for _ in range(4):
        Units.said.clear()
        out = model(inputs().as_subclass(Units))
        said = list(Units.said)
        run.show("said", said, type(out).__name__)


@program()
def parameters_as_inputs(run: Run) -> None:
    class Adds(nn.Module):
        def forward(self, a: T, b: T) -> T:
            return (a * 2 + b).sin()

    model, p = Adds(), nn.Parameter(inputs())
    for _ in range(4):
        out = model(p, inputs())
        out.sum().backward()
        run.show("p", out, p.grad)


@program()
def zero_dim_tensors_and_numbers(run: Run) -> None:
    class Scales(nn.Module):
        def forward(self, x: T, by: Any) -> T:
            return x * by + 1

    model = Scales()
    for by in (2.0, torch.tensor(2.0), 3, torch.tensor(3), True, torch.tensor(2.0, dtype=torch.float64), 2.0):
        run.show("out", model(inputs(), by), model(torch.arange(3), by))


@program()
def tensors_made_inside(run: Run) -> None:
    def make(y: T, x: T) -> Any:
        return y + torch.arange(6), torch.ones(2) * 3, torch.tensor([1, 2]), torch.full((2,), 1.5).exp(), torch.eye(2)

    four_steps(run, Body(make))


@program()
def default_dtype_that_changes(run: Run) -> None:
    class Makes(nn.Module):
        def forward(self, n: T) -> Any:
            return torch.ones(3) * 2 + 1, n / 2, torch.tensor(1.5) * n.sum(), torch.zeros(2).exp()

    model, n = Makes(), torch.arange(3)
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        run.show(f"{dtype}", model(n))


@program()
def meta_tensors(run: Run) -> None:
    model = Body(lambda y, x: y.relu() + 1)
    for device in ("cpu", "cpu", "meta", "cpu"):
        out = model.to_empty(device=device) if device == "meta" else model
        run.show("device", str(out(torch.ones(4, 6, device=device)).device))
        if device == "meta":
            model = Body(lambda y, x: y.relu() + 1)
