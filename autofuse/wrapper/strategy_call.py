"""A strategy as a callable: straight-line Python of aten calls, library calls and generated kernels.

In: a strategy, the loaded kernel of each part, the values of the node's symbols. Out: a flat function of the node's
inputs.
Guarantee: outputs have exactly the sizes and strides that the form promises; intermediates die at their last use.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofuse.codegen.in_place import FRESH, Pairs, Step, find_reuse
from autofuse.codegen.templates import LOOP
from autofuse.dynamo_skip import define
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import VIEWS, info
from autofuse.ir.shape import evaluate
from autofuse.strategies.chains import is_contiguous
from autofuse.strategies.extern_kernels import KEEPING, VENDORS, all_promised, as_promised
from autofuse.strategies.strategy import Rows, Strategy, flat_ref
from autofuse.wrapper.liveness import deaths, deleted
from autofuse.wrapper.node_call import (
    CallSite,
    Composed,
    Entry,
    NodeCall,
    device_type,
    empty_like_spec,
    expected_outputs,
    make_launcher,
    raise_error,
)
from autofuse.wrapper.operation_text import dims_text, form_argument, operation_text, value_name


@dataclass(frozen=True)
class LoadedStrategy(Composed):
    """A strategy with its kernels in this process."""

    strategy: Strategy
    entries: tuple[Entry, ...]  # of the parts, in order

    def make_call(self, site: CallSite) -> NodeCall:
        """The callable for one shape."""
        if self.strategy.rows is None:
            values = dict(zip(site.form.symbols, site.symbol_values, strict=True))
            return self._program(values, site)
        return self._in_blocks(self.strategy.rows, site)

    @functools.cached_property
    def keeps(self) -> bool:
        return any(isinstance(step, Operation) and step.target in KEEPING for step in self.strategy.steps)

    def _program(self, values: Mapping[str, int], site: CallSite) -> NodeCall:
        """``values``: of the symbols of the strategy's own form."""
        kernels = []
        for kernel, entry, reuse in zip(self.strategy.kernels, self.entries, self._reuse, strict=True):
            own = [evaluate(size, values) for size in kernel.sizes]
            answer = site.failed if self._is_one_kernel else None
            kernels.append(make_launcher(kernel.node.form, entry, own, site.threads, site.allocate, answer, reuse))
        if self._is_one_kernel:
            return kernels[0]
        device = torch.device(device_type(self.strategy.form))
        symbols = [values[name] for name in self.strategy.form.symbols]
        call: NodeCall = self._make(*symbols, device, kernels, site.failed, site.kept)
        return call

    @functools.cached_property
    def _is_one_kernel(self) -> bool:
        """Whether a part has the strategy's inputs and outputs, so that it needs no program around it."""
        form, steps = self.strategy.form, self.strategy.steps
        if len(steps) != 1 or not isinstance(steps[0], int):
            return False
        node = self.strategy.kernels[0].node
        return node.input_names == tuple(item.name for item in form.inputs) and tuple(node.outputs) == form.outputs

    @functools.cached_property
    def _reuse(self) -> tuple[Pairs, ...]:
        """For each part, its outputs that are written into the memory of an input that dies there."""
        found: list[Pairs] = [()] * len(self.strategy.parts)
        steps = [_memory_step(self.strategy, step) for step in self.strategy.steps]
        for step, pairs in zip(
            self.strategy.steps, find_reuse(steps, {r.name for r in self.strategy.form.outputs}), strict=True
        ):
            if isinstance(step, int):
                found[step] = pairs
        return tuple(found)

    @functools.cached_property
    def _make(self) -> Callable[..., NodeCall]:
        """The program for any sizes, whose text is the same for all."""
        source, namespace = render(self.strategy)
        define(source, f"strategy {self.strategy.name}", namespace)
        make: Callable[..., NodeCall] = namespace["make"]
        return make

    def _in_blocks(self, rows: Rows, site: CallSite) -> NodeCall:
        values = dict(zip(site.form.symbols, site.symbol_values, strict=True))
        total = evaluate(rows.total, values)
        allocate = site.allocate or empty_like_spec
        thread = _Outputs()  # two threads may run the same node

        def place(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return thread.waiting.pop(0)

        inside = replace(site, allocate=place, failed=raise_error)
        starts = range(0, total, rows.count)
        ends = [min(start + rows.count, total) for start in starts]
        programs = {
            count: self._program({**values, rows.symbol: count}, replace(inside, kept={}))
            for count in {end - start for start, end in zip(starts, ends, strict=True)}
        }
        blocks = [(slice(start, end), programs[end - start]) for start, end in zip(starts, ends, strict=True)]
        kernel = self.strategy.kernels[0].node
        order = [self.strategy.form.outputs.index(ref) for ref in kernel.outputs]
        specs = expected_outputs(site.form, site.symbol_values)

        def run(*inputs: torch.Tensor) -> Any:
            try:
                outputs = [allocate(*spec) for spec in specs]
                if not blocks:
                    return outputs[0] if len(outputs) == 1 else tuple(outputs)
                whole = [(o := outputs[index]).view(total, o.shape[-1]) for index in order]
                flat = [t.view(total, t.shape[-1]) if cut else t for t, cut in zip(inputs, rows.is_cut, strict=True)]
                for block, program in blocks:
                    thread.waiting = [tensor[block] for tensor in whole]
                    program(*[t[block] if cut else t for t, cut in zip(flat, rows.is_cut, strict=True)])
                return outputs[0] if len(outputs) == 1 else tuple(outputs)
            except Exception as error:
                return site.failed(error, *inputs)

        return run


def _memory_step(strategy: Strategy, step: Operation | int) -> Step:
    """A step as `find_reuse` sees it. Several results of one operation are one value, whose memory is not reused."""
    if isinstance(step, Operation):
        is_fresh = len(step.outputs) == 1 and (step.target.startswith("vendor.") or step.short_name in FRESH)
        return Step([ref.name for ref in step.inputs], [step.name], is_fresh)
    node = strategy.kernels[step].node
    inputs = [flat_ref(name).name for name in node.input_names]
    on_cpu = strategy.parts[step].printer == LOOP and device_type(strategy.form) == "cpu"
    is_fresh = all(len(strategy.graph.by_name[ref.name].outputs) == 1 for ref in node.outputs)
    return Step(inputs, [ref.name for ref in node.outputs], is_fresh, node.form if on_cpu else None)


class _Outputs(threading.local):
    """The output tensors of the present block's kernels, in order."""

    def __init__(self) -> None:
        self.waiting: list[torch.Tensor] = []


def render(strategy: Strategy) -> tuple[str, dict[str, Any]]:
    """The Python text of a strategy, and the objects that it reads."""
    form = strategy.form
    namespace: dict[str, Any] = {
        "torch": torch,
        "as_promised": as_promised,
        "all_promised": all_promised,
    }
    inputs = ", ".join(item.name for item in form.inputs)
    head = [f"def make({', '.join([*form.symbols, 'device', 'kernels', 'failed', 'kept'])}):"]
    body: list[str] = []
    uses: list[set[str]] = []
    for step in strategy.steps:
        if isinstance(step, int):
            head.append(f"    k{step} = kernels[{step}]")
            line, read = _part_line(strategy, step)
        elif step.target.startswith("vendor."):
            vendor = f"vendor_{step.name}()"
            if step.target in KEEPING:  # one for all sizes
                vendor = f"kept.get('{step.name}') or kept.setdefault('{step.name}', {vendor})"
            head.append(f"    f_{step.name} = {vendor}")
            namespace[f"vendor_{step.name}"] = VENDORS[step.target]
            line, read = _vendor_line(step, form), {ref.name for ref in step.inputs}
        else:
            line = f"{step.name} = {_operation_text(step, form, namespace)}"
            read = {ref.name for ref in step.inputs}
        body.append(line)
        uses.append(read)
    body = _with_deaths(body, uses, {ref.name for ref in form.outputs}, {item.name for item in form.inputs})
    results = ", ".join(value_name(ref, form) for ref in form.outputs)
    lines = [*head, f"    def run({inputs}):", "        try:", *(f"            {line}" for line in body)]
    lines += [f"            return {results}", "        except Exception as error:"]
    lines += [f"            return failed({', '.join(['error', *([inputs] if inputs else [])])})", "    return run"]
    return "\n".join(lines), namespace


def _part_line(strategy: Strategy, index: int) -> tuple[str, set[str]]:
    node = strategy.kernels[index].node
    refs = [flat_ref(name) for name in node.input_names]
    arguments = ", ".join(value_name(ref, strategy.form) for ref in refs)
    by_operation: dict[str, list[ValueRef]] = {}
    for ref in node.outputs:
        by_operation.setdefault(ref.name, []).append(ref)
    targets = [f"{ref.name}_{ref.index}" for ref in node.outputs]
    line = f"{', '.join(targets)} = k{index}({arguments})"
    for name, outputs in by_operation.items():
        op = strategy.graph.by_name[name]
        if len(op.outputs) == 1:
            line += f"; {name} = {name}_0; del {name}_0"
        else:  # operations with several results are tuples everywhere
            known = {ref.index for ref in outputs}
            items = "".join(f"{name}_{i}, " if i in known else "None, " for i in range(len(op.outputs)))
            line += f"; {name} = ({items}); del {', '.join(f'{name}_{i}' for i in sorted(known))}"
    return line, {ref.name for ref in refs}


def _operation_text(op: Operation, form: NodeForm, namespace: dict[str, Any]) -> str:
    """An aten operation: its results' strides follow from its inputs, which a rewrite may have changed."""
    text = operation_text(op, form, namespace)
    specs = [*(form.spec(ref) for ref in op.inputs), *op.outputs]
    if info(op.target).kind in VIEWS or all(map(is_contiguous, specs)):
        return text
    if len(op.outputs) == 1:
        return f"as_promised({text}, {_layout(op.outputs[0])})"
    # Several results: unread ones may be None.
    promised = "".join(f"({_layout(spec)}), " for spec in op.outputs)
    return f"all_promised({text}, ({promised}))"


def _vendor_line(op: Operation, form: NodeForm) -> str:
    call = f"f_{op.name}({', '.join(form_argument(arg, form) for arg in op.args)})"
    if len(op.outputs) == 1:
        return f"{op.name} = as_promised({call}, {_layout(op.outputs[0])})"
    names = [f"{op.name}_{i}" for i in range(len(op.outputs))]
    promised = [f"as_promised({n}, {_layout(spec)})" for n, spec in zip(names, op.outputs, strict=True)]
    return f"{', '.join(names)} = {call}; {op.name} = ({', '.join(promised)}); del {', '.join(names)}"


def _layout(spec: TensorSpec) -> str:
    return f"{dims_text(spec.shape.dims)}, {dims_text(spec.strides.dims)}"


def _with_deaths(body: list[str], uses: list[set[str]], leaving: set[str], inputs: set[str]) -> list[str]:
    dead = deaths([sorted(names) for names in uses], lambda name: name not in leaving and name not in inputs)
    return ["; ".join([line, *deleted(names, "")]) for line, names in zip(body, dead, strict=True)]
