"""A graph of many equal blocks as one block that runs many times: it is captured, planned and tuned once.

In: Dynamo's graph, before AOTAutograd sees it. Out: the nodes before the blocks, one block, the nodes after the blocks,
and a graph that calls these; None where nothing repeats. Guarantee: every block does the same with the same kinds of
tensors, node by node. The order of all nodes, and so of random numbers, is preserved.

Traced one by one, the twelfth layer of a transformer costs as much as the first, most of it in AOTAutograd (torch
2.13). The price is a call of AOTAutograd's wrapper a block, and a block's last kernels do not fuse with the first of
the next: 3 to 4 % of a step of GPT-2 or Llama with 4 layers 256 wide, wherever the blocks begin. Blocks begin where the
fewest values cross from one to the next.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

MIN_SHARE = 0.5  # of the graph's nodes, that would be captured again
_CANDIDATES = 6  # lengths of a block that are tried

# Their folded weights are kept for one module (see strategies.vendor).
_CONVOLUTIONS = {
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
}

Call = Callable[..., Any]


@dataclass(frozen=True)
class Repeats:
    """Blocks of ``length`` nodes each, with the inputs and outputs of each block in the same order."""

    start: int  # of the first block, among the nodes that compute
    length: int
    inputs: tuple[tuple[fx.Node, ...], ...]
    outputs: tuple[tuple[fx.Node, ...], ...]

    @property
    def count(self) -> int:
        return len(self.inputs)


class Pieces:
    """A graph in pieces: ``compile`` them, then call the whole."""

    def __init__(self, outer: fx.GraphModule, examples: dict[str, list[Any]]) -> None:
        self.outer = outer
        self._examples = examples  # inputs of each piece, as AOTAutograd needs them

    def compile(self, compile_piece: Callable[[fx.GraphModule, list[Any], int], Call]) -> Call:
        """``compile_piece(piece, examples, times)`` makes the callable of a piece that is called ``times`` times."""
        calls = Counter(node.target for node in self.outer.graph.find_nodes(op="call_module"))
        for name, examples in self._examples.items():
            piece = getattr(self.outer, name)
            delattr(self.outer, name)
            setattr(self.outer, name, compile_piece(piece, examples, calls[name]))
        forward: Call = self.outer.forward
        return forward


# ---- finding ---------------------------------------------------------------------------------------------------


def find_repeats(graph: fx.Graph, min_blocks: int) -> Repeats | None:
    """The blocks that most of the graph consists of, None where there are none that can be called one after another."""
    nodes = _computing(graph)
    if len(nodes) < 2 * min_blocks or not all(_may_be_apart(node) for node in nodes):
        return None
    labels = [_label(node) for node in nodes]
    unreached = _unreached(nodes)
    best: Repeats | None = None
    for length in _lengths(labels, min_blocks):
        for start, stop in _runs(labels, length, min_blocks):
            found = _blocks(nodes, unreached, start, stop, length, min_blocks)
            if found is not None and (best is None or _saved(found) > _saved(best)):
                best = found
    return best if best is not None and _saved(best) >= MIN_SHARE * len(nodes) else None


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _saved(repeats: Repeats) -> int:
    return (repeats.count - 1) * repeats.length


def _unreached(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Values that require gradients but get none: they lead to no output, or only through nodes that stop gradients.

    A piece that returns such a value beside others gets zeros as its gradient, so its parameters would have gradients
    of zeros where eager's have none.
    """
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if _has_gradient(_value(node)):
            onward = (user.op == "output" or (_has_gradient(_value(user)) and user not in found) for user in node.users)
            if not any(onward):
                found.add(node)
    return found


def _has_gradient(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_gradient, value))
    return isinstance(value, torch.Tensor) and value.requires_grad


def _may_be_apart(node: fx.Node) -> bool:
    """Whether a node may be in any piece: it is neither a subgraph nor a write that another piece could see."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    name = _name(node)
    of_python = getattr(node.target, "__module__", "") == "_operator"  # where and_ is no write, but iadd is
    is_write = name in _WRITES if of_python else name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, torch._ops.OpOverload):
        is_write = node.target._schema.is_mutable
    return not (is_write or _is_in_place(node) or "out" in node.kwargs or "autocast" in name)


def _is_in_place(node: fx.Node) -> bool:
    """Whether ``inplace`` is set, by name or, as ``nn.Dropout`` does, by its place."""
    if node.op != "call_function" or "inplace" in node.kwargs:
        return bool(node.kwargs.get("inplace"))
    try:
        names = list(inspect.signature(node.target).parameters)
    except (TypeError, ValueError):  # a builtin, which has no such argument
        return False
    return "inplace" in names and bool(dict(zip(names, node.args, strict=False)).get("inplace"))


def _may_be_shared(node: fx.Node) -> bool:
    """Whether the value is not specific to one block, and no switch."""
    return _name(node) not in _CONVOLUTIONS and node.target is not _SWITCH


def _leaves_gradients_as_they_are(nodes: Sequence[fx.Node]) -> bool:
    """Whether gradient mode is the same after the nodes as before them, as all pieces need."""
    switches = [node.args[0] for node in nodes if node.target is _SWITCH]
    return not switches or switches[-1] is torch.is_grad_enabled()


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_SWITCH = torch._C._set_grad_enabled
_WRITES = {name for name in vars(operator) if name.startswith("i") and f"__{name}__" in vars(operator)} | {"setitem"}


def _label(node: fx.Node) -> int:
    """A text that is equal for nodes that do the same with the same kinds of tensors, wherever these come from."""
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Of(_kind(_value(n))))
    return hash((node.op, str(node.target), repr(arguments), _kind(_value(node))))


class _Of(str):
    """The kind of a value, in place of a node."""

    def __repr__(self) -> str:
        return str(self)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
        return f"{value.dtype} {value.device} {tuple(value.shape)} {strides} {value.requires_grad}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_kind(item) for item in value)})"
    return f"{type(value).__name__} {value}"  # of a symbolic number its expression


def _lengths(labels: Sequence[int], min_blocks: int) -> list[int]:
    """Lengths that a block may have: distances between nodes of one label, the most frequent ones.

    Labels of equal frequency are counted together: a node that a block holds once is a whole block away from the next
    one like it; a node that it holds twice is not.
    """
    where: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        where.setdefault(label, []).append(index)
    gaps: dict[int, Counter[int]] = {}
    for found in where.values():
        if len(found) >= min_blocks:
            gaps.setdefault(len(found), Counter()).update(b - a for a, b in itertools.pairwise(found))
    common = [counter.most_common(1)[0] for counter in gaps.values()]
    return [length for length, _ in sorted(common, key=lambda item: -item[0] * item[1])[:_CANDIDATES]]


def _runs(labels: Sequence[int], length: int, min_blocks: int) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) in which every node is like the one ``length`` before it, long enough to matter."""
    start = 0
    for index in range(length, len(labels) + 1):
        if index == len(labels) or labels[index] != labels[index - length]:
            if index - start >= min_blocks * length:
                yield start, index
            start = index - length + 1


def _blocks(
    nodes: list[fx.Node], unreached: set[fx.Node], start: int, stop: int, length: int, min_blocks: int
) -> Repeats | None:
    """As many blocks as fit into a stretch, cut where the fewest values cross from one to the next."""
    count = (stop - start) // length
    offsets = range(start, stop - count * length + 1)
    found = (_linked(nodes, unreached, offset, count, length, min_blocks) for offset in offsets)
    return min(
        (repeats for repeats in found if repeats is not None),
        key=lambda repeats: (-repeats.count, len(repeats.outputs[0]), repeats.start),
        default=None,
    )


def _linked(
    nodes: list[fx.Node], unreached: set[fx.Node], start: int, count: int, length: int, min_blocks: int
) -> Repeats | None:
    """The consecutive blocks from ``start`` on whose inputs are wired alike."""
    blocks = [nodes[start + n * length : start + (n + 1) * length] for n in range(count)]
    place = {node: index for index, node in enumerate(blocks[0])}
    if not all(_may_be_shared(node) for node in blocks[0]) or not _leaves_gradients_as_they_are(nodes[:start]):
        return None
    inputs: list[tuple[fx.Node, ...]] = []
    for block in blocks:
        outside = _outside(blocks[0], block, place)
        if outside is None:
            break
        inputs.append(outside)
    if len(inputs) < min_blocks or not all(_may_cross(node) for node in inputs[0]):
        return None
    blocks = blocks[: len(inputs)]
    given = sorted({index for block in blocks for index in _given(block)})
    outputs = [tuple(block[index] for index in given) for block in blocks]
    if not all(_may_cross(node) for node in outputs[0]):
        return None
    repeats = Repeats(start, length, tuple(inputs), tuple(outputs))
    end = start + repeats.count * length
    output = nodes[0].graph.find_nodes(op="output")[0]
    later = _taken(nodes[:start], nodes[end:]) + _taken(nodes[:start] + nodes[end:], [output])
    crossing = {*itertools.chain(*outputs), *_taken(nodes[:start], [*nodes[start:], output])}
    return repeats if all(_may_cross(node) for node in later) and not crossing & unreached else None


def _outside(
    first: Sequence[fx.Node], block: Sequence[fx.Node], place: dict[fx.Node, int]
) -> tuple[fx.Node, ...] | None:
    """The block's inputs, in the first block's order; None where it is wired otherwise."""
    inside = set(block)
    found: dict[fx.Node, fx.Node] = {}
    for model, node in zip(first, block, strict=True):
        for one, other in zip(_arguments(model), _arguments(node), strict=True):
            if one in place:
                if block[place[one]] is not other:
                    return None
            elif (
                other in inside
                or found.setdefault(one, other) is not other
                or _kind(_value(one)) != _kind(_value(other))
            ):
                return None
    return tuple(found.values())


def _arguments(node: fx.Node) -> list[fx.Node]:
    """Nodes among the arguments, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _given(block: Sequence[fx.Node]) -> Iterator[int]:
    inside = set(block)
    return (index for index, node in enumerate(block) if any(user not in inside for user in node.users))


def _inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs of a range of nodes, in order, each once."""
    inside = set(nodes)
    return list(dict.fromkeys(n for node in nodes for n in _arguments(node) if n not in inside))


def _may_cross(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor | torch.SymInt)


# ---- taking apart --------------------------------------------------------------------------------------------------


def take_apart(module: fx.GraphModule, inputs: Sequence[Any], min_blocks: int) -> Pieces | None:
    """The module's graph in pieces; ``inputs`` are its example inputs. None where it does not repeat enough."""
    repeats = find_repeats(module.graph, min_blocks)
    if repeats is None:
        return None
    nodes = _computing(module.graph)
    examples = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    end = repeats.start + repeats.count * repeats.length
    output = module.graph.find_nodes(op="output")[0]
    ahead, after = nodes[: repeats.start], nodes[end:]
    later = [*nodes[repeats.start :], output]
    calls = [(name, i, o) for name, i, o in [("ahead", _inputs_of(ahead), _taken(ahead, later))] if ahead]
    calls += [("block", list(i), list(o)) for i, o in zip(repeats.inputs, repeats.outputs, strict=True)]
    calls += [("after", _inputs_of(after), _taken(after, [output]))] if after else []
    sizes = _sizes(examples)
    calls = [(name, [*i, *_unread_sizes(i, sizes)], o) for name, i, o in calls]
    texts = {"ahead": ahead, "block": nodes[repeats.start : repeats.start + repeats.length], "after": after}

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.node_copy(node) for node in examples}
    pieces: dict[str, fx.GraphModule] = {}
    wanted: dict[str, list[Any]] = {}
    for name, taken, given in calls:
        if name not in pieces:
            pieces[name] = _piece(module, texts[name], taken, given, is_shared=name == "block")
            wanted[name] = [examples[node] if node in examples else _example(_value(node)) for node in taken]
        call = graph.call_module(name, tuple(copies[node] for node in taken))
        for index, node in enumerate(given):
            copies[node] = graph.call_function(operator.getitem, (call, index))
    graph.output(fx.node.map_arg(output.args[0], lambda node: copies[node]))
    return Pieces(fx.GraphModule(pieces, graph, "Pieces"), wanted)


def _sizes(examples: Mapping[fx.Node, Any]) -> dict[Any, fx.Node]:
    """Inputs that are symbols of the shape environment, by symbol."""
    found = {node: value.node.expr for node, value in examples.items() if isinstance(value, torch.SymInt)}
    return {expr: node for node, expr in found.items() if expr.is_Symbol}


def _unread_sizes(taken: Sequence[fx.Node], sizes: Mapping[Any, fx.Node]) -> list[fx.Node]:
    """Symbols in the shapes of a piece's inputs that the piece does not read; a whole graph has them as inputs too.

    Guards of a kept graph mention inputs only (`graph_cache`): a size that is no input would have no guard.
    """
    symbols = {symbol for node in taken for symbol in free_symbols_of(_value(node))}
    return [sizes[symbol] for symbol in sorted(symbols, key=str) if symbol in sizes and sizes[symbol] not in taken]


def free_symbols_of(value: Any) -> set[Any]:
    """Symbols in a size, or in a tensor's shape, strides and offset."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        numbers: Sequence[Any] = (*value.shape, *strides, *((value.storage_offset(),) if strides else ()))
    else:
        numbers = (value,)
    return {s for number in numbers if isinstance(number, torch.SymInt) for s in number.node.expr.free_symbols}


def _taken(nodes: Sequence[fx.Node], by: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [node for node in _inputs_of(by) if node in inside]


def _piece(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    given: Sequence[fx.Node],
    is_shared: bool,
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in taken:
        copy = copies[node] = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        # Where Dynamo's guards find it; a block's is another one each time.
        copy._dynamo_source = None if is_shared else getattr(node, "_dynamo_source", None)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in given))
    piece = fx.GraphModule(torch.nn.Module(), graph)
    piece.meta = dict(module.meta)
    piece._param_name_to_source = {}
    return piece


def _example(value: Any) -> Any:
    """A value as an input has it: without a gradient history."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
