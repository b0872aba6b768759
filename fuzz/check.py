"""One random program checked: each node's every candidate, then the whole program on kernels against eager.

In: a `Program`. Out: what is wrong, in words; how many nodes and candidates there were. Guarantee: nothing is wrong
where eager itself raises, or where torch makes no graph of it.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.errors import CompilerError
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, TensorSpec
from autofuse.ir.shape import evaluate
from autofuse.runtime.graphs.choice import Choice
from autofuse.strategies.enumeration import is_group, strategies_of
from autofuse.strategies.groups import Group, find_groups
from autofuse.strategies.strategy import Strategy
from autofuse.tuner.verify import FAR, Inaccurate
from autofuse.wrapper.graph_call import Program as GraphProgram
from autofuse.wrapper.node_call import Entry, node_symbol_values
from autofuse.wrapper.operation_text import arguments_of, value_name
from autofuse.wrapper.strategy_call import LoadedStrategy
from fuzz.candidates import Text, c_texts, compile_together, problems_of
from fuzz.fused import REFUSED, Kernels, fused, fused_below_dynamo
from fuzz.graphs import Program
from tests.codegen.compare import wrong_outputs

T = torch.Tensor
_KNOWN: dict[NodeForm, Mapping[str, Entry]] = {}  # kernels of earlier programs
_PARTS: dict[NodeForm, Mapping[str, Entry]] = {}  # the same of loops alone, of nodes and of parts of their strategies
MOST_KNOWN = 2000
DRAWS = 3
_TRACES = os.path.join("capture", "backend.py")  # through which all of torch's tracing is called


@dataclass
class Outcome:
    """What was checked, and what was found."""

    nodes: int = 0
    candidates: int = 0
    skipped: str = ""  # why the program was not compared
    wrong: list[str] = field(default_factory=list)


class Verified(Kernels):
    """Every node is verified before its generic kernel runs."""

    def __init__(self, seed: int, outcome: Outcome) -> None:
        super().__init__()
        self.rng, self.outcome = random.Random(seed), outcome
        self.fresh: set[NodeForm] = set()  # compiled, and not verified yet

    def groups_of(self, graph: FusionGraph, nodes: Sequence[FusionNode]) -> Sequence[Group]:
        return find_groups(graph, nodes, FusionConfig())[0]

    def prepare(self, program: GraphProgram, hints: Mapping[str, int]) -> None:
        if len(_PARTS) > MOST_KNOWN:
            _KNOWN.clear()
            _PARTS.clear()
        slots = {slot.node.form: node_symbol_values(slot.symbols, hints) for slot in program.slots}
        strategies = {form: _possible(form) for form in slots if is_group(form) and form not in _KNOWN}
        wanted = {form: values for form, values in slots.items() if not is_group(form)}
        for form, found in strategies.items():
            sizes = dict(zip(form.symbols, slots[form], strict=True))
            wanted |= {part: values for strategy in found for part, values in parts_of(strategy, sizes)}
        texts: list[Text] = []
        for form, values in wanted.items():
            if form not in _PARTS:
                try:
                    texts += c_texts(form, values, self.rng)
                except Exception as error:
                    self.problems.append(f"no C of {form.text()}: {type(error).__name__}: {error}")
        try:
            entries = compile_together(texts)
        except CompilerError as error:
            self.problems.append(f"{error}")
            return
        for form in dict.fromkeys(item.form for item in texts):
            pairs = zip(texts, entries, strict=True)
            _PARTS[form] = {item.label: entry for item, entry in pairs if item.form is form}
        new = [form for form in slots if form not in _KNOWN and form not in strategies]
        made = {item.form for item in texts}
        for form in new:
            if form in made:
                _KNOWN[form] = _PARTS[form]
            elif form in _PARTS:  # made as a part of an earlier strategy, and specialised for its sizes
                _KNOWN[form] = {label: _PARTS[form][label] for label in _PARTS[form] if not _is_specialised(label)}
        self.fresh.update(new)
        for form, found in strategies.items():
            _KNOWN[form] = {f"strategy {strategy.name}": self._loaded(strategy) for strategy in found}
            self.fresh.add(form)

    def _loaded(self, strategy: Strategy) -> LoadedStrategy:
        """A strategy, each part with one of its kernels for any sizes."""
        known = [_PARTS[kernel.node.form] for kernel in strategy.kernels]
        return LoadedStrategy(strategy, tuple(self.rng.choice(for_any_sizes(entries)) for entries in known))

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        form = self.nodes[fusion_id].form
        entries = _KNOWN.get(form)
        if entries and form in self.fresh:  # not before: a graph is made of fake tensors
            self.fresh.discard(form)
            self.outcome.nodes += 1
            self.outcome.candidates += len(entries)
            self.problems += [
                f"{text}\n{row_of(form, values)}" for text in problems_of(form, tuple(values), entries, self.rng)
            ]
        return Choice(True, for_any_sizes(entries)[-1], "generic") if entries else Choice(True)


def _possible(form: NodeForm) -> list[Strategy]:
    """The strategies of a group without those for which this processor lacks instructions."""
    has = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    lacks = not all(has.get(item.spec.dtype, True) for item in form.inputs)
    return [strategy for strategy in strategies_of(form) if not (lacks and strategy.has_extern)]


def for_any_sizes(entries: Mapping[str, Entry]) -> list[Entry]:
    """The candidates that hold for other sizes, too: generic kernels, and strategies."""
    return [entry for label, entry in entries.items() if not _is_specialised(label)]


def _is_specialised(label: str) -> bool:
    return label.startswith("specialised")


def parts_of(strategy: Strategy, sizes: Mapping[str, int]) -> Iterator[tuple[NodeForm, tuple[int, ...]]]:
    """The generated parts of a node's strategy, each with the values of its symbols at ``sizes`` of the node."""
    for index, kernel in enumerate(strategy.kernels):
        yield kernel.node.form, node_symbol_values(strategy.sizes_of(index), sizes)


def row_of(form: NodeForm, values: Sequence[int]) -> str:
    """A node as a function and a row of it for `tests/cases.py`."""
    sizes = dict(zip(form.symbols, values, strict=True))
    names = ", ".join(i.name for i in form.inputs)
    lines = [f"def found({names}):"]
    for symbol in form.symbols:
        places = ((i.name, axis) for i in form.inputs for axis, dim in enumerate(i.spec.shape) if str(dim) == symbol)
        place = next(places, None)
        lines.append(f"    {symbol} = {f'{place[0]}.shape[{place[1]}]' if place else sizes[symbol]}")
    for op in form.operations:
        args, kwargs = arguments_of(op, form)
        text = ", ".join([*args, *(f"{name}={value}" for name, value in kwargs.items())])
        lines.append(f"    {op.name} = {op.target}({text})")
    lines.append(f"    return {', '.join(value_name(ref, form) for ref in form.outputs)}")
    examples = "".join(f"{_example(i.spec, sizes)}, " for i in form.inputs)
    return "\n".join([*lines, f'("found", found, ({examples})),'])


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    shape, strides = spec.shape.bind(sizes), tuple(evaluate(stride, sizes) for stride in spec.strides)
    if torch.empty_strided(shape, strides).is_contiguous():
        return f"_t({''.join(f'{size}, ' for size in shape)}dtype=torch.{spec.dtype})"
    return f"torch.empty_strided({shape}, {strides}, dtype=torch.{spec.dtype})"


def check(program: Program) -> Outcome:
    """Check a program, and the same said in another way: in another order, after an idle view, at other sizes."""
    outcome = Outcome()
    for variant in dict.fromkeys((program, _variant(program))):
        _check(variant, outcome)
        if outcome.wrong or outcome.skipped:
            break
    return outcome


def _variant(program: Program) -> Program:
    return (program, program, program.with_idle_view(), program.in_another_order())[program.seed % 4]


def _check(program: Program, outcome: Outcome) -> None:
    if _eager(program) is None:
        outcome.skipped = "eager raises"
        return
    kernels = Verified(program.seed, outcome)
    try:
        env = None  # of a trace without Dynamo, which asks for another where sizes need one
        if program.needs_dynamo:
            torch._dynamo.reset()
            call: Callable[..., Sequence[T]] = fused(program.function, kernels, dynamic=True)
        else:
            inputs = program.make_inputs()
            call, env = fused_below_dynamo(program.function, kernels, inputs, program.is_dynamic)
        outcome.wrong += _compared(call, program)
        outcome.wrong += kernels.problems
        if program.is_dynamic and not outcome.wrong and (env is None or _holds(env, program)):
            outcome.wrong += [f"a size plus one: {text}" for text in _compared(call, program, larger=1)]
    except REFUSED as error:
        outcome.skipped = f"refused: {type(error).__name__}"
    except Exception as wrapped:
        error = getattr(wrapped, "inner_exception", None) or wrapped  # Dynamo's own hides what a backend raised
        if isinstance(error, REFUSED):
            outcome.skipped = f"refused: {type(error).__name__}"
        elif _is_torchs(error):
            outcome.skipped = f"no graph: {type(error).__name__}"
        else:
            outcome.wrong.append("".join(traceback.format_exception(error)[-6:]))


def _is_torchs(error: Exception) -> bool:
    """Whether torch raised it while it traced, with none of our code in between."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [name for name in frames if f"{os.sep}autofuse{os.sep}" in name and not name.endswith(_TRACES)]
    return not ours and f"{os.sep}torch{os.sep}" in frames[-1]


def run(function: Callable[..., Sequence[T]], program: Program, inputs: list[T]) -> list[T]:
    """Results, gradients, and what the inputs have become."""
    outputs = list(function(*inputs))
    generator = torch.Generator().manual_seed(program.seed + 1)
    leaves = [t for t in inputs if t.requires_grad]
    losses = [(t.double() * torch.randn(t.shape, generator=generator)).sum() for t in outputs if t.requires_grad]
    gradients: Sequence[T] = ()
    if losses and leaves:
        gradients = torch.autograd.grad(losses, leaves, allow_unused=True, materialize_grads=True)
    return [t.detach() for t in (*outputs, *gradients, *inputs)]


def _eager(program: Program, larger: int = 0, wide: bool = False) -> list[T] | None:
    try:
        return run(program.function, program, program.make_inputs(larger, wide))
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


def _compared(call: Callable[..., Sequence[T]], program: Program, larger: int = 0) -> list[str]:
    """What differs from eager for each of a few inputs: one number that is rounded up or down proves nothing."""
    wrong: list[str] = []
    for draw in range(DRAWS):
        own = replace(program, seed=program.seed + draw)
        eager = _eager(own, larger)
        if eager is None:
            return []
        wrong = _differences(run(call, own, own.make_inputs(larger)), eager, own, larger)
        if not wrong:
            break
    return wrong


def _differences(found: list[T], eager: list[T], program: Program, larger: int) -> list[str]:
    exact = _eager(program, larger, wide=True)
    if exact is None or any(a.shape != b.shape for a, b in zip(exact, eager, strict=True)):
        exact = eager
    # A comparison is right as eager has it, and as float64 has it.
    theirs = [
        e if e.is_floating_point() else torch.where(f == x, f, e) for f, e, x in zip(found, eager, exact, strict=True)
    ]
    errors = wrong_outputs(found, theirs, exact)
    # No strides are compared: torch's fake tensors have others than eager for some operators, and a kernel has those.
    return [str(error) for error in errors if not isinstance(error, Inaccurate) or error.times > FAR]


def _holds(env: ShapeEnv, program: Program) -> bool:
    """Whether the guards of a trace hold for sizes that are larger by one."""
    hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # torch 2.12 and before
    values = {symbol: sympy.Integer(int(hint) + 1) for symbol, hint in hints.items()}
    if any(int(values[s]) != int(rest.xreplace(values)) for s, rest in env.replacements.items() if s in values):
        return False
    return all(guard.expr.xreplace(values) == sympy.true for guard in env.guards)
