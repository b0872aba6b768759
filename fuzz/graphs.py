"""Random graphs of a few operations, as text: a strategy of hypothesis.

In: a draw. Out: a `Program`, a function of tensors as the lines of Python that a person would write, with the sizes,
dtypes and layouts of its inputs. Each line is tried while it is drawn, so a program runs in eager. Guarantee: equal
draws give equal programs.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from autofuse.ir.optable import OPS, OpKind

T = torch.Tensor
MOST_ELEMENTS = 5000
_SIGNS = ("aten.signbit.default", "aten.copysign.Tensor", "aten.copysign.Scalar")  # of NaN, nothing is promised
_SERIES = 60  # operations an element, from which a small error of an argument is a large one of the result
NAMESPACE: Mapping[str, Any] = {"torch": torch, "F": F, "aten": torch.ops.aten}


class Row(NamedTuple):
    """An operation of the strategy: on tensors of which kinds, of how many dims, and its text."""

    kinds: str  # of the first tensor: f float, i integer, b bool
    dims: int  # that it has at least
    text: str  # {a}, {b}, {c}: tensors; {k}: an index tensor; {d}, {e}: dims of a; {n}: a small number; {x}: a factor


def _rows(kinds: str, dims: int, texts: str) -> list[Row]:
    return [Row(kinds, dims, text.strip()) for text in texts.split(";")]


POINTWISE = [
    *_rows("f", 0, """
        torch.tanh({a}); torch.sigmoid({a}); torch.relu({a}); torch.sin({a}); torch.erf({a}); torch.exp({a}); -{a};
        torch.square({a}); torch.floor({a}); torch.sign({a}); F.gelu({a}); F.silu({a}); F.softplus({a}); F.elu({a});
        F.hardswish({a}); F.leaky_relu({a}); {a}.abs().sqrt(); torch.log1p({a}.abs()); torch.rsqrt({a}.abs() + 1);
        {a}.clamp(-0.5, {x}); {a}.masked_fill({a} > 0, {x}); torch.nan_to_num({a}); {a} ** 2; {a} ** 3; {a} / {x};
        {a}.double(); {a}.bfloat16(); {a}.half(); {a}.isnan(); {a} > 0;
        {a}.nan_to_num(0, 9, -9).clamp(-99, 99).long(); {a}.nan_to_num(0, 9, -9).clamp(-99, 99).int();
        torch.addcmul({a}, {b}, {c}, value={x}); torch.lerp({a}, {b}, {x}); torch.atan2({a}, {b}); {a} - {b};
        torch.fmod({a}, {b}.abs() + 1); torch.hypot({a}, {b}); torch.xlogy({a}, {b}.abs())"""),
    *_rows("fib", 0, """
        {a} + {b}; {a} * {b}; {a} == {b}; {a} < {b}; torch.where({a} > 0, {b}, {c}); {a} + {n}; {a} * {x}; {x} - {a};
        torch.logical_and({a}, {b}); {a}.logical_not(); {a} != 0; torch.where({a} != 0, {b}, {x}); {a}.float();
        {a}.bool(); {a}.clone(); torch.zeros_like({a}); torch.full_like({a}, {n}); torch.maximum({a}, {b});
        torch.minimum({a}, {b})"""),
    *_rows("fi", 0, "{a} - {b}; {a}.clamp(min={n}); {a}.abs(); {a} / ({b}.abs() + 1); -{a}; {a} % 3"),
    *_rows("ib", 0, "{a} & {b}; {a} | {b}; {a} ^ {b}; ~{a}"),
    *_rows("i", 0, "{a} // 3; torch.div({a}, 3, rounding_mode='trunc'); {a} >> 1; {a} << 2"),
]  # fmt: skip
VIEWS = [
    *_rows("fib", 1, """
        {a}.transpose({d}, {e}); {a}.unsqueeze({d}); {a}.squeeze({d}); {a}.reshape(-1); {a}[1:]; {a}[::2]; {a}[:-1];
        {a}[..., 1:]; {a}[..., ::2]; {a}[..., :-1]; {a}.select({d}, 0); {a}.select({d}, -1); {a}.narrow({d}, 1, 1);
        {a}.chunk(2, {d})[0]; {a}.chunk(2, {d})[-1]; {a}.unbind({d})[0]; {a}.split(2, {d})[-1]; {a}.detach();
        {a}.unflatten({d}, (-1, 2)); {a}.unflatten({d}, (2, -1)); {a}.unsqueeze(0).expand({every});
        {a}.expand_as({b}); {a}.unfold({d}, 2, 1); {a}.unfold({d}, 2, 2); {a}.movedim({d}, {e});
        {a}.view({a}.shape)"""),
    *_rows("fib", 2, "{a}.t(); {a}.flatten(0, 1); {a}.diagonal(); {a}.flatten({d}, -1); {a}[:, 1:]; {a}.mT"),
]  # fmt: skip
MOVES = _rows("fib", 1, """
    torch.cat([{a}, {b}], {d}); torch.cat([{a}, {b}, {c}], {d}); torch.cat([{a}, {a}], {d});
    torch.stack([{a}, {b}], {d});
    {a}.flip({d}); {a}.roll(1, {d}); F.pad({a}, (1, 2)); F.pad({a}, (-1, 1)); {a}.repeat_interleave(2, {d});
    {a}.contiguous(); {a}.index_select({d}, {k}); {a}[{k}]; {a}[..., {k}]; torch.tril({a}); torch.triu({a}, 1);
    torch.arange({a}.shape[{d}]); {a}.slice_scatter({b}, {d}, 1); {a}.select_scatter({b}, {d}, 0);
    {a}.index_add({d}, {k}, {b}); {a}.index_fill({d}, {k}, {n}); {a}.index_copy({d}, {k}, {b}); {a}.tile(2)""",
)  # fmt: skip
REDUCTIONS = [
    *_rows("fib", 1, """
        {a}.sum({d}); {a}.sum({d}, keepdim=True); {a}.sum(); {a}.amax({d}); {a}.amin({d}, keepdim=True); {a}.any({d});
        {a}.all(); {a}.argmax({d}); {a}.max({d})[0]; {a}.max({d})[1]; {a}.cumsum({d}); {a}.max(); {a}.prod({d});
        {a}.count_nonzero({d}); torch.cummax({a}, {d})[0]"""),
    *_rows("f", 1, """
        {a}.mean({d}); {a}.mean(); {a}.mean({d}, keepdim=True); torch.softmax({a}, {d}); torch.log_softmax({a}, {d});
        {a}.norm(); {a}.logsumexp({d}); {a}.var({d}); {a}.std({d}, keepdim=True); torch.var_mean({a}, {d})[0];
        F.layer_norm({a}, {a}.shape[-1:]); F.normalize({a}, dim={d}); F.mse_loss({a}, {b}); F.glu({a}, {d});
        torch.linalg.vector_norm({a}, dim={d})"""),
]  # fmt: skip
PRODUCTS = [
    *_rows("f", 2, """
        {a} @ {b}; {a} @ {b}.mT; {a}.mT @ {b}; F.linear({a}, {b}); F.relu(F.linear({a}, {b})); F.gelu({a} @ {b}.mT);
        torch.softmax({a} @ {b}.mT * {x}, -1) @ {b}; F.silu({a} @ {a}.mT) * {x}; torch.matmul({a}, {b}.mT) + {x};
        F.layer_norm({a} @ {a}.mT, ({a}.shape[-2],)); torch.einsum('...ij,...kj->...ik', {a}, {b});
        ({a}.mT @ {b}).sum(-1); F.scaled_dot_product_attention({a}, {b}, {b}); torch.tanh({a} @ {b}.mT)[..., 1:]"""),
    *_rows("f", 3, "torch.bmm({a}, {b}.mT); F.relu(F.conv1d({a}, {b}, padding={n})); torch.baddbmm({c}, {a}, {b}.mT)"),
]  # fmt: skip
IMAGES = _rows("f", 4, """
    F.conv2d({a}, {b}[..., :2, :3]); F.conv2d({a}, {b}[..., :3, :3].contiguous(), padding={n});
    F.relu(F.conv2d({a}, {b}[..., :3, :2], {b}[:, 0, 0, 0], stride=2, padding=1));
    F.silu(F.conv2d({a}, {b}[..., :2, :2], dilation=2, padding={n})) * {x}; F.conv2d({a}, {a}[..., :1, :1]) + {x};
    F.conv2d({a}, {b}[..., :3, :3], stride=(1, 3), padding=(2, {n})); F.max_pool2d({a}, 2); F.avg_pool2d({a}, 3, 2, 1);
    F.conv_transpose2d({a}, {b}[: {a}.shape[1], :, :2, :2], stride=2); F.conv2d({a}, {b}[:, :1, :2, :2], groups={n});
    F.group_norm({a}, 2); F.batch_norm({a}, None, None, training=True); F.interpolate({a}, scale_factor=2);
    F.adaptive_avg_pool2d({a}, 2); {a}.contiguous(memory_format=torch.channels_last); F.pixel_shuffle({a}, 2);
    F.interpolate({a}, scale_factor=1.5, mode='bilinear'); F.max_pool2d({a}, 3, {n}, 1) + {x}"""
)  # fmt: skip
WRITES = [
    *_rows("fib", 0, """
        {a}.add_({b}); {a}.mul_({b}); {a}.copy_({b}); {a}.fill_({n}); {a}.zero_(); {a}.masked_fill_({b} > 0, {n})"""),
    *_rows("f", 0, "{a}.relu_(); {a}.tanh_(); {a}.sub_({x}); {a}.div_({x}); {a}.clamp_(-0.5, 0.75); {a}.neg_()"),
    *_rows("fib", 1, """
        {a}[1:].add_({n}); {a}[..., 1:].mul_({b}); {a}.select({d}, 0).copy_({b}); {a}.transpose({d}, {e}).add_({b});
        {a}[::2].zero_(); {a}.flatten().add_({n}); {a}.index_add_({d}, {k}, {b}); {a}[1:].copy_({a}[:-1].clone());
        {a}.select({d}, -1).add_({a}.select({d}, 0)); {a}.diagonal().fill_({n}); {a}.index_fill_({d}, {k}, {n});
        {a}.view(-1)[1:].add_({n})"""),
]  # fmt: skip


def _of_table() -> Iterator[Row]:
    """Each element-wise operator of our own table that takes tensors and numbers alone; no long series."""
    for target, facts in OPS.items():
        # A gradient has its tensor's dtype.
        is_left_out = facts.flops >= _SERIES or "backward" in target or target in _SIGNS
        if facts.kind is not OpKind.POINTWISE or is_left_out or not target.startswith("aten."):
            continue
        packet, overload = target.removeprefix("aten.").split(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        wanted = [str(a.type) for a in found._schema.arguments if not a.has_default_value()] if found else []
        tensors = iter("abc")
        args = [f"{{{next(tensors, '?')}}}" if name == "Tensor" else "{x}" for name in wanted]
        if wanted and {"Tensor", "number", "float"} >= set(wanted) and "{?}" not in args:
            yield Row("fib", 0, f"{target}({', '.join(args)})")


STEPS = (POINTWISE, VIEWS, MOVES, REDUCTIONS, WRITES, PRODUCTS, list(_of_table()))
OF_IMAGES = (IMAGES, IMAGES, POINTWISE, REDUCTIONS)  # what programs that begin with an image are made of
# A view that changes nothing, of any tensor.
IDLE = ("{a}.unsqueeze(0).squeeze(0)", "{a}.unsqueeze(-1).squeeze(-1)", "{a}.view({a}.shape)", "{a}.expand({a}.shape)")
_WRITE = re.compile(r"_\(")

# Each gives a tensor of the wanted sizes from `_fresh`, which has memory of its own.
LAYOUTS: Mapping[str, Callable[[tuple[int, ...], Callable[[tuple[int, ...]], T]], T]] = {
    "contiguous": lambda sizes, fresh: fresh(sizes),
    "transposed": lambda sizes, fresh: fresh(sizes[::-1]).permute(tuple(range(len(sizes)))[::-1]),
    "every second": lambda sizes, fresh: fresh((*sizes[:-1], 2 * sizes[-1]))[..., ::2] if sizes else fresh(sizes),
    "offset": lambda sizes, fresh: fresh((*sizes[:-1], sizes[-1] + 1))[..., 1:] if sizes else fresh(sizes),
    "expanded": lambda sizes, fresh: fresh((1, *sizes[1:])).expand(sizes) if sizes else fresh(sizes),
    "channels last": lambda sizes, fresh: fresh((sizes[0], *sizes[2:], sizes[1])).movedim(-1, 1),
}
SPREAD = ("every second", "offset")  # with strides that do not follow from the sizes
# In the memory of the first input, where it has room: from its first element on, or up to its last one.
INSIDE = ("first of i0", "last of i0")
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "index")


@dataclass(frozen=True)
class Input:
    """A tensor that a program is given."""

    sizes: tuple[int, ...]
    dtype: str  # "index": int64, 0 or 1
    layout: str

    def make(self, generator: torch.Generator, larger: int = 0) -> T:
        """Random values; each size of 2 and more is ``larger`` by so much."""
        sizes = tuple(size + larger if size > 1 else size for size in self.sizes)

        def fresh(sizes: tuple[int, ...]) -> T:
            if self.dtype in ("index", "bool"):
                return torch.randint(0, 2, sizes, generator=generator).to(self.torch_dtype)
            if not self.torch_dtype.is_floating_point:
                low = 0 if self.dtype == "uint8" else -20
                return torch.randint(low, 20, sizes, generator=generator).to(self.torch_dtype)
            return torch.randn(sizes, generator=generator, dtype=torch.float64).to(self.torch_dtype)

        return LAYOUTS.get(self.layout, LAYOUTS["contiguous"])(sizes, fresh)

    def inside(self, first: T, larger: int = 0) -> T | None:
        """A view of the first input; None where that has no room for it, or where it is a tensor of its own."""
        sizes = tuple(size + larger if size > 1 else size for size in self.sizes)
        count = math.prod(sizes)
        if self.layout not in INSIDE or count > first.numel() or not first.is_contiguous():
            return None
        begin = 0 if self.layout == INSIDE[0] else first.numel() - count
        return first.detach().view(-1)[begin : begin + count].view(sizes)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = torch.int64 if self.dtype == "index" else getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class Program:
    """A function of tensors, and what it is run on."""

    inputs: tuple[Input, ...]  # i0, i1, ...
    lines: tuple[str, ...]  # "v0 = i0 + i1"
    outputs: tuple[str, ...]
    is_dynamic: bool  # sizes of 2 and more are symbols
    trains: bool  # inputs of floats require gradients
    seed: int  # of the inputs, and of what is drawn while it is checked

    @property
    def needs_dynamo(self) -> bool:
        """Whether strides are symbols of their own, which only Dynamo makes inputs of a graph."""
        return self.is_dynamic and any(item.layout in SPREAD for item in self.inputs)

    @functools.cached_property
    def function(self) -> Callable[..., tuple[T, ...]]:
        namespace = dict(NAMESPACE)
        exec(self.text, namespace)
        found: Callable[..., tuple[T, ...]] = namespace["function"]
        return found

    @property
    def text(self) -> str:
        names = ", ".join(f"i{n}" for n in range(len(self.inputs)))
        body = [*self.lines, f"return ({', '.join(self.outputs)},)"]
        return f"def function({names}):\n" + "".join(f"    {line}\n" for line in body)

    def __str__(self) -> str:
        given = [f"i{n}: {i.dtype}{list(i.sizes)} {i.layout}" for n, i in enumerate(self.inputs)]
        facts = f"dynamic={self.is_dynamic} trains={self.trains} seed={self.seed}"
        return f"# {'; '.join(given)}; {facts}\n{self.text}"

    def make_inputs(self, larger: int = 0, wide: bool = False) -> list[T]:
        """Equal arguments give equal values. ``wide``: floats as float64."""
        generator = torch.Generator().manual_seed(self.seed)
        made = [item.make(generator, larger) for item in self.inputs]
        found: list[T] = []
        for item, own in zip(self.inputs, made, strict=True):
            t = _widened(own) if wide and own.is_floating_point() else own
            view = item.inside(found[0], larger) if found else None
            t = view if view is not None and view.dtype is t.dtype else t
            found.append(t.requires_grad_(self.trains and t.is_floating_point()))
        return found

    def with_idle_view(self) -> Program:
        """The same after a view that changes nothing."""
        rng = random.Random(self.seed)
        at = rng.randrange(len(self.lines))
        name = rng.choice([f"i{n}" for n in range(len(self.inputs))] + [f"v{n}" for n in range(at)])
        view = f"w = {rng.choice(IDLE).format(a=name)}"
        reads = [re.sub(rf"\b{name}\b", "w", line) for line in self.lines[at:]]
        return replace(self, lines=(*self.lines[:at], view, *reads))

    def in_another_order(self) -> Program:
        """The lines in another order, as far as each still follows what it reads; itself where one writes."""
        if any(map(_WRITE.search, self.lines)):
            return self
        rng, left, made = random.Random(self.seed), list(self.lines), list[str]()
        while left:
            ready = [line for line in left if not _reads(line) & {_name(other) for other in left}]
            made.append(rng.choice(ready))
            left.remove(made[-1])
        return replace(self, lines=tuple(made))


def _name(line: str) -> str:
    return line.partition(" = ")[0]


def _reads(line: str) -> set[str]:
    return set(re.findall(r"\bv\d+\b", line.partition(" = ")[2]))


def _widened(t: T) -> T:
    """The tensor as float64, with its strides: elements that share memory still do."""
    strides, sizes = t.stride(), t.shape
    wide = torch.empty_strided(sizes, strides, dtype=torch.float64)
    at = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    wide[at] = t.detach()[at].double()
    return wide


# ---- the strategy ------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn, steps: tuple[int, int] = (3, 15), tables: Sequence[Sequence[Row]] = STEPS) -> Program:
    """A program of so many steps, as far as eager takes them."""
    dims = draw(st.lists(st.sampled_from((2, 3, 4, 5, 6, 8, 17, 33)), min_size=1, max_size=3))
    is_dynamic, trains = draw(st.integers(0, 2)) == 2, draw(st.integers(0, 3)) == 3
    first = tables
    if len(dims) > 2 and draw(st.booleans()):
        like, first, tables = _images(dims), (IMAGES,), OF_IMAGES
    elif len(dims) > 1 and draw(st.booleans()):
        like, first = _matrices(dims), (PRODUCTS,)
    else:
        like = _inputs(dims, is_dynamic)
    inputs = tuple(draw(like) for _ in range(draw(st.integers(1, 3))))
    program = Program(inputs, (), (), is_dynamic, trains, draw(st.integers(0, 1 << 16)))
    values = {f"i{n}": t for n, t in enumerate(program.make_inputs())}
    lines: list[str] = []
    for _ in range(draw(st.integers(*steps))):
        line = draw(_lines(values, tables if lines else first, f"v{len(lines)}"))
        found = _tried(line, values)
        if found is not None:
            values[f"v{len(lines)}"] = found
            lines.append(line)
    if not lines:
        lines.append("v0 = i0 + 1")
    read = set().union(*map(_reads, lines))
    others = [name for name in map(_name, lines) if name not in read or draw(st.integers(0, 7)) == 7]
    return replace(program, lines=tuple(lines), outputs=tuple(others))


def _inputs(dims: Sequence[int], is_dynamic: bool) -> st.SearchStrategy[Input]:
    """Tensors that can be broadcast with each other: the last ones of these sizes, or 1.

    Where sizes are symbols, few have strides that are: Dynamo makes inputs of the graph of these, and takes its time.
    """
    few = is_dynamic and random.Random(str(dims)).randrange(4) > 0
    layouts = [name for name in LAYOUTS if (not few or name not in SPREAD) and name != "channels last"]
    layouts += INSIDE

    @st.composite
    def one(draw: st.DrawFn) -> Input:
        dtype = draw(st.sampled_from(DTYPES))
        if dtype == "index":
            return Input((draw(st.sampled_from((2, 3))),), dtype, "contiguous")
        rank = draw(st.integers(0 if len(dims) < 3 else 1, len(dims)))
        sizes = tuple(1 if draw(st.integers(0, 5)) == 5 else size for size in dims[len(dims) - rank :])
        return Input(sizes, dtype, draw(st.sampled_from(("contiguous", *layouts))))

    return one()


def _matrices(dims: Sequence[int]) -> st.SearchStrategy[Input]:
    """Tensors of floats that can be multiplied with each other, or with each other's transposes."""
    sizes, square = tuple(dims), (*dims[:-1], dims[-2])
    dtypes, layouts = ("float32", "float32", "float64", "bfloat16"), ("contiguous", "contiguous", "transposed")
    return st.builds(Input, st.sampled_from((sizes, sizes, square)), st.sampled_from(dtypes), st.sampled_from(layouts))


def _images(dims: Sequence[int]) -> st.SearchStrategy[Input]:
    """Images that convolve each other: weights are windows of one. Enough channels for generated convolutions."""
    channels, height, width = 2 + dims[0], dims[1], dims[2]
    sizes = st.tuples(st.sampled_from((1, 2, 5)), st.just(channels), st.just(height), st.just(width))
    layouts = ("contiguous", "contiguous", "channels last", "offset")
    return st.builds(Input, sizes, st.sampled_from(("float32", "float32", "float64")), st.sampled_from(layouts))


@st.composite
def _lines(draw: st.DrawFn, values: Mapping[str, T], tables: Sequence[Sequence[Row]], name: str) -> str:
    names = list(values)[::-1]  # the newest first: it is what a draw shrinks to
    a = draw(st.sampled_from(names[:6]))
    tensor = values[a]
    kind = _kind(tensor)
    indices = [n for n in names if values[n].dtype is torch.int64 and values[n].dim() == 1]
    fitting = [[r.text for r in rows if kind in r.kinds and tensor.dim() >= r.dims] for rows in tables]
    texts = draw(st.sampled_from([rows for rows in fitting if rows]))
    text = draw(st.sampled_from([text for text in texts if indices or "{k}" not in text]))
    others = [n for n in names if _joins(values[n], tensor)] if "{b}" in text else []
    pick = {
        "b": lambda: draw(st.sampled_from(others)),
        "c": lambda: draw(st.sampled_from(others)),
        "k": lambda: draw(st.sampled_from(indices)),
        "d": lambda: draw(st.integers(-tensor.dim(), tensor.dim() - 1)),
        "e": lambda: draw(st.integers(-tensor.dim(), tensor.dim() - 1)),
        "n": lambda: draw(st.integers(1, 3)),
        "x": lambda: draw(st.sampled_from((0.5, -1.5, 2.0, 3))),
        "every": lambda: ", ".join(["3"] + ["-1"] * tensor.dim()),
    }
    found = {key: pick[key]() for key in pick if f"{{{key}}}" in text}
    return f"{name} = {text.format(a=a, **found)}"


def _kind(t: T) -> str:
    return "f" if t.is_floating_point() else "b" if t.dtype is torch.bool else "i"


def _joins(one: T, other: T) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(one.shape[::-1], other.shape[::-1], strict=False))


def _tried(line: str, values: Mapping[str, T]) -> T | None:
    """What a line makes; None where eager refuses it, or where it makes too much."""
    try:
        found = eval(line.partition(" = ")[2], {**NAMESPACE, **values})
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None
    is_small = isinstance(found, T) and 0 < found.numel() <= MOST_ELEMENTS and found.dim() <= 5
    return found if is_small and not found.is_complex() else None
