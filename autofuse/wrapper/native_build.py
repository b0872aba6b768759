"""Writes down the calls of a graph in one shape as the numbers that the runner in C carries out (`native_source`).

In: the steps of a graph in their order, as the text of `native_text` names them, with the plan's callables for nodes.
Out: the words of a program, and the Python callables of its steps. Guarantee: what the runner cannot do is a step by
its Python callable, so every graph can be written down.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from autofuse.codegen.c.load import address_of
from autofuse.wrapper import native_source as code
from autofuse.wrapper.node_call import KERNEL, KernelCall

# Operators that the runner carries out by itself, and its codes; those of views have numbers behind their tensor.
PRODUCTS = {"aten.mm.default": code.MM, "aten.addmm.default": code.ADDMM, "aten.bmm.default": code.BMM}
VIEWS = {
    "aten.view.default": code.VIEW,
    "aten._unsafe_view.default": code.VIEW,
    "aten.t.default": code.TURN,
    "aten.transpose.int": code.SWAP,
    "aten.permute.default": code.PERMUTE,
    "aten.unsqueeze.default": code.UNSQUEEZE,
    "aten.select.int": code.SELECT,
    "aten.expand.default": code.EXPAND,
    "aten.detach.default": code.ALIAS,
    "aten.alias.default": code.ALIAS,
}
_MOST_DIMS = 24
# A step in C saves 0.3 us and more; one by its Python callable costs 0.1 us more than a line of the Python text.
_MOST_IN_PYTHON = 3


class NativeProgram(NamedTuple):
    """A program of the runner."""

    words: bytes
    callables: tuple[Callable[..., Any], ...]


class NativeBuilder:
    """Takes the steps of one graph."""

    def __init__(self, dtypes: Mapping[str, int]) -> None:
        """``dtypes``: the numbers that torch has for dtypes, by name."""
        self._dtypes = dtypes
        self._words: list[int] = []
        self._callables: list[Callable[..., Any]] = []
        self._registers = 0
        self._in_c = 0
        self._inputs: list[int] = []
        self._results: tuple[list[int], bool] = ([], False)

    def take(self, are_tensors: Sequence[bool]) -> None:
        """The graph's inputs, which are the first registers."""
        self._inputs = [int(is_tensor) for is_tensor in are_tensors]
        self._registers = max(self._registers, len(self._inputs))

    def below(self) -> None:
        """What follows runs below autograd."""
        self._words += [code.BELOW, 2]

    def call(self, function: Callable[..., Any], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """A step by its Python callable."""
        self._step(code.CALL, function, inputs, outputs, ())

    def constant(self, output: int, value: object) -> None:
        self.call(lambda: value, (), (output,))

    def item(self, function: Callable[..., Any], source: int, output: int, index: int) -> None:
        """One of several results of an operation."""
        self._step(code.ITEM, function, (source,), (output,), (index,))

    def operator(
        self, target: str, function: Callable[..., Any], inputs: Sequence[int], output: int, numbers: Sequence[Any]
    ) -> None:
        """An operator of tensors, behind which are ``numbers``; ``function`` does the same in Python."""
        if target in PRODUCTS and len(inputs) == (3 if target == "aten.addmm.default" else 2) and not numbers:
            self._step(PRODUCTS[target], function, inputs, (output,), ())
            return
        own = _numbers_of_view(target, numbers) if len(inputs) == 1 else None
        if own is None:
            self.call(function, inputs, (output,))
        else:
            self._step(VIEWS[target], function, inputs, (output,), (len(own), *own))

    def node(self, function: Callable[..., Any], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """A node or a group."""
        made = getattr(function, KERNEL, None)
        own = self._kernel(made) if made is not None else None
        if own is None:
            self.call(function, inputs, outputs)
        else:
            self._step(code.KERNEL, function, inputs, outputs, own)

    def _kernel(self, made: KernelCall) -> list[int] | None:
        form, address = made.form, address_of(made.entry)
        specs = [form.spec(ref) for ref in form.outputs]
        if not address or any(spec.dtype not in self._dtypes for spec in specs):
            return None
        values, reuse = dict(zip(form.symbols, made.symbol_values, strict=True)), dict(made.reuse)
        words = [address, made.sizes]
        for number, spec in enumerate(specs):
            sizes, strides = spec.shape.bind(values), spec.strides.bind(values)
            own = [reuse[number]] if number in reuse else [self._dtypes[spec.dtype], len(sizes), *sizes, *strides]
            words += [len(own), *own]
        return words

    def drop(self, *registers: int) -> None:
        """Values that are dead from here on."""
        self._words += [code.DROP, len(registers) + 2, *registers]

    def result(self, registers: Sequence[int], is_list: bool) -> None:
        """What the graph returns."""
        self._results = [*registers], is_list

    def _step(
        self,
        step: int,
        function: Callable[..., Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        own: Sequence[int],
    ) -> None:
        self._in_c += step not in (code.CALL, code.ITEM)
        words = [len(inputs), *inputs, len(outputs), *outputs, *own]
        self._words += [step, len(words) + 3, len(self._callables), *words]
        self._callables.append(function)
        self._registers = max(self._registers, *(r + 1 for r in (*inputs, *outputs)), 0)

    @property
    def pays(self) -> bool:
        """Whether the program takes less time than Python: not where hardly a step is in C."""
        return len(self._callables) <= self._in_c * (1 + _MOST_IN_PYTHON)

    def program(self) -> NativeProgram:
        results, is_list = self._results
        head = [self._registers, len(self._inputs), len(results), int(is_list), *results]
        head.append(len(self._inputs) + len(self._words))  # where the steps end, from the inputs' flags on
        return NativeProgram(array("q", [*head, *self._inputs, *self._words]).tobytes(), tuple(self._callables))


def _numbers_of_view(target: str, numbers: Sequence[Any]) -> list[int] | None:
    """The numbers of a view in a row; None where it is none, or has other arguments than usual."""
    if target not in VIEWS:
        return None
    if target == "aten.t.default" and not numbers:
        numbers = (0, 1)
    wanted = {code.TURN: 2, code.SWAP: 2, code.UNSQUEEZE: 1, code.SELECT: 2, code.ALIAS: 0}.get(VIEWS[target])
    if wanted is None:
        if len(numbers) != 1 or not isinstance(numbers[0], list | tuple):
            return None
        numbers = numbers[0]
    elif len(numbers) != wanted:
        return None
    is_plain = all(type(number) is int for number in numbers) and len(numbers) <= _MOST_DIMS
    return [*numbers] if is_plain else None
